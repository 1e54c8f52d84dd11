"""A store that does not answer while requests wait is named, and so is its return."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from patience import until

from trainer.storage import outages


def test_a_store_that_is_away_is_named_until_it_is_back(monkeypatch, caplog):
    for name, value in {"SLOW_SECONDS": 0.2, "_CHECK_SECONDS": 0.05, "_process": 0}.items():
        monkeypatch.setattr(outages, name, value)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with outages.report_outages(url):
        until(lambda: f"{url}: no answer from the server" in caplog.text)
        assert "again" not in caplog.text
        with HTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            until(lambda: f"{url} answers again" in caplog.text)
            server.shutdown()
