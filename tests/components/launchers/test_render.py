"""Specifications of jobs and their renderers: golden files, the resource definition, the operator's rules."""

import os
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from job_specs import ODD, job

from components.launchers.cluster.kinds import KINDS, fits_shared_runtime
from components.launchers.render import TARGETS, render
from components.launchers.spec import JobSpec, build_spec
from trainer.base.errors import ConfigError

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "deploy" / "examples" / "jobs").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
CRD = Path(os.environ.get("KUBEDET_CRDS", ROOT.parent / "shared" / "crds")) / "kubeflow.org_pytorchjobs.yaml"


def example(path: Path) -> JobSpec:
    return build_spec(yaml.safe_load(path.read_text()), where=path.name)


def pytorchjob(spec: JobSpec) -> dict[str, Any]:
    (manifest,) = KINDS["pytorchjob"].manifests(spec, lambda *_: False)
    return manifest


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "runai-submit-pytorch"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_golden(path: Path, target: str) -> None:
    text = render(target, example(path))
    golden = GOLDEN / f"{path.stem}.{target}.{'sh' if target.startswith('runai') else 'yaml'}"
    if os.environ.get("KUBEDET_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), "KUBEDET_WRITE_GOLDEN=1 writes it anew: look at the difference"


def strict(schema: Any) -> Any:
    """Refuse what the API server would cut off: fields that the schema does not name."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict_schema = {key: strict(value) for key, value in schema.items()}
    if isinstance(strict_schema.get("properties"), dict) and "additionalProperties" not in strict_schema:
        strict_schema["additionalProperties"] = bool(
            strict_schema.get("x-kubernetes-preserve-unknown-fields")
        )
    return strict_schema


def crd() -> Any:
    if not CRD.is_file():
        pytest.skip(f"no resource definition at {CRD}; name its folder in KUBEDET_CRDS")
    definition = yaml.safe_load(CRD.read_text())
    return strict(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ODD, *(path.stem for path in EXAMPLES)])
def test_a_cluster_takes_it(name: str) -> None:
    spec = ODD.get(name) or example(next(path for path in EXAMPLES if path.stem == name))
    manifest = pytorchjob(spec)
    jsonschema.Draft202012Validator(crd()).validate(manifest)


def worker(manifest: dict[str, Any]) -> Any:
    return manifest["spec"]["pytorchReplicaSpecs"]["Worker"]


def container(manifest: dict[str, Any]) -> Any:
    return worker(manifest)["template"]["spec"]["containers"][0]


def test_one_volume_for_a_claim_that_is_mounted_twice() -> None:
    spec = worker(pytorchjob(ODD["everything"]))["template"]["spec"]
    assert [item["name"] for item in spec["volumes"]] == ["shm", "claim-0"]
    mounts = [(item["name"], item["mountPath"]) for item in spec["containers"][0]["volumeMounts"]]
    assert mounts == [("shm", "/dev/shm"), ("claim-0", "/a"), ("claim-0", "/b")]


def test_fixed_and_elastic_jobs_have_one_form_of_workers_only() -> None:
    """A Master would add an init container that Pod Security refuses."""
    specs = [job(nodes=3), ODD["elastic"], job()]
    fixed, elastic, single = (pytorchjob(spec)["spec"] for spec in specs)
    assert {role for spec in (fixed, elastic, single) for role in spec["pytorchReplicaSpecs"]} == {"Worker"}
    names = ("minReplicas", "maxReplicas", "maxRestarts", "rdzvBackend")
    assert [fixed["elasticPolicy"][name] for name in names] == [3, 3, 0, "static"]
    assert [elastic["elasticPolicy"][name] for name in names] == [1, 4, 10, "c10d"]
    assert "elasticPolicy" not in single
    env = list(yaml.safe_load_all(render("indexed-job", ODD["elastic"])))[1]["spec"]["template"]["spec"][
        "containers"
    ][0]["env"]
    assert {"name": "PET_NNODES", "value": "1:4"} in env
    with pytest.raises(ConfigError, match="not support elastic"):
        render("runai", ODD["elastic"])


def test_the_jobs_own_environment_wins_over_the_profile() -> None:
    spec = job(network={"profile": "tcp"}, env={"NCCL_IB_DISABLE": "0"})
    env = container(pytorchjob(spec))["env"]
    assert {"name": "NCCL_IB_DISABLE", "value": "0"} in env
    assert {"name": "NCCL_IB_DISABLE", "value": "1"} not in env


@pytest.mark.parametrize("target", TARGETS)
def test_the_folder_in_which_the_program_starts(target: str) -> None:
    text = render(target, job(working_dir="/code", nodes=2))
    assert ("workingDir: /code" if "job" in target else "--working-dir /code") in text
    assert "working" not in render(target, job(nodes=2)).lower()


def allocators(**fields: Any) -> dict[str, str]:
    env = container(pytorchjob(job(**fields)))["env"]
    return {item["name"]: item.get("value", "") for item in env if "ALLOC_CONF" in item["name"]}


def test_the_memory_of_gpus_grows_in_one_piece_unless_the_job_says_otherwise() -> None:
    assert allocators(gpus=1) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocators() == {} and allocators(gpus=1, gpu_resource="amd.com/gpu") == {}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert allocators(gpus=1, env={name: "x:1"}) == {name: "x:1"}


def test_a_read_only_root_has_a_folder_of_its_own_to_write_to() -> None:
    spec = worker(pytorchjob(job(read_only_root=True)))["template"]["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    assert {"name": "tmp", "emptyDir": {}} in spec["volumes"]
    mounted = job(read_only_root=True, mounts=[{"claim": "c", "path": "/tmp"}])
    (container,) = worker(pytorchjob(mounted))["template"]["spec"]["containers"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]].count("/tmp") == 1
    assert fits_shared_runtime(job(read_only_root=True))


def test_runai_says_what_it_leaves_out_and_quotes() -> None:
    text = render("runai", job(fs_group=1, command=["sh", "-c", "echo 'a b'; $(x)"], shared_memory="1Gi"))
    assert text.startswith("# Run:ai's command line has no option for: fs_group, shared_memory's size\n")
    words = shlex.split(text, comments=True)
    assert words[-3:] == ["sh", "-c", "echo 'a b'; $(x)"]
    assert words[:5] == ["runai", "training", "standard", "submit", "job"]
    # Only a pytorch training has these.
    assert not {"--workers", "--master-restart-policy"} & set(words)


def test_runais_older_command_lines() -> None:
    spec = job(
        nodes=2,
        run_as_user=7,
        tolerations=[{"key": "gpu", "effect": "NoSchedule"}],
        mounts=[{"claim": "c", "path": "/a", "read_only": True}, {"claim": "d", "path": "/b"}],
    )
    text = render("runai-submit-dist", spec)
    left_out = "run_as_user, run_as_non_root, grace_seconds"
    assert text.splitlines()[0] == f"# Run:ai's command line has no option for: {left_out}"
    options = list(pairwise(shlex.split(text, comments=True)))
    for pair in [("--pvc", "c:/a:ro"), ("--toleration", "operator=Exists,key=gpu,effect=NoSchedule")]:
        assert pair in options
    assert render("runai-submit-pytorch", spec) == text.replace("submit-dist pytorch", "submit-pytorch")


def test_an_image_and_a_known_target_are_needed() -> None:
    with pytest.raises(ConfigError, match="no container image"):
        render("pytorchjob", job(image=""))
    with pytest.raises(ConfigError, match="slurm"):
        render("slurm", job())


FIELDS: dict[str, Any] = {"command": ["python", "-V"], "image": "image:1"}


def refused(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_spec(FIELDS | fields)
    return caught.value.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "x" * 51}, "name: 'xxx"),
        ({"name": "1job"}, "DNS-1035"),
        ({"namespace": "a_b"}, "namespace"),
        ({"nodes": 0}, "nodes"),
        ({"gpus": -1}, "gpus"),
        ({"gpus": True}, "gpus"),
        ({"elastic": {"min_nodes": 3, "max_nodes": 2}}, "min_nodes 3 is above max_nodes 2"),
        ({"nodes": 5, "elastic": {"min_nodes": 1, "max_nodes": 2}}, "nodes 5 is outside"),
        ({"gpu": 1}, "gpu: no such field"),
        ({"network": {"profil": "tcp"}}, "network.profil: no such field"),
        ({"mounts": [{"claim": "data"}]}, "mounts.0.path: is missing"),
        ({"mounts": [{"claim": "data", "path": "data"}]}, "absolute path"),
        ({"mounts": [{"claim": "data", "path": "/a/../b"}]}, "absolute path"),
        ({"mounts": [{"claim": "", "path": "/data"}]}, "mounts.0.claim"),
        ({"mounts": [{"claim": "a", "path": "/d"}, {"claim": "b", "path": "/d/"}]}, "two mounts at /d"),
        ({"mounts": [{"claim": "a", "path": "/dev/shm"}]}, "two mounts at /dev/shm"),
        ({"shared_memory": "much"}, "shared_memory"),
        ({"memory_request": "2Gi", "memory_limit": "1Gi"}, "memory_request 2Gi is above memory_limit 1Gi"),
        ({"cpu_request": "1500m", "cpu_limit": "1"}, "cpu_request 1500m is above"),
        ({"resources": {"nvidia.com/gpu": 1}}, "resources.nvidia.com/gpu has a field of its own"),
        ({"resources": {"rdma/hca": 0}}, "resources.rdma/hca"),
        ({"env": {"A B": "c"}}, "is not a valid name of a variable"),
        ({"env": {"A": "b"}, "secret_env": [{"name": "A", "secret": "s", "key": "k"}]}, "two values for A"),
        ({"network": {"hca": "mlx5"}}, "require the profile rdma"),
        ({"network": {"socket_threads": 2}}, "require the profile tcp"),
        ({"network": {"profile": "tcp", "socket_threads": 16, "sockets_per_thread": 8}}, "at most 64"),
        ({"image_pull_policy": "Often"}, "image_pull_policy"),
        ({"command": []}, "command"),
        ({"command": "python"}, "command"),
        ({"grace_seconds": -1}, "grace_seconds"),
        ({"working_dir": "code"}, "working_dir"),
    ],
)
def test_refused(fields: dict[str, Any], said: str) -> None:
    assert said in refused(**fields)


def test_all_problems_at_once() -> None:
    message = refused(name="Bad", nodes=0, gpus="x", unknown=1, mounts=[{"claim": "c"}])
    for field in ("name:", "nodes:", "gpus:", "unknown:", "mounts.0.path:"):
        assert f"  {field}" in message
    assert len(message.splitlines()) == 6


def test_what_is_not_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="not JSON"):
        build_spec({"command": {1, 2}})


def test_the_fingerprint_is_of_everything() -> None:
    one = JobSpec(command=("a",), env={"A": "1", "B": "2"})
    same = JobSpec(command=("a",), env={"B": "2", "A": "1"})
    other = JobSpec(command=("a",), env={"A": "1", "B": "3"})
    assert one.fingerprint == same.fingerprint != other.fingerprint
