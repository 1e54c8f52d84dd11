"""What stores and web servers refuse, as errors that name the URI, the cause and the remedy."""

import html
import re
import ssl
from collections.abc import Sequence

import urllib3
from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from trainer.base.errors import DamagedError, MissingError, RefusedError, StorageError
from trainer.base.os_errors import missing
from trainer.storage.clouds import IDENTITY, is_panic
from trainer.storage.uris import CLOUDS, scheme

BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""

_KEYS = (
    "check the access keys in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "MINIO_ACCESS_KEY and MINIO_SECRET_KEY)"
)
_REFUSED = "check what these keys may do; for a public bucket set AWS_SKIP_SIGNATURE=true"
_REGION = "set AWS_REGION (for minio:// MINIO_REGION) to the bucket's region"
_FIXES = {
    "NoSuchBucket": "create the bucket, or correct the URI",
    "AccessDenied": _REFUSED,
    "InvalidAccessKeyId": f"{_KEYS}; for a public bucket set AWS_SKIP_SIGNATURE=true",
    "SignatureDoesNotMatch": f"{_KEYS}: the secret does not belong to the key, or the region is wrong",
    "ExpiredToken": "the session's token has expired: log in again and set AWS_SESSION_TOKEN with its keys",
    "InvalidToken": "AWS_SESSION_TOKEN does not belong to these keys: set all three, or unset it",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "InvalidObjectState": "the object is in an archive tier: have it restored first",
    "EntityTooLarge": "the store takes no object of this size: make shards smaller (data.shard_bytes)",
    "QuotaExceeded": "the bucket's quota is used up: free space or raise it",
    "XMinioStorageFull": "the store's disk is full: free space there",
}
_TRANSIENT = (
    "BadDigest", "IncompleteBody", "InvalidPart", "NoSuchUpload", "OperationAborted", "RequestTimeout",
    "XAmzContentSHA256Mismatch",
)  # fmt: skip
"""Refusals after which the next try may succeed; obstore does not retry them: their status is 400 or 404."""
_UNKNOWN_AUTHORITY = "the authority that signed its certificate is not known here"
_TLS = {
    10: ("its certificate is out of date", "have it renewed, or set this machine's clock if that is wrong"),
    62: ("its certificate is for another name", "use the certificate's name in the endpoint"),
    64: ("its certificate is for another address", "use the certificate's name in the endpoint"),
}
"""By the code of OpenSSL's X509_verify_cert."""


class Absent(MissingError):
    """The file does not exist."""


class Transient(StorageError):
    """What came, or went, was cut off, altered or of two versions: the whole may succeed at the next try."""


class Changed(Transient):
    """The file became another one while it was read."""


class Corrupt(Transient, DamagedError):
    """The bytes are not those whose hash is known."""


class RedirectLoop(StorageError):
    """The server redirects from one address to the next without end."""


def absent(uri: str) -> Absent:
    """Return the error for a file that is not there."""
    error = missing(uri)
    return Absent(error.message, fix=error.fix)


def changed(uri: str) -> Changed:
    """Return the error for a file that is not what it was."""
    return Changed(f"{uri} changed while it was read", fix="run again when nobody writes to it", passing=True)


def not_kept(uri: str, reason: str) -> Transient:
    """Return the error for an object that a store has acknowledged and does not give back."""
    fix = "look at the store's log and disks, and run again: it is written again"
    message = f"{uri} was written, and the store acknowledged it, but {reason}"
    return Transient(message, fix=fix, passing=True)


def redirect_loop(uri: str, hops: Sequence[str]) -> RedirectLoop:
    """Return the error for an address that is redirected without end."""
    message = f"cannot read {uri}: it is redirected without end: {' -> '.join(hops)}"
    return RedirectLoop(message, fix="correct the address, or the server: it is no use to try again")


def no_store(uri: str, verb: str) -> StorageError:
    """Return the error for a server that answers as no object store does."""
    fix = "check that the endpoint is one of S3, not a console or a proxy's page"
    return StorageError(f"cannot {verb} {uri}: the answer is not that of an object store", fix=fix)


def status_of(error: BaseException) -> int:
    """Return the HTTP status that an error of obstore is about; 0 if there is none."""
    text = str(error)
    match = re.search(r"status code: (\d{3})", text)
    if match is None:
        return 301 if "redirect without LOCATION" in text else 0
    return int(match[1])


def translate(error: BaseException, uri: str, verb: str) -> StorageError:
    """Return an error of obstore as one that names the URI and the remedy.

    Raises:
        Exception: the error itself, if it is none of obstore's.
    """
    if isinstance(error, StorageError):
        return error
    text, status = str(error), status_of(error)
    if isinstance(error, PreconditionError) or status in (412, 416):
        return changed(uri)
    if isinstance(error, FileNotFoundError) or status:
        return _refusal(error, text, status, uri, verb)
    first_line = text.partition("\n")[0].strip()[:300]
    if isinstance(error, InvalidPathError) or "invalid path" in first_line:
        fix = "rename the object: no '.', no '..' and nothing empty between slashes"
        return StorageError(f"refused name under {uri}: {first_line}", fix=fix)
    if isinstance(error, BaseError):
        fix = "check the network and the server, and run again: what is finished is kept"
        return StorageError(f"cannot {verb} {uri}: {first_line}", fix=fix, passing="HTTP error" in text)
    if is_panic(error) or isinstance(error, ValueError):
        fix = "check the URI, and the endpoint and the keys in the environment"
        return StorageError(f"cannot {verb} {uri}: {first_line}", fix=fix)
    raise error


