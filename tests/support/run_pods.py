"""Pods of a pipeline's run in a simulated cluster, as Kubeflow Pipelines 2.17 makes them with Argo 4."""

import itertools
from datetime import UTC, datetime, timedelta

_numbers = itertools.count(1)
_START = datetime.now(UTC) - timedelta(hours=1)


def put(cluster, run_id, node, *, phase="Failed", main=None, log="", namespace="kubeflow", **status):
    """Put a pod there; returns its name."""
    number = next(_numbers)
    name = f"kubedet-abcde-system-container-impl-{number}"
    body = cluster.add(
        "pods",
        namespace,
        {
            "metadata": {
                "name": name,
                "labels": {"pipeline/runid": run_id},
                "annotations": {
                    "workflows.argoproj.io/node-name": f"kubedet-abcde(0).root(0).exit-handler-1(0).{node}"
                },
            },
            "spec": {"containers": [{"name": "main"}]},
            "status": {"phase": phase, **status},
        },
    )
    body["metadata"]["creationTimestamp"] = f"{_START + timedelta(seconds=number):%Y-%m-%dT%H:%M:%SZ}"
    if main:
        of_argo = {"terminated": {"exitCode": 0, "reason": "Completed"}}
        body["status"]["containerStatuses"] = [
            {"name": name, "state": state, "image": "i", "imageID": "", "ready": False, "restartCount": 0}
            for name, state in (("main", main), ("wait", of_argo))
        ]
    cluster.pods[body["metadata"]["uid"]].say(*log.splitlines())
    return name
