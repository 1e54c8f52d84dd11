"""`kubedet submit`: requests, output and exit codes."""

import pytest
import run_pods

import kubedet
from kubedet import cli
from pipelines import wait

ARGUMENTS = [
    "submit", "--data-root", "s3://bucket/root", "--recipe", "coco_r50", "--nodes", "2", "--gpus", "8",
    "--set", "train.epochs=3", "--job", "cpu_limit=32", "--job", "network.profile=rdma",
    "--name", "try",
]  # fmt: skip
PARAMETERS = {
    "data_root": "s3://bucket/root", "recipe": "coco_r50", "nodes": 2, "gpus": 8,
    "overrides": {"train.epochs": 3}, "job": {"cpu_limit": "32", "network": {"profile": "rdma"}},
    "step_cpu": "500m", "step_memory": "2Gi",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(wait, "POLL_SECONDS", 0.01)


def test_a_run_is_started(kfp_server, capsys):
    assert cli.main(ARGUMENTS) == 0
    (run,) = kfp_server.runs
    assert run["display_name"] == "try" and run["runtime_config"]["parameters"] == PARAMETERS
    assert run["experiment_id"] == kfp_server.experiments[0]["experiment_id"]
    assert set(run["pipeline_spec"]) == {"pipeline_spec", "platform_spec"}
    shown = capsys.readouterr().out
    assert f"{kfp_server.url}/#/runs/details/{run['run_id']}" in shown
    assert "kfp --endpoint" in shown and "nodes=2" in shown
    assert f"kubedet job status kubedet-{run['run_id'].replace('-', '')[:12]}-train" in shown


def test_the_function_starts_what_the_command_starts(kfp_server, capsys):
    job, overrides = {"cpu_limit": "32", "network": {"profile": "rdma"}}, {"train.epochs": 3}
    asked = kubedet.PipelineRun(
        recipe="coco_r50",
        data_root="s3://bucket/root",
        nodes=2,
        gpus=8,
        job=job,
        overrides=overrides,
    )
    started = kubedet.submit(asked, name="try", wait=True)
    (run,) = kfp_server.runs
    assert run["display_name"] == "try" and run["runtime_config"]["parameters"] == PARAMETERS
    assert (started.run_id, started.parameters) == (run["run_id"], PARAMETERS)
    assert started.link == f"{kfp_server.url}/#/runs/details/{run['run_id']}"
    assert "succeeded" in capsys.readouterr().out.lower()  # The states of the run.


def test_a_dry_run_needs_no_cluster(kfp_server, monkeypatch, capsys):
    monkeypatch.delenv("KFP_ENDPOINT")
    assert cli.main(["submit", "--claim", "sets", "--dry-run"]) == 0
    assert "kubedet cluster compile --volume --output" in capsys.readouterr().out
    assert cli.main(["submit", "--claim", "sets"]) == 2
    assert "Kubeflow Pipelines is not configured" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [ARGUMENTS, ["schedule", "create", "--cron", "0 2 * * *", *ARGUMENTS[1:3]]]
)
def test_a_server_that_is_too_old_is_refused_before_anything_is_sent(kfp_server, capsys, command):
    for kfp_server.tag in ("2.15.3", "2.14.0-rc.1", "v2.5.0"):
        assert cli.main(command) == 2
        shown = capsys.readouterr().err
        assert f"{kfp_server.tag} is too old" in shown and "upgrade Kubeflow Pipelines to 2.17.0" in shown
    assert kfp_server.asked("POST") == [] and kfp_server.experiments == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nope"], "unknown recipe 'nope'"),
        (["--set", "train.epochs"], "--set 'train.epochs' is not key=value"),
        (["--job", "memory_limit"], "'memory_limit' is not FIELD=VALUE"),
        (["--job", "memory=1Gi"], "memory: no such field"),
        (["--deadline", "-1"], "deadline -1 is less than zero"),
        (["--space", "space.yaml"], "belong to a search"),
        (["--until", "shards"], "nodes: has no effect in a run until shards"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(kfp_server, capsys, arguments, message):
    assert cli.main([*ARGUMENTS, *arguments]) == 2
    assert message in capsys.readouterr().err and kfp_server.requests == []


@pytest.mark.parametrize("has_metadata", [True, False])
def test_waiting_shows_the_steps(kfp_server, capsys, has_metadata):
    kfp_server.has_metadata = has_metadata
    running = [
        {"display_name": "download", "state": "SUCCEEDED"},
        {"display_name": "train", "state": "RUNNING"},
    ]
    inner = [{"display_name": "train-driver", "state": "SUCCEEDED"}]
    kfp_server.states = ["PENDING", ("RUNNING", running), ("RUNNING", running + inner), "SUCCEEDED"]
    assert cli.main([*ARGUMENTS, "--wait"]) == 0
    lines = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()[-5:]]
    assert lines == [
        "run: pending",
        "Download: succeeded",
        "Train: running",
        "run: running",
        "run: succeeded",
    ]


