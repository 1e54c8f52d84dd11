"""What pods are given to reach an object store."""

import re

import pytest

from components import stores


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in (*stores.SETTINGS, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def test_every_variable_is_one_that_the_store_reads():
    from trainer.storage import environment

    read = environment.__doc__
    assert set(stores.SECRET_KEYS.values()) <= set(re.findall(r"[A-Z_]{5,}", read))


def test_settings_are_not_secret(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-1")
    monkeypatch.setenv("MINIO_SECURE", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert stores.settings() == {"AWS_REGION": "eu-1"}
    assert not set(stores.settings()) & set(stores.secret_variables().values())


def test_in_a_cluster_minio_means_kubeflows_own(monkeypatch):
    stores.set_defaults()
    assert "MINIO_ENDPOINT" not in stores.settings()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("MINIO_ENDPOINT", "mine:9000")
    stores.set_defaults()
    assert stores.settings()["MINIO_ENDPOINT"] == "mine:9000"
    monkeypatch.setenv("MINIO_ENDPOINT", "")
    stores.set_defaults()
    assert stores.settings()["MINIO_ENDPOINT"] == stores.KUBEFLOW_STORE
