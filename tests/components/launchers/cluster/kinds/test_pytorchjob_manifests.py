"""PyTorchJobs as they are rendered, by the models of kubeflow-training."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from job_specs import ODD, job
from kubeflow.training.api_client import ApiClient

from components.launchers.cluster.kinds import KINDS

JOBS = {"plain": job(), **ODD}


def known(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest that the models know."""
    client = ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
    spec: dict[str, Any] = client.sanitize_for_serialization(read)
    return spec


@pytest.mark.parametrize("name", JOBS)
def test_the_models_of_the_api_know_every_field(name: str) -> None:
    (manifest,) = KINDS["pytorchjob"].manifests(JOBS[name], lambda *_: False)
    assert known(manifest)["spec"] == manifest["spec"]
    assert known({**manifest, "surprise": 1}) == known(manifest)
