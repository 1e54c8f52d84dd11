"""Azure's Blob Storage as far as the program uses it, in memory: its REST API, with the keys it checks.

(https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api)
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from web_server import WebServer

ACCOUNT, KEY = "kubedet", "c2VjcmV0"
_PAGE = 3
"""Blobs of a page of a listing: so few that tests see several."""


@dataclass
class Blob:
    data: bytes
    headers: dict[str, str]
    etag: str
    changed: str


@dataclass
class Account:
    url: str = ""
    containers: dict[str, dict[str, Blob]] = field(default_factory=dict)
    blocks: dict[str, bytes] = field(default_factory=dict)
    """Blocks that belong to no blob yet, by the blob's name and their own."""
    versions: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    account: Account
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        container, _, name = unquote(parts.path.removeprefix("/")).partition("/")
        query = dict(parse_qsl(parts.query))
        blobs = self.account.containers.get(container)
        if not self.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:"):
            return self._refuse(403, "AuthenticationFailed")
        if blobs is None:
            return self._refuse(404, "ContainerNotFound")
        with self.account.lock:
            if query.get("comp") == "list":
                return self._list(blobs, query)
            if query.get("comp") == "batch":
                return self._batch(body)
            return getattr(self, f"_{self.command.lower()}")(blobs, name, query, body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

    def _put(self, blobs: dict[str, Blob], name: str, query: dict[str, str], body: bytes) -> None:
        if query.get("comp") == "block":
            self.account.blocks[f"{name} {query['blockid']}"] = body
            return self._answer(201)
        if self.headers.get("If-None-Match") == "*" and name in blobs:
            return self._refuse(409, "BlobAlreadyExists")
        headers = {
            key.lower(): value for key, value in self.headers.items() if key.lower()[:9] == "x-ms-meta"
        }
        headers["Content-Type"] = self.headers.get("x-ms-blob-content-type") or "application/octet-stream"
        if query.get("comp") == "blocklist":
            names = re.findall("<(?:Latest|Uncommitted)>([^<]+)<", body.decode())
            body = b"".join(self.account.blocks.pop(f"{name} {block}") for block in names)
        else:
            headers["Content-Type"] = self.headers.get("Content-Type") or headers["Content-Type"]
            assert self.headers["x-ms-blob-type"] == "BlockBlob"
        self.account.versions += 1
        blobs[name] = Blob(
            body, headers, f'"0x{self.account.versions:X}"', formatdate(time.time(), usegmt=True)
        )
        return self._answer(201, {"ETag": blobs[name].etag, "Last-Modified": blobs[name].changed})

    def _get(self, blobs: dict[str, Blob], name: str, query: dict[str, str], body: bytes) -> None:
        blob = blobs.get(name)
        if blob is None:
            return self._refuse(404, "BlobNotFound")
        if self.headers.get("If-Match", blob.etag) != blob.etag:
            return self._refuse(412, "ConditionNotMet")
        headers = {
            **blob.headers,
            "ETag": blob.etag,
            "Last-Modified": blob.changed,
            "x-ms-blob-type": "BlockBlob",
        }
        wanted = re.fullmatch(
            r"bytes=(\d+)-(\d*)", self.headers.get("x-ms-range") or self.headers.get("Range", "")
        )
        if not wanted:
            return self._answer(200, headers, blob.data)
        start, size = int(wanted[1]), len(blob.data)
        stop = min(int(wanted[2] or size) + 1, size)
        if start >= size:
            return self._refuse(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return self._answer(206, headers, blob.data[start:stop])

    _head = _get

    def _delete(self, blobs: dict[str, Blob], name: str, query: dict[str, str], body: bytes) -> None:
        return self._answer(202) if blobs.pop(name, None) else self._refuse(404, "BlobNotFound")

    def _batch(self, body: bytes) -> None:
        """Delete what the parts of a request name, and answer in parts."""
        boundary, answers = "batchresponse_1", []
        for part in body.decode().split("\r\n--")[0:]:
            if line := re.search(r"DELETE /([^/]+)/(\S+) HTTP", part):
                number = re.search(r"Content-ID: (\d+)", part)
                gone = self.account.containers[line[1]].pop(unquote(line[2]), None)
                said = "202 Accepted" if gone else "404 The specified blob does not exist."
                code = "" if gone else "x-ms-error-code: BlobNotFound\r\n"
                answers.append(
                    f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: {number and number[1]}"
                    f"\r\n\r\nHTTP/1.1 {said}\r\n{code}x-ms-request-id: 1\r\n\r\n"
                )
        text = "".join(answers) + f"--{boundary}--"
        self._answer(202, {"Content-Type": f"multipart/mixed; boundary={boundary}"}, text.encode())

    def _list(self, blobs: dict[str, Blob], query: dict[str, str]) -> None:
        prefix, delimiter, page, following = query.get("prefix", ""), query.get("delimiter"), {}, ""
        for name in sorted(name for name in blobs if name.startswith(prefix)):
            end = name.find(delimiter, len(prefix)) if delimiter else -1
            shown = name if end < 0 else name[: end + 1]
            if shown < query.get("marker", ""):
                continue
            if len(page) == _PAGE and shown not in page:
                following = shown
                break
            page[shown] = self._entry(shown, blobs[name] if end < 0 else None)
        self._answer(
            200,
            {"Content-Type": "application/xml"},
            f"<EnumerationResults><Blobs>{''.join(page.values())}</Blobs>"
            f"<NextMarker>{escape(following)}</NextMarker></EnumerationResults>".encode(),
        )

    def _entry(self, name: str, blob: Blob | None) -> str:
        if blob is None:
            return f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
        return (
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{blob.changed}</Last-Modified>"
            f"<Etag>{blob.etag}</Etag><Content-Length>{len(blob.data)}</Content-Length>"
            f"<Content-Type>{blob.headers['Content-Type']}</Content-Type></Properties></Blob>"
        )

    def _refuse(self, status: int, code: str) -> None:
        text = (
            f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}\nRequestId:1</Message></Error>'
        )
        self._answer(status, {"x-ms-error-code": code, "Content-Type": "application/xml"}, text.encode())

    def _answer(self, status: int, headers: dict[str, str] | None = None, data: bytes = b"") -> None:
        self.send_response(status)
        for pair in {"x-ms-version": "2023-11-03", "x-ms-request-id": "1", **(headers or {})}.items():
            self.send_header(*pair)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def azure_store() -> Iterator[Account]:
    account = Account()
    with WebServer(type("Handler", (_Handler,), {"account": account})) as server:
        account.url = server.url
        yield account
