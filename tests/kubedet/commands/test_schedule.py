"""`kubedet schedule`: one recurring run of a name, never two."""

from datetime import datetime
from itertools import islice

import pytest

from kubedet import cli
from pipelines.schedules import due_times, parse_cron
from trainer.base.errors import ConfigError
from trainer.steps import records

NOW = datetime(2026, 11, 21, 7, 30)
TIMES = {"created_at": "2026-11-21T02:00:00Z", "finished_at": "2026-11-21T03:30:00Z"}
NIGHTLY = ["schedule", "create", "--cron", "0 2 * * *", "--data-root", "s3://bucket/root"]


def only(server):
    (schedule,) = server.schedules
    return schedule


def test_a_schedule_is_created(kfp_server, capsys):
    assert cli.main([*NIGHTLY, "--source", "coco:s3://bucket/sets"]) == 0
    recurring_run = only(kfp_server)
    assert recurring_run["display_name"] == "kubedet" and recurring_run["mode"] == "ENABLE"
    assert recurring_run["trigger"] == {"cron_schedule": {"cron": "0 0 2 * * *"}}
    assert recurring_run["max_concurrency"] == "1" and recurring_run["no_catchup"] is True
    assert recurring_run["runtime_config"]["parameters"] == {
        "data_root": "s3://bucket/root",
        "source": "coco:s3://bucket/sets",
        "step_cpu": "2",
        "step_memory": "8Gi",
    }
    shown = capsys.readouterr().out
    assert "schedule kubedet: created" in shown and " 02:00:00, " in shown
    assert f"{kfp_server.url}/#/recurringrun/details/{recurring_run['recurring_run_id']}" in shown


def test_the_same_again_changes_nothing(kfp_server, capsys):
    cli.main(NIGHTLY)
    before = only(kfp_server)
    assert cli.main(NIGHTLY) == 0
    assert only(kfp_server) == before and "schedule kubedet: unchanged" in capsys.readouterr().out
    before["status"] = "DISABLED"
    assert cli.main(NIGHTLY) == 0
    assert only(kfp_server)["status"] == "ENABLED" and "enabled" in capsys.readouterr().out


@pytest.mark.parametrize("change", [["--cron", "0 3 * * *"], ["--nodes", "2"], ["--experiment", "other"]])
def test_another_one_of_the_name_replaces_it(kfp_server, capsys, change):
    cli.main(NIGHTLY)
    before = only(kfp_server)
    assert cli.main([*NIGHTLY, *change]) == 0
    assert only(kfp_server)["recurring_run_id"] != before["recurring_run_id"]
    assert "schedule kubedet: replaced" in capsys.readouterr().out


def test_one_that_could_not_be_deleted_goes_the_next_time(kfp_server, capsys):
    cli.main(NIGHTLY)
    kfp_server.failures = [("DELETE", "/recurringruns", 503, "later")]
    assert cli.main([*NIGHTLY, "--nodes", "2"]) == 1
    assert len(kfp_server.schedules) == 2 and "cannot delete the schedule" in capsys.readouterr().err
    assert cli.main([*NIGHTLY, "--nodes", "2"]) == 0
    assert only(kfp_server)["runtime_config"]["parameters"]["nodes"] == 2


def running(server):
    """Let the only schedule have a run that goes on, and one that has ended."""
    of = {"recurring_run_id": only(server)["recurring_run_id"]}
    server.runs = [{"run_id": "r1", "state": "SUCCEEDED", **of}, {"run_id": "r2", "state": "RUNNING", **of}]
    return server.runs[1]


@pytest.mark.parametrize("arguments", [[*NIGHTLY, "--nodes", "2"], ["schedule", "delete"]])
def test_a_run_outlives_its_schedule(kfp_server, capsys, arguments):
    cli.main(NIGHTLY)
    before, run = only(kfp_server)["recurring_run_id"], running(kfp_server)
    assert cli.main(arguments) == 0
    assert run["state"] == "RUNNING"
    assert before not in [item["recurring_run_id"] for item in kfp_server.schedules]


