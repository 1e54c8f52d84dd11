"""What servers and networks refuse, as errors that name the URI, the cause and the remedy.

obstore raises one class for most errors; status, code and cause are read from its text, in which they stand
as object_store writes them (https://github.com/apache/arrow-rs-object-store, version 0.14).
"""

import html
import re
from collections.abc import Sequence
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from obstore.exceptions import BaseError, InvalidPathError, PreconditionError

from trainer.base.errors import DamagedError, MissingError, RefusedError, StorageError
from trainer.base.os_errors import missing
from trainer.storage.clouds import IDENTITY, is_panic
from trainer.storage.uris import CLOUDS, WEB, scheme

BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""

_NAMES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or MINIO_ACCESS_KEY and MINIO_SECRET_KEY"
_REGION = "set AWS_REGION (for minio:// MINIO_REGION) to the bucket's region"
_KEYS = f"check the access keys in the environment ({_NAMES})"
_REFUSED = "check what these keys may do; for a public bucket set AWS_SKIP_SIGNATURE=true"
_BUSY = "the store is overloaded or down: run again later, what is finished is kept"
_ALTERED = "the store got other bytes than were sent: check the network and the proxies on the way to it"
_NO_STORE = "check that the endpoint is one of S3, not a console or a proxy's page"

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
_ABSENT = ("NoSuchKey", "BlobNotFound", "NoSuchObject", "ResourceNotFound", "NoSuchVersion")
_AGAIN = (
    "BadDigest", "IncompleteBody", "InternalError", "InvalidPart", "NoSuchUpload", "OperationAborted",
    "RequestTimeout", "SlowDown", "ServiceUnavailable", "XAmzContentSHA256Mismatch",
    "XMinioServerNotInitialized",
)  # fmt: skip
_STATUS = {301: "PermanentRedirect", 307: "TemporaryRedirect", 401: "AccessDenied", 403: "AccessDenied"}


class Absent(MissingError):
    """The file does not exist."""


class Spoiled(StorageError):
    """What arrived is not what was sent, or not of one version: the whole may go well at the next try."""


class Changed(Spoiled):
    """The file became another one while it was read."""


class Damaged(Spoiled, DamagedError):
    """The bytes are not those whose hash is known."""


class Whole(StorageError):
    """The server gives this file only whole, or does not tell its size."""


class Circling(StorageError):
    """The server sends from one address to the next without end."""


class Misplaced(StorageError):
    """The bucket is in another region than was asked."""


def absent(uri: str) -> Absent:
    """Return the error for a file that is not there."""
    error = missing(uri)
    return Absent(error.message, fix=error.fix)


def changed(uri: str) -> Changed:
    """Return the error for a file that is not what it was."""
    return Changed(f"{uri} changed while it was read", fix="run again when nobody writes to it", passing=True)


def unkept(uri: str, why: str) -> Spoiled:
    """Return the error for an object that a store has acknowledged and does not give back."""
    fix = "look at the store's log and disks, and run again: it is written again"
    return Spoiled(f"{uri} was written, and the store acknowledged it, but {why}", fix=fix, passing=True)


def whole(uri: str) -> Whole:
    """Return the error for a file that has to be read from start to end."""
    return Whole(f"{uri} cannot be read in parts", fix="read it whole")


def broken(uri: str, cause: BaseException) -> StorageError:
    """Return the error for a connection of urllib3 that could not be made, or broke."""
    fix = "check the address, the network and the server, and run again"
    return StorageError(f"cannot read {uri}: {cause or 'the server is too slow'}", fix=fix, passing=True)


def circling(uri: str, hops: Sequence[str] = ()) -> Circling:
    """Return the error for an address that is redirected without end; `hops` are the addresses, in order."""
    fix = "correct the address, or the server: it is no use to try again"
    listed = f": {' -> '.join(hops)}" if hops else ""
    return Circling(f"cannot read {uri}: it is redirected without end{listed}", fix=fix)


def no_store(uri: str, verb: str) -> StorageError:
    """Return the error for a server that answers as no object store does."""
    return StorageError(f"cannot {verb} {uri}: the answer is not that of an object store", fix=_NO_STORE)


