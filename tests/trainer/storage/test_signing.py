"""Requests are signed so that a store takes them."""

import os

import pytest
from minio import Minio
from minio.credentials import StaticProvider

from trainer import storage
from trainer.storage import quick, signing
from trainer.storage.environment import client


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "s3.amazonaws.com"])
@pytest.mark.parametrize("token", [None, "a session's token"])
@pytest.mark.parametrize(
    ("method", "key", "query", "headers"),
    [
        ("GET", "a b/é+~'(1).jpg", None, {"Range": "bytes=0-4194303", "If-Match": '"abc"'}),
        ("PUT", "x", {"partNumber": "2", "uploadId": "a/b=+&c"}, {"Content-Type": "image/png"}),
        ("PUT", "x/y.json", None, {"Content-Type": "application/json", "x-amz-meta-sha256": "0" * 64}),
    ],
)
def test_requests_go_where_the_client_sends_them(endpoint, token, method, key, query, headers):
    provider = StaticProvider("key", "secret/+", token)
    store = Minio(endpoint, secure=False, region="eu-west-3", credentials=provider)
    before = dict(headers)
    address, found, keys = signing.request(
        store, method, "bucket", key, headers, query=query, sha256="f" * 64
    )
    wanted = store._base_url.build(
        method=method, region="eu-west-3", bucket_name="bucket", object_name=key, query_params=query
    )
    assert address == wanted.geturl() and headers == before
    assert keys == signing.Keys("eu-west-3", "key", "secret/+") and "secret/" not in repr(keys)
    extra = {"x-amz-content-sha256": "f" * 64} | ({"x-amz-security-token": token} if token else {})
    assert found == {**headers, **extra}


def test_without_keys_nothing_is_signed():
    store = Minio("127.0.0.1:9000", secure=False, region="us-east-1")
    headers = {"Range": "bytes=0-1"}
    address = "http://127.0.0.1:9000/bucket/x"
    assert signing.request(store, "GET", "bucket", "x", headers) == (address, headers, None)


@pytest.mark.parametrize(
    "key", ["x", "a b/é+~'(1).jpg", "a=1/b=2.json", "p&q?r#s", "a!*;:@,$.x", "ü/%41", "quote'\"<>^`{|}"]
)
def test_a_store_takes_what_is_signed_here(bucket, monkeypatch, key):
    """Of the server behind `bucket`, which checks signatures: keys of all kinds, and parts."""
    store, content = client("s3"), os.urandom(100)
    monkeypatch.setattr(store, "_put_object", lambda *_: pytest.fail("it went the careful way"))
    monkeypatch.setattr(store, "get_object", lambda *_, **__: pytest.fail("it went the careful way"))
    storage.write_bytes(f"s3://bucket/{key}", content)
    assert storage.read_bytes(f"s3://bucket/{key}") == content
    number = store._create_multipart_upload("bucket", key, {})
    try:
        query = {"partNumber": "1", "uploadId": number}
        address, headers, keys = signing.request(store, "PUT", "bucket", key, {}, query=query)
        assert quick.put(store._http, address, headers, keys, content) is not None
        wrong = signing.Keys(keys.region, keys.access, keys.secret + "x")
        assert quick.put(store._http, address, headers, wrong, content) is None
    finally:
        store._abort_multipart_upload("bucket", key, number)
