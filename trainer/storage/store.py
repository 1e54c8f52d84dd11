"""Files on servers, by obstore: s3://, minio://, gs:// and az://, and http(s)://.

Where they are, what is known of them, listing and deleting; `reads.py` and `writes.py` move the bytes. Every
request goes through `attempts.call`.
"""

import itertools
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import ParseError

import obstore
from minio.error import MinioException
from obstore.store import HTTPStore, ObjectStore, S3Store
from urllib3.exceptions import HTTPError

from trainer.base.errors import StorageError, refuse_userinfo
from trainer.storage import attempts, clouds, environment, failures, hub, web
from trainer.storage.uris import (
    CLOUDS,
    WEB,
    FileState,
    check_bucket,
    climbs,
    host_and_port,
    invalid_address,
    scheme,
)

Result = TypeVar("Result")
Purpose = Literal["read", "stream", "write"]

_REASONLESS = (301, 307, 400, 403)
"""Refusals of a look at an object, whose answer has no text: asked for a byte, the store says why."""
_NO_HEAD = (405, 501)
_A_DAY = 86_400.0


class Place(NamedTuple):
    """Where a file is."""

    uri: str
    store: ObjectStore | None
    """None where the address is one that obstore cannot write down."""
    key: str
    server: str
    """Names the server for `attempts.call`."""

    def get(self, **options: Any) -> "obstore.GetResult":
        """Begin to read; the options are obstore's."""
        if self.store is None:
            raise failures.whole(self.uri)
        result = obstore.get(self.store, self.key, options=options or None)  # type: ignore[arg-type]
        attempts.note_answer(self.server)
        return result

    def call(self, verb: str, request: Callable[[], Result]) -> Result:
        """Make a request as `attempts.call` does; of a bucket in another region it is told in which."""
        try:
            return attempts.call(self.uri, verb, self.server, request)
        except failures.Misplaced as error:
            with suppress(HTTPError):
                region = environment.bucket_region(self.server, split(self.uri, folder=True)[0])
                if region:
                    raise failures.misplaced(self.uri, verb, region) from error
            raise
        except failures.Circling:
            if scheme(self.uri) in WEB:
                web.head(self.uri)  # It names the hops.
            raise


def state(uri: str) -> FileState | None:
    """Return a file's size, time and ETag as the server tells them, or None if it is missing."""
    place = locate(uri)

    def look() -> "obstore.ObjectMeta":
        if place.store is None:
            raise failures.whole(uri)
        try:
            return obstore.head(place.store, place.key)
        except Exception as error:
            status = failures.status(error)
            if scheme(uri) in WEB and status in _NO_HEAD:
                return place.get().meta
            if status in _REASONLESS:
                place.get(range=(0, 1))
            raise

    try:
        meta = place.call("read", look)
    except failures.Absent:
        return None
    except failures.Whole:
        return place.call("read", lambda: web.state(uri))
    return _file_state(meta, quoted=scheme(uri) in WEB)


def scan(uri: str, recursive: bool) -> Iterator[tuple[str, FileState]]:
    """Yield the objects under a prefix, by name relative to it; page by page in order where it is recursive.

    Raises:
        StorageError: it cannot be listed, or a name leads out of the folder.
    """
    kind = scheme(uri)
    if kind in WEB:
        fix = "name one file, or use a local folder or an object store"
        raise StorageError(f"cannot list {uri}", fix=fix)
    place = locate(uri, folder=True)
    skip, empty = len(place.key) + 1 if place.key else 0, True
    metas: Iterator[Any] = _all_objects(place) if recursive else _objects(place)
    for meta, following in itertools.pairwise(itertools.chain(metas, [None])):
        empty = False
        name = meta["path"][skip:]
        if not name or _is_folder(place, meta, following):
            continue
        if climbs(name):
            fix = "rename the object: no '..' and no first '/'"
            raise StorageError(f"refused name {name!r} under {uri}", fix=fix)
        yield name, _file_state(meta)
    if empty and kind not in CLOUDS:
        _check_listing(place)


def delete(uri: str) -> None:
    """Delete an object; one that is not there is no error."""
    place = locate(uri, "write")
    with suppress(failures.Absent):
        place.call("delete", lambda: obstore.delete(_store(place), place.key))