def status(error: BaseException) -> int:
    """Return the HTTP status that an error is about; 0 where there is none."""
    match = re.search(r"status code: (\d{3})", str(error))
    return int(match[1]) if match else 0


def is_whole(error: BaseException) -> bool:
    """Tell whether a server gives no parts of a file, or does not tell its length."""
    text = str(error)
    said = ("non-partial response", "Range request not supported", "Content-Length Header missing")
    return isinstance(error, Whole) or any(part in text for part in said)


def explain(error: BaseException, uri: str, verb: str) -> tuple[StorageError, bool]:
    """Turn what obstore raises into an error that names the URI and the remedy.

    Args:
        error: of obstore; PanicException too, where it breaks down.
        uri: what was asked for.
        verb: what was to be done with it.

    Returns:
        Absent: the file is not there; Changed: a condition on its content does not hold; Whole: it cannot be
        had in parts; StorageError: anything else. And whether a server answered.

    Raises:
        Exception: the error itself, where it is none of obstore's.
    """
    if isinstance(error, StorageError):
        return error, False
    text, code = str(error), status(error)
    network = not code and isinstance(error, BaseError) and not isinstance(error, InvalidPathError)
    answered = not network or is_whole(error) or "redirect without LOCATION" in text
    return _explained(error, text, code, uri, verb), answered


def _explained(error: BaseException, text: str, code: int, uri: str, verb: str) -> StorageError:  # noqa: PLR0911
    if "token request" in text and scheme(uri) in CLOUDS:
        fix = IDENTITY[scheme(uri)]
        passing = code in BUSY or (not code and ": HTTP" not in text)
        return StorageError(
            f"cannot {verb} {uri}: no identity: {_first_line(text)}", fix=fix, passing=passing
        )
    if isinstance(error, PreconditionError) or code in (412, 416):
        return changed(uri)
    if is_whole(error):
        return whole(uri)
    if "TooManyRedirects" in text:
        return circling(uri)
    if "redirect without LOCATION" in text:
        return _explain_answer(f"<Code>PermanentRedirect</Code>{text}", 301, uri, verb)
    if code:
        return web_refusal(code, uri, verb) if scheme(uri) in WEB else _explain_answer(text, code, uri, verb)
    if isinstance(error, FileNotFoundError):  # one of several that Azure was asked to delete
        return absent(uri)
    if isinstance(error, InvalidPathError) or "Could not parse path" in text:
        fix = "rename the object: no '.', no '..' and nothing empty between slashes"
        return StorageError(f"refused name under {uri}: {_first_line(text)}", fix=fix)
    if isinstance(error, BaseError):
        return _explain_network(text, uri, verb)
    if is_panic(error):
        fix = "check the endpoint and the keys in the environment"
        return StorageError(f"cannot {verb} {uri}: {_first_line(text)}", fix=fix)
    if isinstance(error, ValueError):
        fix = "correct the URI or the environment"
        return StorageError(f"cannot {verb} {uri}: {_first_line(text)}", fix=fix)
    raise error


def _explain_answer(text: str, status: int, uri: str, verb: str) -> StorageError:
    """Explain what an object store refuses."""
    code, message = _told(text, "Code"), _told(text, "Message")
    code = "NoSuchBucket" if code == "ContainerNotFound" else code
    if code in _ABSENT or (status == 404 and code != "NoSuchBucket" and verb == "read"):
        return absent(uri)
    if not code and status == 404:
        code = "NoSuchBucket"
    if scheme(uri) in CLOUDS and status in (301, 307, 400, 401, 403):
        what = ": ".join(filter(None, (code, message.partition("\n")[0][:300] or f"status {status}")))
        fix = f"check what this identity may do; {IDENTITY[scheme(uri)]}"
        return StorageError(f"cannot {verb} {uri}: {what}", fix=fix)
    code = code if code in _FIXES else _STATUS.get(status, code)
    if code == "NoSuchBucket":
        message = "no such bucket"
    passing = status in BUSY or code in _AGAIN
    otherwise = "check that the endpoint is one of S3, and the store's log"
    fix = _FIXES.get(code) or (_BUSY if passing else otherwise)
    what = ": ".join(part for part in (code, message[:300] or f"status {status}") if part)
    if fix == _REGION:
        region = re.search(r"expecting '([\w-]+)'|use region ([\w-]+)|<Region>([\w-]+)<", text)
        if region:
            return misplaced(uri, verb, next(filter(None, region.groups())))
        return Misplaced(f"cannot {verb} {uri}: {what}", fix=fix)
    kind = Spoiled if fix == _ALTERED else StorageError
    return kind(f"cannot {verb} {uri}: {what}", fix=fix, passing=passing)


