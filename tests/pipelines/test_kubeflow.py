"""The client of Kubeflow Pipelines and its errors, and the pods of a run that wait or fail."""

import json

import pytest
import run_pods
from event_lines import failed
from patience import until

from components import jobs
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.spec import JobSpec
from pipelines import Access
from pipelines.kubeflow import Server, ServiceUnavailable
from pipelines.wait import Pods
from trainer.base.errors import ConfigError


def test_the_token_of_the_environment_is_sent(kfp_server, monkeypatch):
    kfp_server.token = "s3cr3t"
    monkeypatch.setenv("KFP_EXISTING_TOKEN", "s3cr3t\n")
    Server(Access.resolve()).find_or_create_experiment("e")
    assert {headers["authorization"] for _, _, headers in kfp_server.requests} == {"Bearer s3cr3t"}


def test_a_pods_token_is_read_for_every_request(kfp_server, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("first")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    kfp_server.token = "first"
    server = Server(Access.resolve())
    kfp_server.token = "second"
    (tmp_path / "token").write_text("second")
    assert server.find_or_create_experiment("e")


def test_a_kubeconfig_leads_there_by_the_api_server(kfp_server, monkeypatch, tmp_path):
    cluster = {"name": "c", "cluster": {"server": kfp_server.url.removesuffix("/pipeline")}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "of-the-kubeconfig"}}
    config = {"clusters": [cluster], "contexts": [context], "users": [user], "current-context": "x"}
    monkeypatch.delenv("KFP_ENDPOINT")
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text("clusters: [")
    with pytest.raises(ConfigError, match="no host is set, and no kubeconfig is usable: "):
        Server(Access.resolve())
    (tmp_path / ".kube" / "config").write_text(json.dumps(config))
    assert Server(Access.resolve()).find_or_create_experiment("e")
    way = "/api/v1/namespaces/kubeflow/services/ml-pipeline:http/proxy/apis/v2beta1/"
    assert [path for _, path, _ in kfp_server.requests if not path.startswith(way)] == []
    assert kfp_server.requests[-1][2]["authorization"] == "Bearer of-the-kubeconfig"


def test_an_experiment_is_found_or_made(kfp_server):
    kfp_server.multi_user = True
    server = Server(Access.resolve(namespace="team"))
    experiment_id = server.find_or_create_experiment("nightly")
    assert Server(Access.resolve(namespace="team")).find_or_create_experiment("nightly") == experiment_id
    assert Server(Access.resolve(namespace="team")).find_or_create_experiment("other") != experiment_id
    assert [item["display_name"] for item in kfp_server.experiments] == ["nightly", "other"]
    assert {item["namespace"] for item in kfp_server.experiments} == {"team"}


def test_a_single_users_server_has_no_namespaces(kfp_server, capsys):
    server = Server(Access.resolve(namespace="wrong"))
    assert (server.namespace, server.access.namespace) == ("", "")
    assert "namespace wrong is ignored" in capsys.readouterr().err
    server.find_or_create_experiment("nightly")
    assert kfp_server.experiments[0].get("namespace") is None


def test_all_pages_of_schedules_are_read(kfp_server):
    kfp_server.schedules = [{"recurring_run_id": str(n), "display_name": f"s{n}"} for n in range(5)]
    assert [item.display_name for item in Server(Access.resolve()).list_schedules()] == [
        "s0",
        "s1",
        "s2",
        "s3",
        "s4",
    ]


@pytest.mark.parametrize(
    ("status", "answer", "kind", "message", "fix"),
    [
        (401, {"message": "Request header error"}, ConfigError, "401", "kubectl create token"),
        (403, {"error": "User a is not authorized"}, ConfigError, "a is not", "in the namespace team"),
        (404, "<html>nothing</html>", ConfigError, "404", "/pipeline"),
        (403, "<Error><Code>AccessDenied</Code></Error>", ConfigError, "not the API", "--host"),
        (403, "RBAC: access denied", ConfigError, "RBAC", "kubeflow-edit"),
        (400, {"error": "Invalid input error: name"}, ConfigError, "Invalid input error: name", "correct"),
        (503, "no healthy upstream", ServiceUnavailable, "no healthy upstream", "ml-pipeline"),
    ],
)  # fmt: skip
def test_a_refusal_has_a_remedy(kfp_server, status, answer, kind, message, fix):
    kfp_server.multi_user = True
    server = Server(Access.resolve(namespace="team"))
    kfp_server.failures = [("GET", "/experiments", status, answer)]
    with pytest.raises(kind) as caught:
        server.find_or_create_experiment("nightly")
    assert message in caught.value.message and fix in caught.value.fix
    assert "cannot look for the experiment nightly" in caught.value.message and "<" not in str(caught.value)
    assert caught.value.exit_code == (1 if kind is ServiceUnavailable else 2)


def test_what_may_have_been_taken_is_not_sent_again(kfp_server):
    server = Server(Access.resolve())
    kfp_server.failures = [("POST", "/experiments", 502, "bad gateway")]
    with pytest.raises(ServiceUnavailable, match="look at the UI first"):
        server.find_or_create_experiment("nightly")
    assert len(kfp_server.asked("POST")) == 1


def test_a_page_to_log_in_at_is_not_taken_for_an_answer(kfp_server):
    server = Server(Access.resolve())
    kfp_server.failures = [("POST", "/experiments", 200, "<html>Log in to Dex</html>")]
    with pytest.raises(ConfigError, match="is not the API of Kubeflow Pipelines"):
        server.find_or_create_experiment("nightly")


