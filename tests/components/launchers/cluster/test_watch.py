"""Running a job to its end: one test for each failure."""

import re
from dataclasses import replace

import pytest
from cluster.api import Fault
from cluster.fixtures import connect_backend
from cluster.pods import endless, ends, fine
from event_lines import failed
from kinds import both, plain

from components.launchers.backend import Ending, JobStatus, Phase, PodStatus
from components.launchers.cluster import pods
from components.launchers.cluster.watch import first_failed_pod, job_error
from components.launchers.output import Hints
from components.launchers.spec import Network
from trainer.base.errors import Interrupted, LaunchError


@both
def test_a_job_that_succeeds_prints_every_line_once(run, simulated, first):
    simulated.lives[first] = ends(0, *(f"step {number}" for number in range(200)))
    lines = run(nodes=2)
    assert [line for line in lines if line.startswith("[")] == [f"[{first}] step {n}" for n in range(200)]
    assert lines.count("job train: succeeded") == 1
    assert simulated.job("train")  # Its pods and logs stay until its ttl.


@both
def test_a_failed_job_is_an_error_with_pod_code_and_message(run, simulated, first):
    simulated.lives[first] = ends(2, "step 1", failed("no such recipe 'x'\n  fix: use one of: debug"))
    with pytest.raises(LaunchError) as error:
        run()
    assert str(error.value) == (
        f"pod {first} (rank 0) failed with exit code 2: no such recipe 'x'\n  fix: use one of: debug"
    )
    assert error.value.exit_code == 2


def test_a_crash_is_an_error_with_the_last_lines(run, simulated, first, second):
    simulated.lives |= {
        first: endless,
        second: ends(1, *(f"line {number}" for number in range(50)), "ZeroDivisionError"),
    }
    with pytest.raises(LaunchError, match=rf"pod {second} \(rank 1\) failed with exit code 1") as error:
        run(nodes=2)
    assert error.value.message.endswith("  ZeroDivisionError")
    assert "line 31\n" in error.value.message and "line 30\n" not in error.value.message
    assert error.value.exit_code == 1


@both
def test_a_pod_that_dies_again_and_again_ends_the_job(run, simulated, first):
    def dies(pod):
        pod.run()
        pod.say("segmentation fault")
        pod.sleep(0.5)
        pod.exit(139)

    simulated.lives[first] = dies
    printed = r"restarted 3 times \(exit code 139\) without a newer checkpoint; the limit is 2"
    with pytest.raises(LaunchError, match=printed) as error:
        run(backoff=2)
    assert "segmentation fault" in error.value.message
    assert f"pod {first}: restarted, 2 of 2 (exit code 139)" in run.lines
    assert simulated.job() is None


def test_pods_that_stay_pending_are_explained_and_removed(run, simulated, first, second):
    simulated.lives |= {
        first: lambda pod: pod.unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        second: lambda pod: pod.wait("ImagePullBackOff", 'Back-off pulling image "i:1"'),
    }
    with pytest.raises(LaunchError, match=r"does not run after 1 s \(0 of 2 pods run\)") as error:
        run(nodes=2, start_timeout=1)
    for part in (
        f"pod {first} is Pending: Unschedulable",
        "Insufficient nvidia.com/gpu",
        "FailedScheduling (x7)",
    ):
        assert part in error.value.message
    assert f'pod {second} is Pending: ImagePullBackOff: Back-off pulling image "i:1"' in error.value.message
    assert simulated.job() is None
    # And both are told at once, once each.
    assert sum("waits: ImagePullBackOff" in line for line in run.lines) == 1


@pytest.mark.slow
def test_the_start_timeout_counts_each_wait_by_itself(run, simulated, first):
    def preempted(pod):
        pod.sleep(1.2)
        pod.run()
        pod.sleep(0.4)
        pod.exit(137)

    def resumed(pod):
        pod.sleep(1.2)
        fine(pod)

    simulated.lives[first] = [preempted, resumed]
    assert "job train: restarting, 0 of 1 pods run" in run(start_timeout=2)


@both
@pytest.mark.parametrize(
    ("message", "word", "seconds"),
    [("exceeded quota: gpus", "request less", 3), ('violates PodSecurity "restricted"', "enforce", 0.3)],
)
def test_a_job_without_pods_is_explained_and_given_up(
    run, simulated, kind, monkeypatch, message, word, seconds
):
    monkeypatch.setattr(pods, "SLOW_SECONDS", -1.0)
    simulated.asleep = {"pytorchjobs", "trainjobs"}
    simulated.event("train", "FailedCreate", message, kind=kind.title)
    begun = simulated.clock.monotonic()
    with pytest.raises(LaunchError, match=re.escape(message)):
        run(start_timeout=3)
    assert simulated.clock.monotonic() - begun > seconds
    (line,) = [
        line for line in run.lines if line.startswith(f"job train waits: FailedCreate: {message} (fix: ")
    ]
    assert word in line


