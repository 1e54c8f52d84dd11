"""Who one is to an object store and where it is, from the environment.

    s3://     AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (else Amazon's), AWS_REGION or AWS_DEFAULT_REGION,
              AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN
    minio://  MINIO_ENDPOINT (http unless it says https:// or MINIO_SECURE is true), MINIO_REGION,
              MINIO_ACCESS_KEY, MINIO_SECRET_KEY; each falls back to its AWS_ twin
    both      AWS_CA_BUNDLE, SSL_CERT_FILE or REQUESTS_CA_BUNDLE; HTTP_PROXY, HTTPS_PROXY, NO_PROXY

Without keys in the environment a pod's role is used (AWS_WEB_IDENTITY_TOKEN_FILE,
AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or _FULL_URI), then the credentials file of the AWS tools
(AWS_SHARED_CREDENTIALS_FILE, AWS_PROFILE); else requests are anonymous. AWS_SKIP_SIGNATURE=true
makes them anonymous in any case.
"""

import os
from dataclasses import dataclass, field
from functools import lru_cache, partial
from urllib.parse import urlsplit

from minio import Minio
from minio.credentials import AWSConfigProvider, IamAwsProvider, Provider
from urllib3 import PoolManager

from trainer.errors import StorageError
from trainer.storage.connections import pool

_AMAZON = "s3.amazonaws.com"
_AMAZONS = (".amazonaws.com", ".amazonaws.com.cn")
_ENDPOINT = "give it as https://host:port, without a path"
_ROLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class Settings:
    """All that decides how a store is reached."""

    kind: str
    """The scheme: "s3" or "minio"."""
    url: str
    """http(s)://host[:port]"""
    region: str
    """"" lets the client ask for a bucket's region."""
    key: str
    secret: str = field(repr=False)
    token: str = field(repr=False)
    source: str
    """Where keys come from: "keys", "role", "file" or "" for nowhere: anonymous requests."""
    identity: tuple[str, ...]
    """Which role, or which file and profile."""


def settings(kind: str) -> Settings:
    """Read the settings for URIs of a scheme.

    Raises:
        StorageError: there is no endpoint, or half a pair of keys.
    """
    value = partial(_value, kind)
    endpoint = _endpoint(kind)
    if not endpoint and kind == "minio":
        raise StorageError(
            "minio:// URIs need an endpoint", fix="set MINIO_ENDPOINT, e.g. minio-service.kubeflow:9000"
        )
    if "://" not in endpoint:
        secure = not endpoint or _yes("MINIO_SECURE")
        endpoint = f"{'https' if secure else 'http'}://{endpoint or _AMAZON}"
    region = value("REGION") or value("DEFAULT_REGION")
    key, secret = value("ACCESS_KEY_ID", "ACCESS_KEY"), value("SECRET_ACCESS_KEY", "SECRET_KEY")
    if bool(key) != bool(secret):
        raise StorageError(
            f"{kind}:// has an access key without its secret, or the reverse",
            fix="set both, or neither for anonymous access",
        )
    # A session's token belongs to the AWS_ pair.
    own = kind == "minio" and os.environ.get("MINIO_ACCESS_KEY")
    token = "" if own or not key else os.environ.get("AWS_SESSION_TOKEN", "")
    source, *identity = [""] if _yes("AWS_SKIP_SIGNATURE") else _source(bool(key))
    if _AMAZON not in endpoint:
        region = region or "us-east-1"  # what stores of one region call themselves
    return Settings(
        kind,
        endpoint if endpoint.endswith("//") else endpoint.rstrip("/"),
        region,
        key,
        secret,
        token,
        source,
        tuple(identity),
    )


def is_amazon(kind: str) -> bool:
    """Tell whether URIs of a scheme lead to Amazon's own store."""
    endpoint = _endpoint(kind)
    return (urlsplit(endpoint).hostname or "").endswith(_AMAZONS) if endpoint else kind == "s3"


def client(kind: str) -> Minio:
    """Return this process's client for URIs of a scheme, as the environment is now.

    Raises:
        StorageError: the environment does not say enough, or something that cannot be used.
    """
    found = settings(kind)
    return _client(found, pool(found.url, follow=False))


@lru_cache(maxsize=8)
def _client(found: Settings, connections: PoolManager) -> Minio:
    """Make a client; the connections are of this process alone, and so is what is made of them."""
    scheme, _, host = found.url.partition("://")
    unusable = f"endpoint {found.url!r} of {found.kind}:// cannot be used"
    if not host:
        raise StorageError(f"{unusable}: it names no host", fix=_ENDPOINT)
    provider: Provider | None = None
    if found.source == "role":
        provider = IamAwsProvider()
    elif found.source == "file":
        provider = AWSConfigProvider()
    keys = found.source == "keys"
    try:
        return Minio(
            host,
            access_key=found.key if keys else None,
            secret_key=found.secret if keys else None,
            session_token=(found.token or None) if keys else None,
            secure=scheme.lower() == "https",
            region=found.region or None,
            credentials=provider,
            http_client=connections,
        )
    except ValueError as error:
        raise StorageError(f"{unusable}: {error}", fix=_ENDPOINT) from error


def _value(kind: str, name: str, own: str = "") -> str:
    """Return a setting: under MinIO's name for its scheme, else under Amazon's."""
    return (kind == "minio" and os.environ.get(f"MINIO_{own or name}")) or os.environ.get(f"AWS_{name}", "")


def _endpoint(kind: str) -> str:
    return _value(kind, "ENDPOINT_URL_S3", "ENDPOINT") or _value(kind, "ENDPOINT_URL")


def _source(keys: bool) -> list[str]:
    """Return where keys come from, and for what is read from elsewhere, from where."""
    if keys:
        return ["keys"]
    roles = [os.environ.get(name, "") for name in _ROLES]
    if any(roles):
        return ["role", *roles, os.environ.get("AWS_ROLE_ARN", "")]
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    return ["file", file, os.environ.get("AWS_PROFILE", "")] if os.path.isfile(file) else [""]


def _yes(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")
