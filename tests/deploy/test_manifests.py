"""Every object under deploy/: the API would take it, and it grants what is needed and no more."""

import base64
from ipaddress import ip_address, ip_network

import kubernetes_validate
import pytest
import yaml

from components import environment, job_limits
from components.doctor import PERMISSIONS
from components.launchers import pod_template
from components.launchers.cluster.kinds import API_VERSION, SHARED, shared_runtime
from components.launchers.spec import JobSpec

VERSIONS = ("1.28", kubernetes_validate.latest_version())
"""The oldest Kubernetes we mean to serve, and the newest that is known here."""
CUSTOM = ("security.openshift.io/v1", "machineconfiguration.openshift.io/v1", API_VERSION)
ULIMITS = "/etc/crio/crio.conf.d/99-ulimits.conf"


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_it(manifest, version):
    if manifest["apiVersion"] not in CUSTOM:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_it_names_no_namespace_of_its_own(manifest):
    """The overlay does; a file that did would be out of step with it."""
    assert "namespace" not in manifest["metadata"]


def granted(role):
    """What a Role grants, as (group, resource, verb)."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


EXEC = {("", "pods/exec"): ("create", "get")}


def expanded(permissions):
    """The same triples, of verbs by group and resource."""
    return {(*resource, verb) for resource, verbs in permissions.items() for verb in verbs}


def test_a_shell_in_a_pod_needs_a_role_of_its_own(the):
    assert granted(the("Role", "kubedet-exec")) == expanded(EXEC)


def test_the_doctor_asks_for_what_is_granted(the):
    roles = (the("Role", "kubedet-launcher"), the("Role", "kubedet-exec"))
    assert expanded(PERMISSIONS) == granted(roles[0]) | granted(roles[1])


def test_the_shared_runtime_is_the_one_that_the_launcher_counts_on(the):
    assert the("TrainingRuntime", SHARED) == shared_runtime()


def test_the_example_secret_is_the_one_that_the_steps_read(the):
    secret = the("Secret", environment.CREDENTIALS)
    assert set(secret["stringData"]) <= set(environment.SECRET_KEYS)
    assert set(secret["stringData"]) == {
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION", "MINIO_ENDPOINT",
    }  # fmt: skip


def test_it_holds_no_key_of_anybody(manifest):
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


def test_yaml_has_no_key_twice(deploy):
    """PyYAML keeps the last one without a word."""

    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"a key stands twice: {keys}"
            return super().construct_mapping(node, deep)

    for path in deploy.rglob("*.yaml"):
        list(yaml.load_all(path.read_text(), Strict))


def test_the_shipped_limits_are_those_that_the_step_reads(the):
    limits = the("ConfigMap", job_limits.CONFIG_MAP)["data"]
    assert limits.keys() == job_limits.VARIABLES.keys()
    secrets = limits["secrets"].split()
    assert environment.CREDENTIALS in secrets and not job_limits.OF_STEPS & set(secrets)
    assert "*" not in "".join(limits.values()) and "SYS_ADMIN" not in limits["capabilities"]
    assert limits["service-accounts"] == "kubedet-training" and "apparmor" not in limits["annotations"]


@pytest.mark.parametrize("name", ["jobs", "steps"])
def test_no_policy_lets_anybody_in_or_out_to_a_nodes_keys(the, name):
    policy = the("NetworkPolicy", f"kubedet-{name}")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    chosen = policy["podSelector"]
    assert [peer for rule in policy["ingress"] for peer in rule["from"]] == (
        [{"podSelector": chosen}] if name == "jobs" else []
    )
    blocks = [peer["ipBlock"] for rule in policy["egress"] if "ports" not in rule
              for peer in rule["to"] if "ipBlock" in peer]  # fmt: skip
    for address in ("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "fe80::1"):
        reached = [
            block for block in blocks
            if ip_address(address) in ip_network(block["cidr"])
            and not any(ip_address(address) in ip_network(each) for each in block["except"])
        ]  # fmt: skip
        assert not reached, address


def test_the_policy_of_jobs_chooses_their_pods(the):
    chosen = the("NetworkPolicy", "kubedet-jobs")["spec"]["podSelector"]["matchLabels"]
    pods = pod_template.pod_labels(JobSpec(command=("x",), labels={pod_template.LABEL_MANAGED: "somebody"}))
    assert chosen.items() <= pods.items()
