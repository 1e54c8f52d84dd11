"""A webhook in a thread: keeps what is posted to it, and answers as it is told."""

import json
import threading
from http.server import BaseHTTPRequestHandler

from web_server import WebServer


class Webhook:
    """Answers with `codes`, one a request, the last again and again; a code of 3xx names `elsewhere`."""

    def __init__(self):
        self.posted = []
        """Body of each request."""
        self.codes = [200]
        self.elsewhere = ""
        self.release = threading.Event()
        """Answers wait for it."""
        self.release.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                hook.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                hook.release.wait(10)
                self.send_response(hook.codes.pop(0) if len(hook.codes) > 1 else hook.codes[0])
                self.send_header("Content-Length", "0")
                if hook.elsewhere:
                    self.send_header("Location", hook.elsewhere)
                self.end_headers()

        self._server = WebServer(Handler)
        self.url = f"{self._server.url}/services/T0/B0/geheim"

    def close(self):
        self.release.set()
        self._server.server_close()
