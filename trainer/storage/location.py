"""Buckets: where each is and how obstore reaches it, as the environment said when it was first used."""

import os
import re
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from typing import Any

import obstore
from obstore.store import HTTPStore, ObjectStore, S3Store
from urllib3.exceptions import HTTPError

from trainer.base.errors import StorageError
from trainer.storage import clouds, environment, failures, hub, retry_policy, web
from trainer.storage.uris import CLOUDS, check_bucket, scheme


class Location:
    """A bucket or container.

    Args:
        uri: of anything in it.

    Raises:
        StorageError: the URI or the environment is wrong, or the server gives no answer.
    """

    def __init__(self, uri: str) -> None:
        check_bucket(uri)
        kind, bucket = scheme(uri), uri.partition("://")[2].partition("/")[0]
        if kind in CLOUDS:
            cloud = clouds.settings(kind)
            self.server, self._make = cloud.url, partial(clouds.store, cloud, bucket)
        else:
            settings = environment.settings(kind)
            environment.client(settings)  # It checks them.
            self.server = settings.url
        self._proxy, self._authorities = environment.proxy_of(self.server), environment.authorities()
        self.gives_ranges = True
        """Whether the store gives parts of objects; some answer with the whole object."""
        if kind in CLOUDS:
            _ = self.parts  # An identity that cannot be used is refused before anything is waited for.
        _wait_for(self.server, uri)
        if kind not in CLOUDS:
            region = settings.region or _region(settings.url, bucket)
            self._make = partial(_s3_store, settings, region, bucket)

    @cached_property
    def parts(self) -> ObjectStore:
        """What reads an object of a few megabytes, or a part, and makes other short requests."""
        return self._make(**self._options(retry_policy.RETRIES.silence, retry_policy.RETRIES.total / 2))

    @cached_property
    def whole(self) -> ObjectStore:
        """What writes, and reads objects of any size: while a body is sent, no byte of an answer comes."""
        return self._make(**self._options(retry_policy.RETRIES.total, 86_400.0))

    def _options(self, silence: float, longest: float) -> dict[str, Any]:
        waits = retry_policy.RETRIES
        backoff = {
            "init_backoff": timedelta(seconds=min(0.1, waits.wait)),
            "max_backoff": timedelta(seconds=waits.wait),
            "base": 2,
        }
        retries = {
            "max_retries": 10_000, "backoff": backoff, "retry_timeout": timedelta(seconds=waits.total),
        }  # fmt: skip
        return {
            "client_options": _client_options(self._proxy, silence, longest, self._authorities),
            "retry_config": retries,
        }


def _client_options(proxy: str, silence: float, longest: float, authorities: str) -> Any:
    client = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=retry_policy.RETRIES.connect),
        "read_timeout": timedelta(seconds=silence),
        "timeout": timedelta(seconds=longest),
        "root_certificate": authorities,
        "user_agent": "kubedet",
    }
    return client | ({"proxy_url": proxy} if proxy else {})


def _s3_store(settings: environment.Settings, region: str, bucket: str, **options: Any) -> ObjectStore:
    arguments: dict[str, Any] = {"region": region, "skip_signature": not settings.source}
    if settings.url != environment.AMAZON:
        # Of the two names for an endpoint the one that the environment cannot overrule.
        arguments["aws_endpoint_url_s3"] = settings.url
    if settings.source:
        arguments["credential_provider"] = environment.library_keys(settings)
    else:
        # If nothing is signed, a hash goes with what is written all the same.
        arguments["checksum_algorithm"] = "SHA256"
    return S3Store(bucket, **arguments, **options)


def _region(url: str, bucket: str) -> str:
    try:
        return environment.bucket_region(url, bucket) or "us-east-1"
    except HTTPError as error:
        fix = "check the network, or set AWS_REGION"
        raise StorageError(f"cannot ask {url} for the region of {bucket}: {error}", fix=fix) from error


def _wait_for(server: str, uri: str) -> None:
    """Wait until a server gives its first answer to this process.

    Raises:
        StorageError: it gives none, or cannot be trusted.
    """
    waits = retry_policy.RETRIES
    end = time.monotonic() + waits.first
    while problem := web.problem_of(server, uri, min(waits.connect, waits.first), waits.first):
        if not problem.passing or time.monotonic() > end:
            raise problem
        time.sleep(min(1.0, retry_policy.RETRIES.wait))


_locations: dict[str, Location] = {}
_pending: dict[str, "Future[Location]"] = {}
_lock = threading.Lock()


