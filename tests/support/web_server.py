"""A web server of a test, in a thread."""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebServer(ThreadingHTTPServer):
    """Serves from the start on, without a log, until it is closed; a context manager."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1") -> None:
        handler.log_message = lambda *_: None  # type: ignore[method-assign, assignment]
        super().__init__((host, 0), handler)
        self.url = f"http://{host}:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Let clients go away without a message."""

    def server_close(self) -> None:
        with suppress(OSError):
            self.shutdown()
        super().server_close()
