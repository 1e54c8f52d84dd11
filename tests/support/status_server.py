"""Kubeflow Trainer's server for the status of jobs, as a training pod meets it: HTTPS, a token, JSON."""

import datetime
import http.server
import ipaddress
import json
import ssl
import threading
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trainer import reporter

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/hello/status"


class StatusServer:
    """Takes states from whoever has the token."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.token = folder / "ca.crt", folder / "token"
        self.token.write_text("first\n")
        self.answer: tuple[int, dict[str, str]] = (200, {})
        """Code and body of its answers to those with the token."""
        self.delay = 0.0
        """Seconds before it answers."""
        self.asked: list[tuple[float, str]] = []
        """When it was asked, and with which token."""
        self.states: list[dict] = []
        """What it took."""
        key = folder / "server.pem"
        key.write_bytes(_certificate())
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
        """What the controller gives each container."""
        return {reporter.URL: self.url, reporter.CA: str(self.ca), reporter.TOKEN: str(self.token)}

    def wait_for(self, count: int, seconds: float = 20) -> None:
        """Wait until it was asked so often."""
        end = time.monotonic() + seconds
        while len(self.asked) < count:
            assert time.monotonic() < end, f"asked {len(self.asked)} times"
            time.sleep(0.01)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


def _handler(server: StatusServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = self.headers["Authorization"]
            server.asked.append((time.monotonic(), given))
            time.sleep(server.delay)
            code, answer = server.answer
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


def _certificate() -> bytes:
    """A certificate for 127.0.0.1 that signed itself, without key identifiers, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "status server")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM) + private
