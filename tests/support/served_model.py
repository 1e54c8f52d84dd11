"""The local server of a bundle, running in a thread of the test's process."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trainer.export import bundle
from trainer.export.predict import open_bundle


@contextmanager
def served(uri: str) -> Iterator[tuple[int, str]]:
    """Serve a bundle on this machine; gives the port and the model's name."""
    pytest.importorskip("uvicorn")
    server = pytest.importorskip("trainer.export.server")
    predictor = open_bundle(bundle.load(uri))
    running = server.WebServer(predictor, names=["models.example"])
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not running.started:
        assert time.monotonic() < end
        time.sleep(0.01)
    try:
        yield running.servers[0].sockets[0].getsockname()[1], predictor.metadata.name
    finally:
        running.should_exit = True
        thread.join()