def test_others_schedules_are_left_alone(kfp_server, capsys):
    foreign = {"recurring_run_id": "1", "display_name": "kubedet", "description": "mine", "status": "ENABLED"}
    kfp_server.schedules = [foreign]
    for arguments in (NIGHTLY, ["schedule", "delete"]):
        assert cli.main(arguments) == 2
        assert "was not created by `kubedet schedule`" in capsys.readouterr().err
    assert kfp_server.schedules == [foreign]
    assert cli.main([*NIGHTLY, "--name", "nightly"]) == 0
    assert len(kfp_server.schedules) == 2


def test_schedules_are_listed_and_deleted(kfp_server, capsys):
    assert cli.main(["schedule", "list"]) == 0
    assert capsys.readouterr().out == "no schedules\n"
    for name in ("b", "a"):
        cli.main([*NIGHTLY, "--name", name])
    kfp_server.schedules.append({"recurring_run_id": "1", "display_name": "foreign"})
    capsys.readouterr()
    assert cli.main(["schedule", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "a: 0 0 2 * * *, enabled",
        "b: 0 0 2 * * *, enabled",
    ]
    assert "  data_root=s3://bucket/root" in lines
    assert cli.main(["schedule", "delete", "--name", "a"]) == 0
    assert [item["display_name"] for item in kfp_server.schedules] == ["b", "foreign"]
    assert cli.main(["schedule", "delete", "--name", "a"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--until", "shards", "--gate", "coco/AP50 >= 1"], "gate: has no effect in a run until shards"),
        (["--cron", "0 25 * * *"], "hour"),
        (["--output", "s3://bucket/run"], "share one folder"),
        (["--nodes", "0"], "nodes: "),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(kfp_server, capsys, arguments, message):
    assert cli.main([*NIGHTLY, *arguments]) == 2
    assert message in capsys.readouterr().err and kfp_server.requests == []


def test_a_run_is_started_now_with_what_the_schedule_runs(kfp_server, capsys):
    cli.main([*NIGHTLY, "--name", "weekly", "--nodes", "2"])
    before = dict(only(kfp_server))
    assert cli.main(["schedule", "run", "--name", "weekly"]) == 0
    (run,) = kfp_server.runs
    assert run["runtime_config"] == before["runtime_config"]
    assert run["pipeline_spec"] == before["pipeline_spec"]
    assert run["experiment_id"] == before["experiment_id"]
    assert only(kfp_server) == before
    shown = capsys.readouterr().out
    assert f"started the run {run['run_id']}" in shown and f"/#/runs/details/{run['run_id']}" in shown


def test_a_run_that_was_started_belongs_to_the_schedule(kfp_server, capsys, tmp_path):
    cli.main(NIGHTLY)
    assert cli.main(["schedule", "run"]) == 0
    (run,) = kfp_server.runs
    somebodys = {"run_id": "other", "display_name": run["display_name"], "state": "SUCCEEDED", **TIMES}
    kfp_server.runs.append(somebodys)
    assert cli.main(["schedule", "run"]) == 2  # One at a time.
    run |= {"state": "SUCCEEDED", **TIMES}
    capsys.readouterr()
    assert cli.main(["schedule", "history", "--data-root", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert run["run_id"] in shown and "other" not in shown


def test_the_runs_of_a_schedule_that_was_replaced_stay_in_its_history(kfp_server, capsys, tmp_path):
    for number in range(3):
        cli.main([*NIGHTLY, "--nodes", str(number + 1)])
        of = {"recurring_run_id": only(kfp_server)["recurring_run_id"], **TIMES}
        kfp_server.runs.append({"run_id": f"night-{number}", "state": "SUCCEEDED", **of})
    assert cli.main([*NIGHTLY, "--nodes", "3"]) == 0
    capsys.readouterr()
    assert cli.main(["schedule", "history", "--data-root", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert [f"night-{number}" in shown for number in range(3)] == [True] * 3
    assert len(shown.splitlines()) == 4


@pytest.mark.parametrize("what", ["run", "delete"])
def test_a_schedule_that_there_is_not(kfp_server, capsys, what):
    assert cli.main(["schedule", what, "--name", "none"]) == 2
    assert "there is no schedule 'none'" in capsys.readouterr().err


@pytest.fixture
def past(kfp_server, tmp_path):
    """A schedule with four runs that ended: two left an evaluation, one had nothing new."""
    cli.main([*NIGHTLY, "--name", "weekly"])
    of = {"recurring_run_id": only(kfp_server)["recurring_run_id"]}
    for number, state in enumerate(["SUCCEEDED"] * 3 + ["FAILED"], start=1):
        times = {"created_at": f"2026-11-2{number}T02:00:00Z", "finished_at": f"2026-11-2{number}T03:30:00Z"}
        kfp_server.runs.append({"run_id": f"id-{number}", "state": state, **times, **of})
    kfp_server.runs[-1]["state_history"] = [{"state": "CANCELING"}, {"state": "FAILED"}]  # By a user.
    kfp_server.runs.append({"run_id": "id-5", "state": "RUNNING", "created_at": "2026-11-25T02:00:00Z", **of})
    root = str(tmp_path / "root")
    for number, ap, passed in ((1, 0.4, True), (2, 0.3, False)):
        records.VerdictRecord(f"2026112{number}020000-id-{number}", passed, {"coco/AP": ap}).write(root)
    folder = tmp_path / "root" / "lineage" / "nothing_new"
    folder.mkdir(parents=True)
    (folder / "id-3.json").write_text("{}")
    return str(tmp_path / "root")


def test_the_history_has_the_result_of_each_run(past, capsys):
    capsys.readouterr()
    assert cli.main(["schedule", "history", "--name", "weekly", "--data-root", past]) == 0
    shown = capsys.readouterr()
    assert [line.split() for line in shown.out.splitlines()] == [
        ["began", "hours", "state", "verdict", "AP", "run"],
        ["2026-11-21", "02:00", "1.50", "succeeded", "passed", "0.4000", "id-1"],
        ["2026-11-22", "02:00", "1.50", "succeeded", "held", "back", "0.3000", "id-2"],
        ["2026-11-23", "02:00", "1.50", "succeeded", "nothing", "new", "-", "id-3"],
        ["2026-11-24", "02:00", "1.50", "stopped", "-", "-", "id-4"],
        ["2026-11-25", "02:00", "-", "running", "-", "-", "id-5"],
    ]
    assert shown.err == ""


def test_the_history_says_where_it_could_not_look(past, tmp_path, capsys):
    assert cli.main(["schedule", "history", "--name", "weekly", "--data-root", f"{tmp_path}/none"]) == 0
    shown = capsys.readouterr()
    assert "verdicts and APs could not be read: " in shown.err
    assert "id-1" in shown.out and "0.4000" not in shown.out


@pytest.mark.parametrize(
    ("text", "sent", "times"),
    [
        ("0 2 * * *", "0 0 2 * * *", ["2026-11-22 02:00:00", "2026-11-23 02:00:00"]),
        ("30 0 2 * * ?", "30 0 2 * * ?", ["2026-11-22 02:00:30"]),
        ("*/20 7-8 * * *", "0 */20 7-8 * * *",
         ["2026-11-21 07:40:00", "2026-11-21 08:00:00", "2026-11-21 08:20:00"]),
        # Both days: either is enough.
        ("0 0 1 * 0", "0 0 0 1 * 0", ["2026-11-22 00:00:00", "2026-11-29 00:00:00", "2026-12-01 00:00:00"]),
        ("0 0 29 FEB *", "0 0 0 29 FEB *", ["2028-02-29 00:00:00"]),
    ],
)  # fmt: skip
def test_when_it_comes_due(text, sent, times):
    assert parse_cron(text) == sent
    assert [str(time) for time in islice(due_times(sent, NOW), len(times))] == times


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@daily", "1 fields"),
        ("60 2 * * *", "minute"),
        ("0 2 * * 7", "7 for Sunday"),
        ("0 2 L * *", "L"),
        ("0 2 * * MON#1", "#"),
        ("0 0 31 2 *", "day-of-month"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_cron(text)
    assert message in str(caught.value) and caught.value.fix
