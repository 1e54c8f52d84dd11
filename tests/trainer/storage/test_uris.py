"""Names of buckets: as strict as the client, or as Amazon where requests go there."""

import random

import pytest
from minio.helpers import check_bucket_name

from trainer.base.errors import StorageError
from trainer.storage import check_place
from trainer.storage.uris import InvalidAddress, check_bucket, host_and_port


@pytest.mark.parametrize(
    "uri",
    ["s3://bucket", "s3://my-bucket.2/Any_Key//x", f"minio://{'a' * 63}/x", "s3://1.2.3/x", "s3://999.1.1.1/x",
     "/My_Bucket/x", "file:///A_b", "https://a..b/x", "sample", ""],
)  # fmt: skip
def test_others_pass(uri):
    check_bucket(uri, strict=True)


def accepts(check, *arguments, **options):
    try:
        check(*arguments, **options)
    except (ValueError, StorageError):
        return False
    return True


def test_it_is_exactly_as_strict_as_the_client():
    draw = random.Random(7)
    names = [
        "".join(draw.choices("ab1-.AZ_:/"[:kinds], k=draw.randint(1, 8)))
        for kinds in (3, 5, 7, 9)
        for _ in range(1500)
    ]
    names += [f"{a}.{b}.{c}.{c}" for a in (0, 9, 255, 256) for b in ("1", "01", "x") for c in (10, 199, 300)]
    names += ["a" * size for size in (62, 63, 64)] + ["x-s3alias", "x--ol-s3", "xn--x", "x--x-s3"]
    lax = {name for name in names if accepts(check_bucket, f"s3://{name}")}
    assert lax == {name for name in names if accepts(check_bucket_name, name)}
    strict = {name for name in names if accepts(check_bucket, f"s3://{name}", strict=True)}
    assert strict == {name for name in names if accepts(check_bucket_name, name, strict=True, s3_check=True)}
    assert 500 < len(strict) < len(lax) < len(names) - 500


@pytest.mark.parametrize(
    ("uri", "environment", "possible"),
    [
        ("s3://My_Bucket/x", {}, False),
        ("s3://My_Bucket/x", {"AWS_ENDPOINT_URL": "https://s3.eu-west-1.amazonaws.com"}, False),
        ("s3://My_Bucket/x", {"AWS_ENDPOINT_URL": "http://ceph:8080"}, True),
        ("s3://My_Bucket/x", {"AWS_ENDPOINT_URL_S3": "http://ceph:8080"}, True),
        ("s3://My_Bucket/x", {"MINIO_ENDPOINT": "ceph:8080"}, False),
        ("minio://My_Bucket/x", {}, True),
        ("minio://My..Bucket/x", {}, False),
        ("s3://My..Bucket/x", {"AWS_ENDPOINT_URL": "http://ceph:8080"}, False),
        ("My_Folder/x", {}, True),
    ],
)
def test_a_store_with_laxer_rules_keeps_its_buckets(monkeypatch, uri, environment, possible):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "MINIO_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert accepts(check_place, uri) is possible


@pytest.mark.parametrize("uri", ["s3://My_Bucket/x", "s3:///x", "s3:bucket/x", "minio://ä-b/x"])
def test_a_name_that_no_bucket_can_have_is_refused(uri):
    with pytest.raises(StorageError, match=r"no bucket can be named|names no bucket") as caught:
        check_bucket(uri, strict=True)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("uri", "host", "port"),
    [
        ("http://Example.org/a b", "example.org", 80),
        ("https://a_b.-c.example.:8443?x", "a_b.-c.example", 8443), ("http://user@1.2.3.4:/x", "1.2.3.4", 80),
        ("HTTPS://[2001:DB8::0:1]#x", "2001:db8::1", 443), ("http://bücher.example/", "bücher.example", 80),
        ("http://xn--bcher-kva.example", "xn--bcher-kva.example", 80),
        ("http://2a.example/[x", "2a.example", 80),
    ],
)  # fmt: skip
def test_host_and_port_of_an_address(uri, host, port):
    assert host_and_port(uri) == (host, port)


@pytest.mark.parametrize(
    "host",
    [
        "", "@", ":80", ".", "a..b", "a.b..", ".a", f"{'a' * 64}.b", ".".join(["a" * 60] * 5), "256.1.1.1",
        "1.2.3", "1.2.3.4.5", "0177.0.0.1", "0x7f.1", "2130706433", "١.1.1.1", "[]", "[::1", "::1]", "[::1]x",
        "[::g]", "[v1.x]", "[fe80::1%25eth0]", "[::ffff:256.1.1.1]", "127.0.0.1 ", " a", "a b", "a\tb",
        "a\nb", "a\0b", "a\u2028b", "a%00b", "a%2fb", "a\\b", "a:b", "a:0", "a:99999", "a:-1", "a:1:1", "a:१",
        f"a:{'9' * 5000}", "xn--a.b", "\ud800.b", "a|b", "<a>", "a*b", "a,b",
    ],
)  # fmt: skip
def test_hosts_that_no_server_can_have(host):
    with pytest.raises(InvalidAddress) as caught:
        host_and_port(f"http://{host}/i.jpg")
    assert not caught.value.passing and caught.value.fix
