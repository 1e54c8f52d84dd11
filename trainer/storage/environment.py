"""Who one is to an object store and where it is, from the environment.

    s3://     AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (else Amazon's), AWS_REGION or AWS_DEFAULT_REGION,
              AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN
    minio://  MINIO_ENDPOINT (http unless it says https:// or MINIO_SECURE is true), MINIO_REGION,
              MINIO_ACCESS_KEY, MINIO_SECRET_KEY; each falls back to its AWS_ twin
    gs://     GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS (a file), GOOGLE_SERVICE_ACCOUNT_KEY
              (its JSON), GOOGLE_BEARER_TOKEN, GOOGLE_SKIP_SIGNATURE, GOOGLE_BASE_URL; else gcloud's login,
              or GKE's workload identity (clouds.py)
    az://     AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or
              AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET or AZURE_FEDERATED_TOKEN_FILE (workload
              identity); AZURE_STORAGE_ENDPOINT, AZURE_STORAGE_USE_EMULATOR, AZURE_SKIP_SIGNATURE
    https://  HF_TOKEN, shown to the Hugging Face hub alone, whose address HF_ENDPOINT may name (hub.py)
    all       AWS_CA_BUNDLE, SSL_CERT_FILE or REQUESTS_CA_BUNDLE; HTTP_PROXY, HTTPS_PROXY, NO_PROXY

For s3:// and minio://: without keys in the environment a pod's role is used (AWS_WEB_IDENTITY_TOKEN_FILE,
AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or _FULL_URI), then the credentials file of the AWS tools
(AWS_SHARED_CREDENTIALS_FILE, AWS_PROFILE); else requests are anonymous. AWS_SKIP_SIGNATURE=true
makes them anonymous in any case.
"""

import os
import re
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
from minio import Minio
from minio.credentials import AWSConfigProvider, IamAwsProvider, Provider, StaticProvider
from urllib3 import PoolManager, ProxyManager

from trainer.base.errors import StorageError, refuse_userinfo

AMAZON = "https://s3.amazonaws.com"
"""Where requests go if no endpoint is named."""

_AMAZONS = (".amazonaws.com", ".amazonaws.com.cn")
_CA_VARIABLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_PROXY = re.compile(
    r"((https?|socks[45][ah]?)://)?([^/@\s]*@)?([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?",
    re.IGNORECASE | re.ASCII,
)
_SECONDS = 10.0
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
    """"" where a bucket's region is asked for."""
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
    refuse_userinfo(endpoint, f"the endpoint of {kind}:// in the environment")
    if not endpoint:
        endpoint = AMAZON
    elif "://" not in endpoint:
        endpoint = f"{'https' if _yes('MINIO_SECURE') else 'http'}://{endpoint}"
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
    if AMAZON.removeprefix("https://") not in endpoint:
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


def client(current: Settings) -> Minio:
    """Return a client for what obstore does not do: finding and making buckets, and headers.

    Raises:
        StorageError: no client can use these settings.
    """
    protocol, _, host = current.url.partition("://")
    unusable = f"endpoint {current.url!r} of {current.kind}:// cannot be used"
    if not host:
        raise StorageError(f"{unusable}: it names no host", fix=_ENDPOINT)
    try:
        return Minio(
            host,
            secure=protocol.lower() == "https",
            region=current.region or None,
            credentials=credentials(current),
            http_client=web_client(current.url),
        )
    except ValueError as error:
        raise StorageError(f"{unusable}: {error}", fix=_ENDPOINT) from error


def library_keys(current: Settings) -> Any:
    """Return what gives obstore the keys; None for anonymous requests."""
    provider = credentials(current)
    if provider is None:
        return None

    def give() -> dict[str, Any]:
        keys = provider.retrieve()
        # The provider knows when they end, and asks for new ones: so it is asked again soon.
        soon = datetime.now(UTC) + timedelta(minutes=10)
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.session_token,
            "expires_at": None if current.source == "keys" else soon,
        }

    return give


def credentials(current: Settings) -> Provider | None:
    """Return what gives the keys; None for anonymous requests."""
    if current.source == "role":
        return IamAwsProvider()
    if current.source == "file":
        return AWSConfigProvider()
    if current.source == "keys":
        return StaticProvider(current.key, current.secret, current.token or None)
    return None


def bucket_region(url: str, bucket: str) -> str:
    """Return the region that a store says a bucket is in; "" where it does not tell.

    Any answer of Amazon's has it, refusals too.
    (https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html)
    """
    response = web_client(url).request("HEAD", f"{url}/{bucket}", redirect=False, retries=3, timeout=_SECONDS)
    return response.headers.get("x-amz-bucket-region", "")


def web_client(url: str) -> PoolManager:
    """Return connections of urllib3 for an address: for the few requests that obstore cannot make.

    Raises:
        StorageError: the CA bundle that the environment names cannot be used.
    """
    proxy, trusted = proxy_of(url), ssl.create_default_context(cadata=authorities())
    return ProxyManager(proxy, ssl_context=trusted) if proxy else PoolManager(ssl_context=trusted)


def proxy_of(url: str) -> str:
    """Return the proxy that the environment names for an address; "" for none.

    Raises:
        StorageError: what it names cannot be one.
    """
    address = urlsplit(url)
    if proxy_bypass(address.hostname or ""):
        return ""
    proxy = getproxies().get(address.scheme, "").strip()
    match = _PROXY.fullmatch(proxy)
    if proxy and (match is None or int(match["port"] or 0) >= 2**16):
        # obstore says of such a one only that it cannot be built.
        raise StorageError(
            f"{address.scheme.upper()}_PROXY in the environment is no address of a proxy",
            fix="use one like http://proxy.example:3128",
        )
    return proxy


def authorities() -> str:
    """Return the certificates that are trusted, in PEM form.

    What the environment names comes on top of the public authorities: one process reads both the cluster's
    store, under the cluster's own authority, and the web.

    Raises:
        StorageError: the CA bundle that the environment names cannot be used.
    """
    variable = next((name for name in _CA_VARIABLES if os.environ.get(name)), "")
    return _authorities(variable, os.environ.get(variable, ""))


@lru_cache(maxsize=4)
def _authorities(variable: str, bundle: str) -> str:
    public = Path(certifi.where()).read_text()
    if not bundle:
        return public
    try:
        ssl.create_default_context(cafile=bundle)
        return f"{public}\n{Path(bundle).read_text()}"
    except (OSError, UnicodeDecodeError) as error:  # SSLError is an OSError
        raise StorageError(
            f"the CA bundle {bundle} cannot be read: {getattr(error, 'strerror', None) or error}",
            fix=f"let {variable} name a file of PEM certificates, or unset it",
        ) from error


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
