"""Specifications of jobs that ask for much: what every renderer must be able to say."""

from typing import Any

from components.launchers.spec import JobSpec, build_spec


def job(**fields: Any) -> JobSpec:
    return build_spec({"command": ["python", "-V"], "image": "image:1", "name": "job"} | fields)


ODD = {
    "elastic": job(nodes=2, elastic={"min_nodes": 1, "max_nodes": 4}),
    "everything": job(
        nodes=3,
        gpus=2,
        gpu_resource="amd.com/gpu",
        cpu_request="500m",
        cpu_limit="4",
        memory_limit="8Gi",
        image_pull_policy="Always",
        image_pull_secrets=["registry"],
        service_account="trainer",
        node_selector={"pool": "a"},
        tolerations=[{"key": "gpu", "effect": "NoSchedule"}],
        spread=[{"required": True}],
        priority_class="high",
        scheduler="volcano",
        kueue_queue="team",
        deadline=3600,
        fs_group=7,
        env={"A": "b"},
        labels={"team": "x"},
        capabilities=["SYS_NICE"],
        mounts=[{"claim": "c", "path": "/a", "sub_path": "x"}, {"claim": "c", "path": "/b"}],
        secret_env=[{"name": "KEY", "secret": "s", "key": "k", "optional": True}],
    ),
}