def misplaced(uri: str, verb: str, region: str) -> StorageError:
    """Return the error for a bucket that is in another region than was asked."""
    fix = _REGION.replace("the bucket's region", region)
    return StorageError(f"cannot {verb} {uri}: the bucket is in region {region}", fix=fix)


def web_refusal(status: int, uri: str, verb: str) -> StorageError:
    """Return the error for what a web server refuses."""
    if status in (404, 410):
        return absent(uri)
    busy = status in BUSY
    fix = "the server is busy or broken: run again later"
    if not busy:
        fix = "the server refuses: check the address and who may read it"
    kind = RefusedError if status in (401, 403) else StorageError
    return kind(f"cannot {verb} {uri}: the server answers {status}", fix=fix, passing=busy)


def _explain_network(text: str, uri: str, verb: str) -> StorageError:
    """Explain why a server cannot be reached, is silent or breaks off."""
    connecting = "kind: Connect," in text
    if "InvalidCertificate" in text or "InvalidContentType" in text:
        return _explain_tls(text, uri, verb)
    address = re.search(r"(https?://[^/\s]+)/", text)
    server = urlsplit(address[1] if address else "")
    proxy = getproxies().get(server.scheme) if not proxy_bypass(server.hostname or "") else None
    if connecting and proxy:
        what = "the proxy does not answer"
        fix = "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY in the environment"
    elif "dns error" in text:
        what = f"the name {server.hostname!r} of the server is not known"
        fix = "correct the address or the endpoint in the environment; check this machine's DNS"
    elif "TimedOut" in text or "kind: Timeout" in text:
        what, fix = "the server is silent", "check the address, the network and the server, and run again"
    elif connecting:
        reason = re.search(r'message: "([^"]+)"', text)
        what = f"the server does not take connections ({reason[1] if reason else _first_line(text)})"
        fix = "check that it runs, and its address and port (the endpoint in the environment)"
    elif "HTTP error" in text or "HttpError" in text:
        reason = re.search(r'message: "([^"]+)"', text)
        what = f"the connection broke off ({reason[1] if reason else 'an answer was not whole'})"
        fix = "check the network and the server, and run again: what is finished is kept"
    elif "xml" in text.lower() or "Deserialize" in text or "response" in text.lower():
        return no_store(uri, verb)
    else:
        fix = "check the URI, and the keys and the endpoint in the environment"
        return StorageError(f"cannot {verb} {uri}: {_first_line(text)}", fix=fix)
    return StorageError(f"cannot {verb} {uri}: {what}", fix=fix, passing=True)


def _explain_tls(text: str, uri: str, verb: str) -> StorageError:
    """Explain why a server is not trusted."""
    if "InvalidContentType" in text:
        why = "the server speaks plain http there"
        fix = "write http:// in the endpoint, or another port"
    elif "NotValidForName" in text:
        why, fix = "its certificate is for another name", "use the certificate's name in the endpoint"
    elif "Expired" in text or "NotValidYet" in text:
        why = "its certificate is out of date"
        fix = "have it renewed, or set this machine's clock if that is wrong"
    else:
        why = "the authority that signed its certificate is not known here"
        fix = "name a file with the certificate of that authority in AWS_CA_BUNDLE"
    return StorageError(f"cannot {verb} {uri}: no trusted connection: {why}", fix=fix)


def _told(text: str, name: str) -> str:
    """Return what stands in an element of a store's answer."""
    match = re.search(f"<{name}>([^<]*)</{name}>", text)
    return html.unescape(match[1]) if match else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()[:300]
