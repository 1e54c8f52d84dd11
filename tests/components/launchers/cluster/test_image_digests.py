"""The record of the images that a run used: of the training pods and of the step."""

import json
from pathlib import Path

import pytest
from fake_api import Fault
from fake_pod import FakePod
from kinds import both

from components.launchers.cluster import watch
from components.records import ImagesRecord
from components.training import Images

TRAINER, STEP = "registry.example/kubedet-trainer@sha256:aa", "registry.example/kubedet-component@sha256:bb"


@pytest.fixture
def images(tmp_path):
    return Images(str(tmp_path), "night-1")


def of(tmp_path):
    record = ImagesRecord.find(str(tmp_path), "night-1")
    return {who: images for who in ("step", "training") if (images := getattr(record, who, None))}


@both
def test_the_pods_images_are_noted_before_the_training_ends(
    backend, job, fake_cluster, master, images, tmp_path, monkeypatch
):
    monkeypatch.setattr(FakePod, "image_id", f"docker-pullable://{TRAINER}")
    file = Path(ImagesRecord.place(str(tmp_path), "night-1"))

    def life(pod):
        pod.run()
        for _ in range(3000):
            if file.exists():
                return pod.exit(0)
            pod.sleep(0.02)
        raise TimeoutError("nothing was noted while it ran")

    fake_cluster.lives[master] = life
    watch.run(backend, job(), lambda line: None, images.note_pods)
    assert of(tmp_path) == {"training": [TRAINER]}


@pytest.fixture
def step(fake_cluster, monkeypatch):
    """This process seems to run in the pod of a pipeline's step."""
    statuses = [{"name": name, "image": "i", "imageID": image, "ready": True, "restartCount": 0}
                for name, image in (("wait", "argoexec@sha256:00"), ("main", STEP))]  # fmt: skip
    monkeypatch.setenv("KFP_POD_NAME", "step-pod")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    return fake_cluster.add(
        "pods", "default",
        {"metadata": {"name": "step-pod"}, "spec": {"containers": []},
         "status": {"containerStatuses": statuses}},
    )  # fmt: skip


def test_the_steps_own_image_is_noted(step, images, tmp_path):
    images.note_own()
    assert of(tmp_path) == {"step": [STEP]}
    record = json.loads(Path(ImagesRecord.place(str(tmp_path), "night-1")).read_text())
    assert (record["kind"], record["run"]) == ("images", "night-1") and "file_sha256" in record


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_pod_that_cannot_be_read_is_left_out(step, images, tmp_path, fake_cluster, status):
    fake_cluster.faults.append(Fault("GET", "/pods/step-pod", status=status))
    images.note_own()
    assert of(tmp_path) == {} and not list(tmp_path.rglob("*.json"))


def test_what_cannot_be_kept_ends_no_training(backend, job, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(FakePod, "image_id", TRAINER)
    (tmp_path / "lineage").write_text("in the way")
    watch.run(backend, job(), lambda line: None, Images(str(tmp_path), "night-1").note_pods)
    assert caplog.text.count("the digests of the images are not kept") == 1