@pytest.mark.parametrize(("condition", "count"), [(["--min-new-images", "1"], 1), ([], 0)])
def test_a_run_without_new_images_reports_it(kfp_server, capsys, condition, count):
    prepared = [{"display_name": "download", "state": "SUCCEEDED"}]
    kfp_server.states = [("RUNNING", prepared), ("SUCCEEDED", prepared)]
    assert cli.main([*ARGUMENTS, *condition, "--wait"]) == 0
    assert capsys.readouterr().out.count("nothing new: nothing was trained") == count


def test_a_failed_run_ends_with_the_words_of_the_step_and_its_remedy(kfp_server, served_cluster, capsys):
    kfp_server.states = ["RUNNING", ("FAILED", [{"display_name": "train", "state": "FAILED"}])]
    ended = {"exitCode": 1, "reason": "Error", "message": "unknown recipe 'nope'\n  fix: use debug"}
    kfp_server.started = lambda run: run_pods.put(
        served_cluster, run["run_id"], "train(0).executor(0)", main={"terminated": ended}
    )
    assert cli.main([*ARGUMENTS, "--wait"]) == 1
    error = "error: the run try failed\n  Train: unknown recipe 'nope'\n  fix: use debug\n"
    assert capsys.readouterr().err.endswith(error)


def test_what_steps_recorded_is_shown_at_the_end(kfp_server, served_cluster, capsys):
    recorded = {"exitCode": 0, "message": "held back\ncoco/AP 0.1 < 0.5"}
    kfp_server.started = lambda run: run_pods.put(
        served_cluster,
        run["run_id"],
        "evaluate(0).executor(0)",
        main={"terminated": recorded},
        phase="Succeeded",
    )
    assert cli.main([*ARGUMENTS, "--wait"]) == 0
    assert "Evaluate and decide: held back; coco/AP 0.1 < 0.5" in capsys.readouterr().out


@pytest.fixture
def cluster(kfp_server, served_cluster):
    """A cluster with Kubeflow Pipelines and a node of 4 cores, 16 GiB and 8 GPUs."""
    labels = {"app": "ml-pipeline"}
    served_cluster.add(
        "pods", "kubeflow", {"metadata": {"name": "api", "labels": labels}, "spec": {"containers": []}}
    )
    allocatable = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "8"}
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
    served_cluster.add("nodes", "", {"metadata": {"name": "a"}, "spec": {}, "status": status})
    return served_cluster


@pytest.mark.parametrize("option", ["--credentials", "--claim"])
def test_a_run_whose_secret_or_claim_is_missing_is_not_started(kfp_server, cluster, capsys, option):
    command = ["submit", "--data-root", "/data/root", "--claim", "sets"]
    cluster.add(
        "persistentvolumeclaims", "kubeflow", {"metadata": {"name": "sets"}, "spec": {}, "status": {}}
    )
    assert cli.main([*command, option, "nosuch"]) == 2
    error = capsys.readouterr().err.partition("error: ")[2]
    assert "nosuch in namespace kubeflow: does not exist" in error and "fix: create it" in error
    assert kfp_server.runs == []
    cluster.denied |= {("get", "secrets"), ("get", "persistentvolumeclaims")}
    assert cli.main([*command, option, "nosuch"]) == 0


def test_what_may_keep_pods_from_starting_is_a_warning(kfp_server, cluster, capsys):
    assert cli.main(["submit", "--data-root", "s3://bucket/root", "--gpus", "8"]) == 0
    shown = capsys.readouterr().err
    assert "secret kubedet-object-store: does not exist" in shown and "KUBEDET_IMAGE is not set" in shown
    assert shown.count("warning: ") == shown.count("\n  fix: ") == 2


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (["--nodes", "2"], "nvidia.com/gpu 8): room for 1 of 2 on 1 ready nodes"),
        (["--job", "memory_limit=64Gi"], "most free on a node: memory 14.0Gi"),
        (["--data-workers", "9"], "a data worker (cpu 500m, memory 2Gi): room for 7 of 9 on 1"),
        (
            ["--step-memory", "32Gi"],
            "room for a step (cpu 500m, memory 32Gi): room for 0 of 1 on 1 ready nodes",
        ),
    ],
)
def test_pods_that_no_node_has_room_for_are_a_warning(kfp_server, cluster, capsys, options, warning):
    resources = {"requests": {"cpu": "100m", "memory": "2Gi"}}
    spec = {"nodeName": "a", "containers": [{"name": "c", "resources": resources}]}
    cluster.add(
        "pods", "elsewhere", {"metadata": {"name": "other"}, "spec": spec, "status": {"phase": "Running"}}
    )
    assert cli.main(["submit", "--data-root", "s3://bucket/root", "--gpus", "8", *options]) == 0
    assert warning in capsys.readouterr().err


