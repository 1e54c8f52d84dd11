"""Which restarts count, and when a job is given up for them."""

import pytest
from cluster.pods import endless, fine
from event_lines import resumed
from kinds import both

from components.launchers.backend import Ending, PodStatus
from components.launchers.cluster.watch import MAX_MEMORY_KILLS, Restarts
from trainer.base.errors import EXIT_USAGE, LaunchError

OOM = Ending("OOMKilled", "", 137)
PROGRAM = 'exec: "no-such-program": executable file not found in $PATH: unknown'


def pod(restarts, before=OOM, name="train-worker-0"):
    return PodStatus(name, "Running", 0, restarts=restarts, before=before)


def test_a_start_from_the_same_checkpoint_forgives_nothing():
    restarts = Restarts()
    restarts.resume(100)
    for number in range(1, MAX_MEMORY_KILLS + 1):
        restarts.record(pod(number))
        restarts.resume(100)
    assert restarts.count(pod(MAX_MEMORY_KILLS)) == MAX_MEMORY_KILLS
    assert restarts.find_oom_killed([pod(MAX_MEMORY_KILLS)])


def killed(*lines, after=0.5):
    def life(pod):
        pod.run()
        pod.say(*lines)
        pod.sleep(after)
        pod.exit(137, "OOMKilled")

    return life


@both
def test_memory_that_runs_out_again_and_again_ends_the_job_and_is_named(run, simulated, first):
    """The operator deletes a pod that ended in the same moment: no look at the job shows why."""
    simulated.lives[first] = killed("step 1")
    with pytest.raises(LaunchError) as error:
        run()
    assert f"pod {first} was killed 3 times" in error.value.message
    assert "OOMKilled, exit code 137" in error.value.message and "step 1" in error.value.message
    assert "raise memory_limit" in error.value.fix
    assert f"pod {first}: restarted, 1 of 10 (OOMKilled, exit code 137)" in run.lines
    assert simulated.job() is None


def test_a_pod_that_cannot_be_scheduled_again_reports_its_last_end(run, simulated, first):
    full = "0/3 nodes are available"
    simulated.lives[first] = [killed("step 1", after=0.4), lambda pod: pod.unschedulable(full)]
    with pytest.raises(LaunchError, match="does not run after 1 s") as error:
        run(start_timeout=1)
    assert "the previous pod or container ended: OOMKilled, exit code 137" in error.value.message


@both
def test_memory_that_runs_out_late_is_no_end(run, simulated, first):
    lines_of_resuming = [resumed(step) for step in range(1, 4)]
    simulated.lives[first] = [*(killed(line, after=0.4) for line in ["step 1", *lines_of_resuming]), fine]
    lines = run(backoff=2)
    assert "job train: succeeded" in lines
    lines_said = [line for line in lines if "restarted" in line]
    assert len(lines_said) == 4 and all("of 2 (OOMKilled, exit code 137)" in line for line in lines_said)


def test_without_the_right_to_watch_restarts_are_counted(run, simulated, first):
    simulated.denied.add(("watch", "pods"))
    simulated.lives[first] = [killed("step 1"), fine]
    (line,) = [line for line in run() if "restarted" in line]
    assert line.startswith(f"pod {first}: restarted, 1 of 10")


def test_a_container_that_is_killed_in_its_pod_is_known_too(run, simulated, first):
    def restarts(pod):
        pod.run()
        for _ in range(5):
            pod.sleep(0.1)
            pod.restart(137, "OOMKilled")
        pod.sleep(60)

    simulated.lives[first] = restarts
    with pytest.raises(LaunchError, match="OOMKilled") as error:
        run()
    assert "raise memory_limit" in error.value.fix


def cannot_start(code, reason):
    def life(pod):
        pod.sleep(0.3)  # A real one takes longer, and is seen before it is gone.
        pod.exit(code, reason, PROGRAM)
        pod.sleep(0.3)

    return life


@both
@pytest.mark.parametrize(("code", "reason"), [(128, "StartError"), (127, "ContainerCannotRun")])
def test_a_program_that_does_not_exist_is_not_tried_again(run, simulated, code, reason, first, second):
    simulated.lives |= {first: endless, second: cannot_start(code, reason)}
    begun = simulated.clock.monotonic()
    with pytest.raises(LaunchError) as error:
        run(nodes=2, command=("no-such-program", "-x"))
    assert simulated.clock.monotonic() - begun < 60
    assert PROGRAM in error.value.message and second in error.value.message
    assert "holds the program" in error.value.fix
    if code > 127:  # Else the operator has ended the job.
        assert "program 'no-such-program' of image i:1" in error.value.message
        assert error.value.exit_code == EXIT_USAGE
        assert simulated.job() is None


def test_a_node_that_cannot_start_anything_is_given_another_chance(run, simulated, first):
    def broken(pod):
        pod.sleep(0.2)
        pod.exit(128, "StartError", "nvidia-container-cli: initialization error: driver not loaded")

    simulated.lives[first] = [broken, fine]
    assert "job train: succeeded" in run()
    simulated.delete_job()
    simulated.lives[first] = broken
    with pytest.raises(LaunchError, match=r"cannot start.*driver not loaded") as error:
        run()
    assert "check the node" in error.value.fix
    assert simulated.job() is None


@pytest.mark.parametrize(
    ("reason", "message", "fix", "at_once"),
    [
        ("InvalidImageName", 'couldn\'t parse image name "A:b:c"', "correct image", True),
        (
            "CreateContainerConfigError",
            "container has runAsNonRoot and image will run as root (pod: ...)",
            "set run_as_user",
            True,
        ),
        ("CreateContainerConfigError", 'secret "keys" not found', "create the Secret", False),
    ],
)
def test_what_can_never_run_ends_the_job(run, simulated, reason, message, fix, at_once, first):
    simulated.lives[first] = lambda pod: pod.wait(reason, message)
    begun = simulated.clock.monotonic()
    with pytest.raises(LaunchError, match="cannot start") as error:
        run(start_timeout=600 if at_once else 6)
    assert simulated.clock.monotonic() - begun < 60
    assert message in error.value.message and fix in error.value.fix
    assert error.value.exit_code == EXIT_USAGE
    # And it was told at once, with the remedy.
    assert any(f"waits: {reason}" in line and fix in line for line in run.lines)
    assert simulated.job() is None


@both
def test_a_failed_job_does_not_wait_for_a_peer_that_takes_its_time(run, simulated, first, second, kind):
    """A peer that ignores SIGTERM goes on, and talks, until its grace is over."""

    def stubborn(pod):
        pod.run()
        while True:
            pod.say("still here")
            pod.sleep(0.05)

    def fails(pod):
        pod.run()
        pod.sleep(0.2)
        pod.say("out of luck")
        pod.exit(3)

    # Trainer says that a job failed only when all of its pods are gone.
    simulated.termination_seconds = 600 if kind.name == "pytorchjob" else 0.5
    simulated.lives |= {first: stubborn, second: fails}
    begun = simulated.clock.monotonic()
    with pytest.raises(LaunchError, match="exit code 3") as error:
        run(nodes=2)
    assert simulated.clock.monotonic() - begun < 60
    assert "out of luck" in error.value.message
