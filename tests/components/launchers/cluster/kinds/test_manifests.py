"""PyTorchJobs, TrainJobs and their runtimes as they are rendered, by the models of their APIs."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from job_specs import ODD, job

from components.launchers.cluster.kinds import KINDS, shared_runtime
from components.launchers.spec import JobSpec, build_spec

ROOT = Path(__file__).parents[5]
KIND = KINDS["trainjob"]
EXAMPLES = sorted((ROOT / "deploy" / "examples" / "jobs").glob("*.yaml"))

SPECS = {"plain": job(), **ODD}
JOBS = SPECS | {path.stem: build_spec(yaml.safe_load(path.read_text()), where=path.name) for path in EXAMPLES}


def policies(spec: JobSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the runtime says of the JobSet's failures, and its Job."""
    jobset = KIND.manifests(spec, lambda *_: False)[0]["spec"]["template"]["spec"]
    return jobset["failurePolicy"], jobset["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_with_the_shared_runtime_keeps_all_of_its_pod(name: str) -> None:
    """The models of a patch leave out what a TrainJob cannot set: that must be in the runtime."""
    manifests = KIND.manifests(JOBS[name], lambda *_: True)
    assert KIND.problems(manifests) == []
    if len(manifests) == 1:
        own, _ = KIND.manifests(JOBS[name], lambda *_: False)
        pod = own["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        trainer = manifests[0]["spec"]["trainer"]
        (patch,) = manifests[0]["spec"]["runtimePatches"]
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        patched = replicated["template"]["spec"]["template"]
        (container,) = patched["spec"]["containers"]
        container |= {key: trainer[key] for key in ("image", "command", "env") if key in trainer}
        container["resources"] = trainer.get("resourcesPerNode", {})
        runtime = shared_runtime()["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert runtime["template"]["spec"] | patched["spec"] == pod["spec"]
        assert patched["metadata"] == pod["metadata"]


def test_only_an_error_of_the_program_ends_the_job() -> None:
    failures, of_job = policies(job(nodes=2, backoff=3))
    assert of_job["backoffLimit"] == 0
    lost, error = of_job["podFailurePolicy"]["rules"]
    assert (lost["action"], error["action"]) == ("Count", "FailJob")
    assert error["onExitCodes"] == {"containerName": "node", "operator": "In", "values": list(range(1, 128))}
    assert (failures["maxRestarts"], failures["restartStrategy"]) == (30, "BlockingRecreate")
    assert [rule["action"] for rule in failures["rules"]] == ["FailJobSet"]
    # With a time to live a failed job would begin anew when it is over.
    assert "ttlSecondsAfterFinished" not in yaml.safe_dump(KIND.manifests(job(ttl=60), lambda *_: False))


def test_a_node_of_an_elastic_job_is_recreated_alone() -> None:
    failures, of_job = policies(job(nodes=2, backoff=3, elastic={"min_nodes": 1, "max_nodes": 4}))
    assert failures == {"maxRestarts": 0}
    assert of_job["backoffLimit"] == 60 and of_job["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert [rule["action"] for rule in of_job["podFailurePolicy"]["rules"]] == ["Ignore", "FailJob"]


def test_a_job_in_a_queue_is_suspended_and_its_pods_have_a_label_of_their_own() -> None:
    runtime, trainjob_manifest = KIND.manifests(job(kueue_queue="team"), lambda *_: False)
    assert trainjob_manifest["spec"]["suspend"] is True
    assert trainjob_manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    for body in (runtime, shared_runtime()):
        (replicated,) = body["spec"]["template"]["spec"]["replicatedJobs"]
        # Without it the controller fails at jobs that Kueue has evicted.
        assert replicated["template"]["spec"]["template"]["metadata"]["labels"]
        assert replicated["template"]["metadata"]["labels"] == {
            "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
        }
