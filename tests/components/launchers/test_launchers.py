"""The register of launchers, and what a new kind of job takes: one file."""

import dataclasses
from collections.abc import Mapping

import pytest
from fake_pod import fine

import components.launchers as launchers
from components.launchers import pod_template
from components.launchers.backend import Phase
from components.launchers.cluster import watch
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import KINDS
from components.launchers.cluster.kinds.kind import Kind, Standing
from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError

JOB = JobSpec(command=("true",), name="train", image="i:1")


@pytest.mark.parametrize("name", launchers.LAUNCHERS)
def test_every_launcher_has_a_meaning_and_kinds_that_exist(name):
    entry = launchers.entry(name)
    assert entry.meaning and set(entry.kinds) <= set(KINDS)
    assert entry.pods is (name != "local")


def test_the_default_one_is_in_the_register_and_every_kind_has_one():
    assert launchers.DEFAULT in launchers.LAUNCHERS
    assert {entry.kinds for entry in launchers.LAUNCHERS.values()} >= {(name,) for name in KINDS}


@pytest.mark.parametrize("act", ["run", "remove"])
def test_one_that_does_not_exist_is_refused_with_the_list(act):
    with pytest.raises(ConfigError, match="no launcher 'slurm'") as error:
        getattr(launchers, act)("slurm", JOB)
    assert error.value.fix == "use one of: local, kubernetes, pytorchjob, trainjob"


class ToyJob(Kind):
    """A third kind: as many pods as it names, and their state as its own."""

    name, title, controller = "toyjob", "ToyJob", "the toy controller"
    group, version, plural = "toys.example", "v1", "toyjobs"
    pod_label = "toys.example/job"

    def manifests(self, job, there):
        """Return the job alone."""
        meta = {"name": job.name, "labels": pod_template.job_labels(job)}
        spec = {"pods": job.nodes, "template": pod_template.template(job, container="toy")}
        return [{"apiVersion": "toys.example/v1", "kind": "ToyJob", "metadata": meta, "spec": spec}]

    def problems(self, manifests):
        """See nothing wrong."""
        return []

    def left_out(self, job):
        """Name what toys do not have."""
        return ["deadline"] if job.deadline else []

    def probe(self):
        """Return a job of no pods."""
        return {"metadata": {"generateName": "probe-"}, "spec": {"pods": 0}}

    def rank(self, job, labels: Mapping[str, str]):
        """Read the number."""
        return int(labels["toys.example/number"])

    def nodes(self, job):
        """Return its number of pods."""
        return job["spec"]["pods"]

    def bounds(self, job):
        """Have a fixed number."""

    def standing(self, job):
        """Read the state."""
        return Standing({"good": Phase.SUCCEEDED, "bad": Phase.FAILED}.get(job.get("state")))


@pytest.fixture
def toys(fake_cluster, monkeypatch):
    """The fake cluster runs toy jobs: a pod for each number, done when all are."""

    def life(pod):
        fine(pod)
        job = fake_cluster.objects["toyjobs", "default", pod.body["metadata"]["labels"]["toys.example/job"]]
        mine = [other for other in fake_cluster.pods.values() if "toys.example/job" in str(other.body)]
        if all(other.body["status"]["phase"] == "Succeeded" for other in mine):
            job["state"] = "good"

    def add(resource, namespace, body, add=fake_cluster.add):
        launcher = add(resource, namespace, body)
        for number in range(body["spec"]["pods"] if resource == "toyjobs" else 0):
            name = f"{body['metadata']['name']}-{number}"
            marks = {"toys.example/job": body["metadata"]["name"], "toys.example/number": str(number)}
            fake_cluster.lives[name] = life
            template = body["spec"]["template"]["spec"]
            fake_cluster.make_pod(namespace, {"metadata": {"name": name, "labels": marks}, "spec": template})
        return launcher

    monkeypatch.setattr(fake_cluster, "add", add)
    monkeypatch.setattr(fake_cluster, "reconcile", lambda pod: None)
    return fake_cluster


def test_a_third_kind_needs_no_other_file(toys, caplog):
    lines = []
    job = dataclasses.replace(JOB, nodes=2, deadline=3600)
    watch.run(ClusterBackend.connect(kinds=[ToyJob()]), job, lines.append)
    assert "[train-0] hello from train-0" in lines and "job train: succeeded" in lines
    assert "a ToyJob knows nothing of: deadline" in caplog.text
    backend = ClusterBackend.connect(kinds=[*KINDS.values(), ToyJob()])
    assert [(status.kind, len(status.pods)) for status in backend.list_jobs()] == [("ToyJob", 2)]
    assert backend.status("train").kind == "ToyJob"
