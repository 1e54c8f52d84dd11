"""Names of buckets and hosts."""

import pytest

from trainer.base.errors import MissingError, StorageError
from trainer.storage import check_place
from trainer.storage.web import host_and_port


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket", "s3://my-bucket.2/Any_Key//x", f"minio://{'a' * 63}/x", "s3://1.2.3/x", "s3://My_Bucket/x",
        "/My_Bucket/x", "file:///A_b", "https://a.b/x", "sample", "", "gs://my_bucket-1/x",
        f"gs://{'a' * 60}.example.org", "az://abc-1/X_y", "az://$root/x",
    ],
)  # fmt: skip
def test_places_that_exist(uri):
    check_place(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "s3:///x", "s3:bucket/x", "minio://ä-b/x", "minio://My..Bucket/x", "s3://1.2.3.4/x", "s3://a/x",
        "s3://-ab/x", "gs://ab/x", "gs://10.0.0.1/x", "gs://a..b/x", "gs:///x", "az://",
    ],
)  # fmt: skip
def test_a_name_that_no_bucket_can_have_is_refused(uri):
    with pytest.raises(StorageError, match=r"no bucket can be named|names no bucket") as caught:
        check_place(uri)
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
    with pytest.raises(MissingError) as caught:
        host_and_port(f"http://{host}/i.jpg")
    assert not caught.value.transient and caught.value.fix
