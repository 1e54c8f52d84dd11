"""The compiled pipeline as a user starts it: `kfp run create`, and `kubedet submit`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.test_training import CONFIG
from tests.cluster.user import KUBEDET

MINUTES = 20


@pytest.fixture(scope="module")
def host():
    """Address of Kubeflow Pipelines; skipped where none is named, or none answers."""
    import kfp

    address = os.environ.get("KUBEDET_KFP", "")
    if not address:
        pytest.skip("no Kubeflow Pipelines is named: set KUBEDET_KFP")
    try:
        kfp.Client(host=address).get_kfp_healthz()
    except Exception as error:
        pytest.skip(f"Kubeflow Pipelines at {address} does not answer: {error}")
    return address


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The compiled pipeline, in the form that the data root asks for."""
    file = tmp_path_factory.mktemp("package") / "pipeline.yaml"
    volume = ["--volume"] if os.environ.get("KUBEDET_PVC") else []
    subprocess.run(
        [*KUBEDET, "compile", *volume, "-o", str(file)],
        check=True,
        env={**os.environ, "KUBEDET_IMAGE": steps_image()},
    )
    return file


def steps_image():
    """Image of the pipeline's steps."""
    return os.environ.get("KUBEDET_COMPONENT_IMAGE", os.environ["KUBEDET_IMAGE"])


def parameters(work):
    """The pipeline's parameters for a training that takes a minute."""
    found = {
        "source": "sample:images=48,seed=3,size=96", "data_root": work, "overrides": json.dumps(CONFIG),
        "nodes": "2", "image": os.environ["KUBEDET_IMAGE"], "job": '{"shared_memory": "256Mi"}',
    }  # fmt: skip
    if os.environ.get("KUBEDET_PVC"):
        found["claim"] = os.environ["KUBEDET_PVC"]
    return found


def state(host, run_id):
    """Wait for a run's end; returns its state."""
    import kfp

    return kfp.Client(host=host).wait_for_run_completion(run_id, timeout=MINUTES * 60).state


@pytest.mark.parametrize("verb", ["create", "submit"])
def test_kfp_run_create(host, package: Path, work, verb):
    kfp_command = [str(Path(sys.executable).with_name("kfp")), "--endpoint", host, "--output", "json"]
    named = [f"{name}={value}" for name, value in parameters(f"{work}/{verb}").items()]
    done = subprocess.run(
        [*kfp_command, "run", verb, "-e", "kubedet-tests", "-r", verb, "-f", str(package), *named],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    run_id = re.search(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout)
    assert run_id, done.stdout
    assert state(host, run_id[0]) == "SUCCEEDED"


def test_kubedet_submit_waits_for_the_end(host, work):
    claim = ["--claim", os.environ["KUBEDET_PVC"]] if os.environ.get("KUBEDET_PVC") else []
    options = [word for key, value in CONFIG.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    done = subprocess.run(
        [
            *KUBEDET, "submit", "--host", host, "--wait", "--source", "sample:images=48,seed=3,size=96",
            "--data-root", f"{work}/kubedet", "--nodes", "2", "--image", os.environ["KUBEDET_IMAGE"],
            "--job", "shared_memory=256Mi", *claim, *options,
        ],
        capture_output=True, text=True, env={**os.environ, "KUBEDET_IMAGE": steps_image()},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