def _refusal(error: BaseException, text: str, status: int, uri: str, verb: str) -> StorageError:
    """Return the error for an answer of a store."""
    code, message = _element(text, "Code"), _element(text, "Message").partition("\n")[0][:300]
    if isinstance(error, FileNotFoundError) and code in ("", "NoSuchKey") and verb != "write":
        return absent(uri)
    if code in ("ContainerNotFound", "NoSuchBucket") or (status == 404 and verb != "read"):
        code, message = "NoSuchBucket", "no such bucket"
    elif isinstance(error, FileNotFoundError):
        return absent(uri)
    code = code or {301: "PermanentRedirect", 401: "AccessDenied", 403: "AccessDenied"}.get(status, "")
    cause = ": ".join(filter(None, (code, message or f"status {status}")))
    if code in _TRANSIENT:
        fix = "the store got other bytes than were sent: check the network and the proxies on the way to it"
        return Transient(f"cannot {verb} {uri}: {cause}", fix=fix, passing=True)
    if scheme(uri) in CLOUDS and status in (301, 307, 400, 401, 403):
        fix = f"check what this identity may do; {IDENTITY[scheme(uri)]}"
        return StorageError(f"cannot {verb} {uri}: {cause}", fix=fix)
    busy = status in BUSY
    fix = "check that the endpoint is one of S3, and the store's log"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        fix = _REFUSED
    if busy:
        fix = "the store is overloaded or down: run again later, what is finished is kept"
    region = re.search(r"expecting '([\w-]+)'|<Region>([\w-]+)<", text)
    if region and _FIXES.get(code) == _REGION:
        cause = f"the bucket is in region {region[1] or region[2]}"
    return StorageError(f"cannot {verb} {uri}: {cause}", fix=_FIXES.get(code, fix), passing=busy)


def web_refusal(status: int, uri: str) -> StorageError:
    """Return the error for what a web server refuses."""
    if status in (404, 410):
        return absent(uri)
    busy = status in BUSY
    fix = "the server is busy or broken: run again later"
    if not busy:
        fix = "the server refuses: check the address and who may read it"
    kind = RefusedError if status in (401, 403) else StorageError
    return kind(f"cannot read {uri}: the server answers {status}", fix=fix, passing=busy)


def cut_off(uri: str, reason: object) -> Transient:
    """Return the error for an answer that ended before its end."""
    fix = "check the network and the server, and run again: what is finished is kept"
    return Transient(f"cannot read {uri}: the connection broke off ({reason})", fix=fix, passing=True)


def no_answer(uri: str, error: BaseException) -> StorageError:
    """Return the error for a server from which urllib3 gets no answer."""
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    if isinstance(cause, urllib3.exceptions.SSLError | ssl.SSLError):
        return _untrusted(uri, cause)
    fix = "check the address, the network and the server, and run again: what is finished is kept"
    if isinstance(cause, urllib3.exceptions.ProxyError):
        reason = "the proxy does not answer"
        fix = "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY in the environment"
    elif isinstance(cause, urllib3.exceptions.NameResolutionError):
        reason = f"the name {cause.conn.host!r} of the server is not known"
        fix = "correct the address or the endpoint in the environment; check this machine's DNS"
    elif isinstance(cause, urllib3.exceptions.NewConnectionError):
        reason = f"the server does not take connections ({str(cause).rpartition('] ')[2]})"
        fix = "check that it runs, and its address and port (the endpoint in the environment)"
    elif isinstance(cause, urllib3.exceptions.TimeoutError):
        reason = "the server is silent"
    else:
        reason = f"the connection broke off ({cause})"
    return StorageError(f"cannot read {uri}: {reason}", fix=fix, passing=True)


def _untrusted(uri: str, error: BaseException) -> StorageError:
    """Return the error for a server that is not trusted."""
    cause = error.args[0] if error.args and isinstance(error.args[0], ssl.SSLError) else error
    fix = "name a file with the certificate of that authority in AWS_CA_BUNDLE"
    reason, fix = _TLS.get(getattr(cause, "verify_code", 0), (_UNKNOWN_AUTHORITY, fix))
    if getattr(cause, "reason", "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        reason = "the server speaks plain http there"
        fix = "write http:// in the endpoint, or another port"
    return StorageError(f"cannot read {uri}: no trusted connection: {reason}", fix=fix)


def _element(text: str, name: str) -> str:
    """Return what an element of a store's answer holds."""
    match = re.search(f"<{name}>([^<]*)</{name}>", text)
    return html.unescape(match[1]) if match else ""
