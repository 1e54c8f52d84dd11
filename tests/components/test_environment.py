"""What the pods of a run get from outside."""

import socket

import pytest

from components import environment
from components.environment import SIGNING_NAME, find_signing_key
from trainer.base.errors import ConfigError, StorageError


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in (*environment.SETTINGS, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("services", "found"),
    [
        ({"minio-service.kubeflow"}, "minio-service.kubeflow:9000"),
        ({"seaweedfs.kubeflow"}, "seaweedfs.kubeflow:9000"),
        ({"seaweedfs.kubeflow", "minio-service.kubeflow"}, "seaweedfs.kubeflow:9000"),
        (set(), "seaweedfs.kubeflow:9000"),
    ],
)
def test_the_store_that_the_cluster_has_is_found(monkeypatch, services, found):
    def lookup(host, port, **_):
        if host not in services:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.96.0.9", port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("MINIO_ENDPOINT", "")
    environment.set_minio_endpoint()
    assert environment.read_settings()["MINIO_ENDPOINT"] == found


def test_a_store_that_fails_for_want_of_keys_is_told_as_that(monkeypatch):
    for name in environment._STORE_KEYS:
        monkeypatch.delenv(name, raising=False)
    error = StorageError(
        "cannot read s3://bucket/x: the name 's3.amazonaws.com' is not known", fix="check it", transient=True
    )
    environment.add_hint(error, "team-keys")
    assert not error.transient, "to try again brings no keys into this pod"
    assert "has no keys" in error.message and "its namespace has no Secret team-keys" in error.message
    assert (
        error.fix.startswith("create the Secret team-keys with AWS_ACCESS_KEY_ID") and "check it" in error.fix
    )
    assert "team-keys" in str(error)


@pytest.fixture
def mounted(tmp_path):
    """A Secret as Kubernetes mounts it: what it keeps for itself begins with two dots."""

    def write(**keys):
        held = tmp_path / "..2026_11_21"
        held.mkdir()
        (tmp_path / "..data").symlink_to(held.name)
        for name, text in keys.items():
            (held / f"{name}.pem").write_text(text)
            (tmp_path / f"{name}.pem").symlink_to(f"..data/{name}.pem")
        return str(tmp_path)

    return write


@pytest.mark.parametrize("secret", [SIGNING_NAME, "ours"])
def test_a_signing_key_is_found(mounted, secret):
    folder = mounted(private="key", public="key")
    assert find_signing_key(secret, folder) == f"{folder}/private.pem"


def test_the_default_secret_need_not_exist(mounted, tmp_path):
    assert find_signing_key(SIGNING_NAME, str(tmp_path / "nothing")) == ""
    assert find_signing_key(SIGNING_NAME, mounted()) == ""


def test_a_secret_that_was_named_must_exist(mounted):
    with pytest.raises(ConfigError, match="the Secret ours has no signing key: it does not exist"):
        find_signing_key("ours", mounted())


def test_a_secret_must_hold_the_key(mounted):
    with pytest.raises(ConfigError, match=r"(?s)it contains public\.pem.*--from-file=private\.pem="):
        find_signing_key(SIGNING_NAME, mounted(public="key"))
