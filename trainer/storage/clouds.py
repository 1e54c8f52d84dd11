"""Google Cloud Storage (gs://) and Azure's Blob Storage (az://): who one is there, from the environment.

obstore reads its variables itself; here they are checked before it is asked, so that nobody waits for
a server of identities that is not there, and stores are made of them. The names are in `environment.py`.
"""

import json
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3
from obstore.store import AzureStore, GCSStore, ObjectStore

from trainer.base.errors import StorageError

IDENTITY = {
    "gs": "name a service account's key file in GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, "
    "give its JSON as GOOGLE_SERVICE_ACCOUNT_KEY, or run under GKE's workload identity; for a public "
    "bucket set GOOGLE_SKIP_SIGNATURE=true",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run "
    "under AKS' workload identity (AZURE_CLIENT_ID, AZURE_TENANT_ID, AZURE_FEDERATED_TOKEN_FILE); for a "
    "public container set AZURE_SKIP_SIGNATURE=true",
}
"""What to do for want of an identity, by scheme."""

_PREFIXES = {"gs": ("GOOGLE_", "GCE_METADATA_", "HOME"), "az": ("AZURE_", "AZURITE_")}
_SOURCES = {
    "gs": ("SERVICE_ACCOUNT", "SERVICE_ACCOUNT_PATH", "SERVICE_ACCOUNT_KEY", "APPLICATION_CREDENTIALS",
           "BEARER_TOKEN"),
    "az": ("STORAGE_ACCOUNT_KEY", "STORAGE_ACCESS_KEY", "STORAGE_MASTER_KEY", "STORAGE_SAS_KEY",
           "STORAGE_SAS_TOKEN", "STORAGE_TOKEN", "FEDERATED_TOKEN_FILE", "CLIENT_SECRET",
           "STORAGE_CLIENT_SECRET", "USE_AZURE_CLI", "MSI_ENDPOINT", "IDENTITY_ENDPOINT"),
}  # fmt: skip
_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?(/[A-Za-z0-9._/-]*)?")
_LINK_LOCAL = "169.254.169.254"
_TRIES, _SECONDS = 3, 2.0  # a pod's server of identities may come up a little after the pod
_present: set[str] = set()
"""Schemes whose server of identities has answered."""


@dataclass(frozen=True)
class Settings:
    """All that decides how a cloud's store is reached."""

    kind: str
    """The scheme: "gs" or "az"."""
    url: str
    """`http(s)://host:port/path`, of which port and path may be absent."""
    variables: tuple[tuple[str, str], ...] = field(repr=False)
    """What obstore reads of the environment."""


def settings(kind: str) -> Settings:
    """Read the settings for URIs of a scheme.

    Raises:
        StorageError: they cannot be used, or nothing says who one is.
    """
    names = _PREFIXES[kind]
    variables = tuple(sorted(pair for pair in os.environ.items() if pair[0].startswith(names)))
    url = _google_url() if kind == "gs" else _azure_url()
    host = _URL.fullmatch(url)
    if not host or int((host[2] or ":1")[1:]) > 65535:
        raise StorageError(
            f"the endpoint {url!r} of {kind}:// cannot be used", fix="give it as https://host:port"
        )
    unprintable = [name for name, value in variables if not value.isprintable()]
    if kind == "az" and unprintable:  # Keys of Google's are JSON of several lines.
        fix = "correct it in the environment"
        raise StorageError(f"{unprintable[0]} holds a line break or another such character", fix=fix)
    if not _is_known(kind):
        raise StorageError(f"nothing says who one is to {kind}://", fix=IDENTITY[kind])
    return Settings(kind, url.rstrip("/"), variables)


def store(current: Settings, bucket: str, **options: Any) -> ObjectStore:
    """Return obstore's store of a bucket or container; `options` are its client's and for trying again.

    Raises:
        StorageError: what the environment says of one's identity cannot be used.
    """
    # What tells who one is lies beside the machine, not behind a proxy.
    client = options["client_options"] | {"proxy_excludes": f"{_LINK_LOCAL},metadata.google.internal"}
    make: Any = GCSStore if current.kind == "gs" else AzureStore
    try:
        return make(bucket, **options | {"client_options": client})
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        said = str(error).partition("\n")[0].strip()[:300]
        raise StorageError(f"{current.kind}:// cannot be used: {said}", fix=IDENTITY[current.kind]) from error


def is_panic(error: BaseException) -> bool:
    """Tell whether obstore broke down over what it was given; its class can be imported from nowhere."""
    return type(error).__name__ == "PanicException"


def _google_url() -> str:
    path = os.environ.get("GOOGLE_SERVICE_ACCOUNT") or os.environ.get("GOOGLE_SERVICE_ACCOUNT_PATH")
    text, where = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", ""), "GOOGLE_SERVICE_ACCOUNT_KEY"
    account: Any = {}
    try:
        if path:
            where = f"GOOGLE_SERVICE_ACCOUNT {path}"
            text = Path(path).read_text()
        account = json.loads(text) if text else {}
        base = account.get("gcs_base_url", "https://storage.googleapis.com")
    except (OSError, ValueError, AttributeError) as error:
        why = getattr(error, "strerror", None) or "it is no service account's JSON"
        raise StorageError(f"{where} cannot be used: {why}", fix=IDENTITY["gs"]) from error
    return os.environ.get("GOOGLE_BASE_URL") or str(base)


def _azure_url() -> str:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if _is_yes("AZURE_STORAGE_USE_EMULATOR"):
        return os.environ.get("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:10000")
    if not re.fullmatch("[a-z0-9]{3,24}", account):
        what = f"{account!r} can be no storage account" if account else "az:// needs a storage account"
        raise StorageError(what, fix=IDENTITY["az"])
    named = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")
    return named or f"https://{account}.blob.core.windows.net"


def _is_known(kind: str) -> bool:
    """Tell whether the environment, a login on this machine or the cloud's own server says who one is."""
    prefix = "GOOGLE_" if kind == "gs" else "AZURE_"
    named = any(os.environ.get(prefix + name) for name in _SOURCES[kind])
    if named or _is_yes(f"{prefix}SKIP_SIGNATURE") or _is_yes("AZURE_STORAGE_USE_EMULATOR"):
        return True
    login = os.path.expanduser("~/.config/gcloud/application_default_credentials.json")
    return (kind == "gs" and os.path.isfile(login)) or kind in _present or _has_server(kind)


def _has_server(kind: str) -> bool:
    """Ask the cloud's server of identities, of which nothing is to be seen in a pod of GKE."""
    if kind == "gs":
        url, headers = (
            f"http://{os.environ.get('GCE_METADATA_IP', _LINK_LOCAL)}/",
            {"Metadata-Flavor": "Google"},
        )
    else:
        url, headers = f"http://{_LINK_LOCAL}/metadata/instance?api-version=2021-02-01", {"Metadata": "true"}
    for attempt in range(_TRIES):
        time.sleep(attempt / 2)
        try:
            answer = urllib3.PoolManager().request(
                "GET", url, headers=headers, timeout=_SECONDS, retries=False
            )
        except urllib3.exceptions.HTTPError:
            continue
        if answer.status == 200 and (kind == "az" or answer.headers.get("Metadata-Flavor") == "Google"):
            _present.add(kind)
            if kind == "gs" and "GCE_METADATA_IP" in os.environ:
                # obstore asks for the server's name first, and retries for minutes if that is not known.
                os.environ.setdefault("GCE_METADATA_HOST", os.environ["GCE_METADATA_IP"])
            return True
    return False


def _is_yes(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")
