"""Where files on servers are read from without obstore: as they stand in the web, signed in stores."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple
from urllib.parse import quote

import obstore
from obstore.store import S3Store

from trainer.base.errors import StorageError
from trainer.storage import environment
from trainer.storage.store import Place, locate, split
from trainer.storage.uris import CLOUDS, WEB, scheme

_PLAIN = re.compile(r"https?://[A-Za-z0-9._\[\]:-]+/[A-Za-z0-9/._~!$&'()*+,;=:@%?-]*")
"""Addresses that libcurl sends as they stand."""
_VALID = timedelta(minutes=15)


class Address(NamedTuple):
    """Where a file is read from."""

    uri: str
    server: str
    """Scheme, host and port."""
    url: str
    """Signed where it must be; "" where the file has to be read with care."""


class Addresses:
    """The addresses of files, with one look at the environment for each server.

    It takes half as long as a small file's request otherwise.
    """

    def __init__(self) -> None:
        self._servers: dict[str, tuple[str, Callable[[str], str]]] = {}

    def __call__(self, uri: str) -> Address:
        """Return where a file is read from, if no proxy is between.

        Raises:
            StorageError: the URI names no file.
        """
        origin = "/".join(uri.split("/", 3)[:3])
        known = self._servers.get(origin)
        if known is None:
            known = self._servers[origin] = self._server(uri, origin)
        server, url = known
        return Address(uri, server, url(uri))

    def _server(self, uri: str, origin: str) -> tuple[str, Callable[[str], str]]:
        try:
            place = locate(uri, folder=True)
            return place.server, (_of_none if environment.proxy_of(place.server) else _urls(place))
        except StorageError:
            # To find that out may take long; whoever reads the file with care tells of it.
            return origin, _of_none


def _of_none(_uri: str) -> str:
    return ""


def _urls(place: Place) -> Callable[[str], str]:
    """Return what gives the URLs that files of a bucket, or of a server of the web, are read from."""
    if scheme(place.uri) in WEB:
        return lambda uri: uri if _PLAIN.fullmatch(uri) and "/." not in uri else ""
    if scheme(place.uri) in CLOUDS:
        return _of_none  # to sign may take a request of its own, according to who one is
    store = place.store
    assert isinstance(store, S3Store)
    if store.config.get("skip_signature") != "true":
        return lambda uri: obstore.sign(store, "GET", split(uri)[1], _VALID)
    amazon = f"https://s3.{store.config['region']}.amazonaws.com"
    endpoint = store.config.get("endpoint_url_s3", amazon)
    return lambda uri: f"{endpoint}/{quote('/'.join(split(uri)))}"
