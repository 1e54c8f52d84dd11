"""Requests are signed as the client signs its own."""

import datetime

import pytest
from minio import Minio
from minio.credentials import StaticProvider
from minio.signer import sign_v4_s3

from trainer.storage import signing


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "s3.amazonaws.com"])
@pytest.mark.parametrize("token", [None, "a session's token"])
@pytest.mark.parametrize(
    ("method", "key", "query", "headers"),
    [
        ("GET", "a b/é+~'(1).jpg", None, {"Range": "bytes=0-4194303", "If-Match": '"abc"'}),
        ("PUT", "x", {"partNumber": "2", "uploadId": "a/b=+&c"}, {"Content-MD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}),
        ("PUT", "x/y.json", None, {"Content-Type": "application/json", "x-amz-meta-sha256": "0" * 64}),
    ],
)
def test_requests_are_those_of_the_client(endpoint, token, method, key, query, headers):
    keys = StaticProvider("key", "secret/+", token)
    store = Minio(endpoint, secure=False, region="eu-west-3", credentials=keys)
    address, found = signing.signed(store, method, "bucket", key, headers, query=query, sha256="f" * 64)
    assert found.get("x-amz-security-token") == token
    wanted = store._base_url.build(
        method=method, region="eu-west-3", bucket_name="bucket", object_name=key, query_params=query
    )
    assert address == wanted.geturl()
    signed = {name: value for name, value in found.items() if name != "Authorization"}
    theirs = sign_v4_s3(
        method=method, url=wanted, region="eu-west-3", headers={**signed, "Host": wanted.netloc},
        credentials=keys.retrieve(), content_sha256="f" * 64,
        date=datetime.datetime.strptime(found["x-amz-date"], "%Y%m%dT%H%M%SZ"),
    )  # fmt: skip
    assert found["Authorization"] == theirs["Authorization"]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    assert now[:8] >= found["x-amz-date"][:8] and len(found["x-amz-date"]) == len(now)


def test_without_keys_nothing_is_signed():
    store = Minio("127.0.0.1:9000", secure=False, region="us-east-1")
    headers = {"Range": "bytes=0-1"}
    assert signing.signed(store, "GET", "bucket", "x", headers) == ("http://127.0.0.1:9000/bucket/x", headers)
