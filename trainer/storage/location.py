"""Buckets: each is looked up once, with the environment of that time, and reached through obstore."""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import obstore
from minio.credentials import StaticProvider
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store
from urllib3.exceptions import HTTPError

from trainer.base.daemon_threads import DaemonThreadPool
from trainer.base.errors import MissingError, StorageError
from trainer.storage import environment, failures, web
from trainer.storage.uris import CLOUDS, WEB, check_place, scheme

_CREDENTIAL_SECONDS = 10.0  # how long to wait for a cloud's metadata server


class Location:
    """The bucket or container of a URI."""

    reader: ObjectStore  # for short requests: objects of a few megabytes, parts, listings
    writer: ObjectStore  # for long requests: while a body is sent, no byte of an answer arrives
    gives_ranges = True  # some stores answer with the whole object

    def __init__(self, uri: str) -> None:
        check_place(uri)
        if scheme(uri) in WEB:
            message = f"cannot list, write or delete {uri}: files on the web can only be read"
            raise StorageError(message, fix="name one file, or use a local folder or an object store")
        kind, bucket = scheme(uri), uri.partition("://")[2].partition("/")[0]
        waits, settings = environment.RETRIES, None
        if kind in CLOUDS:
            self.server = environment.cloud_url(kind)
        else:
            settings = environment.settings(kind)
            self.server = settings.url
        end = time.monotonic() + waits.first
        while problem := web.problem_of(self.server, uri, min(waits.connect, waits.first), waits.first):
            if not problem.passing or time.monotonic() > end:
                raise problem
            time.sleep(min(1.0, waits.wait))
        options = _s3_options(settings, bucket) if settings else {}
        try:
            self.reader = self._store(kind, bucket, waits.silence, waits.total / 2, options)
            self.writer = self._store(kind, bucket, waits.total, 86_400.0, options)
            if kind in CLOUDS:  # obstore itself waits for minutes for a missing metadata server.
                with DaemonThreadPool(1, "credentials") as thread, suppress(FileNotFoundError):
                    thread.submit(obstore.head, self.reader, "kubedet").result(timeout=_CREDENTIAL_SECONDS)
        except BaseException as error:
            is_known = isinstance(error, StorageError) or kind not in CLOUDS
            if is_known or not (isinstance(error, Exception) or failures.is_panic(error)):
                raise
            if not failures.status_of(error):  # Otherwise the server knows us.
                reason = str(error).partition("\n")[0].strip()[:300] or "no server gives credentials"
                problem = StorageError(f"cannot use {kind}://: {reason}", fix=environment.IDENTITY[kind])
                raise web.problem_of(self.server, uri, 5.0, 5.0) or problem from error

    def _store(
        self, kind: str, bucket: str, silence: float, longest: float, options: dict[str, Any]
    ) -> ObjectStore:
        """Return obstore's store for requests of at most `longest` seconds."""
        waits, proxy = environment.RETRIES, environment.proxy_of(self.server)
        client: Any = {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=waits.connect),
            "read_timeout": timedelta(seconds=silence),
            "timeout": timedelta(seconds=longest),
            "root_certificate": environment.authorities(),
            "user_agent": "kubedet",
            # The metadata server is on this machine, not behind a proxy.
            **({"proxy_excludes": "169.254.169.254,metadata.google.internal"} if kind in CLOUDS else {}),
            **({"proxy_url": proxy} if proxy else {}),
        }
        retries: Any = {
            "max_retries": 10_000,
            "retry_timeout": timedelta(seconds=waits.total),
            "backoff": {
                "init_backoff": timedelta(seconds=min(0.1, waits.wait)),
                "max_backoff": timedelta(seconds=waits.wait),
                "base": 2,
            },
        }
        make: Any = {"gs": GCSStore, "az": AzureStore}.get(kind, S3Store)
        store: ObjectStore = make(bucket, client_options=client, retry_config=retries, **options)
        return store


