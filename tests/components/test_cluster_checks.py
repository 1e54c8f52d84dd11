"""What the doctor finds in a cluster."""

import base64

import pytest
from cluster.api import Fault

from components import cluster_checks
from components.launchers.backend import Timings
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.kinds import shared_runtime
from components.launchers.cluster.roles import ROLES


def connect():
    return ClusterBackend.connect(timings=Timings(backoff=0.01, patience=0.2))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(cluster_checks, "_TIMEOUT", 0.2)


@pytest.fixture
def look(served_cluster):
    return lambda **needs: {item.title: item for item in cluster_checks.check_cluster(connect(), **needs)}


def node(cluster, name, allocatable, ready="True", unschedulable=False):
    conditions = [{"type": "Ready", "status": ready}]
    status = {"allocatable": allocatable, "conditions": conditions}
    spec = {"unschedulable": unschedulable}
    cluster.add("nodes", "", {"metadata": {"name": name}, "spec": spec, "status": status})


def healthy(found):
    return all(check.state != "missing" for check in found)


def claim(cluster, modes, phase="Bound"):
    body = {"metadata": {"name": "data"}, "spec": {"accessModes": modes}}
    status = {"phase": phase, "capacity": {"storage": "20Gi"}}
    cluster.add("persistentvolumeclaims", "default", {**body, "status": status})


def test_a_cluster_that_has_all_is_healthy_and_nothing_is_changed_in_it(look, served_cluster):
    checks = look()
    assert healthy(checks.values())
    assert {finding.state for finding in checks.values()} == {"ok"}
    assert "v1.33.0" in checks["API server"].detail
    sent = {seen.path.rpartition("/")[2] for seen in served_cluster.requests("POST")}
    assert sent == {"selfsubjectaccessreviews", "pytorchjobs?dryRun=All"}
    assert {seen.method for seen in served_cluster.seen} == {"GET", "POST"}


@pytest.mark.parametrize("absent", [{}, {"trainer.kubeflow.org"}, {"kubeflow.org"}], ids=str)
def test_every_verb_is_asked_for_in_the_namespace_but_those_on_what_is_not_there(
    look, served_cluster, absent
):
    kinds = {"kubeflow.org": "pytorchjobs", "trainer.kubeflow.org": "trainjobs"}
    served_cluster.installed = {name for group, name in kinds.items() if group not in absent}
    look()
    attributes = [
        seen.body["spec"]["resourceAttributes"] for seen in served_cluster.requests("POST", "reviews")
    ]
    checked = {(item.get("group", ""), _resource(item), item["verb"]) for item in attributes}
    granted = [item for role in ROLES.values() for item in role.items()]
    expected = {(*what, verb) for what, verbs in granted for verb in verbs.split() if what[0] not in absent}
    assert checked == expected
    assert {item["namespace"] for item in attributes} == {"default"}


def _resource(item):
    return "/".join(filter(None, [item["resource"], item.get("subresource")]))


def test_a_missing_permission_names_the_rule_to_add(look, served_cluster):
    served_cluster.denied |= {("create", "pytorchjobs"), ("delete", "pytorchjobs"), ("create", "pods/exec")}
    checks = look()
    jobs = checks["permissions on pytorchjobs"]
    assert jobs.state == "missing"
    assert jobs.detail == "not allowed: create, delete"
    assert 'apiGroups ["kubeflow.org"], resources ["pytorchjobs"], verbs ["create", "delete"]' in jobs.fix
    # A run works without this one.
    assert checks["permissions on pods/exec"].state == "warning"
    assert "kubedet job exec" in checks["permissions on pods/exec"].detail


OPERATOR, TRAINER = "PyTorchJobs (Training Operator)", "TrainJobs (Kubeflow Trainer)"
RUNTIME = "runtime kubedet"


def silent(cluster, plural):
    words = 'Internal error occurred: failed calling webhook "validator": connection refused'
    cluster.faults.append(Fault("POST", f"{plural}?dryRun", status=500, message=words, times=10**6))


def test_a_cluster_without_any_kind_of_jobs_lacks_them(look, served_cluster):
    served_cluster.installed.clear()
    checks = look()
    assert [checks[title].state for title in (OPERATOR, TRAINER)] == ["missing"] * 2
    assert checks[OPERATOR].fix == "install the Training Operator (v1.9)"
    assert checks[TRAINER].fix.startswith("install Kubeflow Trainer (v2.3)")
    assert RUNTIME not in checks


@pytest.mark.parametrize(
    ("installed", "taken"),
    [({"pytorchjobs"}, OPERATOR), ({"trainjobs"}, TRAINER), ({"pytorchjobs", "trainjobs"}, OPERATOR)],
)
def test_one_kind_of_jobs_is_enough_and_the_one_that_is_taken_is_named(
    look, served_cluster, installed, taken
):
    served_cluster.installed = installed
    checks = look()
    assert healthy(checks.values())
    assert [
        title for title in (OPERATOR, TRAINER) if "launcher=kubernetes creates" in checks[title].detail
    ] == [taken]
    for title, plural in ((OPERATOR, "pytorchjobs"), (TRAINER, "trainjobs")):
        assert checks[title].state == "ok"
        assert ("does not know them" in checks[title].detail) is (plural not in installed)


