"""Refusals of stores and web servers as errors that name the URI, the cause and the remedy."""

import re
import ssl

import urllib3
from obstore.exceptions import BaseError, InvalidPathError, PreconditionError

from trainer.base.errors import DamagedError, RefusedError, StorageError
from trainer.base.os_errors import missing
from trainer.storage.environment import IDENTITY
from trainer.storage.uris import CLOUDS, scheme

BUSY = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which the same request may succeed
RUN_AGAIN = "check the network and the server, and run again: what is finished is kept"
_NETWORK = (
    "check the address (the endpoint in the environment), HTTP_PROXY and NO_PROXY, this machine's DNS, and "
    "that the server runs; run again: what is finished is kept"
)
_REFUSED = "check what these keys may do; for a public bucket set AWS_SKIP_SIGNATURE=true"
_KEYS = (
    "check the access keys in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "MINIO_ACCESS_KEY and MINIO_SECRET_KEY) and the region; for a public bucket set AWS_SKIP_SIGNATURE=true"
)
_REGION = "set AWS_REGION (for minio:// MINIO_REGION) to the bucket's region"
_FIXES = {
    "AccessDenied": _REFUSED,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
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


class Transient(StorageError):
    """Bytes were cut off, altered or of two versions: the next try may succeed."""

    passing = True


class PastEnd(Transient):
    """The file ends before the range that was asked for."""


class Corrupt(Transient, DamagedError):
    """The bytes do not have the expected hash."""

    passing = False


class NoRanges(StorageError):
    """The server gives a file only whole."""


def changed(uri: str, status: int = 0) -> Transient:
    """Return the error for a file that changed while it was read; `status`: of the HTTP answer."""
    kind = PastEnd if status == 416 else Transient
    return kind(f"{uri} changed while it was read", fix="run again when nobody writes to it")


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
    """Return an error of obstore as one that names the URI and the remedy."""
    if not isinstance(error, BaseError | FileNotFoundError | ValueError) and not is_panic(error):
        raise error
    text, status = str(error), status_of(error)
    if isinstance(error, PreconditionError) or status in (412, 416):
        return changed(uri, status)
    if "non-partial response" in text or "Range request not supported" in text:
        return NoRanges(f"{uri} cannot be read in parts")
    code = next(iter(re.findall(r"<Code>(\w+)</Code>", text)), "")
    if code in _TRANSIENT:
        fix = "the store got other bytes than were sent: check the network and the proxies on the way to it"
        return Transient(f"cannot {verb} {uri}: {code}", fix=fix)
    if isinstance(error, FileNotFoundError) or status == 404:
        if code not in ("NoSuchBucket", "ContainerNotFound") and verb in ("read", "delete"):
            return missing(uri)
        fix = "create the bucket, or correct the URI"
        return StorageError(f"cannot {verb} {uri}: no such bucket", fix=fix)
    code = code or {301: "PermanentRedirect", 401: "AccessDenied", 403: "AccessDenied"}.get(status, "")
    reason, passing = code or f"status {status}", status in BUSY
    if not status:
        reason, passing = text.partition("\n")[0].strip()[:300], "HTTP error" in text
        fix = RUN_AGAIN if isinstance(error, BaseError) else "check the URI, the endpoint and the keys"
        if isinstance(error, InvalidPathError) or "invalid path" in reason:
            fix = "rename the object: no '.', no '..' and nothing empty between slashes"
    elif status in BUSY:
        fix = _FIXES.get(code, "the store is overloaded or down: run again later, what is finished is kept")
    elif scheme(uri) in CLOUDS:
        fix = f"check what this identity may do; {IDENTITY[scheme(uri)]}"
    else:
        no_store = "check that the endpoint is one of S3, and the store's log"
        fix = _FIXES.get(code, _REFUSED if status in (401, 403) else no_store)
    return StorageError(f"cannot {verb} {uri}: {reason}", fix=fix, passing=passing)


def web_refusal(status: int, uri: str) -> StorageError:
    """Return the error for a status of a web server."""
    if status in (404, 410):
        return missing(uri)
    if status in (412, 416):
        return changed(uri, status)
    kind = RefusedError if status in (401, 403) else StorageError
    busy = status in BUSY
    fix = "run again later" if busy else "check the address and who may read it"
    return kind(f"cannot read {uri}: the server answers {status}", fix=fix, passing=busy)


def no_answer(uri: str, error: BaseException) -> StorageError:
    """Return the error for a server from which urllib3 gets no answer."""
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    if isinstance(cause, urllib3.exceptions.SSLError | ssl.SSLError):
        cause = cause.args[0] if cause.args and isinstance(cause.args[0], ssl.SSLError) else cause
        reason = getattr(cause, "verify_message", "") or str(cause)
        fix = "name a file with the certificate of its authority in AWS_CA_BUNDLE, or correct the address"
        if getattr(cause, "reason", "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            fix = "the server speaks plain http there: write http:// in the endpoint, or another port"
        return StorageError(f"cannot read {uri}: no trusted connection: {reason}", fix=fix)
    who = "the proxy" if isinstance(cause, urllib3.exceptions.ProxyError) else "the server"
    reason = str(cause).rpartition("] ")[2].rstrip("\"')")
    return StorageError(f"cannot read {uri}: no answer from {who}: {reason}", fix=_NETWORK, passing=True)
