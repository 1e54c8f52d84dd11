"""Status, restarts and logs of jobs, and the images that their pods run."""

import pytest
from cluster.fixtures import connect_backend
from cluster.pods import endless
from kinds import both, plain, pod_name

from components import cluster_checks
from components.launchers.backend import Phase
from components.launchers.spec import Elastic


@both
def test_the_status_reports_pods(backend, simulated, job, first, second, kind):
    def fails(pod):
        pod.run(node="node-7")
        pod.exit(3, "Error")

    simulated.lives |= {
        first: endless,
        second: fails,
        pod_name(kind, 2): lambda pod: pod.wait("ImagePullBackOff", "no such image"),
    }
    backend.submit(job(nodes=3))
    simulated.clock.until(lambda: backend.status("train").phase is Phase.FAILED)
    status = backend.status("train")
    why = {"pytorchjob": "worker replica(s) failed", "trainjob": "FailJobSet failure policy"}
    assert status.nodes == 3 and status.created and why[kind.name] in status.message
    assert status.kind == kind.title
    (pod,) = status.pods
    assert (plain(pod.name), pod.rank, pod.exit_code, pod.reason) == (second, 1, 3, "Error")
    assert pod.node == "node-7" and pod.uid and pod.ended


@both
def test_a_pod_that_is_recreated_counts_as_restart(backend, simulated, job, first, kind):
    go_on = []

    def preempted(pod):
        pod.run()
        pod.until(lambda: go_on)
        pod.exit(143)

    simulated.lives[first] = [preempted, endless]
    backend.submit(job())
    simulated.clock.until(lambda: backend.status("train").phase is Phase.RUNNING)
    assert backend.status("train").pods[0].restarts == 0
    go_on.append(True)
    simulated.notify()
    simulated.clock.until(lambda: [pod.restarts for pod in backend.status("train").pods] == [1])
    # Who looks for the first time knows what the controller counts: a JobSet does, the operator does not.
    (seen,) = connect_backend(simulated, [kind]).status("train").pods
    assert seen.restarts == {"pytorchjob": 0, "trainjob": 1}[kind.name]


def test_running_is_when_all_pods_run(backend, simulated, job, first, second):
    go_on = []

    def late(pod):
        pod.until(lambda: go_on)
        endless(pod)

    simulated.lives |= {first: endless, second: late}
    backend.submit(job(nodes=2))
    simulated.clock.until(lambda: any(pod.phase == "Running" for pod in backend.status("train").pods))
    assert backend.status("train").phase is Phase.PENDING
    go_on.append(True)
    simulated.notify()
    simulated.clock.until(lambda: backend.status("train").phase is Phase.RUNNING)


@both
def test_an_elastic_job_runs_with_enough_nodes(backend, simulated, job, first, second):
    simulated.lives |= {first: endless, second: lambda pod: pod.unschedulable("full")}
    backend.submit(job(nodes=2, elastic=Elastic(min_nodes=1, max_nodes=2)))
    simulated.clock.until(lambda: backend.status("train").phase is Phase.RUNNING)
    status = backend.status("train")
    assert status.elastic and [pod.rank for pod in status.pods] == [0, 1]


def test_logs_are_those_of_rank_0_and_of_pods_that_fail(backend, simulated, job, kind, first, second):
    def fails(pod):
        pod.run()
        pod.say("second's last words")
        pod.exit(1)

    def talks(pod):
        pod.run()
        pod.say("rank 0")
        pod.sleep(60)

    simulated.lives |= {first: talks, second: fails, pod_name(kind, 2): endless}
    backend.submit(job(nodes=3))
    lines = {(plain(line.pod), line.text) for line in backend.logs("train")}
    assert (second, "second's last words") in lines
    assert not any(pod == pod_name(kind, 2) for pod, _ in lines)


@pytest.mark.parametrize(
    ("workflow", "orphaned"),
    [({"status": {"finishedAt": "2026-01-01T00:00:00Z"}}, True), ({}, False), (None, True)],
    ids=str,
)
def test_a_job_whose_run_has_ended_is_listed_as_such(backend, simulated, job, first, workflow, orphaned):
    simulated.lives[first] = endless
    backend.submit(job())
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "run-x", "uid": "u"}
    simulated.job("train")["metadata"]["ownerReferences"] = [owner]
    if workflow is not None:
        simulated.add("workflows", "default", {"metadata": {"name": "run-x"}, **workflow})
    (status,) = backend.list_jobs()
    assert status.orphaned is orphaned
    checks = {check.title: check for check in cluster_checks.check_cluster(backend)}
    assert checks["jobs of ended runs"].state == ("warning" if orphaned else "ok")
    simulated.denied.add(("get", "workflows"))
    assert not backend.list_jobs()[0].orphaned