@both
def test_the_end_of_an_obstacle_is_reported(run, simulated, first):
    def late(pod):
        pod.unschedulable("full")
        pod.sleep(0.5)
        pod.run()
        pod.sleep(0.5)
        pod.exit(0)

    simulated.lives[first] = late
    lines = run()
    waits = [line.partition(" (fix")[0] for line in lines if "waits" in line]
    assert waits == [f"pod {first} waits: Unschedulable: full", f"pod {first} waits no longer"]


def test_the_deadline_counts_from_the_jobs_creation(run, backend, job, simulated, first):
    simulated.lives[first] = endless
    backend.submit(job(deadline=3600))
    simulated.job("train")["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(LaunchError, match="stopped at its deadline of 3600 s"):
        run(deadline=3600)
    assert simulated.job() is None


@pytest.mark.parametrize("fault", [{"status": 503}, {"drop": True}], ids=str)
def test_an_api_server_that_is_away_is_waited_for(run, simulated, fault, caplog, first):
    def life(pod):
        pod.run()
        simulated.faults.append(Fault("GET", times=6, **fault))
        for number in range(20):
            pod.say(f"step {number}")
            pod.sleep(0.02)
        pod.exit(0)

    caplog.set_level("INFO")
    simulated.lives[first] = life
    lines = run()
    assert [line for line in lines if line.startswith("[")] == [f"[{first}] step {n}" for n in range(20)]
    assert "still trying" in caplog.text and "answers again" in caplog.text


def test_an_outage_has_an_end(run, backend, simulated, timings, first):
    def life(pod):
        simulated.faults.append(Fault("GET", times=10**6, status=503))
        endless(pod)

    simulated.lives[first] = life
    backend.timings = replace(timings, outage=0.3)
    with pytest.raises(LaunchError, match=r"503.*; the job train continues") as error:
        run()
    assert "kubedet job stop -n default train" in error.value.fix
    assert simulated.job()  # It may be well: the next launcher takes it up.


def test_a_sign_of_life_is_given_when_nothing_happens(run, backend, simulated, timings, first):
    def quiet(pod):
        pod.run()
        pod.sleep(0.8)
        pod.exit(0)

    simulated.lives[first] = quiet
    backend.timings = replace(timings, heartbeat=0.3)
    signs = [line for line in run() if "no output for" in line]
    assert 1 <= len(signs) <= 3
    printed = r"job train: running, 1 of 1 pods run, for \d+ s; no output for \d+ s"
    assert re.fullmatch(printed, signs[0])


def test_hints_are_given_where_they_arise_and_at_the_end(run, simulated, first):
    simulated.lives[first] = ends(1, "node NCCL INFO Using network NET/Socket", "Call to ibv_reg_mr failed")
    with pytest.raises(LaunchError) as error:
        run(network=Network(profile="rdma"))
    assert "NET/Socket" in error.value.fix and "memlock" in error.value.fix
    assert sum(line.startswith("hint: ") for line in run.lines) == 2


def test_a_logs_permission_that_is_missing_does_not_end_the_watching(run, simulated, caplog):
    simulated.denied.add(("get", "pods/log"))
    assert "job train: succeeded" in run()
    assert 'resources ["pods/log"]' in caplog.text


@both
def test_the_launcher_kubernetes_is_this(served_cluster, job, capsys, first, kind):
    from components.launchers import run

    served_cluster.installed = {kind.plural}
    served_cluster.lives[first] = ends(0, "hello")
    run("kubernetes", job())
    assert f"[{first}] hello" in plain(capsys.readouterr().out)


@pytest.fixture
def once_it_runs(run, simulated):
    """Do something as soon as the run has reported that the job runs."""

    def begin(act):
        def wait():
            simulated.clock.until(lambda: any("running" in line for line in run.lines))
            act()

        simulated.clock.start(wait)

    return begin


@pytest.fixture
def patient(backend, timings):
    """The backend, which gives another job of the name time to appear: that takes no longer than it does."""
    backend.timings = replace(timings, replaced=30.0)
    return backend


def test_a_job_that_is_deleted_is_reported(run, once_it_runs, simulated, first):
    simulated.lives[first] = endless
    once_it_runs(lambda: simulated.delete_job())
    with pytest.raises(LaunchError, match="the job train no longer exists"):
        run()


@both
def test_a_job_that_another_specification_replaces_is_reported(
    run, patient, once_it_runs, job, simulated, first
):
    simulated.lives[first] = endless

    def replace_it():
        simulated.delete_job()
        simulated.clock.sleep(0.2)
        connect_backend(simulated).submit(job(env={"A": "other"}))

    once_it_runs(replace_it)
    with pytest.raises(
        LaunchError, match="was replaced by a job of that name with another specification"
    ) as error:
        run()
    assert "rename" in error.value.fix and "stop" not in error.value.fix
    assert simulated.job() and not simulated.requests("DELETE")


@both
def test_the_same_job_recreated_by_another_launcher_is_followed(run, patient, once_it_runs, simulated, first):
    simulated.lives[first] = [endless, ends(0, "anew")]

    def replace_it():
        old = simulated.job("train")
        simulated.collection_seconds = 60
        simulated.delete_job()
        simulated.create_job("default", {**old, "metadata": dict(old["metadata"]), "status": {}})

    once_it_runs(replace_it)
    lines = run()
    assert "job train: succeeded" in lines and f"[{first}] anew" in lines


def pod(rank, code, *, reason="Error", ended="", phase="Failed", message=""):
    return PodStatus(f"pod-{rank}", phase, rank, reason=reason, exit_code=code, ended=ended, message=message)


def failure(*pods, last=None, **fields):
    status = JobStatus("train", Phase.FAILED, pods=pods, **fields)
    return job_error(status, last or {}, Hints(rdma=False))


@pytest.mark.parametrize(
    ("pods", "rank"),
    [
        ([pod(0, 143), pod(1, 1)], 1),
        ([pod(0, 137), pod(1, 1)], 1),
        ([pod(0, 143), pod(1, 137)], 1),
        ([pod(0, 1, ended="2026-01-01T00:00:05Z"), pod(1, 1, ended="2026-01-01T00:00:04Z")], 1),
        ([pod(0, 1), pod(1, 1)], 0),
        ([pod(0, 0, phase="Succeeded"), pod(1, 3)], 1),
    ],
)
def test_the_first_that_failed_by_itself_is_the_culprit(pods, rank):
    assert first_failed_pod(pods).rank == rank


def test_a_job_whose_pods_are_gone_is_reported_by_its_condition():
    error = failure(reason="PyTorchJobFailed", message="1 worker replica(s) failed.")
    assert error.message == "the job train failed: PyTorchJobFailed: 1 worker replica(s) failed."
    assert "job status" in error.fix
    assert "reports no reason" in str(failure())


@pytest.mark.parametrize(
    ("code", "reason", "message", "exit_code"),
    [
        (1, "Error", "pod pod-0 (rank 0) failed with exit code 1", 1),
        (127, "ContainerCannotRun", "pod pod-0 (rank 0) failed with exit code 127 (ContainerCannotRun)", 127),
        (137, "OOMKilled", "pod pod-0 (rank 0) was killed by signal 9 (OOMKilled)", 1),
        (135, "Error", "pod pod-0 (rank 0) was killed by signal 7", 1),
        (None, "Evicted", "pod pod-0 (rank 0) failed (Evicted)", 1),
    ],
)
def test_an_end_is_reported(code, reason, message, exit_code):
    error = failure(pod(0, code, reason=reason))
    assert error.message == message
    assert isinstance(error, LaunchError) and error.exit_code == exit_code


def test_too_little_memory_has_a_remedy():
    assert "memory_limit" in failure(pod(0, 137, reason="OOMKilled")).fix
    assert "shared_memory" in failure(pod(0, 135)).fix
    assert "job logs" in failure(pod(0, 1)).fix


def test_a_training_that_saved_and_stopped_can_continue():
    error = failure(pod(0, 143))
    assert isinstance(error, Interrupted) and error.exit_code == 143


def test_memory_is_reported_with_the_message_of_the_training():
    message = (
        "the training process of rank 0 was killed (SIGKILL)\n  fix: the step probably ran out of memory"
    )
    lines = [failed(message, 137)]
    error = failure(pod(0, 137, reason="OOMKilled"), last={"pod-0": lines})
    assert "(OOMKilled)" in error.message and "the step probably ran out of memory" in error.message
    assert "raise memory_limit" in error.fix


def test_a_pod_in_crash_loop_is_reported_with_its_last_end():
    before = Ending("OOMKilled", "", 137)
    waits = PodStatus("pod-0", "Running", 0, reason="CrashLoopBackOff", restarts=10, before=before)
    error = failure(waits)
    assert "was killed by signal 9 (OOMKilled)" in error.message and "raise memory_limit" in error.fix