def test_an_absent_server_is_an_error(kfp_server, monkeypatch, tmp_path):
    kfp_server.close()
    with pytest.raises(ServiceUnavailable, match=r"cannot be reached: .*refused"):
        Server(Access.resolve())
    monkeypatch.delenv("KFP_ENDPOINT")
    with pytest.raises(ConfigError, match="Kubeflow Pipelines is not configured"):
        Server(Access.resolve())
    with pytest.raises(ConfigError, match="is not a file"):
        Server(Access(host="https://kfp", ca=str(tmp_path / "ca.pem")))


@pytest.mark.parametrize(
    ("host", "ui", "link"),
    [
        ("https://kf.example/pipeline/", "", "https://kf.example/pipeline/#/runs/details/7"),
        ("kf.example/pipeline", "", "https://kf.example/pipeline/#/runs/details/7"),
        ("http://127.0.0.1:8888", "https://ui.example", "https://ui.example/#/runs/details/7"),
    ],
)
def test_the_address_of_a_run_in_the_ui(kfp_server, monkeypatch, host, ui, link):
    server = Server(Access.resolve())
    monkeypatch.setattr(server, "access", Access.resolve(host))
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", ui)
    assert server.link("runs", "7") == link


RUN = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def cluster(served_cluster):
    """A simulated cluster, and a function that puts a pod of the run there."""
    served_cluster.put = lambda node, **state: run_pods.put(served_cluster, RUN, node, **state)
    return served_cluster


def seen(namespace=""):
    return Pods(RUN, namespace)


def ended(code=1, reason="Error", message=""):
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


@pytest.mark.parametrize(
    ("log", "text", "fix"),
    [
        ("working\n" + failed("no disk\n  fix: free some"), "no disk", "free some"),
        (
            "a\nb\nc\nd\ne\nTraceback\nValueError: x\nI1122 09:47:35.7 17 launcher.go:1] uploaded\n",
            "c\nd\ne\nTraceback\nValueError: x",
            "",
        ),
    ],
)
def test_the_log_is_read_if_the_container_left_no_message(cluster, log, text, fix):
    cluster.put("train(0).executor(0)", main=ended(), log=log)
    (cause,) = seen().failure_causes()
    assert (cause.step, cause.text, cause.fix) == ("Train", text, fix)


def test_a_pod_with_a_forbidden_log_is_named(cluster):
    name = cluster.put("train(0).executor(0)", main=ended(7), log="error: hidden")
    cluster.denied.add(("get", "pods/log"))
    (cause,) = seen().failure_causes()
    assert cause.text == f"main ended with exit code 7; see `kubectl -n kubeflow logs {name} -c main`"


def test_the_last_attempt_counts(cluster):
    cluster.put("train(0).executor(0)", reason="Evicted", message="low")
    assert len(list(seen().failure_causes())) == 1
    cluster.put("train(0).executor(1)", phase="Succeeded", main=ended(0, "Completed"))
    assert list(seen().failure_causes()) == []


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": '0/1 nodes are available: persistentvolumeclaim "no" not found.',
                    }
                ]
            },
            "Unschedulable",
            '0/1 nodes are available: persistentvolumeclaim "no" not found.',
        ),
        (
            {"main": {"waiting": {"reason": "ErrImagePull", "message": "not\nfound"}}},
            "ErrImagePull",
            "not found",
        ),
        (
            {"main": {"waiting": {"reason": "CreateContainerError", "message": 'secret "s" not found'}}},
            "CreateContainerError",
            'secret "s" not found',
        ),
    ],
)
def test_reasons_of_pending_pods(cluster, state, reason, text):
    cluster.put("train(0).executor(0)", phase="Pending", **state)
    cluster.put("download(0).executor(0)", phase="Running", main={"running": {}})
    assert seen().step_obstacles() == [("Train", reason, text)]


def test_the_pods_of_the_training_are_looked_at_too(cluster):
    cluster.put("train(0).executor(0)", phase="Running", main={"running": {}})
    name = jobs.job_name(RUN)
    cluster.lives[f"{name}-worker-0"] = lambda pod: pod.unschedulable("no GPU")
    backend = ClusterBackend.connect("kubeflow")
    backend.submit(JobSpec(command=("true",), name=name, image="i"))
    waits = (f"Train: pod {name}-worker-0", "Unschedulable", "no GPU")
    until(lambda: seen().training_obstacles() == [waits])
    backend.stop(name)
    until(lambda: seen().training_obstacles() is None)


def test_events_explain_a_volume_that_cannot_be_mounted(cluster):
    starting = {"waiting": {"reason": "PodInitializing"}}
    name = cluster.put("train(0).executor(0)", phase="Pending", main=starting)
    assert seen().step_obstacles() == []
    cluster.event(name, "FailedMount", 'secret "no" not found', namespace="kubeflow", count=3)
    assert seen().step_obstacles() == [("Train", "FailedMount", 'secret "no" not found')]


@pytest.mark.parametrize(("namespace", "expected"), [("", "kubeflow"), ("", "default"), ("team", "team")])
def test_the_namespace_is_found(cluster, namespace, expected):
    cluster.put("train(0).executor(0)", main=ended(message="x"), namespace=expected)
    assert len(list(seen(namespace).failure_causes())) == 1
    assert seen(namespace).find_namespace() == expected
