"""Google's XML API before a store of S3: obstore's addresses and headers, as that store takes them.

obstore writes `-` and `/` of an object's name as %2D and %2F, which Google takes and others do not.
"""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from web_server import WebServer

_FROM_US = ("content-length", "transfer-encoding", "connection", "date", "server")
_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)


class _Handler(BaseHTTPRequestHandler):
    upstream = ""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower().replace("x-goog-", "x-amz-"): value for name, value in self.headers.items()}
        if headers.pop("x-amz-if-generation-match", "") == "0":
            headers["if-none-match"] = "*"
        headers["authorization"] = _SIGNED  # moto looks for one, and compares nothing
        path, _, query = self.path.partition("?")
        connection = http.client.HTTPConnection(self.upstream)
        target = quote(unquote(path), safe="/~") + (f"?{query}" if query else "")
        connection.request(self.command, target, body or None, headers)
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        length = answer.getheader("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        for name, value in answer.getheaders():
            if name.lower() not in _FROM_US:
                self.send_header(name.lower().replace("x-amz-meta-", "x-goog-meta-"), value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do


@contextmanager
def google_store(upstream: str) -> Iterator[str]:
    """Serve Google's API while the block runs, before a store of S3; gives the endpoint."""
    with WebServer(type("Handler", (_Handler,), {"upstream": urlsplit(upstream).netloc})) as server:
        yield server.url


def service_account(folder: Path, endpoint: str) -> str:
    account = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
    path = folder / "account.json"
    path.write_text(json.dumps(account | {"gcs_base_url": endpoint}))
    return str(path)