def locate(uri: str, *, folder: bool = False) -> tuple[Location, str]:
    """Return the bucket and the key of an object; the key as it stands, without decoding.

    Raises:
        StorageError: it names none, the key would be another one after normalisation, or see `Location`.
    """
    head, separator, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    name = f"{head}{separator}{bucket}"
    location = _locations.get(name) or _new_location(name, uri)
    if not key and not folder:
        raise StorageError(f"{uri} names no object", fix=f"use {scheme(uri)}://bucket/key")
    key = key.rstrip("/")
    if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
        fix = "use a key without '.', '..' or nothing between slashes"
        raise StorageError(f"refused key {key!r} in {uri}", fix=fix)
    return location, key


def _new_location(name: str, uri: str) -> Location:
    """Make a location once, however many threads ask for it at the same time."""
    if _forked:
        raise StorageError(
            "this process was forked from one that had already read from a store",
            fix="start it by spawn, or fork before the first file of a store is read",
        )
    with _lock:
        future = _pending.get(name)
        if is_first := future is None:
            future = _pending[name] = Future()
    if is_first:
        try:
            location = Location(uri)
            if _pending.get(name) is future:  # The environment was not forgotten meanwhile.
                _locations[name] = location
            future.set_result(location)
        except BaseException as error:
            future.set_exception(error)
        finally:
            _pending.pop(name, None)
    return future.result()


def forget_locations() -> None:
    """Read the environment again when a bucket is used next."""
    _locations.clear()
    _pending.clear()
    _trusted_server.cache_clear()


_STORE = re.compile(r"https://([a-z0-9.-]+\.)?(s3[.-]([a-z0-9-]+\.)?amazonaws\.com|storage\.googleapis\.com)")
_PLAIN = re.compile(r"/[A-Za-z0-9/._~-]+")


def read_at_once(uri: str, most: int) -> Any:
    """Return a web file's content by one request of obstore, which takes half the time of urllib3.

    obstore follows redirects wherever they lead, so it asks only Amazon's and Google's stores, and servers of
    the network that this process is in, which users name.

    Args:
        uri: of a server that the user named.
        most: bytes that it may have.

    Returns:
        A buffer; None if the answer is not a whole file, so that the client that checks has to ask.
    """
    origin = "/".join(uri.split("/", 3)[:3])
    path = uri[len(origin) :]
    if not _PLAIN.fullmatch(path) or "//" in path or "/." in path or path.endswith("/"):
        return None
    store = _trusted_server(origin)
    if store is None:
        return None
    try:
        answer = obstore.get(store, path[1:])
        return answer.bytes() if answer.meta["size"] <= most else None
    except FileNotFoundError:
        raise failures.absent(uri) from None
    except Exception:  # The client that checks retries, and says what is wrong.
        return None


@lru_cache(maxsize=256)
def _trusted_server(origin: str) -> ObjectStore | None:
    trusted = _STORE.fullmatch(origin) or web.policy_of_user(origin).anywhere
    if not trusted or hub.authorization(origin):
        return None
    waits = retry_policy.RETRIES
    proxy, authorities = environment.proxy_of(origin), environment.authorities()
    options = _client_options(proxy, waits.silence, waits.total / 2, authorities)
    try:
        return HTTPStore(origin, client_options=options, retry_config={"max_retries": 0})
    except ValueError:  # obstore refuses more names than DNS does.
        return None


_forked = False


def _note_fork() -> None:
    # The threads of obstore are not in the child: a request would never end.
    global _forked  # noqa: PLW0603 (of this process)
    _forked = _forked or bool(_locations)
    _locations.clear()


os.register_at_fork(after_in_child=_note_fork)


class translated:
    """A context that raises what obstore raises as StorageErrors; what the server says of itself is added."""

    __slots__ = ("_location", "_uri", "_verb")

    def __init__(self, location: Location, uri: str, verb: str) -> None:
        self._location, self._uri, self._verb = location, uri, verb

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, StorageError):
            return
        if not isinstance(error, Exception) and not clouds.is_panic(error):
            return
        problem = failures.translate(error, self._uri, self._verb)
        if not isinstance(problem, failures.Absent | failures.Transient):
            forget_locations()  # The environment may be corrected, in a notebook.
            if problem.passing and not failures.status_of(error):
                problem = web.problem_of(self._location.server, self._uri, 5.0, 5.0) or problem
        raise problem from error
