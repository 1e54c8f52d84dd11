import ipaddress
import socket

import pytest

from trainer.base.errors import ConfigError, StorageError
from trainer.storage.web import Refused, UrlPolicy

SPECIAL_IPV4 = [
    "0.0.0.0", "0.255.255.255", "10.0.0.1", "10.255.255.255", "100.64.0.0", "100.100.100.200",
    "100.127.255.255", "127.0.0.1", "127.255.255.255", "169.254.169.254", "172.16.0.0", "172.31.255.255",
    "192.0.0.1", "192.0.0.8", "192.0.0.9", "192.0.0.170", "192.0.0.192", "192.0.0.255", "192.0.2.1",
    "192.88.99.1", "192.168.0.1", "198.18.0.0", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16",
]  # fmt: skip
"""First, last or known addresses of each range."""

SPECIAL_IPV6 = [
    "::", "::1", "::2", "::8.8.8.8", "::127.0.0.1", "::ffff:0:8.8.8.8", "64:ff9b:1::",
    "64:ff9b:1:ffff::808:808", "100::1", "100:0:0:1::1", "1fff::1", "2001::1", "2001:0:808:808::1",
    "2001:1::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:1ff:ffff::1", "2001:db8::1", "2002:7f00:1::1",
    "2002:808:808::1", "3fff::1", "3fff:fff:ffff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254",
    "fe80::1", "fe80::1%eth0", "febf::1", "fec0::1", "feff::1", "ff02::1", "ffff::1",
]  # fmt: skip

PUBLIC_IPV4 = [
    "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255",
    "128.0.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0", "192.0.3.0",
    "192.88.98.255", "192.88.100.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0",
    "223.255.255.255",
]  # fmt: skip
"""Neighbours of the ranges, and two resolvers."""


@pytest.mark.parametrize(
    "peer",
    [
        *SPECIAL_IPV6,
        *(form.format(address) for address in SPECIAL_IPV4 for form in ("{}", "::ffff:{}", "64:ff9b::{}")),
    ],
)
def test_what_is_not_of_the_public_network_is_refused(peer):
    with pytest.raises(Refused, match="no address of the public network") as caught:
        UrlPolicy().check_peer("http://example.org/a.jpg", peer)
    assert "data.allow_hosts" in caught.value.fix and "example.org" in caught.value.fix


@pytest.mark.parametrize(
    "peer",
    [
        "2000::1", "2001:200::1", "2001:db7::1", "2001:4860:4860::8888", "2003::1", "2606:4700::1111",
        "3ffe::1",
        *(form.format(address) for address in PUBLIC_IPV4 for form in ("{}", "::ffff:{}", "64:ff9b::{}")),
    ],
)  # fmt: skip
def test_what_is_public_is_reached(peer):
    UrlPolicy().check_peer("http://example.org/a.jpg", peer)


@pytest.mark.parametrize(
    ("allowed", "uri", "peer"),
    [
        ("example.org", "http://example.org/a", "10.0.0.1"),
        ("Example.org", "http://EXAMPLE.ORG:81/a", "10.0.0.1"),
        ("example.org:81", "http://example.org:81/a", "10.0.0.1"),
        ("10.0.0.0/8", "http://example.org/a", "10.0.0.1"),
        ("10.0.0.1", "http://example.org/a", "10.0.0.1"),
        ("[::1]:81", "http://[::1]:81/a", "::1"),
        ("fd00::/8", "https://example.org/a", "fd00::7"),
    ],
)
def test_what_is_allowed_by_name_is_reached(allowed, uri, peer):
    UrlPolicy((), (allowed,)).check_peer(uri, peer)


@pytest.mark.parametrize(
    ("allowed", "uri"),
    [
        ("example.org:81", "http://example.org:82/a"),
        ("example.org", "http://other.example.org/a"),
        ("example.org", "http://example.org.evil.net/a"),
        ("example.org", "http://example.org@evil.net/a"),
        ("192.168.0.0/16", "http://example.org/a"),
    ],
)
def test_an_allowance_holds_for_what_it_names_alone(allowed, uri):
    with pytest.raises(Refused):
        UrlPolicy((), (allowed,)).check_peer(uri, "10.0.0.1")


@pytest.mark.parametrize(
    "allowed", ["", "http://a", "a/b", "10.0.0.0/99", "s3://", "s3://a/b", "a:0", "a b", "*"]
)
def test_an_allowance_that_is_none_is_named(allowed):
    with pytest.raises(ConfigError, match=r"data\.allow_hosts"):
        UrlPolicy((), (allowed,))


def test_the_servers_and_buckets_that_the_user_named_are_reached_and_no_others():
    policy = UrlPolicy(("http://10.0.0.1:8000/set.json", "s3://own/set"), ("s3://shared", "minio://own/"))
    for uri in [
        "http://10.0.0.1:8000/b.jpg",
        "s3://own/x.jpg",
        "s3://shared/x.jpg",
        "minio://own/x",
        "/a.jpg",
    ]:
        policy.check(uri)
    others = "http://10.0.0.1/b.jpg http://10.0.0.1:6443/ s3://other/x gs://own/x s3://own2/x ftp://a/b"
    inside = "http://169.254.169.254/latest/meta-data http://[::1]/a http://0x7f000001.0.0.1:x/"
    for uri in f"{others} {inside}".split():
        with pytest.raises(StorageError, match=r"refused|no address"):
            policy.check(uri)
    assert policy.is_named("s3://own/a")
    assert not policy.is_named("s3://shared/a") and not policy.is_named("ftp://")


def test_each_address_of_a_name_counts(monkeypatch):
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (peer, 80)) for peer in ("8.8.8.8", "169.254.169.254")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(Refused, match=r"169\.254"):
        UrlPolicy().check_names("http://two-faced.example/a.jpg")
    assert ipaddress.ip_address(UrlPolicy((), ("169.254.169.254",)).check_names("http://x.example/")[0][4][0])
