"""Checks of names, quantities and paths: each returns its text, or raises ValueError.

Source: Kubernetes' apimachinery, `validation` (names, qualified names) and `resource.Quantity`.
"""

import re
from decimal import Decimal

MAX_JOB_NAME_LENGTH = 50  # Maximum length: pods append `-worker-NNN`, and a label has at most 63 characters.

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ENVIRONMENT = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[mkMGTPE]?)")
_FACTORS = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    "k": Decimal(10**3),
    **{letter: Decimal(10 ** (3 * power)) for power, letter in enumerate("MGTPE", start=2)},
    **{f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
}

LABEL_SPEC = "kubedet/spec-hash"  # Hash of the specification, by which a job is adopted or replaced.
LABEL_NAME = "app.kubernetes.io/instance"  # Name of the job, on each of its pods.
LABEL_MANAGED, MANAGED_BY = (
    "app.kubernetes.io/managed-by",
    "kubedet",
)  # Objects without this label are never changed.
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"  # Kueue's queue that admits a job.


def _require(text: str, valid: object, problem: str) -> str:
    if not valid:
        raise ValueError(f"{text!r} {problem}")
    return text


def check_job_name(text: str) -> str:
    """Check the name of a job."""
    problem = "is not a DNS-1035 label: lower-case letters, digits and '-', beginning with a letter"
    _require(text, _DNS_1035.fullmatch(text), problem)
    problem = f"has {len(text)} characters, more than the allowed {MAX_JOB_NAME_LENGTH}"
    return _require(text, len(text) <= MAX_JOB_NAME_LENGTH, problem)


def check_name(text: str) -> str:
    """Check the name of an object; it may be empty."""
    valid = not text or (len(text) <= 253 and _DNS_SUBDOMAIN.fullmatch(text))
    return _require(text, valid, "is not a Kubernetes name: lower-case letters, digits, '-' and '.'")


def check_required_name(text: str) -> str:
    """Check the name of an object."""
    if not text:
        raise ValueError("must not be empty")
    return check_name(text)


def check_qualified_name(text: str) -> str:
    """Check the key of a label, annotation or resource: `name` or `domain/name`."""
    domain, slash, name = text.rpartition("/")
    valid = (not slash or _DNS_SUBDOMAIN.fullmatch(domain)) and len(name) <= 63 and _QUALIFIED.fullmatch(name)
    return _require(text, valid, "is not of the form name or domain/name")


def check_variable(text: str) -> str:
    """Check the name of an environment variable."""
    return _require(text, _ENVIRONMENT.fullmatch(text), "is not a valid name of a variable")


def check_quantity(text: str) -> str:
    """Check the amount of a resource, e.g. 500m or 128Gi; it may be empty."""
    return _require(text, not text or _QUANTITY.fullmatch(text), "is not an amount like 4, 500m or 128Gi")


def parse_quantity(text: str) -> Decimal:
    """Return the number that a quantity represents; 0 if it is empty."""
    match = _QUANTITY.fullmatch(text)
    return Decimal(match[1]) * _FACTORS[match[2]] if match else Decimal(0)


def check_mount_path(text: str) -> str:
    """Check an absolute path in a container."""
    valid = text.startswith("/") and ":" not in text and ".." not in text.split("/") and text.strip("/")
    return _require(text, valid, "is not an absolute path below /").rstrip("/")


def check_working_dir(text: str) -> str:
    """Check an absolute path in a container; it may be / or empty."""
    return text if text in ("", "/") else check_mount_path(text)


def check_image(text: str) -> str:
    """Check the name of a container image; it may be empty."""
    forbidden = sorted(set(text) & set("\"'\\ \t\n"))
    return _require(text, not forbidden, f"is not an image: it contains {' '.join(map(repr, forbidden))}")