def _s3_options(settings: environment.Settings, bucket: str) -> dict[str, Any]:
    options: dict[str, Any] = {"region": settings.region}
    if not settings.region:
        # https://docs.aws.amazon.com/AmazonS3/latest/API/API_HeadBucket.html
        try:
            address, client = f"{settings.url}/{bucket}", environment.web_client(settings.url)
            answer = client.request("HEAD", address, redirect=False, retries=3, timeout=10.0)
        except HTTPError as error:
            message = f"cannot ask {settings.url} for the region of {bucket}: {error}"
            raise StorageError(message, fix="check the network, or set AWS_REGION") from error
        options["region"] = answer.headers.get("x-amz-bucket-region", "") or "us-east-1"
    if settings.url != environment.AMAZON:
        # Of the two names of this option, the one that the environment cannot override.
        options["aws_endpoint_url_s3"] = settings.url
    provider = settings.keys
    if provider is None:  # An unsigned request needs a checksum of its body.
        return {**options, "skip_signature": True, "checksum_algorithm": "SHA256"}

    def keys() -> dict[str, Any]:
        current = provider.retrieve()
        # The provider renews expiring keys, so obstore has to ask it again soon.
        soon = datetime.now(UTC) + timedelta(minutes=10)
        return {
            "access_key_id": current.access_key,
            "secret_access_key": current.secret_key,
            "token": current.session_token,
            "expires_at": None if isinstance(provider, StaticProvider) else soon,
        }

    return {**options, "credential_provider": keys}


_locations: dict[str, Location] = {}
_pending: dict[str, "Future[Location]"] = {}
"""Locations that a thread is making. Asking a future takes a lock, which costs much for each object."""
_lock = threading.Lock()
_forked = False


def locate(uri: str, *, folder: bool = False) -> tuple[Location, str]:
    """Return the bucket and the key of an object; the key is not decoded."""
    head, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    name = f"{head}://{bucket}"
    location = _locations.get(name) or _new_location(name, uri)
    if not key and not folder:
        raise StorageError(f"{uri} names no object", fix=f"use {scheme(uri)}://bucket/key")
    key = key.rstrip("/")
    if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
        fix = "use a key without '.', '..' or nothing between slashes"
        raise StorageError(f"refused key {key!r} in {uri}", fix=fix)
    return location, key


def _new_location(name: str, uri: str) -> Location:
    """Make a location once, for all threads that ask for it at the same time."""
    if _forked:
        raise StorageError(
            "this process was forked from one that had already read from a store",
            fix="start it by spawn, or fork before the first file of a store is read",
        )
    with _lock:
        if location := _locations.get(name):
            return location
        future = _pending.get(name)
        if is_first := future is None:
            future = _pending[name] = Future()
    if is_first:
        try:
            future.set_result(Location(uri))
        except BaseException as error:
            future.set_exception(error)
        if _pending.get(name) is future:  # Else the environment has changed.
            if not future.exception():
                _locations[name] = future.result()
            _pending.pop(name, None)
    return future.result()


def forget_locations() -> None:
    """Read the environment again when a bucket is used next."""
    _locations.clear()
    _pending.clear()
    web.forget_stores()


def _note_fork() -> None:
    # obstore's threads do not exist in the child: a request would never end.
    global _forked  # noqa: PLW0603 (of this process)
    _forked = _forked or bool(_locations or _pending)
    _locations.clear()
    _pending.clear()


os.register_at_fork(after_in_child=_note_fork)


@contextmanager
def translated(location: Location, uri: str, verb: str) -> Iterator[None]:
    """Raise errors of obstore as StorageErrors, and others as they are."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, StorageError) or not (isinstance(error, Exception) or failures.is_panic(error)):
            raise
        problem = failures.translate(error, uri, verb)
        if isinstance(problem, failures.NoRanges):
            location.gives_ranges = False
        elif not isinstance(problem, MissingError | failures.Transient):
            forget_locations()  # The environment may be corrected, in a notebook.
            if problem.passing and not failures.status_of(error):
                problem = web.problem_of(location.server, uri, 5.0, 5.0) or problem
        raise problem from error
