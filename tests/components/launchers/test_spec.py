"""Specifications are strict: every problem is reported at once."""

from typing import Any

import pytest

from components.launchers.spec import JobSpec, from_fields
from trainer.base.errors import ConfigError

FIELDS: dict[str, Any] = {"command": ["python", "-V"], "image": "image:1"}


def refused(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_fields(FIELDS | fields)
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
        ({"resources": {"nvidia.com/gpu": 1}}, "resources.nvidia.com/gpu is a field itself"),
        ({"resources": {"rdma/hca": 0}}, "resources.rdma/hca"),
        ({"env": {"A B": "c"}}, "cannot be a variable's name"),
        ({"env": {"A": "b"}, "secret_env": [{"name": "A", "secret": "s", "key": "k"}]}, "two values of A"),
        ({"network": {"hca": "mlx5"}}, "belong to profile rdma"),
        ({"network": {"socket_threads": 2}}, "belong to profile tcp"),
        ({"network": {"profile": "tcp", "socket_threads": 16, "sockets_per_thread": 8}}, "64 sockets"),
        ({"restart_policy": "Always"}, "restart_policy"),
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
        from_fields({"command": {1, 2}})


def test_the_fingerprint_is_of_everything() -> None:
    one = JobSpec(command=("a",), env={"A": "1", "B": "2"})
    same = JobSpec(command=("a",), env={"B": "2", "A": "1"})
    other = JobSpec(command=("a",), env={"A": "1", "B": "3"})
    assert one.fingerprint == same.fingerprint != other.fingerprint
