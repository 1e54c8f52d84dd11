"""Checks of names, quantities and paths by Kubernetes' rules, before anything is sent.

Each function returns its text, or raises ValueError with the problem. Source: Kubernetes' apimachinery,
`validation` (names, qualified names) and `resource.Quantity`.
"""

import re
from decimal import Decimal

JOB_LENGTH = 50
"""Characters of a job's name: its pods append `-worker-NNN`, and a label holds 63."""

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ENVIRONMENT = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[mkMGTPE]?)")
_FACTORS = {
    "m": Decimal("0.001"), "": Decimal(1), "k": Decimal(10**3),
    **{letter: Decimal(10 ** (3 * power)) for power, letter in enumerate("MGTPE", start=2)},
    **{f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
}  # fmt: skip


def job(text: str) -> str:
    """A job's name."""
    if not _DNS_1035.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a DNS-1035 label: lower-case letters, digits and '-', beginning with a letter"
        )
    if len(text) > JOB_LENGTH:
        raise ValueError(f"{text!r} has {len(text)} characters, {JOB_LENGTH} are allowed")
    return text


def dns(text: str) -> str:
    """A name of another object, or nothing."""
    if text and (len(text) > 253 or not _DNS_SUBDOMAIN.fullmatch(text)):
        raise ValueError(f"{text!r} is not a name of Kubernetes: lower-case letters, digits, '-' and '.'")
    return text


def dns_required(text: str) -> str:
    """A name of another object."""
    if not text:
        raise ValueError("must not be empty")
    return dns(text)


def qualified(text: str) -> str:
    """A key of a label, annotation or resource: `name` or `domain/name`."""
    domain, slash, name = text.rpartition("/")
    if (slash and not _DNS_SUBDOMAIN.fullmatch(domain)) or len(name) > 63 or not _QUALIFIED.fullmatch(name):
        raise ValueError(f"{text!r} is not of the form name or domain/name")
    return text


def environment(text: str) -> str:
    """A name of an environment variable."""
    if not _ENVIRONMENT.fullmatch(text):
        raise ValueError(f"{text!r} cannot be a variable's name")
    return text


def quantity(text: str) -> str:
    """An amount of a resource, e.g. 500m or 128Gi, or nothing."""
    if text and not _QUANTITY.fullmatch(text):
        raise ValueError(f"{text!r} is not an amount like 4, 500m or 128Gi")
    return text


def amount(text: str) -> Decimal:
    """The number that a quantity stands for; nothing is 0."""
    match = _QUANTITY.fullmatch(text)
    return Decimal(match[1]) * _FACTORS[match[2]] if match else Decimal(0)


def mount_path(text: str) -> str:
    """An absolute path in a container."""
    if not text.startswith("/") or ":" in text or ".." in text.split("/") or text.strip("/") == "":
        raise ValueError(f"{text!r} is not an absolute path below /")
    return text.rstrip("/")


def working_dir(text: str) -> str:
    """An absolute path in a container, the root too, or nothing."""
    return text if text in ("", "/") else mount_path(text)


def image(text: str) -> str:
    """A container image, or nothing."""
    if forbidden := sorted(set(text) & set("\"'\\ \t\n")):
        raise ValueError(f"{text!r} is no container image: it holds {' '.join(map(repr, forbidden))}")
    return text
