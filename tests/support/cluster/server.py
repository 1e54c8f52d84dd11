"""The API server of a simulated cluster over HTTP, on this machine's clock, for commands and processes.

def test_something(served_cluster):
    subprocess.run([...], env=served_cluster.environment)    # KUBECONFIG names it.
"""

import contextlib
import json
import os
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from web_server import WebServer

from cluster import exec_stream
from cluster.api import Broken, Request, SimulatedCluster
from trainer.base.clock import CLOCK


class ServedCluster(SimulatedCluster):
    """A cluster behind HTTP; a context manager."""

    def __init__(self, folder):
        super().__init__(CLOCK)
        self.kubeconfig = folder / "kubeconfig"
        self.executed = []  # Pod, container and command of each exec.
        self._server = WebServer(type("Handler", (_Handler,), {"cluster": self}))
        self.url = self._server.url
        self.write_kubeconfig()

    @property
    def environment(self):
        """This process's environment, with a kubeconfig of this cluster, for a subprocess."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "NO_PROXY": "127.0.0.1"}

    def write_kubeconfig(self, namespace="default"):
        context = {"cluster": "simulated", "user": "me", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "simulated",
            "clusters": [{"name": "simulated", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [{"name": "simulated", "context": context}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True
        self._server.server_close()
        for pod in self.pods.values():
            pod.gone = True
        self.notify()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Otherwise each answer waits 40 ms for the client's acknowledgement.
    cluster: ServedCluster

    def _serve(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        headers = {name.lower(): value for name, value in self.headers.items()}
        if urlsplit(self.path).path.endswith("/exec"):
            return self._exec()
        try:
            self._send(self.cluster.serve(Request(self.command, self.path, body, headers)))
        except (Broken, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def _send(self, response):
        self.send_response(response.status)
        if response.stream is not None:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for data in response.stream:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if data else b"")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Type", response.kind)
        self.send_header("Content-Length", str(len(response.body)))
        if response.retry_after:
            self.send_header("Retry-After", str(response.retry_after))
        self.end_headers()
        self.wfile.write(response.body)

    def _exec(self):
        url = urlsplit(self.path)
        namespace, _, name, _ = url.path.split("/")[-4:]
        if ("create", "pods/exec") in self.cluster.denied or self.cluster.pod(name, namespace) is None:
            denied = ("create", "pods/exec") in self.cluster.denied
            text = "is forbidden" if denied else "not found"
            body = json.dumps({"message": f'pods "{name}" {text}'}).encode()
            self.send_response(403 if denied else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        query = parse_qs(url.query)
        self.cluster.executed.append((name, query["container"], query["command"]))
        exec_stream.shake_hands(self)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            exec_stream.serve(self.connection, query["command"], query["tty"] == ["True"])
