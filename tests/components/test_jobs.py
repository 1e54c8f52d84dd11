"""A run's training job: what of the pipeline's parameters reaches it, its name, and its end."""

import re
import time

import pytest
from cluster.api import Fault
from cluster.pods import endless, fine

from components import environment, jobs
from components.jobs import Request, delete_unfinished, job_name
from components.launchers.cluster.backend import ClusterBackend
from trainer.base.errors import ConfigError, KubedetError

RUN = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
COMMAND = ("train", "--config", "s3://b/config.json")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in (*environment.SETTINGS, *environment.secret_variables().values()):
        monkeypatch.delenv(name, raising=False)


def on_cluster(**changes):
    return Request(**{"launcher": "kubernetes", "image": "registry/kubedet:1", "run_id": RUN, **changes})


def test_all_parameters_reach_the_job():
    spec = on_cluster(
        nodes=2,
        nproc=4,
        gpus=8,
        claim="sets",
        credentials="keys",
        job={"memory_limit": "64Gi", "network": {"profile": "rdma", "gid_index": 3.0}, "env": {"A": "1"}},
    ).build_spec(COMMAND)
    assert (spec.nodes, spec.nproc, spec.gpus, spec.image) == (2, 4, 8, "registry/kubedet:1")
    assert spec.memory_limit == "64Gi" and spec.network.profile == "rdma" and spec.network.gid_index == 3
    assert spec.env == {"A": "1"}
    assert [(mount.claim, mount.path) for mount in spec.mounts] == [("sets", "/data")]
    assert spec.command[-3:] == COMMAND
    assert {item.secret for item in spec.secret_env} == {"keys"} and all(i.optional for i in spec.secret_env)
    assert {item.name for item in spec.secret_env} == set(environment.secret_variables().values())


def test_pods_get_the_settings_of_stores_and_trackers_but_no_secret_value(monkeypatch):
    settings = {"AWS_ENDPOINT_URL": "https://store:9000", "MLFLOW_RUN_ID": "1"}
    secrets = dict.fromkeys(["AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY"], "geheim")
    for name, value in {**settings, **secrets}.items():
        monkeypatch.setenv(name, value)
    spec = on_cluster().build_spec(COMMAND)
    assert spec.env == settings and "geheim" not in repr(spec)
    own = {"env": {"MLFLOW_RUN_ID": "3"}}
    assert on_cluster(job=own).build_spec(COMMAND).env == settings | own["env"]


def test_all_mistakes_are_told_at_once():
    job = {
        "nodes": 3, "name": "mine", "gpu": 1,
        "env": {"AWS_SECRET_ACCESS_KEY": "s"}, "mounts": [{"claim": "c"}],
    }  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        on_cluster(nodes=0, job=job).build_spec(COMMAND)
    lines = str(caught.value).splitlines()
    for said in (
        "  job.nodes: is a parameter of the run",
        "  job.name: is decided by the run",
        "  job.gpu: no such field",
        "  job.env.AWS_SECRET_ACCESS_KEY: is secret: put it into a Secret (secret_env)",
        "  job.mounts.0.path: is missing",
    ):
        assert said in lines
    assert any(line.startswith("  nodes: ") for line in lines)


def test_what_means_nothing_to_processes_of_the_step_is_refused():
    with pytest.raises(ConfigError) as caught:
        Request(gpus=1, image="x", job={"memory_limit": "1Gi"}).build_spec(COMMAND)
    assert all(
        f"  {name}: has no effect with the launcher local" in str(caught.value)
        for name in ("gpus", "image", "job")
    )


def test_a_runs_job_has_one_name():
    assert job_name(RUN) == job_name(RUN.upper()) == "kubedet-0f1e2d3c4b5a-train"
    assert job_name("local-run/7") == job_name("local-run/7") != job_name("local-run/8")
    assert on_cluster(run_id="local-run/7").build_spec(COMMAND).name == job_name("local-run/7")


@pytest.fixture
def job(served_cluster):
    """Start a run's job, whose pod has a life, in a cluster that is asked by HTTP."""

    def start(life):
        served_cluster.lives[f"{job_name(RUN)}-worker-0"] = life
        ClusterBackend.connect().submit(on_cluster().build_spec(COMMAND))

    return start


def test_the_end_of_a_run_deletes_a_job_that_goes_on(served_cluster, job):
    job(endless)
    delete_unfinished("kubernetes", RUN)
    assert len(served_cluster.requests("DELETE", job_name(RUN))) == 1
    # Once it is gone there is nothing more to do.
    delete_unfinished("kubernetes", RUN)
    assert len(served_cluster.requests("DELETE", job_name(RUN))) == 1


def test_the_end_of_a_run_leaves_an_ended_job_to_its_readers(served_cluster, job):
    backend = ClusterBackend.connect()
    job(fine)
    name = job_name(RUN)
    while not backend.status(name).phase.final:
        time.sleep(0.01)
    delete_unfinished("kubernetes", RUN)
    assert served_cluster.requests("DELETE", name) == [] and backend.status(name).phase == "succeeded"