def split(uri: str, *, folder: bool = False) -> tuple[str, str]:
    """Return bucket and key; a key is taken as it stands, without decoding.

    Raises:
        StorageError: there is none, or the key would be another one after normalisation.
    """
    check_bucket(uri)
    bucket, _, key = uri.partition("://")[2].partition("/")
    if not key and not folder:
        raise StorageError(f"{uri} names no object", fix=f"use {scheme(uri)}://bucket/key")
    key = key.rstrip("/")
    if key and {"", ".", ".."} & set(key.split("/")):
        fix = "use a key without '.', '..' or nothing between slashes"
        raise StorageError(f"refused key {key!r} in {uri}", fix=fix)
    return bucket, key


def locate(uri: str, purpose: Purpose = "read", *, folder: bool = False) -> Place:
    """Return where a file is.

    Raises:
        StorageError: the URI or the environment is wrong.
    """
    _refuse_forks()
    kind = scheme(uri)
    if kind in WEB:
        return _web_place(uri, purpose)
    bucket, key = split(uri, folder=folder)
    if kind in CLOUDS:
        cloud = clouds.settings(kind)
        options = _options(purpose, environment.proxy_of(cloud.url))
        return Place(uri, _cloud_store(cloud, bucket, options), key, cloud.url)
    settings = environment.settings(kind)
    environment.check(settings)
    region = settings.region or _region(settings.url, bucket)
    store = _bucket_store(settings, region, bucket, _options(purpose, environment.proxy_of(settings.url)))
    return Place(uri, store, key, settings.url)


def _web_place(uri: str, purpose: Purpose) -> Place:
    if purpose == "write":
        fix = "use a local folder or s3://bucket/key"
        raise StorageError(f"cannot write {uri}: the web is read only", fix=fix)
    refuse_userinfo(uri, "the address")
    host_and_port(uri)
    address = urlsplit(uri)
    origin = f"{address.scheme}://{address.netloc}"
    web.check_hops(uri)
    options = _options(purpose, environment.proxy_of(origin), hub.authorization(origin))
    key = unquote(address.path).removeprefix("/")
    if not key or posixpath.normpath(key) != key or key.startswith("/"):
        return Place(uri, None, "", origin)
    try:
        if address.query:
            return Place(uri, _web_store.__wrapped__(uri.partition("#")[0], options), "", origin)
        return Place(uri, _web_store(origin, options), key, origin)
    except ValueError as error:  # obstore refuses more names than DNS does.
        raise invalid_address(uri, str(error)) from error


def _store(place: Place) -> ObjectStore:
    assert place.store is not None, "only addresses of the web have none"
    return place.store


def _options(
    purpose: Purpose, proxy: str, headers: Mapping[str, str] | None = None
) -> tuple[tuple[str, Any], ...]:
    """Return what all stores of a process have in common, as the environment is now."""
    patience = attempts.PATIENCE
    # An attempt has half of the time: what hangs is tried again, and goes on where it was.
    longest = {"read": patience.total / 2, "write": patience.total + 2**30 / patience.rate, "stream": _A_DAY}
    return (
        ("connect", patience.connect),
        # While a body is sent nothing is read: only the whole request has an end then.
        ("silence", longest["write"] if purpose == "write" else patience.silence),
        ("total", longest[purpose]),
        ("wait", min(1.0, patience.wait)),
        ("proxy", proxy),
        ("authorities", environment.authorities()),
        ("headers", tuple((headers or {}).items())),
    )


def _library_options(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    values = dict(options)
    client: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=values["connect"]),
        "read_timeout": timedelta(seconds=values["silence"]),
        "timeout": timedelta(seconds=values["total"]),
        "root_certificate": values["authorities"],
        "user_agent": "kubedet",
    }
    if values["proxy"]:
        client["proxy_url"] = values["proxy"]
    if values["headers"]:
        # Dropped by the library where it is sent on to another server.
        client["default_headers"] = dict(values["headers"])
    wait = values["wait"]
    waits = {"init_backoff": timedelta(seconds=wait / 10), "max_backoff": timedelta(seconds=wait), "base": 2}
    retries = {"max_retries": 3, "backoff": waits, "retry_timeout": timedelta(seconds=values["total"])}
    return {"client_options": client, "retry_config": retries}


