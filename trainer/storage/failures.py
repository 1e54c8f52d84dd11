"""Refusals of stores and web servers as errors that name the URI, the cause and the remedy."""

import re
import ssl

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
from trainer.storage.environment import IDENTITY
from trainer.storage.uris import CLOUDS, scheme

BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""

RUN_AGAIN = "check the network and the server, and run again: what is finished is kept"
_KEYS = (
    "check the access keys in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "MINIO_ACCESS_KEY and MINIO_SECRET_KEY)"
)
_REFUSED = "check what these keys may do; for a public bucket set AWS_SKIP_SIGNATURE=true"
_REGION = "set AWS_REGION (for minio:// MINIO_REGION) to the bucket's region"
_FIXES = {
    "AccessDenied": _REFUSED,
    "InvalidAccessKeyId": f"{_KEYS}; for a public bucket set AWS_SKIP_SIGNATURE=true",
    "SignatureDoesNotMatch": f"{_KEYS}: the secret does not belong to the key, or the region is wrong",
    "ExpiredToken": "the session's token has expired: log in again and set AWS_SESSION_TOKEN with its keys",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "InvalidObjectState": "the object is in an archive tier: have it restored first",
    "EntityTooLarge": "the store takes no object of this size: make shards smaller (data.shard_bytes)",
    "QuotaExceeded": "the bucket's quota is used up: free space or raise it",
    "XMinioStorageFull": "the store's disk is full: free space there",
}
"""By the codes of S3 (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html)."""
_TRANSIENT = (
    "BadDigest", "IncompleteBody", "InvalidPart", "NoSuchUpload", "OperationAborted", "RequestTimeout",
    "XAmzContentSHA256Mismatch",
)  # fmt: skip
"""Codes after which the next try may succeed. Their status is 400 or 404, which obstore does not retry."""
_TLS = {
    10: ("its certificate is out of date", "have it renewed, or set this machine's clock if that is wrong"),
    62: ("its certificate is for another name", "use the certificate's name in the endpoint"),
    64: ("its certificate is for another address", "use the certificate's name in the endpoint"),
}
"""By the code of OpenSSL's X509_verify_cert."""


class Absent(MissingError):
    """The file does not exist."""


class Transient(StorageError):
    """Bytes were cut off, altered or of two versions: the next try may succeed."""

    passing = True


class Changed(Transient):
    """The file changed while it was read."""


class PastEnd(Changed):
    """The file ends before the range that was asked for."""


class Corrupt(Transient, DamagedError):
    """The bytes do not have the expected hash."""

    passing = False


class RedirectLoop(StorageError):
    """The server redirects without end."""


def absent(uri: str) -> Absent:
    """Return the error for a missing file."""
    error = missing(uri)
    return Absent(error.message, fix=error.fix)


def changed(uri: str, kind: type[Changed] = Changed) -> Changed:
    """Return the error for a file that changed while it was read."""
    return kind(f"{uri} changed while it was read", fix="run again when nobody writes to it")


def cut_off(uri: str, reason: object) -> Transient:
    """Return the error for an answer that ended too early."""
    return Transient(f"cannot read {uri}: the connection broke off ({reason})", fix=RUN_AGAIN)


def is_panic(error: BaseException) -> bool:
    """Return whether obstore crashed on its input; its exception class cannot be imported."""
    return type(error).__name__ == "PanicException"


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an obstore error; 0 if there was no answer."""
    match = re.search(r"status code: (\d{3})", str(error))
    if match:
        return int(match[1])
    return 301 if "redirect without LOCATION" in str(error) else 0


def translate(error: BaseException, uri: str, verb: str) -> StorageError:
    """Return an error of obstore as one that names the URI and the remedy.

    Raises:
        Exception: the error itself, if it is not from obstore.
    """
    if not isinstance(error, BaseError | FileNotFoundError | ValueError) and not is_panic(error):
        raise error
    text, status = str(error), status_of(error)
    if isinstance(error, PreconditionError) or status in (412, 416):
        return changed(uri, PastEnd if status == 416 else Changed)
    code = next(iter(re.findall(r"<Code>(\w+)</Code>", text)), "")
    if code in _TRANSIENT:
        fix = "the store got other bytes than were sent: check the network and the proxies on the way to it"
        return Transient(f"cannot {verb} {uri}: {code}", fix=fix)
    if isinstance(error, FileNotFoundError) or status == 404:
        if code not in ("NoSuchBucket", "ContainerNotFound") and verb in ("read", "delete"):
            return absent(uri)
        message = f"cannot {verb} {uri}: no such bucket"
        return StorageError(message, fix="create the bucket, or correct the URI")
    if not status:
        return _no_status(error, uri, verb)
    code = code or {301: "PermanentRedirect", 401: "AccessDenied", 403: "AccessDenied"}.get(status, "")
    if status in BUSY:
        fix = _FIXES.get(code, "the store is overloaded or down: run again later, what is finished is kept")
    elif scheme(uri) in CLOUDS:
        fix = f"check what this identity may do; {IDENTITY[scheme(uri)]}"
    elif isinstance(error, PermissionDeniedError | UnauthenticatedError):
        fix = _FIXES.get(code, _REFUSED)
    else:
        fix = _FIXES.get(code, "check that the endpoint is one of S3, and the store's log")
    message = f"cannot {verb} {uri}: {code or f'status {status}'}"
    return StorageError(message, fix=fix, passing=status in BUSY)


def _no_status(error: BaseException, uri: str, verb: str) -> StorageError:
    """Return the error for a request that was refused before it was sent, or that got no answer."""
    first_line = str(error).partition("\n")[0].strip()[:300]
    if isinstance(error, InvalidPathError) or "invalid path" in first_line:
        fix = "rename the object: no '.', no '..' and nothing empty between slashes"
        return StorageError(f"refused name under {uri}: {first_line}", fix=fix)
    is_network = isinstance(error, BaseError)
    fix = RUN_AGAIN if is_network else "check the URI, and the endpoint and the keys in the environment"
    return StorageError(f"cannot {verb} {uri}: {first_line}", fix=fix, passing="HTTP error" in str(error))


def web_refusal(status: int, uri: str) -> StorageError:
    """Return the error for a status of a web server."""
    if status in (404, 410):
        return absent(uri)
    busy = status in BUSY
    fix = "the server refuses: check the address and who may read it"
    if busy:
        fix = "the server is busy or broken: run again later"
    kind = RefusedError if status in (401, 403) else StorageError
    return kind(f"cannot read {uri}: the server answers {status}", fix=fix, passing=busy)


def no_answer(uri: str, error: BaseException) -> StorageError:
    """Return the error for a server from which urllib3 gets no answer."""
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    if isinstance(cause, urllib3.exceptions.SSLError | ssl.SSLError):
        return _untrusted(uri, cause)
    reason, fix = f"the connection broke off ({cause})", RUN_AGAIN
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
    return StorageError(f"cannot read {uri}: {reason}", fix=fix, passing=True)


def _untrusted(uri: str, error: BaseException) -> StorageError:
    cause = error.args[0] if error.args and isinstance(error.args[0], ssl.SSLError) else error
    reason = "the authority that signed its certificate is not known here"
    fix = "name a file with the certificate of that authority in AWS_CA_BUNDLE"
    reason, fix = _TLS.get(getattr(cause, "verify_code", 0), (reason, fix))
    if getattr(cause, "reason", "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        reason = "the server speaks plain http there"
        fix = "write http:// in the endpoint, or another port"
    return StorageError(f"cannot read {uri}: no trusted connection: {reason}", fix=fix)
