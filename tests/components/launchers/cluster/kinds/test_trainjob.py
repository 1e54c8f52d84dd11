"""Status of a TrainJob and its pods, and the effect of its policies."""

import pytest
from cluster.pods import endless

from components.launchers.backend import Phase
from components.launchers.cluster.kinds import KINDS, shared_runtime
from components.launchers.spec import Elastic, Spread
from trainer.base.errors import ConfigError, LaunchError

KIND = KINDS["trainjob"]
FIRST, SECOND = "train-node-0-0", "train-node-0-1"
TWO = Elastic(min_nodes=1, max_nodes=2)


@pytest.fixture
def kind(simulated):
    simulated.installed = {KIND.plural}
    return KIND


@pytest.fixture
def body(job):
    def make(*held, **fields):
        body = KIND.manifests(job(**fields), lambda *_: False)[-1]
        conditions = [{"type": name, "status": "True", "reason": "R", "message": "m"} for name in held]
        return {**body, "status": {"conditions": conditions}}

    return make


@pytest.fixture
def shared(simulated, kind):
    """The namespace has the runtime for all."""
    return simulated.add("trainingruntimes", "default", shared_runtime())


def runtimes(simulated):
    return [name for resource, _, name in list(simulated.objects) if resource == "trainingruntimes"]


def test_what_it_has_no_field_for_is_said(backend, job, simulated, caplog):
    backend.submit(job(ttl=60))
    assert "a TrainJob does not support: ttl" in caplog.text
    assert "ttl" not in str(simulated.job("train"))


@pytest.mark.parametrize(("nodes", "longest"), [(2, 48), (11, 47)])
def test_a_name_whose_pods_names_would_be_too_long_is_refused(backend, job, simulated, nodes, longest):
    with pytest.raises(ConfigError, match=rf"has {longest + 1} characters; .* may have {longest}"):
        backend.submit(job(name="n" * (longest + 1), nodes=nodes))
    assert not simulated.requests("POST")
    backend.submit(job(name="n" * longest, nodes=nodes))
    assert max(len(pod.name) for pod in simulated.pods.values()) == 63


def test_variables_of_the_controller_are_refused(job, shared, backend):
    for there in (False, True):
        problems = KIND.problems(KIND.manifests(job(env={"PET_NNODES": "2"}), lambda *_, there=there: there))
        assert problems == (["spec.trainer.env: PET_NNODES is set by the controller"] if there else [])
    with pytest.raises(ConfigError, match="PET_NNODES is set by the controller"):
        backend.submit(job(env={"PET_NNODES": "2"}))


def test_the_shared_runtime_is_used_where_it_is_there_and_left_there(backend, job, simulated, shared):
    backend.submit(job(nodes=2, gpus=2))
    assert simulated.job("train")["spec"]["runtimeRef"]["name"] == "kubedet"
    assert [seen.path.split("/")[-1] for seen in simulated.requests("POST")] == ["trainjobs"]
    backend.stop("train")
    assert runtimes(simulated) == ["kubedet"]


@pytest.mark.parametrize(
    "fields",
    [
        {"priority_class": "p"},
        {"scheduler": "s"},
        {"spread": (Spread("zone"),)},
        {"backoff": 3},
        {"elastic": TWO, "nodes": 2},
        {"working_dir": "/code"},
        {"image_pull_policy": "Always"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_job_that_says_more_brings_its_own_runtime(job, fields):
    runtime, trainjob = KIND.manifests(job(**fields), lambda *_: True)
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_all_pods_restart_together_with_other_names(backend, job, simulated):
    simulated.lives |= {FIRST: endless, SECOND: endless}
    backend.submit(job(nodes=2))
    simulated.clock.until(lambda: backend.status("train").phase is Phase.RUNNING)
    old = {pod.name for pod in backend.status("train").pods}
    simulated.pod(SECOND).exit(137, "OOMKilled")
    seen = []
    simulated.clock.until(lambda: seen.append(backend.status("train")) or seen[-1].phase is Phase.RUNNING)
    assert {status.phase for status in seen[:-1]} == {Phase.RESTARTING}
    new = seen[-1].pods
    assert not old & {pod.name for pod in new}
    assert [(pod.rank, pod.restarts) for pod in new] == [(0, 1), (1, 1)]


def test_a_deadline_enforced_by_the_controller_is_reported(run, simulated):
    """It deletes the pods at once, which end with 143: no training that was stopped."""

    def life(pod):
        pod.run()
        pod.sleep(0.2)
        simulated.controllers["trainjobs"].exceed_deadline(simulated.job("train"))
        pod.exit(143)

    simulated.lives[FIRST] = life
    simulated.termination_seconds = 0.3
    with pytest.raises(LaunchError, match="stopped at its deadline of 3600 s") as error:
        run(deadline=3600)
    assert "set deadline higher" in error.value.fix


def test_an_elastic_job_replaces_only_the_lost_node(backend, job, simulated):
    simulated.lives |= {FIRST: endless, SECOND: endless}
    backend.submit(job(nodes=2, elastic=TWO))
    simulated.clock.until(lambda: sum(pod.is_healthy for pod in backend.status("train").pods) == 2)
    first, second = (pod.uid for pod in backend.status("train").pods)
    simulated.pod(SECOND).exit(137, "OOMKilled")
    simulated.clock.until(lambda: backend.status("train").pods[1].uid != second)
    # The old pod is there still: the newest of a rank counts.
    assert backend.status("train").pods[0].uid == first
    simulated.clock.until(lambda: backend.status("train").pods[1].phase == "Running")
    status = backend.status("train")
    assert len(status.pods) == 2 and status.phase is Phase.RUNNING
    assert (status.pods[1].restarts, str(status.pods[1].before)) == (1, "OOMKilled, exit code 137")


def test_pods_of_an_earlier_job_of_the_name_do_not_count(backend, job, simulated):
    """They have the same labels, and may take a while to go."""
    simulated.lives[FIRST] = [endless, lambda pod: pod.unschedulable("full")]
    backend.submit(job())
    simulated.clock.until(lambda: backend.status("train").phase is Phase.RUNNING)
    old = simulated.pod(FIRST)
    simulated.termination_seconds = 60
    old_job = simulated.job("train")
    simulated.collection_seconds = 60
    simulated.delete_job()
    old.body["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    simulated.create_job("default", {**old_job, "metadata": dict(old_job["metadata"]), "status": {}})
    (pod,) = backend.status("train").pods
    assert pod.uid != old.uid and backend.status("train").phase is not Phase.RUNNING


def test_what_holds_a_job_back_is_read_of_job_jobset_and_trainjob(backend, job, simulated):
    simulated.asleep = {"trainjobs"}
    backend.submit(job())
    for title, name in (("TrainJob", "train"), ("JobSet", "train"), ("Job", FIRST[:-2])):
        simulated.event(name, "Failed", f"said of the {title}", kind=title)
    explanation = "\n".join(backend.explain(backend.status("train")))
    assert "check Kubeflow Trainer (v2.3) and JobSet" in explanation
    assert all(f"said of the {title}" in explanation for title in ("TrainJob", "JobSet", "Job"))