@lru_cache(maxsize=32)
def _bucket_store(
    settings: environment.Settings, region: str, bucket: str, options: tuple[tuple[str, Any], ...]
) -> ObjectStore:
    arguments: dict[str, Any] = {"region": region, "skip_signature": not settings.source}
    if not environment.is_default(settings):
        # Of the two names for an endpoint the one that the environment cannot overrule.
        arguments["aws_endpoint_url_s3"] = settings.url
    if settings.source:
        arguments["credential_provider"] = environment.library_keys(settings)
    else:
        # Where nothing is signed, a hash goes with what is written all the same.
        arguments["checksum_algorithm"] = "SHA256"
    return S3Store(bucket, **arguments, **_library_options(options))


@lru_cache(maxsize=32)
def _cloud_store(settings: clouds.Settings, bucket: str, options: tuple[tuple[str, Any], ...]) -> ObjectStore:
    return clouds.store(settings, bucket, **_library_options(options))


@lru_cache(maxsize=64)
def _web_store(origin: str, options: tuple[tuple[str, Any], ...]) -> ObjectStore:
    return HTTPStore(origin, **_library_options(options))


@lru_cache(maxsize=64)
def _region(url: str, bucket: str) -> str:
    try:
        return environment.bucket_region(url, bucket) or "us-east-1"
    except HTTPError as error:
        fix = "check the network, or set AWS_REGION"
        raise StorageError(f"cannot ask {url} for the region of {bucket}: {error}", fix=fix) from error


_process: list[int] = []


def _refuse_forks() -> None:
    """Refuse what would never end: the library's threads are not there in a child that was forked."""
    if not _process:
        _process.append(os.getpid())
    elif _process[0] != os.getpid():
        raise StorageError(
            "this process was forked from one that had already read from a server",
            fix="start it by spawn, or fork before the first file of a server is read",
        )


def _objects(place: Place) -> Iterator["obstore.ObjectMeta"]:
    """Yield the objects right below a prefix."""
    listing = place.call("list", lambda: obstore.list_with_delimiter(_store(place), place.key or None))
    yield from listing["objects"]


def _all_objects(place: Place) -> Iterator["obstore.ObjectMeta"]:
    """Yield all objects below a prefix; after a break it goes on behind the last one."""
    last, pages = None, None

    def page() -> Any:
        nonlocal pages
        if pages is None:
            pages = obstore.list(_store(place), place.key or None, offset=last, chunk_size=1000)
        try:
            return next(pages, None)
        except BaseException:
            pages = None
            raise

    while metas := place.call("list", page):
        yield from metas
        last = metas[-1]["path"]


def _is_folder(place: Place, meta: Any, following: Any) -> bool:
    """Tell whether an object stands for a folder: its key ends in a slash, which the library leaves out.

    Consoles make them, empty. Where no file of the folder follows, the store is asked for an object without
    the slash; not for names that have a dot, of which there may be many that are files.
    """
    if meta["size"]:
        return False
    if following and following["path"].startswith(f"{meta['path']}/"):
        return True
    if "." in meta["path"].rpartition("/")[2]:
        return False
    try:
        place.call("read", lambda: obstore.head(_store(place), meta["path"]))
    except failures.Absent:
        return True
    return False


def _check_listing(place: Place) -> None:
    """Refuse an empty listing of something that is no store, a page of the web for one."""
    bucket, _ = split(place.uri, folder=True)
    try:
        next(iter(environment.client(scheme(place.uri)).list_objects(bucket, prefix=place.key)), None)
    except (MinioException, ParseError, ValueError) as error:
        raise failures.no_store(place.uri, "list") from error
    except HTTPError:
        pass  # The library had an answer: what it said holds.


def _file_state(meta: "obstore.ObjectMeta", *, quoted: bool = False) -> FileState:
    etag, modified = meta["e_tag"] or "", meta["last_modified"]
    assert isinstance(modified, datetime)
    # The library gives the beginning of 1970 where a server does not tell.
    return FileState(meta["size"], modified.timestamp() or None, etag if quoted else etag.strip('"'))
