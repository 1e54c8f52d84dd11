"""Which servers may be read by addresses from data and by redirects.

Authors of annotations choose addresses, and servers choose redirects. Either could lead into the pod's
network, to a node's metadata service, or to a bucket that the pod's keys open. Allowed are the servers and
buckets that the user named, public addresses, and what the user allows by name.
"""

import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import ConfigError, MissingError, StorageError
from trainer.base.safe_text import has_userinfo
from trainer.storage.uris import OBJECT_STORES, WEB, host_and_port, scheme

MOST_BYTES = 64 * 1024 * 1024  # of a file whose address comes from data; a server could send without end
_ALLOWED = re.compile(
    r"(s3|minio|gs|az)://[^/]+/?|([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?", re.IGNORECASE
)
"""Buckets and hosts."""


# The standard library's idea of a global address has changed with its patch releases. Ranges with a few
# reachable addresses for infrastructure (anycast relays, Teredo, 6to4) are refused whole: they have no web
# servers, and some lead to any IPv4 address.
# https://www.iana.org/assignments/iana-ipv4-special-registry (2025-10-22), .../iana-ipv6-special-registry
_SPECIAL_IPV4 = tuple(map(ipaddress.IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
    "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    # Azure's platform, seen from its machines alone (Microsoft Learn, "What is IP address 168.63.129.16?").
    "168.63.129.16/32",
)))  # fmt: skip
_ALLOCATED = ipaddress.IPv6Network("2000::/3")
"""All global unicast addresses (https://www.iana.org/assignments/ipv6-address-space)."""
_SPECIAL_IPV6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""A translator forwards packets to the IPv4 address in the last 32 bits (RFC 6052)."""


class Refused(StorageError):
    """An address that is not allowed."""


@dataclass(frozen=True)
class UrlPolicy:
    """Which addresses from data are allowed."""

    named: tuple[str, ...] = ()  # URIs that the user named; their servers and buckets may be read
    allowed: tuple[str, ...] = ()  # others: `host`, `host:port`, `10.0.0.0/8`, `s3://bucket`
    anywhere: bool = False  # whether all servers may be read

    def __post_init__(self) -> None:
        for text in self.allowed:
            if not _ALLOWED.fullmatch(text) and _network(text) is None:
                fix = "write host, host:port, a network as 10.0.0.0/8, or a bucket as s3://bucket"
                raise ConfigError(f"data.allow_hosts: cannot use {text!r}", fix=fix)

    def is_named(self, uri: str) -> bool:
        """Return whether a URI is local, or on a server or in a bucket that the user named."""
        place = _place(uri)
        return scheme(uri) in ("", "file") or (bool(place) and place in map(_place, self.named))

    def check(self, uri: str) -> None:
        """Refuse an address by its text alone; `check_names` looks up its host."""
        kind = scheme(uri)
        if has_userinfo(uri):
            fix = "remove it from the address"
            raise Refused(f"refused {uri}: it contains a name or password", fix=fix)
        host = host_and_port(uri)[0] if kind in WEB else ""
        if self.anywhere or self.is_named(uri):
            return
        if kind in OBJECT_STORES:
            place = _place(uri)
            if place not in map(_place, self.allowed):
                fix = f"to allow it: --set 'data.allow_hosts=[\"{place}\"]'"
                raise Refused(f"refused {uri}: this bucket is not the source's", fix=fix)
        elif kind in WEB:
            with suppress(ValueError):  # A name.
                self.check_peer(uri, host)
        else:
            raise Refused(f"refused {uri}: no address of a server", fix="write http://, https:// or a bucket")

    def check_peer(self, uri: str, peer: str) -> None:
        """Refuse an IP address to which a web address leads, if it is not public."""
        address = ipaddress.ip_address(peer.partition("%")[0].strip("[]"))
        if self.anywhere or _is_public(address):
            return
        host, port = host_and_port(uri)
        if self.is_named(uri):
            return
        for text in self.allowed:
            network = _network(text)
            if network is not None and address in network:
                return
            if text.lower().replace("[", "").replace("]", "") in (host, f"{host}:{port}"):
                return
        at = f"{host} is at {address}" if host != str(address) else str(address)
        raise Refused(
            f"refused {uri}: {at}, which is no address of the public network",
            fix=f"to allow it: --set 'data.allow_hosts=[\"{host}\"]'",
        )

    def check_names(self, uri: str) -> list[Any]:
        """Return what `socket.getaddrinfo` finds for a host; refuse it if one of the addresses is refused."""
        host, port = host_and_port(uri)
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for *_, address in addresses:
            self.check_peer(uri, str(address[0]))
        return addresses


def _place(uri: str) -> str:
    """Return host and port of a web address, scheme and bucket of an object; "" for others."""
    kind = scheme(uri)
    if kind in OBJECT_STORES:
        return f"{kind}://{uri.partition('://')[2].partition('/')[0]}"
    with suppress(MissingError):
        return "{}:{}".format(*host_and_port(uri)) if kind in WEB else ""
    return ""


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    with suppress(ValueError):
        return ipaddress.ip_network(text)
    return None


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is public; of an IPv6 address that contains an IPv4 one, that one counts."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None and address not in _NAT64:
            return address in _ALLOCATED and not any(address in network for network in _SPECIAL_IPV6)
        address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return not any(address in network for network in _SPECIAL_IPV4)
