"""Kubeflow Trainer's server for the status of jobs, as a training pod meets it: HTTPS, a token, JSON."""

import http.server
import json
import ssl
import threading
import time
from pathlib import Path

from certificates import self_signed

from trainer.launching import job_status

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/hello/status"


class StatusServer:
    def __init__(self, folder: Path) -> None:
        self.ca, self.token = folder / "ca.crt", folder / "token"
        self.token.write_text("first\n")
        self.answer: tuple[int, dict[str, str]] = (200, {})
        """Code and body of its answers to those with the token."""
        self.codes: list[int] = []
        """Codes of its next answers, which come before `answer`."""
        self.delay = 0.0
        """Seconds before it answers."""
        self.asked: list[tuple[float, str]] = []
        """When it was asked, and with which token."""
        self.states: list[dict] = []
        """What it took."""
        key = folder / "server.pem"
        key.write_bytes(self_signed())
        self.ca.write_bytes(key.read_bytes().partition(b"-----BEGIN PRIVATE")[0])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(key)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # A client that does not trust it, or waits no longer.
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = f"https://127.0.0.1:{self._server.server_port}{PATH}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        return {job_status.URL: self.url, job_status.CA: str(self.ca), job_status.TOKEN: str(self.token)}

    def wait_for(self, count: int, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while len(self.asked) < count:
            assert time.monotonic() < end, f"asked {len(self.asked)} times"
            time.sleep(0.01)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(server: StatusServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = self.headers["Authorization"]
            # Before anyone can see that it was asked, and say what is answered next.
            code, answer = (server.codes.pop(0), {}) if server.codes else server.answer
            server.asked.append((time.monotonic(), given))
            time.sleep(server.delay)
            if given != f"Bearer {server.token.read_text().strip()}":
                code, answer = 403, {"message": "Forbidden"}
            elif self.path != PATH or self.headers["Content-Type"] != "application/json":
                code, answer = 404, {"message": "Not found"}
            elif code == 200:
                server.states.append(body["trainerStatus"])
            text = json.dumps(answer or body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
