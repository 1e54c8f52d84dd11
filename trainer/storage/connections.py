"""A process's connections to servers: how they are opened, how long they wait, how they try again.

Every request may be repeated until its deadline: after a connection that fails or breaks off, a
silence, or an answer that means "not now". The waits between grow and are drawn at random, so that
many readers that were turned away together do not come back together.
"""

import logging
import os
import random
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
import urllib3

from trainer.errors import StorageError

BUSY = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""

POOL = 64
"""Connections kept to one server: more threads than the project ever reads with."""

_ATTEMPTS = 200
_LOOK = 0.2
"""Seconds between two looks at whether any of several threads has given the work up."""

_PROXY_VARIABLES = [
    name for kind in ("http", "https", "all", "no") for name in (f"{kind}_proxy", f"{kind}_PROXY".upper())
]
_CA_VARIABLES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_LOG = logging.getLogger("storage")


@dataclass(frozen=True)
class Patience:
    """Seconds after which hope is given up."""

    connect: float = 10.0
    """For a connection."""
    silence: float = 30.0
    """Without a byte in the midst of an answer."""
    first: float = 15.0
    """For a server that has not answered this process yet: most likely its address is wrong."""
    total: float = 300.0
    """For one request, with all attempts and the waits between; and on top of it, for an answer,"""
    rate: float = 50_000.0
    """its bytes at this many a second."""
    wait: float = 10.0
    """The longest wait between two attempts."""
    quiet: float = 5.0
    """Of trying again before a line in the log says so."""


PATIENCE = Patience()


_current = threading.local()


class Deadline:
    """The end of a piece of work: a time, or sooner if the work it belongs to was given up.

    Args:
        seconds: from now.
        given_up: set when nobody waits for the work any more.
        within: the work that this is a part of, and is given up with; that of the thread by default.
    """

    def __init__(
        self, seconds: float, given_up: threading.Event | None = None, within: "Deadline | None" = None
    ) -> None:
        self.end = time.monotonic() + seconds
        within = within or work()
        own = () if given_up is None else (given_up,)
        self._given_up: tuple[threading.Event, ...] = (*own, *(within._given_up if within else ()))

    @property
    def shared(self) -> bool:
        """Whether another thread may give the work up."""
        return bool(self._given_up)

    def left(self) -> float:
        """Return the seconds that remain, 0 when it is over."""
        if any(event.is_set() for event in self._given_up):
            return 0.0
        return max(0.0, self.end - time.monotonic())

    def sleep(self, seconds: float) -> None:
        """Wait, but not past the end."""
        until = time.monotonic() + min(seconds, self.left())
        while (left := min(until - time.monotonic(), self.left())) > 0:
            if self._given_up:
                self._given_up[0].wait(min(left, _LOOK if len(self._given_up) > 1 else left))
            else:
                time.sleep(left)


def backoff(attempt: int) -> float:
    """Return a random wait in seconds before attempt number `attempt` (from 1)."""
    return random.uniform(0, min(PATIENCE.wait, 0.2 * 2 ** min(attempt, 16)))


@contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Let every request of this thread inside the block end with `deadline`."""
    before = work()
    _current.deadline = deadline
    try:
        yield
    finally:
        _current.deadline = before


def work() -> Deadline | None:
    """Return the deadline of this thread's work, if it has one."""
    return getattr(_current, "deadline", None)


def current() -> Deadline:
    """Return the deadline of this thread's work; a request's own where there is none."""
    return work() or Deadline(PATIENCE.total)


class _Attempts(urllib3.Retry):
    """Attempts until a deadline; bounded in number because each stands on the stack of the last."""

    server: tuple[str, str]
    deadline: Deadline
    start: float
    told: bool = False

    def new(self, **changed: Any) -> "_Attempts":
        made = super().new(**changed)
        made.server, made.deadline, made.start, made.told = self.server, self.deadline, self.start, self.told
        return made

    def is_exhausted(self) -> bool:
        return self.deadline.left() <= 0 or super().is_exhausted()

    def get_backoff_time(self) -> float:
        return backoff(len(self.history))

    def sleep(self, response: urllib3.BaseHTTPResponse | None = None) -> None:
        asked = None if response is None else self.get_retry_after(response)
        self.deadline.sleep(self.get_backoff_time() if asked is None else asked)

    def increment(
        self,
        method: Any = None,
        url: Any = None,
        response: Any = None,
        error: Exception | None = None,
        _pool: Any = None,
        _stacktrace: Any = None,
    ) -> "_Attempts":
        if error is not None and is_lasting(error):
            raise error
        spent = time.monotonic() - self.start
        if error is not None and self.server not in _answered and spent >= PATIENCE.first:
            raise urllib3.exceptions.MaxRetryError(_pool, url, error) from error
        try:
            made = super().increment(method, url, response, error, _pool, _stacktrace)
        except urllib3.exceptions.MaxRetryError:
            _answered.discard(self.server)  # what follows, an abort for one, need not wait as long again
            raise
        if spent >= PATIENCE.quiet and not self.told:
            made.told = True
            why = error or f"status {response.status}"
            place = f"{getattr(_pool, 'host', '')}{str(url).partition('?')[0]}"
            _LOG.warning("%s %s: %s; trying again for %.0f s", method, place, why, self.deadline.left())
        return made


