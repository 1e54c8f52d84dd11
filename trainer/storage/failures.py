"""What servers and networks refuse, as errors that name the URI, the cause and the remedy."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from xml.etree.ElementTree import ParseError

import urllib3
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from trainer.errors import MissingError, StorageError
from trainer.os_errors import missing
from trainer.storage.connections import BUSY

_NAMES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or MINIO_ACCESS_KEY and MINIO_SECRET_KEY"
_REGION = "set AWS_REGION (for minio:// MINIO_REGION) to the bucket's region"
_KEYS = f"check the access keys in the environment ({_NAMES})"
_REFUSED = "check what these keys may do; for a public bucket set AWS_SKIP_SIGNATURE=true"
_BUSY = "the store is overloaded or down: run again later, what is finished is kept"

_ALTERED = "the store got other bytes than were sent: check the network and the proxies on the way to it"

_FIXES = {
    "BadDigest": _ALTERED,
    "XAmzContentSHA256Mismatch": _ALTERED,
    "NoSuchBucket": "create the bucket, or correct the URI",
    "InvalidBucketName": "correct the bucket's name: 3 to 63 of a-z, 0-9, '.' and '-'",
    "AccessDenied": _REFUSED,
    "AllAccessDisabled": _REFUSED,
    "AccountProblem": _REFUSED,
    "InvalidAccessKeyId": f"{_KEYS}; for a public bucket set AWS_SKIP_SIGNATURE=true",
    "SignatureDoesNotMatch": f"{_KEYS}: the secret does not belong to the key, or the region is wrong",
    "ExpiredToken": "the session's token has expired: log in again and set AWS_SESSION_TOKEN with its keys",
    "TokenRefreshRequired": "the session's token has expired: log in again",
    "InvalidToken": "AWS_SESSION_TOKEN does not belong to these keys: set all three, or unset it",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "Redirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "InvalidObjectState": "the object is in an archive tier: have it restored first",
    "EntityTooLarge": "the store takes no object of this size: make shards smaller (data.shard_bytes)",
    "QuotaExceeded": "the bucket's quota is used up: free space or raise it",
    "XMinioStorageFull": "the store's disk is full: free space there",
    "XMinioAdminBucketQuotaExceeded": "the bucket's quota is used up: free space or raise it",
    "KeyTooLongError": "choose a folder with a shorter name",
}
_ABSENT = ("NoSuchKey", "NoSuchObject", "ResourceNotFound", "NoSuchVersion")
_AGAIN = (
    "BadDigest", "IncompleteBody", "InternalError", "InvalidPart", "NoSuchUpload", "OperationAborted",
    "RequestTimeout", "SlowDown", "ServiceUnavailable", "XAmzContentSHA256Mismatch",
    "XMinioServerNotInitialized",
)  # fmt: skip
_STATUS = {301: "PermanentRedirect", 307: "TemporaryRedirect", 401: "AccessDenied", 403: "AccessDenied"}


class Absent(MissingError):
    """The file does not exist."""


class Changed(StorageError):
    """The file became another one while it was read."""


def absent(uri: str) -> Absent:
    """Return the error for a file that is not there."""
    found = missing(uri)
    return Absent(found.message, fix=found.fix)


def answer(error: MinioException) -> tuple[str, str, int]:
    """Return code, message and HTTP status of a store's refusal; "", text and 0 where there is none.

    Some servers call their XML `text/xml`; then the client hands it over as text.
    """
    text = str(error)
    if isinstance(error, S3Error):
        return error.code or "", error.message or "", error.response.status if error.response else 0
    if isinstance(error, ServerError):
        return "", text, error.status_code
    found = re.search(r"Response code: (\d{3})", text)
    status = int(found.group(1)) if isinstance(error, InvalidResponseError) and found else 0
    code = re.search(r"<Code>(\w+)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    if code:
        return code.group(1), message.group(1) if message else "", status
    return "", text, status


def again(error: Exception) -> bool:
    """Tell whether the same upload may succeed when it is sent once more."""
    if isinstance(error, MinioException):
        code, _, status = answer(error)
        return code in _AGAIN or status in BUSY
    return isinstance(error, ParseError)


@contextmanager
def explained(uri: str, verb: str) -> Iterator[None]:
    """Turn what clients and networks raise into a StorageError that names the URI and the remedy.

    Raises:
        Absent: the file is not there.
        Changed: a condition on its content does not hold.
        StorageError: anything else.
    """
    try:
        yield
    except MinioException as error:
        raise _explain_answer(error, uri, verb) from error
    except urllib3.exceptions.HTTPError as error:
        raise explain_network(error, uri, verb) from error
    except (ParseError, ValueError) as error:
        # The client's own complaint of an answer that it cannot read, or of a bucket's name.
        if isinstance(error, ParseError | UnicodeDecodeError) or "XML" in str(error):
            raise StorageError(
                f"cannot {verb} {uri}: the answer is not that of an object store",
                fix="check that the endpoint is one of S3, not a console or a proxy's page",
            ) from error
        raise StorageError(
            f"cannot {verb} {uri}: {error}", fix="correct the URI or the environment"
        ) from error


def _explain_answer(error: MinioException, uri: str, verb: str) -> StorageError:
    code, message, status = answer(error)
    if status == 412:
        fix = "run again when nobody writes to it"
        return Changed(f"{uri} changed while it was read", fix=fix, passing=True)
    if code in _ABSENT or (status == 404 and code != "NoSuchBucket" and verb == "read"):
        return absent(uri)
    if not code and status == 404:
        code = "NoSuchBucket"
    code = code if code in _FIXES else _STATUS.get(status, code)
    region = _region(error)
    if region:
        return StorageError(
            f"cannot {verb} {uri}: the bucket is in region {region}",
            fix=_REGION.replace("the bucket's region", region),
        )
    if code == "NoSuchBucket":
        message = "no such bucket"
    otherwise = "check that the endpoint is one of S3, and the store's log"
    passing = status in BUSY or code in _AGAIN
    fix = _FIXES.get(code) or (_BUSY if passing else otherwise)
    what = ": ".join(part for part in (code, message[:300] or f"status {status}") if part)
    return StorageError(f"cannot {verb} {uri}: {what}", fix=fix, passing=passing)


def _region(error: MinioException) -> str:
    """Return the bucket's region where the store says that another one was asked."""
    response = getattr(error, "response", None)
    told = response.headers.get("x-amz-bucket-region") if response is not None else None
    code = answer(error)[0]
    if code in ("AuthorizationHeaderMalformed", "PermanentRedirect", "Redirect", "TemporaryRedirect"):
        found = re.search(r"expecting '([\w-]+)'|use region ([\w-]+)|<Region>([\w-]+)<", str(error))
        return told or (next(filter(None, found.groups()), "") if found else "")
    return ""


