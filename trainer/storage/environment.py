"""Settings of servers from environment variables: addresses, keys, proxies, certificates; and patience.

docs/data.md lists the variables of each scheme. Without keys, s3:// and minio:// use a pod's role, else the
credentials file of the AWS tools, else they are anonymous. obstore reads the variables of gs:// and az://.
"""

import os
import re
import ssl
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
from minio import Minio
from minio.credentials import AWSConfigProvider, IamAwsProvider, Provider, StaticProvider
from urllib3 import PoolManager, ProxyManager

from trainer.base.errors import StorageError, refuse_userinfo

AMAZON = "https://s3.amazonaws.com"
"""The endpoint if none is set."""

IDENTITY = {
    "gs": "name a service account's key file in GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, "
    "give its JSON as GOOGLE_SERVICE_ACCOUNT_KEY, or run under GKE's workload identity; for a public "
    "bucket set GOOGLE_SKIP_SIGNATURE=true",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run "
    "under AKS' workload identity (AZURE_CLIENT_ID, AZURE_TENANT_ID, AZURE_FEDERATED_TOKEN_FILE); for a "
    "public container set AZURE_SKIP_SIGNATURE=true",
}
"""What to do without credentials, by scheme."""

_CA_VARIABLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_PROXY = re.compile(
    r"((https?|socks[45][ah]?)://)?([^/@\s]*@)?([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?",
    re.IGNORECASE | re.ASCII,
)
_CLOUD_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?(/[A-Za-z0-9._/-]*)?")
_ENDPOINT = "give it as https://host:port, without a path"
_ROLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait for servers, in seconds."""

    connect: float = 10.0  # for a connection
    silence: float = 30.0  # without a byte of an answer
    first: float = 15.0  # for the first answer of a server to this process: its address may be wrong
    total: float = 300.0  # for one request with all its retries
    wait: float = 10.0  # between two retries, at most


RETRIES = RetryPolicy()


@dataclass(frozen=True)
class Settings:
    """How an S3 store is reached."""

    kind: str  # the scheme: "s3" or "minio"
    url: str  # http(s)://host[:port]
    region: str  # "" if the bucket's region has to be asked for
    source: str  # of keys: "keys", "role", "file" or "" for anonymous requests
    key: str
    secret: str = field(repr=False)
    token: str = field(repr=False)


def settings(kind: str) -> Settings:
    """Read the settings for s3:// or minio:// URIs."""
    endpoint = _endpoint(kind)
    if not endpoint and kind == "minio":
        fix = "set MINIO_ENDPOINT, e.g. minio-service.kubeflow:9000"
        raise StorageError("minio:// URIs need an endpoint", fix=fix)
    refuse_userinfo(endpoint, f"the endpoint of {kind}:// in the environment")
    if endpoint and "://" not in endpoint:
        endpoint = f"{'https' if _is_set('MINIO_SECURE') else 'http'}://{endpoint}"
    endpoint = endpoint or AMAZON
    region = _value(kind, "REGION") or _value(kind, "DEFAULT_REGION")
    if AMAZON.removeprefix("https://") not in endpoint:
        region = region or "us-east-1"  # The name that stores with one region use.
    key, secret = _value(kind, "ACCESS_KEY_ID", "ACCESS_KEY"), _value(kind, "SECRET_ACCESS_KEY", "SECRET_KEY")
    if bool(key) != bool(secret):
        fix = "set both, or neither for anonymous access"
        raise StorageError(f"{kind}:// has an access key without its secret, or the reverse", fix=fix)
    # A session token belongs to the AWS_ pair.
    token = (
        ""
        if kind == "minio" and os.environ.get("MINIO_ACCESS_KEY")
        else os.environ.get("AWS_SESSION_TOKEN", "")
    )
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    if _is_set("AWS_SKIP_SIGNATURE"):
        source = ""
    elif key:
        source = "keys"
    elif any(os.environ.get(name) for name in _ROLES):
        source = "role"
    else:
        source = "file" if os.path.isfile(file) else ""
    url = endpoint if endpoint.endswith("//") else endpoint.rstrip("/")
    return Settings(kind, url, region, source, key, secret, token)


def client(current: Settings) -> Minio:
    """Return a client for what obstore cannot do: buckets and checks."""
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


def credentials(current: Settings) -> Provider | None:
    """Return the provider of keys; None for anonymous requests."""
    if current.source == "role":
        return IamAwsProvider()
    if current.source == "file":
        return AWSConfigProvider()
    return StaticProvider(current.key, current.secret, current.token or None) if current.source else None


def cloud_url(kind: str) -> str:
    """Return the server of gs:// or az://."""
    url = (
        os.environ.get("GOOGLE_BASE_URL", "https://storage.googleapis.com") if kind == "gs" else _azure_url()
    )
    host = _CLOUD_URL.fullmatch(url)
    if not host or int((host[2] or ":1")[1:]) > 65535:
        fix = "give it as https://host:port"
        raise StorageError(f"the endpoint {url!r} of {kind}:// cannot be used", fix=fix)
    for name, value in os.environ.items():
        if kind == "az" and name.startswith("AZURE_") and not value.isprintable():
            fix = "correct it in the environment"
            raise StorageError(f"{name} contains a line break or another control character", fix=fix)
    return url.rstrip("/")


def web_client(url: str) -> PoolManager:
    """Return urllib3's connections for the few requests that obstore cannot make."""
    proxy, trusted = proxy_of(url), ssl.create_default_context(cadata=authorities())
    return ProxyManager(proxy, ssl_context=trusted) if proxy else PoolManager(ssl_context=trusted)


def proxy_of(url: str) -> str:
    """Return the environment's proxy for an address; "" for none."""
    address = urlsplit(url)
    if proxy_bypass(address.hostname or ""):
        return ""
    proxy = getproxies().get(address.scheme, "").strip()
    match = _PROXY.fullmatch(proxy)
    if proxy and (match is None or int(match["port"] or 0) >= 2**16):
        raise StorageError(
            f"{address.scheme.upper()}_PROXY in the environment is no address of a proxy",
            fix="use one like http://proxy.example:3128",
        )
    return proxy


def authorities() -> str:
    """Return the trusted certificates as PEM: the public authorities, and the environment's CA bundle."""
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
    except (OSError, UnicodeDecodeError) as error:  # SSLError is an OSError.
        raise StorageError(
            f"the CA bundle {bundle} cannot be read: {getattr(error, 'strerror', None) or error}",
            fix=f"let {variable} name a file of PEM certificates, or unset it",
        ) from error


def _value(kind: str, name: str, minio_name: str = "") -> str:
    """Return a setting: for minio:// under MinIO's name, else under Amazon's."""
    return (kind == "minio" and os.environ.get(f"MINIO_{minio_name or name}")) or os.environ.get(
        f"AWS_{name}", ""
    )


def _endpoint(kind: str) -> str:
    return _value(kind, "ENDPOINT_URL_S3", "ENDPOINT") or _value(kind, "ENDPOINT_URL")


def _azure_url() -> str:
    if _is_set("AZURE_STORAGE_USE_EMULATOR"):
        return os.environ.get("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:10000")
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if not re.fullmatch("[a-z0-9]{3,24}", account):
        raise StorageError(f"{account!r} cannot be the storage account of az://", fix=IDENTITY["az"])
    named = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")
    return named or f"https://{account}.blob.core.windows.net"


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")
