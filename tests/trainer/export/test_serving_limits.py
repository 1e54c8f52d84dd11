"""Limits of requests to the local server, and the end of the server."""

import asyncio
import http.client
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from PIL import Image
from served_page import jpeg

pytest.importorskip("uvicorn")
from trainer.data.images import MAX_PIXELS
from trainer.export import serving_limits
from trainer.export.predict import decode_image
from trainer.export.serving_limits import LimitedConnection, ModelThread, RequestRefused

PATIENCE = 60
SLOW_SERVER = """
import sys, time
from trainer.export import bundle, server
from trainer.export.predict import open_bundle
model = open_bundle(bundle.load(sys.argv[1]))
run = model.run
def slow(images):
    print("computing", flush=True)
    time.sleep(600)
    return run(images)
model.run = slow
server.serve(model, "127.0.0.1", 0)
"""


def png(side: int) -> bytes:
    """Return a black PNG of one bit a pixel, of some kilobytes, without having its pixels in memory."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), b"\0" + bytes((side + 7) // 8)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


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
        while "Ctrl-C ends it" not in log.read_text():
            assert time.monotonic() < end and process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield process, int(log.read_text().splitlines()[0].rstrip("/").rpartition(":")[2])
    finally:
        process.kill()
        process.wait()


def post(address, body, path="/detect"):
    """Status and JSON of the answer."""
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
    try:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def ending(answer) -> str:
    """Return how a request ended when the server did; one may not have reached it."""
    try:
        status, body = answer.result(PATIENCE)
    except (ConnectionError, http.client.RemoteDisconnected):
        return "refused"
    return "answered" if status == 503 and "ending" in body["error"] else f"{status} {body}"


def test_a_small_file_of_many_pixels_is_refused_by_its_header(address):
    bomb = png(20_000)
    assert len(bomb) < 100_000
    status, answer = post(address, bomb)
    assert status == 413 and f"more than the limit of {MAX_PIXELS:,} pixels" in answer["error"]
    assert "--max-pixels" in answer["fix"]
    strip = io.BytesIO()
    Image.new("1", (1, 1_000_000)).save(strip, "PNG")
    assert post(address, strip.getvalue())[0] == 413


def test_tensors_pass_an_image_that_takes_long_to_decode(address, monkeypatch):
    decoding, decoded = threading.Event(), threading.Event()

    def decode(*arguments):
        decoding.set()
        assert decoded.wait(PATIENCE)
        return decode_image(*arguments)

    monkeypatch.setattr("trainer.export.server.decode_image", decode)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, address, jpeg())
        assert decoding.wait(PATIENCE)
        tensor = {"name": "images", "datatype": "UINT8", "shape": [1, 3, 96, 96], "data": [0] * 3 * 96 * 96}
        body = json.dumps({"inputs": [tensor]})
        assert post(address, body, "/v2/models/pets/infer")[0] == 200 and not slow.done()
        decoded.set()
        assert slow.result(PATIENCE)[0] == 200


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


def test_silent_and_slow_connections_are_closed(address, monkeypatch):
    monkeypatch.setattr(LimitedConnection, "header_seconds", 0.5)
    begun = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
    clients = [opened(address, begun if number % 2 else b"") for number in range(30)]
    dripping = opened(address, begun)
    end = time.monotonic() + PATIENCE
    with pytest.raises(OSError):  # Further bytes must not restart the time limit.
        while time.monotonic() < end:
            dripping.sendall(b"x")
            time.sleep(0.05)
    assert [closed(client) for client in clients] == [b""] * 30
    assert post(address, png(100))[0] == 200


@pytest.mark.parametrize(
    ("owner", "limit", "answer"),
    [(serving_limits, "BODY_SECONDS", b" 408 "), (LimitedConnection, "request_seconds", b"")],
)
def test_a_request_that_takes_too_long_is_cut_off(address, monkeypatch, owner, limit, answer):
    monkeypatch.setattr(owner, limit, 0.3)
    head = b"POST /detect HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
    received = closed(opened(address, head + b"x" * 10))
    assert answer in received if answer else received == b""


def test_too_many_connections_are_refused_and_not_kept(address, monkeypatch):
    monkeypatch.setattr(LimitedConnection, "most", 5)
    kept = [opened(address) for _ in range(5)]
    assert b" 503 " in closed(opened(address))
    for client in kept:
        client.close()
    end = time.monotonic() + PATIENCE
    while True:
        try:
            assert post(address, png(50))[0] == 200
            break
        except (OSError, http.client.HTTPException, ValueError, AssertionError):
            assert time.monotonic() < end
            time.sleep(0.1)


def test_bodies_together_are_bounded(address, monkeypatch):
    monkeypatch.setattr(serving_limits, "_MAX_BYTES_HELD", 1000)
    status, answer = post(address, b"x" * 2000)
    assert status == 503 and "too many large requests" in answer["error"]
    # Each body is no longer counted after its request.
    assert post(address, b"x" * 900)[0] == 400 and post(address, b"x" * 900)[0] == 400


def test_one_request_is_computed_at_a_time_and_few_wait(monkeypatch):
    monkeypatch.setattr(serving_limits, "MAX_WAITING", 3)
    active, most, order = [], [], []

    def job(number):
        active.append(number)
        most.append(len(active))
        time.sleep(0.02)
        order.append(active.pop())
        return number

    async def ask():
        thread = ModelThread()
        return await asyncio.gather(
            *(thread.run(lambda n=n: job(n)) for n in range(6)), return_exceptions=True
        )

    answers = asyncio.run(ask())
    assert answers[:4] == [0, 1, 2, 3] and order == [0, 1, 2, 3] and set(most) == {1}
    assert all(isinstance(answer, RequestRefused) and answer.status == 503 for answer in answers[4:])


@pytest.mark.slow
def test_sigterm_ends_it_under_load_and_every_request_is_answered(bundle_uri, tmp_path):
    with running(["-c", SLOW_SERVER, bundle_uri], tmp_path) as (process, port):
        address = ("127.0.0.1", port)
        silent = [opened(address) for _ in range(20)]
        head = b"POST /detect HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
        half = [opened(address, head) for _ in range(5)]
        with ThreadPoolExecutor(8) as threads:
            # The first takes ten minutes; the others wait for it.
            answers = [threads.submit(post, address, png(200)) for _ in range(8)]
            end = time.monotonic() + PATIENCE
            while "computing" not in (tmp_path / "server.log").read_text():
                assert time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
            ends = [ending(answer) for answer in answers]
            assert set(ends) <= {"answered", "refused"} and "answered" in ends
        assert all(b" 200 " not in closed(client) for client in half)
        assert [closed(client) for client in silent] == [b""] * 20
    assert "Traceback" not in (tmp_path / "server.log").read_text()
