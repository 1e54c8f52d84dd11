"""The local server of a bundle, in this process or another, and requests to it."""

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.export import bundle
from trainer.export.predict import open_bundle
from trainer.export.server import ModelServer

PATIENCE = 60


@contextmanager
def served(uri: str) -> Iterator[tuple[int, str]]:
    """Serve a bundle on this machine; gives the port and the model's name."""
    predictor = open_bundle(bundle.load(uri))
    with ModelServer(("127.0.0.1", 0), predictor, names=["models.example"]) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield running.server_address[1], predictor.metadata.name
        finally:
            running.shutdown()
            thread.join()


@contextmanager
def running(command, folder):
    """Run a server in another process, its output in a file; yields process and port."""
    log = folder / "server.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
    try:
        end = time.monotonic() + PATIENCE
        # The lines are flushed while the server runs.
        while "Ctrl-C to stop" not in log.read_text():
            assert time.monotonic() < end and process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process, int(log.read_text().splitlines()[0].rstrip("/").rpartition(":")[2])
    finally:
        process.kill()
        process.wait()


def png(side: int) -> bytes:
    """Return a black PNG of one bit a pixel, of some kilobytes, without having its pixels in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), b"\0" + bytes((side + 7) // 8)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def post(address, body, path="/detect"):
    """Status and JSON of the answer."""
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
    try:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def opened(address, data=b""):
    """Return a socket that has sent the data."""
    client = socket.create_connection(address, timeout=PATIENCE)
    client.sendall(data)
    return client


def closed(client) -> bytes:
    """Return the bytes received until the other side closed."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    finally:
        client.close()
    return b"".join(parts)
