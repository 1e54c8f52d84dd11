"""Server errors, and retries of reads and writes after transient ones."""

import random
import ssl
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import urllib3

from trainer.base.daemon_threads import run_in_background
from trainer.base.errors import DamagedError, StorageError
from trainer.storage import environment

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_TRIES = 4
BUSY = (408, 429, 500, 502, 503, 504)  # HTTP statuses of requests that may succeed when retried
RETRY_FIX = "check the network and the server, and run again: finished work is kept"
_NETWORK_FIX = (
    "check the address (the endpoint in the environment), HTTP_PROXY and NO_PROXY, this machine's DNS, and "
    "that the server runs; run again: finished work is kept"
)


class TransientError(StorageError):
    """Truncated or altered bytes, or a file that changed while it was read: a retry may succeed."""

    transient = True


class RangePastEndError(TransientError):
    """The file ends before the requested range."""


class CorruptError(TransientError, DamagedError):
    """The bytes do not have the expected hash."""

    transient = False


class RangesNotSupported(StorageError):
    """The server only sends complete files."""


def changed_error(uri: str, status: int = 0) -> TransientError:
    """Return the error for a file that changed while it was read; `status` is the HTTP status, if any."""
    kind = RangePastEndError if status == 416 else TransientError
    return kind(f"{uri} changed while it was read", fix="run again when no other process is writing to it")


def no_answer_error(uri: str, error: BaseException) -> StorageError:
    """Convert urllib3's error for a server that does not respond."""
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    if isinstance(cause, urllib3.exceptions.SSLError | ssl.SSLError):
        cause = cause.args[0] if cause.args and isinstance(cause.args[0], ssl.SSLError) else cause
        reason = getattr(cause, "verify_message", "") or str(cause)
        fix = "set AWS_CA_BUNDLE to a file with the certificate of its authority, or correct the address"
        if getattr(cause, "reason", "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            fix = "the server speaks plain http there: write http:// in the endpoint, or another port"
        return StorageError(f"cannot read {uri}: the connection is not trusted: {reason}", fix=fix)
    who = "the proxy" if isinstance(cause, urllib3.exceptions.ProxyError) else "the server"
    reason = str(cause).rpartition("] ")[2].rstrip("\"')")
    return StorageError(
        f"cannot read {uri}: no answer from {who}: {reason}", fix=_NETWORK_FIX, transient=True
    )


def probe(server: str, uri: str, seconds: float) -> StorageError | None:
    """Send a HEAD request to a server; return an error that names `uri` if there is no response in time."""
    try:
        client, seconds = environment.web_client(server), max(seconds, 0.1)
        timeout = urllib3.Timeout(connect=min(seconds, environment.RETRIES.connect), read=seconds)
        client.request("HEAD", server, timeout=timeout, retries=False, redirect=False)
    except urllib3.exceptions.ProtocolError:
        return None  # The server responds; the request itself will report the problem.
    except urllib3.exceptions.HTTPError as error:
        return no_answer_error(uri, error)
    return None


def retry(action: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function to retry it after a TransientError; signals are handled while it waits."""

    def call_with_retries(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        def run() -> Result:
            for number in range(1, MAX_TRIES):
                try:
                    return action(*args, **kwargs)
                except TransientError:
                    time.sleep(random.uniform(0, min(environment.RETRIES.wait, 0.2 * 2**number)))
            return action(*args, **kwargs)

        return run_in_background(run)

    return call_with_retries