def test_a_controller_that_does_not_answer_is_told_and_the_other_taken(look, served_cluster):
    served_cluster.installed = {"pytorchjobs", "trainjobs"}
    silent(served_cluster, "pytorchjobs")
    checks = look()
    assert checks[OPERATOR].state == "warning" and "does not answer" in checks[OPERATOR].detail
    assert "launcher=kubernetes creates them" in checks[TRAINER].detail
    silent(served_cluster, "trainjobs")
    checks = look()
    assert [checks[title].state for title in (OPERATOR, TRAINER)] == ["missing"] * 2
    assert "pods and logs of the Training Operator" in checks[OPERATOR].fix


def runtime(cluster, *, managed="kubedet", **spec):
    shared = shared_runtime()
    shared["metadata"]["labels"]["app.kubernetes.io/managed-by"] = managed
    shared["spec"] |= spec
    cluster.installed = {"trainjobs"}
    cluster.add("trainingruntimes", "default", shared)


def test_the_shared_runtime_is_found_and_one_of_another_version_or_owner_is_told(look, served_cluster):
    runtime(served_cluster, another="field")  # As the API server adds some.
    assert look()[RUNTIME].state == "ok"
    runtime(served_cluster, mlPolicy={"numNodes": 1})
    finding = look()[RUNTIME]
    assert finding.state == "warning" and "differs from the runtime" in finding.detail
    assert finding.fix.startswith("kubectl apply")
    runtime(served_cluster, managed="somebody")
    assert "not created by kubedet" in look()[RUNTIME].detail
    served_cluster.denied.add(("get", "trainingruntimes"))
    assert "not known" in look()[RUNTIME].detail


def test_a_namespace_that_is_not_there_is_missing(look, served_cluster):
    served_cluster.write_kubeconfig("nowhere")
    absent = Fault("POST", "dryRun", status=404, message='namespaces "nowhere" not found', times=10**6)
    served_cluster.faults.append(absent)
    checks = look()
    assert checks["namespace nowhere"].state == "missing"
    # The kind of jobs itself is there.
    assert checks[OPERATOR].state == "warning" and checks[OPERATOR].fix.startswith("create the namespace")


def test_a_secret_needs_a_key_that_is_read_and_its_values_stay_secret(look, served_cluster):
    assert look(secret="keys")["secret keys"].state == "missing"
    body = {"metadata": {"name": "keys"}, "data": {"other": base64.b64encode(b"hush").decode()}}
    served_cluster.add("secrets", "default", body)
    assert look(secret="keys")["secret keys"].state == "missing"
    body["data"]["AWS_ACCESS_KEY_ID"] = base64.b64encode(b"hush").decode()
    checks = look(secret="keys")
    assert checks["secret keys"].state == "ok"
    assert checks["secret keys"].detail == "has AWS_ACCESS_KEY_ID"
    assert "hush" not in str(checks) and "aHVzaA" not in str(checks)


@pytest.mark.parametrize(
    ("modes", "phase", "nodes", "state"),
    [
        (["ReadWriteMany"], "Bound", 2, "ok"),
        (["ReadWriteOnce"], "Bound", 1, "ok"),
        (["ReadWriteOnce"], "Bound", 2, "missing"),
        (["ReadWriteMany"], "Pending", 1, "ok"),
        (["ReadWriteMany"], "Lost", 1, "missing"),
    ],
)
def test_a_claim_must_be_shared_by_the_nodes(look, served_cluster, modes, phase, nodes, state):
    claim(served_cluster, modes, phase)
    finding = look(claim="data", nodes=nodes)["volume claim data"]
    assert finding.state is state
    assert bool(finding.fix) is (state != "ok")


def test_devices_are_counted_on_nodes_that_take_pods(look, served_cluster):
    node(served_cluster, "a", {"nvidia.com/gpu": "8", "rdma/hca": "1k"})
    node(served_cluster, "b", {"nvidia.com/gpu": "4"})
    node(served_cluster, "c", {"nvidia.com/gpu": "8"}, ready="Unknown")
    node(served_cluster, "d", {"nvidia.com/gpu": "8"}, unschedulable=True)
    checks = look(resources={"nvidia.com/gpu": 8, "rdma/hca": 0, "rdma/other": 0})
    assert checks["nvidia.com/gpu"].detail == "12 on 2 ready nodes; 1 of them have 8 or more"
    assert checks["rdma/hca"].state == "ok"
    assert checks["rdma/other"].state == "warning"
    assert look(resources={"nvidia.com/gpu": 8}, nodes=2)["nvidia.com/gpu"].state == "missing"
    assert look(resources={"nvidia.com/gpu": 4}, nodes=2)["nvidia.com/gpu"].state == "ok"