def explain_network(error: Exception, uri: str, verb: str) -> StorageError:
    """Return the error for a server that cannot be reached, is silent or breaks off."""
    cause: BaseException = error
    if isinstance(cause, urllib3.exceptions.MaxRetryError) and cause.reason is not None:
        cause = cause.reason
    if isinstance(cause, urllib3.exceptions.ProxyError):
        return StorageError(
            f"cannot {verb} {uri}: the proxy does not answer: {cause}",
            fix="check HTTP_PROXY, HTTPS_PROXY and NO_PROXY in the environment",
            passing=True,
        )
    if isinstance(cause, urllib3.exceptions.SSLError):
        return _explain_tls(str(cause), uri, verb)
    if isinstance(cause, urllib3.exceptions.NameResolutionError):
        what = f"the name {getattr(cause, '_host', '')!r} of the server is not known"
        fix = "correct the address or the endpoint in the environment; check this machine's DNS"
    elif isinstance(cause, urllib3.exceptions.NewConnectionError):
        what = f"the server does not take connections ({_reason(cause)})"
        fix = "check that it runs, and its address and port (the endpoint in the environment)"
    elif isinstance(cause, urllib3.exceptions.TimeoutError):
        what, fix = "the server is silent", "check the address, the network and the server, and run again"
    elif isinstance(cause, urllib3.exceptions.ResponseError):
        what, fix = f"the server is busy ({cause})", _BUSY
    else:
        what = f"the connection broke off ({cause})"
        fix = "check the network and the server, and run again: what is finished is kept"
    return StorageError(f"cannot {verb} {uri}: {what}", fix=fix, passing=True)


def _explain_tls(text: str, uri: str, verb: str) -> StorageError:
    if "WRONG_VERSION" in text.upper() or "RECORD_LAYER" in text.upper():
        fix = "the server speaks plain http there: write http:// in the endpoint, or another port"
    elif "hostname" in text.lower() or "ip address mismatch" in text.lower():
        fix = "its certificate is for another name: use that name in the endpoint"
    elif "expired" in text.lower():
        fix = "its certificate has expired, or this machine's clock is wrong"
    else:
        fix = "name a file with the certificate of the authority that signed it in AWS_CA_BUNDLE"
    return StorageError(f"cannot {verb} {uri}: no trusted connection: {text[:200]}", fix=fix)


def _reason(error: BaseException) -> str:
    inner = error.__cause__ or error.__context__
    return str(getattr(inner, "strerror", None) or error).rpartition(": ")[2]