def is_lasting(error: BaseException) -> bool:
    """Tell whether a failed connection would fail again: a certificate or an address that is refused."""
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    if isinstance(error, urllib3.exceptions.SSLError):
        return any(word in str(error).upper() for word in ("CERTIFICATE", "WRONG_VERSION", "HOSTNAME"))
    return isinstance(error, urllib3.exceptions.LocationValueError | urllib3.exceptions.InvalidHeader)


class _Patient:
    """Gives every request of a pool its deadline."""

    follow = True
    """Go where the server redirects. Not with signed requests: the signature holds for one host."""

    authorities: str | bytes
    """Certificates in PEM form that are trusted, or the name of the file that has them."""

    lines: dict[Any, Any]
    """What `quick` keeps, by scheme and host."""

    def urlopen(self, method: str, url: str, redirect: bool = True, **options: Any) -> Any:
        address = urlsplit(url)
        server = (address.scheme, address.netloc)
        if "retries" not in options:  # else this is the second half of a redirect
            deadline = current()
            attempts = _Attempts(
                total=_ATTEMPTS,
                redirect=10,
                status_forcelist=BUSY,
                allowed_methods=None,
                raise_on_status=False,
            )
            attempts.server, attempts.deadline, attempts.start = server, deadline, time.monotonic()
            options["retries"] = attempts
            # A connection that is new has this time to send the body, too.
            sending = len(options.get("body") or b"") / PATIENCE.rate
            options["timeout"] = urllib3.Timeout(
                connect=min(PATIENCE.connect + sending, max(deadline.left(), 0.1)),
                read=min(PATIENCE.silence, max(deadline.left(), 0.1)),
            )
        response = super().urlopen(method, url, redirect=redirect and self.follow, **options)  # type: ignore[misc]
        answered(server)
        return response


_answered: set[tuple[str, str]] = set()


def answered(server: tuple[str, str]) -> None:
    """Note that a server, scheme and host, is there: what breaks from now on may come back."""
    _answered.add(server)


class _Direct(_Patient, urllib3.PoolManager):  # type: ignore[misc]
    pass


class _Proxied(_Patient, urllib3.ProxyManager):  # type: ignore[misc]
    pass


def pool(url: str, *, follow: bool = True) -> urllib3.PoolManager:
    """Return this process's connections for an address, through the proxy the environment names.

    Args:
        url: where the requests will go; what counts is the scheme and the host.
        follow: whether redirects are followed.

    Raises:
        StorageError: this is no address, or the CA bundle that the environment names cannot be used.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise StorageError(f"{url} is no address: {error}", fix="correct it") from error
    variables = tuple(map(os.environ.get, _PROXY_VARIABLES))
    proxy = _proxy(parts.scheme, parts.netloc.rpartition("@")[2], variables)
    bundle = next((name for name in _CA_VARIABLES if os.environ.get(name)), "")
    return _pool(proxy, bundle, os.environ.get(bundle, ""), follow, os.getpid())


@lru_cache(maxsize=256)
def _proxy(kind: str, host: str, _variables: tuple[str | None, ...]) -> str | None:
    """Return the proxy for a host; to look it up takes longer than all the rest of a request."""
    return None if proxy_bypass(host) else getproxies().get(kind)


@lru_cache(maxsize=16)
def _pool(proxy: str | None, variable: str, bundle: str, follow: bool, _process: int) -> urllib3.PoolManager:
    """Make connections; `_process` keeps those of a parent from being shared with a forked child."""
    # What is named comes on top of the public authorities: one process reads both the cluster's
    # store, under the cluster's own authority, and the web.
    authorities: str | bytes = certifi.where()
    trusted = ssl.create_default_context(cafile=certifi.where())
    if bundle:
        try:
            trusted.load_verify_locations(bundle)
            authorities = Path(certifi.where()).read_bytes() + b"\n" + Path(bundle).read_bytes()
        except OSError as error:  # SSLError is one
            raise StorageError(
                f"the CA bundle {bundle} cannot be read: {error.strerror or error}",
                fix=f"let {variable} name a file of PEM certificates, or unset it",
            ) from error
    options: dict[str, Any] = {"maxsize": POOL, "ssl_context": trusted}
    made = _Proxied(proxy, **options) if proxy else _Direct(**options)
    made.follow, made.authorities, made.lines = follow, authorities, {}
    return made
