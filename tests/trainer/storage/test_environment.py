"""Who one is and where the store is, from the environment."""

import os

import pytest
from minio.credentials import IamAwsProvider

from trainer import storage
from trainer.base.errors import StorageError
from trainer.storage import environment
from trainer.storage.environment import read_settings


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("AWS_", "MINIO_", "SSL_CERT", "REQUESTS_CA")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "variables", "url", "region"),
    [
        ("s3", "", "https://s3.amazonaws.com", ""),
        ("s3", "AWS_REGION=eu-west-1", "https://s3.amazonaws.com", "eu-west-1"),
        ("s3", "AWS_DEFAULT_REGION=eu-west-2", "https://s3.amazonaws.com", "eu-west-2"),
        ("s3", "AWS_ENDPOINT_URL=http://a:9000/", "http://a:9000", "us-east-1"),
        ("s3", "AWS_ENDPOINT_URL=http://a AWS_ENDPOINT_URL_S3=https://b", "https://b", "us-east-1"),
        ("s3", "MINIO_ENDPOINT=m:9000 MINIO_REGION=x-1", "https://s3.amazonaws.com", ""),
        ("minio", "MINIO_ENDPOINT=m:9000", "http://m:9000", "us-east-1"),
        ("minio", "MINIO_ENDPOINT=m:9000 MINIO_SECURE=true", "https://m:9000", "us-east-1"),
        ("minio", "MINIO_ENDPOINT=https://m AWS_REGION=r-1", "https://m", "r-1"),
        ("minio", "AWS_ENDPOINT_URL=http://a MINIO_REGION=x-1", "http://a", "x-1"),
    ],
)
def test_endpoint_and_region(kind, variables, url, region, monkeypatch):
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))
    current = read_settings(kind)
    assert current[:3] == (url, region, None)


def test_keys(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIO_ENDPOINT", "m")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id=f\naws_secret_access_key=g\n[other]\naws_access_key_id=h\n"
        "aws_secret_access_key=i\naws_session_token=j\n"
    )
    assert read_settings("s3").keys.retrieve().access_key == "f"
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert read_settings("s3").keys.retrieve().session_token == "j"
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")
    assert isinstance(read_settings("s3").keys, IamAwsProvider)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hide-b")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hide-t")
    keys = read_settings("s3").keys.retrieve()
    assert (keys.access_key, keys.secret_key, keys.session_token) == ("a", "hide-b", "hide-t")
    monkeypatch.setenv("MINIO_ACCESS_KEY", "c")
    monkeypatch.setenv("MINIO_SECRET_KEY", "hide-d")
    keys = read_settings("minio").keys.retrieve()
    assert (keys.access_key, keys.secret_key, keys.session_token) == ("c", "hide-d", None)
    assert "hide" not in repr(read_settings("minio")) + repr(read_settings("s3"))
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert read_settings("s3").keys is read_settings("minio").keys is None


def test_minio_needs_an_endpoint():
    with pytest.raises(StorageError, match="need an endpoint") as caught:
        storage.exists("minio://bucket/x")
    assert "MINIO_ENDPOINT" in caught.value.fix


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_a_pair_of_keys_is_an_error(name, monkeypatch):
    monkeypatch.setenv(name, "x")
    with pytest.raises(StorageError, match="both an access key and its secret"):
        storage.exists("s3://bucket/x")


@pytest.mark.parametrize("endpoint", ["http://host/path", "http://host:port", "http://"])
def test_an_endpoint_that_cannot_be_used_is_named(endpoint, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StorageError, match=f"endpoint '{endpoint}' of s3:// cannot be used") as caught:
        storage.exists("s3://bucket/x")
    assert "https://host:port" in caught.value.fix


@pytest.mark.parametrize("name", ["AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_a_ca_bundle_that_cannot_be_read_is_named(name, monkeypatch, tmp_path):
    (tmp_path / "broken.pem").write_text("no certificate")
    for bundle in (tmp_path / "none.pem", tmp_path / "broken.pem"):
        monkeypatch.setenv(name, str(bundle))
        with pytest.raises(StorageError, match=f"CA bundle {bundle}") as caught:
            environment.ca_certificates()
        assert name in caught.value.fix


def test_the_proxy_of_the_environment_is_used_and_left_out(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", ".svc,localhost")
    assert environment.find_proxy("https://s3.amazonaws.com") == "http://proxy:3128"
    assert environment.find_proxy("https://store.minio.svc:9000") == ""
    assert environment.find_proxy("http://s3.amazonaws.com") == ""


@pytest.mark.parametrize(
    ("value", "proxy"),
    [
        (" ", ""), ("proxy:3128", "proxy:3128"), (" http://[::1]:80/ ", "http://[::1]:80/"), ("|", None),
        ("::", None), ("http://", None), ("a b", None), ("http://x:99999", None), ("ftp://x", None),
    ],
)  # fmt: skip
def test_a_proxy_of_the_environment(monkeypatch, value, proxy):
    monkeypatch.setenv("http_proxy", value)
    if proxy is not None:
        assert environment.find_proxy("http://store.example/x") == proxy
        return
    with pytest.raises(StorageError, match="HTTP_PROXY in the environment is not the address of a proxy"):
        environment.find_proxy("http://store.example/x")
