"""Checks a TrainJob's manifests for what the cluster would refuse or silently prune, before they are sent.

Source: kubeflow/trainer v2.3.0, pkg/runtime/framework/plugins/{torch,jobset}; kubernetes-sigs/jobset
v0.12, the length of its pods' names.
"""

from typing import Any

from components.launchers.render import trainjob
from components.launchers.render.check_pytorchjob import difference

_NAME = 63
_RANDOM = 6  # Characters that end a pod's name: -x8k2p.
_RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def problems(manifests: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a TrainJob, a line for each problem.

    Args:
        manifests: the job, behind its runtime if it has one, as they stand in YAML.
    """
    job = manifests[-1]
    trainer = job["spec"].get("trainer") or {}
    lines = [line for manifest in manifests for line in _unknown(manifest)]
    name, nodes = job["metadata"]["name"], trainer.get("numNodes") or 1
    if not isinstance(nodes, int):
        return lines
    longest = _NAME - _RANDOM - len(f"-{trainjob.NODE}-0-{nodes - 1}")
    if len(name) > longest:
        lines.append(
            f"metadata.name {name!r} has {len(name)} characters; of a TrainJob of {nodes} nodes it may have "
            f"{longest}, for its pods' names are longer"
        )
    reserved = [item["name"] for item in trainer.get("env") or [] if item["name"] in _RESERVED]
    return lines + [f"spec.trainer.env: {name} is the controller's own" for name in reserved]


def _unknown(manifest: dict[str, Any]) -> list[str]:
    """Return the fields that do not survive a round trip through the API's models."""
    from kubeflow_trainer_api import models
    from pydantic import ValidationError

    kinds = {
        trainjob.KIND: models.TrainerV1alpha1TrainJob,
        trainjob.RUNTIME: models.TrainerV1alpha1TrainingRuntime,
    }
    try:
        returned = kinds[manifest["kind"]].from_dict(manifest).to_dict()
    except ValidationError as error:
        return [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
    return difference(manifest, returned)
