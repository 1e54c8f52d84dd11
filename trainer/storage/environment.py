"""Server settings from environment variables (addresses, keys, proxies, certificates), and timeouts.

docs/data.md lists the variables of each scheme. Without keys, s3:// and minio:// use the pod's role, the
credentials file of the AWS tools, or anonymous access, in this order. obstore reads the variables for gs://.
"""

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
from urllib3 import PoolManager, ProxyManager

from trainer.base.errors import StorageError, refuse_userinfo

if TYPE_CHECKING:
    from minio import Minio
    from minio.credentials import Provider

AMAZON = "https://s3.amazonaws.com"  # the endpoint if none is set
GOOGLE_CREDENTIALS_FIX = (  # what to do without credentials for gs://
    "name a service account's key file in GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, give its "
    "JSON as GOOGLE_SERVICE_ACCOUNT_KEY, or run under GKE's workload identity; for a public bucket set "
    "GOOGLE_SKIP_SIGNATURE=true"
)

_CONNECTIONS = 64  # idle connections per server that are kept open
_CA_VARIABLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_PROXY = re.compile(
    r"((https?|socks[45][ah]?)://)?([^/@\s]*@)?([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?/?",
    re.IGNORECASE | re.ASCII,
)
_GOOGLE_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:[1-6]?\d{1,4})?(/[A-Za-z0-9._/-]*)?")
_ROLE_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True)
class RetryPolicy:
    """Timeouts for servers, in seconds."""

    connect: float = 10.0  # to establish a connection
    read_timeout: float = 30.0  # between two bytes of a response
    first: float = 15.0  # for the first response of a server, whose address may be wrong
    total: float = 300.0  # for one request, including retries
    wait: float = 10.0  # between two retries, at most


RETRIES = RetryPolicy()


class Settings(NamedTuple):
    """Connection settings of an S3 store."""

    url: str  # http(s)://host[:port]
    region: str  # "" if the server has to be asked for the bucket's region
    keys: "Provider | None"  # None for anonymous requests
    client: "Minio"  # for operations that obstore lacks: buckets and checks


def read_settings(kind: str) -> Settings:
    """Read the settings for s3:// or minio:// URIs."""
    from minio import Minio
    from minio.credentials import AWSConfigProvider, IamAwsProvider, StaticProvider

    endpoint = _read(kind, "ENDPOINT_URL_S3", "ENDPOINT") or _read(kind, "ENDPOINT_URL")
    if not endpoint and kind == "minio":
        fix = "set MINIO_ENDPOINT, e.g. minio-service.kubeflow:9000"
        raise StorageError("minio:// URIs need an endpoint", fix=fix)
    refuse_userinfo(endpoint, f"the endpoint of {kind}:// in the environment")
    if endpoint and "://" not in endpoint:
        endpoint = f"{'https' if _is_true('MINIO_SECURE') else 'http'}://{endpoint}"
    endpoint = endpoint or AMAZON
    region = _read(kind, "REGION") or _read(kind, "DEFAULT_REGION")
    if AMAZON.removeprefix("https://") not in endpoint:
        region = region or "us-east-1"  # The default name of a store with one region.
    key, secret = _read(kind, "ACCESS_KEY_ID", "ACCESS_KEY"), _read(kind, "SECRET_ACCESS_KEY", "SECRET_KEY")
    if bool(key) != bool(secret):
        fix = "set both, or neither for anonymous access"
        raise StorageError(f"{kind}:// needs both an access key and its secret", fix=fix)
    token = os.environ.get("AWS_SESSION_TOKEN", "")
    if kind == "minio" and os.environ.get("MINIO_ACCESS_KEY"):
        token = ""  # It belongs to the AWS_ pair.
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    keys: Provider | None = AWSConfigProvider() if os.path.isfile(file) else None
    if any(os.environ.get(name) for name in _ROLE_VARIABLES):
        keys = IamAwsProvider()
    if key:
        keys = StaticProvider(key, secret, token or None)
    if _is_true("AWS_SKIP_SIGNATURE"):
        keys = None
    url = endpoint if endpoint.endswith("//") else endpoint.rstrip("/")
    protocol, _, host = url.partition("://")
    try:
        if not host:
            raise ValueError("it has no host")
        secure, connections = protocol.lower() == "https", web_client(url)
        client = Minio(host, secure=secure, region=region or None, credentials=keys, http_client=connections)
    except ValueError as error:
        message = f"endpoint {url!r} of {kind}:// cannot be used: {error}"
        raise StorageError(message, fix="write it as https://host:port, without a path") from error
    return Settings(url, region, keys, client)


def google_url() -> str:
    """Return the URL of the gs:// server."""
    url = os.environ.get("GOOGLE_BASE_URL", "https://storage.googleapis.com")
    if not _GOOGLE_URL.fullmatch(url):
        fix = "write it as https://host:port"
        raise StorageError(f"the endpoint {url!r} of gs:// cannot be used", fix=fix)
    return url.rstrip("/")


def web_client(url: str) -> PoolManager:
    """Return a urllib3 client for the few requests that obstore cannot make."""
    proxy, trusted = find_proxy(url), None
    if proxy or url.lower().startswith("https:"):
        trusted = ssl.create_default_context(cadata=ca_certificates())
    options: dict[str, Any] = {"ssl_context": trusted, "maxsize": _CONNECTIONS}
    return ProxyManager(proxy, **options) if proxy else PoolManager(**options)


def find_proxy(url: str) -> str:
    """Return the environment's proxy for a URL; "" if there is none."""
    address = urlsplit(url)
    if proxy_bypass(address.hostname or ""):
        return ""
    proxy = getproxies().get(address.scheme, "").strip()
    match = _PROXY.fullmatch(proxy)
    if proxy and (match is None or int(match["port"] or 0) >= 2**16):
        raise StorageError(
            f"{address.scheme.upper()}_PROXY in the environment is not the address of a proxy",
            fix="use one like http://proxy.example:3128",
        )
    return proxy


def ca_certificates() -> str:
    """Return the trusted certificates as PEM: the public authorities, and the environment's CA bundle."""
    public = Path(certifi.where()).read_text()
    variable = next((name for name in _CA_VARIABLES if os.environ.get(name)), "")
    bundle = os.environ.get(variable, "")
    if not bundle:
        return public
    try:
        ssl.create_default_context(cafile=bundle)
        return f"{public}\n{Path(bundle).read_text()}"
    except (OSError, UnicodeDecodeError) as error:  # SSLError is an OSError.
        raise StorageError(
            f"the CA bundle {bundle} cannot be read: {getattr(error, 'strerror', None) or error}",
            fix=f"set {variable} to a file of PEM certificates, or unset it",
        ) from error


def _read(kind: str, name: str, minio_name: str = "") -> str:
    """Return a setting from the MINIO_ variable for minio://, or else from the AWS_ variable."""
    own = os.environ.get(f"MINIO_{minio_name or name}") if kind == "minio" else ""
    return own or os.environ.get(f"AWS_{name}", "")


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")
