"""The local server: images, its page, and what it refuses."""

import http.client
import io
import json
import re
import socket
import struct
import subprocess
import sys
import time
from functools import partial

import pytest
from at_once import at_once
from PIL import Image
from served_model import PATIENCE, closed, opened, png, post
from served_page import jpeg

from trainer.base.errors import ConfigError
from trainer.export import bundle, server
from trainer.export.predict import ImageTooLarge, decode_image, open_bundle

SIZE = 96


@pytest.fixture
def ask(address):
    """Sends a request; returns status, headers and body."""

    def send(method, path, body=None, **headers):
        connection = http.client.HTTPConnection(*address, timeout=10)
        connection.request(method, path, body, {key.replace("_", "-"): v for key, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()

    return send


@pytest.mark.parametrize(
    ("status", "hosts"),
    [
        (400, ["evil.example", "127.0.0.1.evil.example", "", "[::1", "a@localhost"]),
        (200, ["localhost", "LOCALHOST:81", "127.0.0.1:80", "10.1.2.3", "[::1]:8080", "models.example"]),
    ],
)
def test_only_names_and_addresses_of_the_server_are_answered(ask, status, hosts):
    assert {host: ask("GET", "/", Host=host)[0] for host in hosts} == dict.fromkeys(hosts, status)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec_Fetch_Site": "cross-site"}, 403), ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200), ({"Sec_Fetch_Site": "none"}, 200),
        ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Origin": ""}, 403),
        ({"Origin": "http://localhost:1", "Host": "localhost:2"}, 403), ({"Origin": "http://[::1"}, 403),
        ({"Origin": "http://localhost.evil.example", "Host": "localhost"}, 403),
        ({"Origin": "http://127.0.0.1:81", "Host": "127.0.0.1:81"}, 200),
        ({"Origin": "http://10.0.0.1", "Host": "10.0.0.1:80"}, 200),
        ({"Origin": "https://models.example", "Host": "10.0.0.1:8080"}, 200),  # behind a proxy
        ({"Origin": "http://evil.example", "Host": "models.example", "Sec_Fetch_Site": "same-origin"}, 403),
    ],
)  # fmt: skip
def test_requests_of_other_sites_are_refused(ask, headers, status):
    assert ask("POST", "/detect", jpeg(), **headers)[0] == status


def test_a_client_that_leaves_is_no_error(address, ask, caplog, capfd):
    for _ in range(3):
        with socket.create_connection(address) as client:
            client.sendall(b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
            time.sleep(0.1)
        with socket.create_connection(address) as client:
            head = b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(jpeg())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(head + jpeg())
    assert ask("POST", "/detect", jpeg())[0] == 200
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr()) and not caplog.records


def test_an_error_of_the_server_is_printed(ask, monkeypatch, capfd):
    def fail(*_):
        raise RuntimeError("the decoder broke")

    monkeypatch.setattr(server, "decode_image", fail)
    with pytest.raises(ConnectionError):
        ask("POST", "/detect", jpeg())
    assert "the decoder broke" in capfd.readouterr().err


def test_images_are_decoded_one_at_a_time(ask, monkeypatch):
    decoding, numbers = [], []

    def decode(*arguments):
        decoding.append(1)
        numbers.append(len(decoding))
        time.sleep(0.05)
        decoding.pop()
        return decode_image(*arguments)

    monkeypatch.setattr(server, "decode_image", decode)
    answers = at_once(*[partial(ask, "POST", "/detect", jpeg())] * 4)
    assert [status for status, *_ in answers] == [200] * 4 and numbers == [1] * 4


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded():
    buffer = io.BytesIO()
    Image.new("RGB", (2000, 2000)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    assert decode_image(data, "x", 4_000_000).size == (2000, 2000)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(ImageTooLarge, match="scans"):
        decode_image(data[:-2] + scan * 50 + data[-2:], "x", 4_000_000)


def test_the_page_is_complete_and_uses_no_other_server(ask):
    status, headers, page = ask("GET", "/")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy and "://" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and "camera=()" in headers["Permissions-Policy"]
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.decode()):
        status, headers, text = ask("GET", f"/{name}")
        assert status == 200 and headers["Content-Type"].partition(";")[0] in (
            "text/javascript",
            "text/css",
            "image/svg+xml",
        )
        assert b"://" not in text.replace(b"http://www.w3.org/2000/svg", b"")  # The name of SVG, no address.
    for name in (
        "none.js",
        "..%2fserver.py",
        "%2e%2e%2fserver.py",
        "server.py",
        ".",
        "page.html%00",
        "a" * 5000,
    ):
        assert ask("GET", f"/page/{name}")[0] == 404, name


@pytest.mark.parametrize(("turned", "size"), [(False, (192, 96)), (True, (96, 192))])
def test_detections_of_an_image(ask, turned, size):
    status, _, body = ask("POST", "/detect", jpeg(turned=turned))
    answer = json.loads(body)
    assert status == 200 and answer["model"] == "pets v1" and (answer["width"], answer["height"]) == size
    assert answer["detections"][0]["box"] == [24, 12, 96, 60]  # In the square, scaled by 1/2.


def test_a_request_that_is_too_large(ask, monkeypatch):
    monkeypatch.setattr(server, "MAX_BYTES", 1000)
    status, _, body = ask("POST", "/detect", b"x" * 2000)
    assert status == 413 and "larger than" in json.loads(body)["error"]


def test_a_port_that_is_taken(address, bundle_uri):
    predictor = open_bundle(bundle.load(bundle_uri))
    with pytest.raises(ConfigError, match="cannot listen at"):
        server.serve(predictor, *address)


def test_other_requests_are_refused(ask, monkeypatch):
    assert ask("POST", "/elsewhere", jpeg())[0] == 404
    assert ask("POST", "/detect", b"", Content_Length="x")[0] == 411
    assert ask("POST", "/detect", b"junk")[0] == 400


@pytest.mark.slow
def test_sigterm_ends_it_while_an_image_is_computed(bundle_uri, tmp_path):
    code = (
        "import sys, time; from trainer.export import bundle, server; "
        "from trainer.export.predict import open_bundle; "
        "model = open_bundle(bundle.load(sys.argv[1])); model.run = lambda images: time.sleep(600); "
        "server.serve(model, '127.0.0.1', 0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, bundle_uri], stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])
        client = socket.create_connection(("127.0.0.1", port))
        head = b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(jpeg())
        client.sendall(head + jpeg())
        time.sleep(0.5)
        process.terminate()
        assert process.wait(PATIENCE) == 0
        client.close()


def test_a_small_file_of_many_pixels_is_refused_by_its_header(address):
    bomb = png(20_000)
    assert len(bomb) < 100_000
    status, answer = post(address, bomb)
    assert status == 413 and answer["fix"]


def test_silent_connections_are_closed(address, monkeypatch):
    monkeypatch.setattr(server._Handler, "timeout", 0.3)
    clients = [opened(address, b"GET / HTTP/1.1\r\n" if number % 2 else b"") for number in range(10)]
    assert [closed(client) for client in clients] == [b""] * 10
    assert post(address, png(100))[0] == 200