@pytest.mark.parametrize("verb", ["GET", "DELETE"])
def test_a_job_that_cannot_be_looked_at_or_deleted_is_not_passed_over(served_cluster, job, verb):
    job(endless)
    served_cluster.faults.append(Fault(verb, "pytorchjobs", status=403, times=3))
    with pytest.raises(KubedetError, match="403"):
        delete_unfinished("kubernetes", RUN)


def test_the_root_of_the_steps_own_image_is_read_only_unless_the_job_says_otherwise():
    assert on_cluster(image="", steps_image="steps:2").build_spec(COMMAND).read_only_root
    assert on_cluster(image="steps:2", steps_image="steps:2").build_spec(COMMAND).read_only_root
    assert not on_cluster(image="own:1", steps_image="steps:2").build_spec(COMMAND).read_only_root
    job = {"read_only_root": False}
    assert not on_cluster(image="", steps_image="steps:2", job=job).build_spec(COMMAND).read_only_root
    assert on_cluster(image="own:1", job={"read_only_root": True}).build_spec(COMMAND).read_only_root


def reading(secret):
    return {"secret_env": [{"name": "TOKEN", "secret": secret, "key": "token"}]}


NETWORKS = "k8s.v1.cni.cncf.io/networks"
APPARMOR = "container.apparmor.security.beta.kubernetes.io/pytorch"


@pytest.mark.parametrize(
    ("job", "key", "value", "named"),
    [
        (reading("other-teams"), "secrets", "keys kubedet-object-store", "other-teams"),
        ({"image_pull_secrets": ["registry"]}, "secrets", "keys kubedet-object-store", "registry"),
        ({"service_account": "cluster-admin"}, "service-accounts", "kubedet-training", "cluster-admin"),
        ({"capabilities": ["SYS_ADMIN", "IPC_LOCK"]}, "capabilities", "IPC_LOCK", "SYS_ADMIN"),
        ({"network": {"profile": "rdma"}}, "capabilities", "", "IPC_LOCK"),
        ({"run_as_non_root": False}, "capabilities", "IPC_LOCK *A* *E* *O* SYS_CHROOT", "KILL"),
        ({"annotations": {APPARMOR: "unconfined"}}, "annotations", NETWORKS, APPARMOR),
        ({"annotations": {NETWORKS: "rdma, ops/net1@eth1"}}, "networks", "ours/*", "ops/net1"),
        (
            {"annotations": {NETWORKS: '[{"name":"a"},{"name":"b","namespace":"ops"}]'}},
            "networks",
            "",
            "ops/b",
        ),
        ({"annotations": {"v1.multus-cni.io/default-network": "ops/b"}}, "networks", "", "ops/b"),
        ({"annotations": {NETWORKS: '{"name": "a"'}}, "networks", "", 'unreadable/{"name": "a"'),
    ],
)
def test_a_job_has_what_the_namespaces_owner_allows_and_no_more(monkeypatch, job, key, value, named):
    on_cluster(job=job).build_spec(COMMAND)  # nobody limits it
    monkeypatch.setenv(jobs.LIMITS[key], value)
    with pytest.raises(ConfigError, match=f"  {re.escape(named)}: not among the {key}") as caught:
        on_cluster(job=job).build_spec(COMMAND)
    assert jobs.CONFIG_MAP in caught.value.message and "owner" in caught.value.message
    added = named if key == "secrets" else f"{named[:3]}*"
    monkeypatch.setenv(jobs.LIMITS[key], f"{value} {environment.CREDENTIALS} {added}")
    on_cluster(job=job).build_spec(COMMAND)


@pytest.mark.parametrize("secret", ["kubedet-signing", "kubedet-notify"])
@pytest.mark.parametrize("allowed", [None, "*", "kubedet-*", "{secret}"])
def test_no_job_reads_the_secrets_of_steps(monkeypatch, secret, allowed):
    if allowed is not None:
        monkeypatch.setenv(
            jobs.LIMITS["secrets"], f"{environment.CREDENTIALS} {allowed.format(secret=secret)}"
        )
    on_cluster().build_spec(COMMAND)
    for asked in (
        {"job": reading(secret)},
        {"job": {"image_pull_secrets": [secret]}},
        {"credentials": secret},
    ):
        with pytest.raises(ConfigError, match=f"  {secret}: only steps"):
            on_cluster(**asked).build_spec(COMMAND)


def test_the_secret_of_the_run_is_limited_too_and_a_run_cannot_lift_it(monkeypatch):
    monkeypatch.setenv(jobs.LIMITS["secrets"], "kubedet-object mine kubedet-*")
    with pytest.raises(ConfigError, match="kubedet-object-store: not among the secrets"):
        on_cluster(job={"env": {jobs.LIMITS["secrets"]: "*"}}).build_spec(COMMAND)
