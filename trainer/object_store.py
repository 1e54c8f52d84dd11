"""The object-store half of `trainer.storage`: s3://bucket/key and minio://bucket/key.

Who one is and where comes from the environment:

    s3://     AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL (else Amazon's), AWS_ACCESS_KEY_ID,
              AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION or AWS_DEFAULT_REGION
    minio://  MINIO_ENDPOINT (http unless it says https:// or MINIO_SECURE is true),
              MINIO_ACCESS_KEY, MINIO_SECRET_KEY, MINIO_REGION; each falls back to its AWS_ twin

Without keys, a pod's IAM role is used where there is one; else requests are anonymous.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import certifi
import urllib3
from minio import Minio
from minio.credentials import IamAwsProvider
from minio.error import InvalidResponseError, MinioException, S3Error

from trainer.errors import StorageError
from trainer.os_errors import missing
from trainer.storage import FileState, scheme

_CONNECTIONS = 64
_TIMEOUT = urllib3.Timeout(connect=10, read=60)
_ATTEMPTS = 3
_BLOCK = 1024 * 1024
_NO_BUCKET = "create the bucket, or correct the URI"
_KEYS = "check the access keys in the environment, and what they may do"
_ABSENT = ("NoSuchKey", "NoSuchObject", "ResourceNotFound")
_REFUSED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")


def find(uri: str) -> FileState | None:
    """Return an object's size and ETag, or None if it is missing."""
    bucket, key = _split(uri)
    try:
        with _explained(uri, "read"):
            found = _client(uri).stat_object(bucket, key)
    except _Absent:
        return None
    return FileState(found.size or 0, found.etag or "")


def read_bytes(uri: str) -> bytes:
    """Return an object's content."""
    buffer = io.BytesIO()
    _read_into(uri, buffer)
    return buffer.getvalue()


def download(uri: str, path: Path) -> None:
    """Write an object's content to a local file."""
    with path.open("wb") as file:
        _read_into(uri, file)


def write_bytes(uri: str, data: bytes) -> None:
    """Write an object; stores show it whole or not at all."""
    bucket, key = _split(uri)
    with _explained(uri, "write"):
        _client(uri).put_object(bucket, key, io.BytesIO(data), len(data))


def upload(path: Path, uri: str) -> None:
    """Write a local file's content as an object; in parts if it is large."""
    bucket, key = _split(uri)
    with _explained(uri, "write"):
        _client(uri).fput_object(bucket, key, str(path))


def list_states(uri: str, recursive: bool) -> dict[str, FileState]:
    """Return size and ETag of the objects under a prefix, by name relative to it."""
    bucket, key = _split(uri, folder=True)
    prefix = f"{key}/" if key else ""
    with _explained(uri, "list"):
        # Materialised inside the block: the listing is fetched page by page.
        found = list(_client(uri).list_objects(bucket, prefix=prefix, recursive=recursive))
    return {
        item.object_name[len(prefix) :]: FileState(item.size or 0, item.etag or "")
        for item in found
        if item.object_name and not item.is_dir and not item.object_name.endswith("/")
    }


def delete(uri: str) -> None:
    """Delete an object; one that is not there is no error."""
    bucket, key = _split(uri)
    try:
        with _explained(uri, "delete"):
            _client(uri).remove_object(bucket, key)
    except _Absent:
        return


class _Absent(StorageError):
    """The object does not exist."""


def _read_into(uri: str, file: Any) -> None:
    """Copy an object into an open file; begin again if the connection breaks off."""
    bucket, key = _split(uri)
    with _explained(uri, "read"):
        for attempt in range(1, _ATTEMPTS + 1):
            file.seek(0)
            file.truncate()
            response = _client(uri).get_object(bucket, key)
            try:
                for block in response.stream(_BLOCK):
                    file.write(block)
                return
            except (urllib3.exceptions.ProtocolError, urllib3.exceptions.TimeoutError):
                if attempt == _ATTEMPTS:
                    raise
            finally:
                response.close()
                response.release_conn()


def _split(uri: str, *, folder: bool = False) -> tuple[str, str]:
    """Return bucket and key; a key is taken as it stands, without decoding."""
    bucket, _, key = uri.partition("://")[2].partition("/")
    if not bucket or (not key and not folder):
        raise StorageError(f"{uri} names no {'bucket' if folder else 'object'}", fix="use s3://bucket/key")
    return bucket, key.rstrip("/")


