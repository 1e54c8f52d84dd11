"""Which servers addresses may lead to that stand in data, and in redirects, rather than in a user's hand.

Whoever writes annotations writes addresses, and a server answers with redirects: either could lead into the
network that the pod is in, to a node's metadata service, or to a bucket that the pod's keys open. What the
user named may be read; besides that only public addresses, and what the user allows by name.
"""

import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import ConfigError, StorageError
from trainer.base.safe_text import has_userinfo
from trainer.storage.uris import OBJECT_STORES, WEB, InvalidAddress, host_and_port, scheme

MOST_BYTES = 64 * 1024 * 1024
"""Of a file from an address that stands in data; a server could send for ever."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]")

# Own lists: what the standard library takes for global has changed with its patch releases. Ranges with a few
# reachable addresses for infrastructure (anycast relays, Teredo, 6to4) are left out as a whole: they hold no
# web servers, and some lead to an IPv4 address of any kind.
# https://www.iana.org/assignments/iana-ipv4-special-registry (2025-10-22), .../iana-ipv6-special-registry
_SPECIAL_IPV4 = tuple(map(ipaddress.IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
    "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
    # Azure's platform, seen from its machines alone (Microsoft Learn, "What is IP address 168.63.129.16?").
    "168.63.129.16/32",
)))  # fmt: skip
_ALLOCATED = ipaddress.IPv6Network("2000::/3")
"""All that is allocated as global unicast (https://www.iana.org/assignments/ipv6-address-space)."""
_SPECIAL_IPV6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""A translator puts the packet on to the IPv4 address in the last 32 bits (RFC 6052)."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Refused(StorageError):
    """An address that nobody allowed."""


@dataclass(frozen=True)
class UrlPolicy:
    """What addresses in data may lead to.

    Args:
        named: URIs that the user named; their servers and buckets may be read.
        allowed: further ones: `host`, `host:port`, `10.0.0.0/8`, `s3://bucket`.
        anywhere: whether all servers may be read.

    Raises:
        ConfigError: one of the allowed is of no such form.
    """

    named: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    anywhere: bool = False

    def __post_init__(self) -> None:
        for text in self.allowed:
            if not _is_usable(text):
                raise ConfigError(
                    f"data.allow_hosts: cannot use {text!r}",
                    fix="write host, host:port, a network as 10.0.0.0/8, or a bucket as s3://bucket",
                )

    def is_named(self, uri: str) -> bool:
        """Tell whether a URI is on a server, or in a bucket, that the user named; local files are."""
        place = _place(uri)
        return scheme(uri) in ("", "file") or (
            bool(place) and any(_place(known) == place for known in self.named)
        )

    def check(self, uri: str) -> None:
        """Refuse what is seen from an address alone; where its host's name leads `check_peer` tells.

        Raises:
            Refused: nobody allowed it.
        """
        kind = scheme(uri)
        if has_userinfo(uri):
            raise Refused(
                f"refused {uri}: it has a name or password in it", fix="leave that out of the address"
            )
        if self.anywhere or self.is_named(uri):
            if kind in WEB:
                host_and_port(uri)
            return
        if kind in OBJECT_STORES:
            place = _place(uri)
            if place not in {_place(text) for text in self.allowed}:
                raise Refused(
                    f"refused {uri}: this bucket is not the source's, but this process' keys may open it",
                    fix=f"where it may be: --set 'data.allow_hosts=[\"{place}\"]'",
                )
        elif kind in WEB:
            host, _ = host_and_port(uri)
            with suppress(ValueError):
                self.check_peer(uri, host)
        else:
            raise Refused(f"refused {uri}: no address of a server", fix="write http://, https:// or a bucket")

    def check_peer(self, uri: str, peer: str) -> None:
        """Refuse an IP address that an address in the web leads to, if it is none of the public network.

        Args:
            uri: the address.
            peer: the IP address, as it is about to be connected to.

        Raises:
            Refused: nobody allowed it.
            ValueError: `peer` is no IP address.
        """
        address = ipaddress.ip_address(peer.partition("%")[0].strip("[]"))
        if self.anywhere or _is_public(address):
            return
        host, port = host_and_port(uri)
        if self.is_named(uri) or any(_is_meant(text, host, port, address) for text in self.allowed):
            return
        at = f"{host} is at {address}" if host != str(address) else str(address)
        raise Refused(
            f"refused {uri}: {at}, which is no address of the public network",
            fix=f"where it may be read: --set 'data.allow_hosts=[\"{host}\"]'",
        )

    def check_names(self, uri: str) -> list[Any]:
        """Look a host's name up, and refuse it if any of its addresses is refused.

        Returns:
            What `socket.getaddrinfo` gave: who connects, connects to these.

        Raises:
            OSError: the name is not known.
            Refused: nobody allowed it.
        """
        host, port = host_and_port(uri)
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for *_, address in addresses:
            self.check_peer(uri, str(address[0]))
        return addresses


def _place(uri: str) -> str:
    """Return host and port of an address in the web, scheme and bucket of an object; "" for what has none."""
    kind = scheme(uri)
    if kind in OBJECT_STORES:
        return f"{kind}://{uri.partition('://')[2].partition('/')[0]}"
    if kind not in WEB:
        return ""
    try:
        return "{}:{}".format(*host_and_port(uri))
    except InvalidAddress:
        return ""


def _is_usable(text: str) -> bool:
    if scheme(text) in OBJECT_STORES and "://" in text:
        return bool(text.partition("://")[2].strip("/")) and "/" not in text.partition("://")[2].rstrip("/")
    with suppress(ValueError):
        return bool(ipaddress.ip_network(text))
    host, _, port = text.rpartition(":") if re.search(r":\d+$", text) else (text, "", "80")
    return bool(_NAME.fullmatch(host)) and 0 < int(port) < 65536


def _is_meant(text: str, host: str, port: int, address: Address) -> bool:
    """Tell whether one of the allowed names a host, or a network that its address is in."""
    with suppress(ValueError):
        return address in ipaddress.ip_network(text)
    return text.lower().replace("[", "").replace("]", "") in (host, f"{host}:{port}")


def _is_public(address: Address) -> bool:
    """Tell whether an address is of the public network; one that holds another is what that one is."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None and address not in _NAT64:
            return address in _ALLOCATED and not any(address in network for network in _SPECIAL_IPV6)
        address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return not any(address in network for network in _SPECIAL_IPV4)
