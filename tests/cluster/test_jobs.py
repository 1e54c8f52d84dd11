"""Submit, stream, succeed, fail, stop: what a user sees, and what is left in the cluster."""

import json
import signal
import time

from tests.cluster.user import until

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
COUNT = "import time\nfor i in range(2000):\n    print(f'line {i:04}', flush=True)\n    time.sleep(0.005)"


def test_a_job_succeeds_and_every_line_arrives_once_and_in_order(user, cluster):
    path, name = user.python(COUNT)
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 0, str(command)
    numbers = [line.rpartition("line ")[2] for line in command.lines if "line " in line]
    assert numbers == [f"{number:04}" for number in range(2000)]
    rank_0 = {"pytorchjob": f"[{name}-worker-0]", "trainjob": f"[{name}-node-0-0-"}[cluster.kind.name]
    assert any(rank_0 in line for line in command.lines)
    listed, code = user.runs("job", "list", "--json")
    phases = {job["name"]: job["phase"] for job in json.loads("\n".join(listed.lines))}
    assert (code, phases[name]) == (0, "succeeded")


def test_lines_arrive_while_the_job_runs(user):
    path, _ = user.python(
        "import time\nprint('first', flush=True)\ntime.sleep(12)\nprint('last', flush=True)"
    )
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    first = command.wait_for("first")
    assert command.wait_for("last") - first > 8
    assert command.end() == 0, str(command)


def test_a_job_that_fails_says_where_and_why(user, cluster):
    code = "import os, sys\nif os.environ['PET_NODE_RANK'] == '1':\n    print('out of luck'); sys.exit(3)\n"
    path, name = user.python(code + "import time; time.sleep(600)", nodes=2)
    command, exit_code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert exit_code == 3, str(command)
    rank_1 = {"pytorchjob": f"{name}-worker-1", "trainjob": f"{name}-node-0-1-"}[cluster.kind.name]
    for text in (rank_1, "exit code 3", "out of luck"):
        assert text in command.errors, str(command)


def test_the_same_job_is_adopted_and_another_of_its_name_replaces_it(user, cluster):
    path, name = user.python(SLEEP)
    assert user.runs("job", "submit", "--spec", str(path))[1] == 0
    cluster.running(name, 1)
    first = cluster.job(name)["metadata"]["uid"]
    assert user.runs("job", "submit", "--spec", str(path))[1] == 0
    assert cluster.job(name)["metadata"]["uid"] == first
    changed, _ = user.python("print('other')", name=name)
    command, code = user.runs("job", "submit", "--spec", str(changed), "--wait")
    assert code == 0, str(command)
    assert command.heard("other")
    assert cluster.job(name)["metadata"]["uid"] != first


def test_a_launcher_that_is_terminated_deletes_the_job(user, cluster):
    path, name = user.python(SLEEP)
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    command.wait_for("up")
    command.signal(signal.SIGTERM)
    assert command.end() == 143, str(command)
    assert cluster.job(name) is None
    until(lambda: not cluster.pods(name), "the pods are gone")


def test_stop_status_and_logs(user, cluster):
    path, name = user.python(SLEEP)
    assert user.runs("job", "submit", "--spec", str(path))[1] == 0
    cluster.running(name, 1)
    until(lambda: user.runs("job", "logs", name)[0].heard("up"), "the log")
    status, code = user.runs("job", "status", name, "--json")
    job_status = json.loads("\n".join(status.lines))
    assert (code, job_status["phase"], [pod["rank"] for pod in job_status["pods"]]) == (0, "running", [0])
    ran, code = user.runs("job", "exec", name, "--", "python", "-c", "print(6 * 7); raise SystemExit(5)")
    assert (code, ran.lines[-1]) == (5, "42"), str(ran)
    assert user.runs("job", "stop", name)[1] == 0
    assert cluster.job(name) is None
    again, code = user.runs("job", "status", name)
    assert code == 2, str(again)


def test_pods_that_cannot_start_are_told_of_and_removed(user, cluster):
    path, name = user.python("pass", image="registry.invalid/none:1", start_timeout=100)
    began = time.monotonic()
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 2, str(command)
    assert time.monotonic() - began < 120
    assert any(word in command.errors for word in ("ImagePullBackOff", "ErrImagePull")), str(command)
    assert any(" waits: " in line and "(fix: correct image" in line for line in command.lines), str(command)
    assert cluster.job(name) is None