def _client(uri: str) -> Minio:
    return _connect(scheme(uri), os.getpid())


@lru_cache(maxsize=4)
def _connect(kind: str, _process: int) -> Minio:
    """Return this process's client: connections must not be shared with a forked child."""

    def setting(*names: str) -> str | None:
        wanted = [f"MINIO_{name}" for name in names] if kind == "minio" else []
        wanted += [f"AWS_{name}" for name in names]
        return next((os.environ[name] for name in wanted if os.environ.get(name)), None)

    aws_endpoint = setting("ENDPOINT_URL_S3", "ENDPOINT_URL")
    endpoint = (os.environ.get("MINIO_ENDPOINT") if kind == "minio" else None) or aws_endpoint
    if endpoint is None and kind == "minio":
        raise StorageError(
            "minio:// URIs need an endpoint", fix="set MINIO_ENDPOINT, e.g. minio-service.kubeflow:9000"
        )
    secure = os.environ.get("MINIO_SECURE", "").lower() in ("1", "true", "yes")
    if endpoint and "://" in endpoint:
        protocol, _, endpoint = endpoint.partition("://")
        secure = protocol.lower() == "https"
    key = setting("ACCESS_KEY", "ACCESS_KEY_ID")
    secret = setting("SECRET_KEY", "SECRET_ACCESS_KEY")
    if bool(key) != bool(secret):
        raise StorageError(
            f"{kind}:// has an access key without its secret, or the reverse",
            fix="set both, or neither for anonymous access",
        )
    roles = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    role = not key and any(os.environ.get(name) for name in roles)
    try:
        return Minio(
            (endpoint or "s3.amazonaws.com").rstrip("/"),
            access_key=key,
            secret_key=secret,
            session_token=os.environ.get("AWS_SESSION_TOKEN") if key else None,
            secure=secure if endpoint else True,
            region=setting("REGION", "DEFAULT_REGION") or ("us-east-1" if endpoint else None),
            credentials=IamAwsProvider() if role else None,
            http_client=_pool(),
        )
    except ValueError as error:
        raise StorageError(
            f"endpoint {endpoint!r} of {kind}:// cannot be used: {error}", fix="give it as https://host:port"
        ) from error


def _pool() -> urllib3.PoolManager:
    """Return connections for many threads that try again when a server is busy."""
    trusted = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or certifi.where()
    retries = urllib3.Retry(total=5, backoff_factor=0.2, status_forcelist=[429, 500, 502, 503, 504])
    return urllib3.PoolManager(
        maxsize=_CONNECTIONS, timeout=_TIMEOUT, retries=retries, cert_reqs="CERT_REQUIRED", ca_certs=trusted
    )


@contextmanager
def _explained(uri: str, verb: str) -> Iterator[None]:
    """Turn what the client raises into a StorageError that names the URI and the remedy."""
    try:
        yield
    except S3Error as error:
        if error.code in _ABSENT:
            absent = missing(uri)
            raise _Absent(absent.message, fix=absent.fix) from error
        fix = "check the endpoint and the store's log"
        if error.code == "NoSuchBucket":
            fix = _NO_BUCKET
        elif error.code in _REFUSED:
            fix = (
                "check the access keys in the environment and what they may do (see trainer/object_store.py)"
            )
        raise StorageError(f"cannot {verb} {uri}: {error.code}: {error.message}", fix=fix) from error
    except InvalidResponseError as error:
        raise _explain_text(error, uri, verb) from error
    except MinioException as error:
        raise StorageError(f"cannot {verb} {uri}: {error}", fix="try again; check the store") from error
    except (urllib3.exceptions.HTTPError, ValueError) as error:
        raise StorageError(
            f"cannot {verb} {uri}: {error}", fix="check the endpoint, the name and the network, and run again"
        ) from error


def _explain_text(error: InvalidResponseError, uri: str, verb: str) -> StorageError:
    """Return the error for an answer that is not in S3's form: some servers answer in text."""
    status = getattr(error, "_code", None)
    if status == 404 and verb in ("write", "list"):
        return StorageError(f"cannot {verb} {uri}: no such bucket", fix=_NO_BUCKET)
    if status == 404:
        absent = missing(uri)
        return _Absent(absent.message, fix=absent.fix)
    fix = _KEYS if status in (401, 403) else "check that the endpoint is one of S3"
    return StorageError(f"cannot {verb} {uri}: {str(error)[:300]}", fix=fix)
