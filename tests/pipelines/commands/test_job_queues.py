"""`kubedet job` of jobs that wait in a queue of Kueue."""

from fake_kueue import give_kueue
from fake_pod import endless

LONG_AGO = "2026-01-01T00:00:00Z"


def test_the_status_of_a_job_that_kueue_does_not_serve_has_a_remedy(kubedet, fake_cluster):
    give_kueue(fake_cluster, serves=())
    fake_cluster.lives["a-master-0"] = endless
    words = ["--backend", "pytorchjob", "--name", "a", "--image", "i:1", "--set", "kueue_queue=gpus"]
    kubedet("job", "submit", *words, "--", "true")
    assert "fix: " not in kubedet("job", "status", "a")[1]  # It is there since a moment.
    fake_cluster.job("a")["metadata"]["creationTimestamp"] = LONG_AGO
    lines = kubedet("job", "status", "a")[1].splitlines()
    assert lines[-3:-1] == [
        "a: in queue gpus: Kueue has no Workload for it",
        "Kueue (API kueue.x-k8s.io/v1beta2)",
    ]
    assert lines[-1].startswith("fix: name kubeflow.org/pytorchjob in integrations.frameworks")