def test_a_pod_that_no_node_can_hold_is_explained(user):
    path, _ = user.python("pass", gpus=1, gpu_resource="example.com/none", start_timeout=15)
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 1, str(command)
    assert "Insufficient example.com/none" in command.errors, str(command)


def test_a_pod_that_uses_too_much_memory_is_told_of_and_not_tried_for_ever(user, cluster):
    """The operator deletes each of them the moment it has ended."""
    code = "print('up', flush=True)\nheld = []\nwhile True:\n    held.append(b'x' * (8 << 20))"
    path, name = user.python(code, memory_request="64Mi", memory_limit="128Mi", shared_memory="32Mi")
    command, exit_code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert exit_code == 1, str(command)
    assert any("restarted, 1 of 10 (OOMKilled, exit code 137)" in line for line in command.lines), str(
        command
    )
    assert "OOMKilled" in command.errors and "raise memory_limit" in command.errors, str(command)
    assert cluster.job(name) is None


def test_a_program_that_does_not_exist_ends_the_job_at_once(user, cluster, common):
    path, name = user.spec(["no-such-program", "--now"])
    began = time.monotonic()
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 2, str(command)
    assert time.monotonic() - began < common["start_timeout"]
    for text in ("'no-such-program'", common["image"], "holds the program"):
        assert text in command.errors, str(command)
    assert cluster.job(name) is None


def test_an_image_that_would_run_as_root_ends_the_job_at_once(user, cluster):
    path, name = user.python("pass", run_as_user=0)
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 2, str(command)
    assert "run_as_user" in command.errors and "non-root policy" in command.errors, str(command)
    assert cluster.job(name) is None


def test_a_failed_job_ends_within_its_grace_though_a_peer_ignores_sigterm(user, cluster):
    """The first process of a container has no default for SIGTERM; this one would not hear of it anyway."""
    code = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['PET_NODE_RANK'] == '1':\n"
        "    time.sleep(5)\n    print('out of luck', flush=True)\n    sys.exit(3)\n"
        "while True:\n    print('still here', flush=True)\n    time.sleep(1)"
    )
    path, name = user.python(code, nodes=2, grace_seconds=15.0)
    command = user.starts("job", "submit", "--spec", str(path), "--wait")
    until(lambda: _failed(cluster.job(name)), "the job has failed")
    assert command.end(60) == 3, str(command)
    assert "out of luck" in command.errors, str(command)
    until(lambda: _running(cluster.pods(name)) == 0, "no pod runs", 15 + 20)


def _failed(job):
    conditions = ((job or {}).get("status") or {}).get("conditions") or []
    return any(item["type"] == "Failed" and item["status"] == "True" for item in conditions)


def _running(pods):
    return sum(pod.status.phase == "Running" for pod in pods)


def test_the_program_starts_in_its_folder(user):
    path, _ = user.python("import os; print('in ' + os.getcwd())", working_dir="/tmp")
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 0 and command.heard("in /tmp"), str(command)


def test_the_loser_of_a_name_is_told_and_leaves_the_winners_job_alone(user, cluster):
    path, name = user.python(SLEEP)
    loser = user.starts("job", "submit", "--spec", str(path), "--wait")
    loser.wait_for("up")
    changed, _ = user.python(SLEEP.replace("up", "other"), name=name, grace_seconds=5.0)
    winner = user.starts("job", "submit", "--spec", str(changed), "--wait")
    winner.wait_for("other")
    assert loser.end() == 1, str(loser)
    assert any(words in loser.errors for words in ("with another specification", "is gone")), str(loser)
    assert cluster.job(name) is not None
    winner.signal(signal.SIGTERM)
    assert winner.end() == 143, str(winner)


def test_a_deadline_ends_the_job(user, cluster):
    path, name = user.python(SLEEP, deadline=20)
    command, code = user.runs("job", "submit", "--spec", str(path), "--wait")
    assert code == 1, str(command)
    assert "deadline" in command.errors, str(command)
    assert cluster.job(name) is None
