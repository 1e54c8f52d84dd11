"""Objects under deploy/ are valid and grant no more than needed."""

import base64
from ipaddress import ip_address, ip_network

import kubernetes_validate
import pytest

from components import environment, jobs
from components.launchers import kubernetes_names, pod_template
from components.launchers.cluster.kinds import API_VERSION, SHARED_RUNTIME, shared_runtime
from components.launchers.cluster.roles import ROLES, permission_fix
from components.launchers.spec import JobSpec

VERSIONS = ("1.28", kubernetes_validate.latest_version())
"""The oldest supported Kubernetes and the newest known here."""
CUSTOM = ("security.openshift.io/v1", "machineconfiguration.openshift.io/v1", API_VERSION)
ULIMITS = "/etc/crio/crio.conf.d/99-ulimits.conf"


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_the_manifest(manifest, version):
    if manifest["apiVersion"] not in CUSTOM:
        kubernetes_validate.validate(manifest, version, strict=True)


def granted(role):
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize(("place", "name"), [("base", "kubedet-launcher"), ("operators", "kubedet-exec")])
def test_remedies_and_the_doctor_name_what_the_roles_grant(the, place, name):
    named = {(*of, verb) for of, verbs in ROLES[place].items() for verb in verbs.split()}
    assert granted(the("Role", name)) == named
    assert all(f"deploy/{place}/" in permission_fix(resource, [verb], "n") for _, resource, verb in named)


@pytest.mark.parametrize(
    ("resource", "verb", "namespace"),
    [("persistentvolumeclaims", "get", "n"), ("pods", "delete", "n"), ("pods", "list", "")],
)
def test_no_remedy_names_a_role_that_does_not_grant_it(resource, verb, namespace):
    assert "deploy" not in permission_fix(resource, [verb], namespace)


def test_the_shared_runtime_is_that_of_the_launcher(the):
    assert the("TrainingRuntime", SHARED_RUNTIME) == shared_runtime()


def test_the_example_secret_has_the_keys_of_the_steps(the):
    secret = the("Secret", environment.CREDENTIALS)
    assert set(secret["stringData"]) <= set(environment.SECRET_KEYS)
    assert set(secret["stringData"]) == {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ENDPOINT_URL",
        "AWS_REGION",
        "MINIO_ENDPOINT",
    }


def test_secrets_hold_placeholders(manifest):
    if manifest["kind"] == "Secret":
        secret = set(environment.secret_variables())
        values = {key: value for key, value in manifest["stringData"].items() if key in secret}
        assert set(values.values()) == {"REPLACE-ME"}
        assert "data" not in manifest


def test_the_machine_config_carries_the_same_file(the, deploy):
    machine_config = the("MachineConfig", "99-worker-kubedet-ulimits")
    assert machine_config["metadata"]["labels"] == {"machineconfiguration.openshift.io/role": "worker"}
    assert machine_config["spec"]["config"]["ignition"] == {"version": "3.2.0"}
    (file,) = machine_config["spec"]["config"]["storage"]["files"]
    assert set(machine_config["spec"]["config"]) == {"ignition", "storage"}
    assert (file["path"], file["mode"], file["overwrite"]) == (ULIMITS, 0o644, True)
    kind, content = file["contents"]["source"].split(",", 1)
    assert kind == "data:text/plain;charset=utf-8;base64"
    assert base64.b64decode(content, validate=True) == (deploy / "nodes" / "99-ulimits.conf").read_bytes()


def test_openshift_allows_ipc_lock_and_nothing_of_the_host(the):
    rules = the("SecurityContextConstraints", "kubedet-training")
    assert rules["allowedCapabilities"] == ["IPC_LOCK"]
    assert not [key for key, value in rules.items() if key.startswith("allow") and value is True]
    assert rules["runAsUser"] == {"type": "MustRunAsNonRoot"}
    assert rules["requiredDropCapabilities"] == ["ALL"]
    assert "hostPath" not in rules["volumes"]
    assert not rules.get("users") and not rules.get("groups")
    host = {f"allowHost{what}" for what in ("DirVolumePlugin", "IPC", "Network", "PID", "Ports")}
    users = {"runAsUser", "fsGroup", "supplementalGroups", "seLinuxContext"}
    required = host | users | {"allowPrivilegedContainer", "readOnlyRootFilesystem"}
    assert required <= set(rules)


def test_the_training_account_may_use_these_constraints_only(the):
    (rule,) = the("Role", "kubedet-training")["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == (["kubedet-training"], ["use"])
    assert the("ServiceAccount", "kubedet-training")["automountServiceAccountToken"] is False


def test_the_shipped_limits_are_those_that_the_step_reads(the):
    limits = the("ConfigMap", jobs.CONFIG_MAP)["data"]
    assert limits.keys() == jobs.LIMITS.keys()
    secrets = limits["secrets"].split()
    assert environment.CREDENTIALS in secrets and not jobs.STEP_SECRETS & set(secrets)
    assert "*" not in "".join(limits.values()) and "SYS_ADMIN" not in limits["capabilities"]
    assert limits["service-accounts"] == "kubedet-training" and "apparmor" not in limits["annotations"]


@pytest.mark.parametrize("name", ["jobs", "steps"])
def test_network_policies_block_ingress_and_metadata_servers(the, name):
    policy = the("NetworkPolicy", f"kubedet-{name}")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    chosen = policy["podSelector"]
    assert [peer for rule in policy["ingress"] for peer in rule["from"]] == (
        [{"podSelector": chosen}] if name == "jobs" else []
    )
    blocks = [
        peer["ipBlock"]
        for rule in policy["egress"]
        if "ports" not in rule
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    for address in ("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "fe80::1"):
        reached = [
            block
            for block in blocks
            if ip_address(address) in ip_network(block["cidr"])
            and not any(ip_address(address) in ip_network(each) for each in block["except"])
        ]
        assert not reached, address


def test_the_job_policy_selects_job_pods(the):
    chosen = the("NetworkPolicy", "kubedet-jobs")["spec"]["podSelector"]["matchLabels"]
    pods = pod_template.pod_labels(
        JobSpec(command=("x",), labels={kubernetes_names.LABEL_MANAGED: "somebody"})
    )
    assert chosen.items() <= pods.items()