TERMINATED = {"state_history": [{"state": state} for state in ("RUNNING", "CANCELING", "FAILED")]}
TOOK = {"created_at": "2026-11-21T07:00:00Z", "finished_at": "2026-11-21T07:10:02Z"}


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ("CANCELED", [], "was stopped"),
        ("SKIPPED", [], "ended with the state skipped"),
        (("FAILED", [], TERMINATED), [], "the run try was stopped"),
        (("FAILED", [], TOOK), ["--deadline", "600"], "reached its deadline of 600 s"),
        (("FAILED", [], TOOK), ["--deadline", "900"], "the run try failed"),
    ],
)
def test_a_run_that_did_not_succeed_says_why(kfp_server, capsys, state, options, message):
    kfp_server.states = ["RUNNING", state]
    assert cli.main([*ARGUMENTS, "--wait", *options]) == 1
    assert message in capsys.readouterr().err


def test_waiting_says_once_why_a_step_does_not_start_and_that_it_is_over(kfp_server, served_cluster, capsys):
    kfp_server.states = [("RUNNING", [{"display_name": "train", "state": "RUNNING"}])] * 5 + ["SUCCEEDED"]
    words = "0/3 nodes are available: 3 Insufficient memory."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    pod = {}

    def put(run):
        node = "train(0).executor(0)"
        name = run_pods.put(served_cluster, run["run_id"], node, phase="Pending", conditions=[unscheduled])
        pod["status"] = served_cluster.objects["pods", "kubeflow", name]["status"]

    kfp_server.started = put
    kfp_server.answered = lambda: len(kfp_server.states) == 3 and pod["status"].update(phase="Running")
    assert cli.main([*ARGUMENTS, "--wait"]) == 0
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if "waits" in line]
    assert lines[0].startswith(f"Train waits: Unschedulable: {words} (fix: ")
    assert lines[1:] == ["Train waits no longer"]


def test_a_step_whose_end_follows_that_of_the_run_is_shown(kfp_server, capsys):
    running, ended = ([{"display_name": "cleanup", "state": state}] for state in ("RUNNING", "SUCCEEDED"))
    kfp_server.states = [("SUCCEEDED", running), ("SUCCEEDED", ended)]
    assert cli.main([*ARGUMENTS, "--wait"]) == 0
    assert "Clean up: succeeded" in capsys.readouterr().out


def test_a_step_that_only_a_person_can_help_ends_the_run(kfp_server, served_cluster, capsys):
    kfp_server.states = [("RUNNING", [])]
    gone = {"reason": "ErrImagePull", "message": 'failed to pull "registry.example/none": not found'}
    kfp_server.started = lambda run: run_pods.put(
        served_cluster, run["run_id"], "download(0).executor(0)", phase="Pending", main={"waiting": gone}
    )
    assert cli.main([*ARGUMENTS, "--wait", "--job", "start_timeout=1"]) == 1
    shown = capsys.readouterr()
    assert "registry.example/none" in shown.out and "registry.example/none" in shown.err
    assert kfp_server.asked("POST")[-1].endswith(":terminate")


def test_waiting_outlives_a_server_that_is_away(kfp_server, capsys):
    kfp_server.failures = [("GET", "/runs/", 503, "no upstream"), ("GET", "/runs/", 429, "slow down")]
    assert cli.main([*ARGUMENTS, "--wait"]) == 0
    assert capsys.readouterr().out.count("no response, trying again") == 1


def test_interrupted_waiting_says_that_the_run_continues(kfp_server, capsys, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    kfp_server.states = ["RUNNING"]
    monkeypatch.setattr(wait.time, "sleep", interrupted)
    assert cli.main([*ARGUMENTS, "--wait"]) == 130
    assert "the run continues: http" in capsys.readouterr().err
