"""The local server: the inference protocol, images, and what it refuses."""

import http.client
import io
import json
import re
import socket
import struct
import time

import numpy as np
import pytest
from bundles import BOX, make_bundle
from PIL import Image
from served_model import served
from served_page import jpeg

from trainer.base.errors import ConfigError, DataError
from trainer.export import bundle, inference_protocol
from trainer.export.predict import ImageTooLarge, decode_image, open_bundle

uvicorn = pytest.importorskip("uvicorn")
from trainer.export import server, serving_limits  # noqa: E402

SIZE = 96
REST = [0] * (3 * SIZE * SIZE - 1)


@pytest.fixture
def ask(address):
    """Sends a request; returns status, headers and body."""

    def send(method, path, body=None, **headers):
        connection = http.client.HTTPConnection(*address, timeout=10)
        connection.request(method, path, body, {key.replace("_", "-"): v for key, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()

    return send


def _request(images, **rest):
    tensor = {"name": "images", "datatype": "UINT8", "shape": list(images.shape)}
    return {"inputs": [{**tensor, "data": images.flatten().tolist()}], **rest}


def test_health_and_metadata(ask):
    for path in ("health/live", "health/ready", "models/pets/ready", "models/pets/versions/v1/ready"):
        assert ask("GET", f"/v2/{path}")[0] == 200
    assert "binary_tensor_data" in json.loads(ask("GET", "/v2")[2])["extensions"]
    model = json.loads(ask("GET", "/v2/models/pets")[2])
    assert model["name"] == "pets" and model["versions"] == ["v1"]
    assert model["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 3, SIZE, SIZE]}]
    assert {item["name"]: item["shape"] for item in model["outputs"]} == {
        "boxes": [-1, 5, 4],
        "scores": [-1, 5],
        "labels": [-1, 5],
        "num": [-1],
    }


def test_boxes_of_a_model_that_squashes_images(tmp_path):
    folder = tmp_path / "made"
    make_bundle(folder)
    metadata = json.loads((folder / bundle.METADATA).read_text())
    metadata["input"] |= {"resize": "squash", "fill": 0}
    (folder / bundle.METADATA).write_text(json.dumps(metadata))
    bundle.seal(folder)
    picture = io.BytesIO()
    Image.new("RGB", (2 * SIZE, SIZE // 2), "white").save(picture, "PNG")
    with served(str(folder)) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/detect", picture.getvalue())
        (found,) = json.loads(connection.getresponse().read())["detections"]
    left, top, right, below = BOX
    assert found["box"] == [2 * left, top / 2, 2 * right, below / 2]
    assert found["score"] == 1.0  # No padding.


def test_inference_in_json(ask):
    images = np.stack([np.zeros((3, SIZE, SIZE), np.uint8), np.full((3, SIZE, SIZE), 255, np.uint8)])
    status, _, body = ask("POST", "/v2/models/pets/infer", json.dumps(_request(images, id="a7")))
    answer = json.loads(body)
    assert status == 200 and answer["id"] == "a7" and answer["model_version"] == "v1"
    outputs = {item["name"]: item for item in answer["outputs"]}
    assert outputs["boxes"]["shape"] == [2, 5, 4] and outputs["boxes"]["data"][:4] == [12, 6, 48, 30]
    assert outputs["scores"]["data"][::5] == [0.0, 1.0] and outputs["num"]["datatype"] == "INT64"


def test_inference_in_binary(ask):
    images = np.full((1, 3, SIZE, SIZE), 51, np.uint8)
    head = _request(
        images, outputs=[{"name": "scores", "parameters": {"binary_data": True}}, {"name": "num"}]
    )
    del head["inputs"][0]["data"]
    head["inputs"][0]["parameters"] = {"binary_data_size": images.nbytes}
    text = json.dumps(head).encode()
    status, headers, body = ask(
        "POST",
        "/v2/models/pets/infer",
        text + images.tobytes(),
        Inference_Header_Content_Length=str(len(text)),
    )
    length = int({key.lower(): value for key, value in headers.items()}["inference-header-content-length"])
    scores, num = json.loads(body[:length])["outputs"]
    assert status == 200 and scores["parameters"]["binary_data_size"] == 20 and num["data"] == [1]
    assert np.frombuffer(body[length:], np.float32) == pytest.approx([0.2, 0, 0, 0, 0])


def test_unknown_models_and_malformed_requests(ask):
    assert ask("GET", "/v2/models/dogs")[0] == 404
    status, _, body = ask("GET", "/v2/models/pets/versions/v9")
    assert status == 404 and "unknown model pets v9" in json.loads(body)["error"]
    status, _, body = ask("POST", "/v2/models/pets/infer", b"junk")
    assert status == 400 and "must be JSON with one input" in json.loads(body)["error"]
    assert ask("POST", "/v2/models/pets/infer", b"{}", Inference_Header_Content_Length="x")[0] == 400


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
    policy = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy and "://" not in policy
    assert headers["x-content-type-options"] == "nosniff" and "camera=(self)" in headers["permissions-policy"]
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.decode()):
        status, headers, text = ask("GET", f"/{name}")
        assert status == 200 and headers["content-type"].partition(";")[0] in (
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
    monkeypatch.setattr(serving_limits, "MOST_BYTES", 1000)
    status, _, body = ask("POST", "/detect", b"x" * 2000)
    assert status == 413 and "larger than" in json.loads(body)["error"]


def test_a_port_that_is_taken(address, bundle_uri):
    predictor = open_bundle(bundle.load(bundle_uri))
    with pytest.raises(ConfigError, match="cannot listen at"):
        server.serve(predictor, *address)


@pytest.mark.parametrize(
    ("changes", "tail", "message"),
    [
        ({"data": [256, *REST]}, b"", "values from 0 to 255"),
        ({"data": [0.5, *REST]}, b"", "integers"),
        ({"data": [1]}, b"", "must contain 27648 integers"),
        ({"datatype": "FP32"}, b"", "must be UINT8"),
        ({"parameters": {"binary_data_size": 3 * SIZE * SIZE}}, b"1234", "needs 27648 bytes, not 4"),
        ({"parameters": {"binary_data_size": 27648.0}}, b"x" * 27648, "needs 27648 bytes"),
        ({"parameters": [1]}, b"", "parameters must be"),
        ({"shape": 5}, b"", "JSON with one input"),
        ({"shape": [float("inf"), 3, SIZE, SIZE]}, b"", "JSON with one input"),
        ({"shape": [1, 3, 8, 8]}, b"", "must have the shape"),
        ({"name": "x"}, b"", "one input named"),
        ({"outputs": [{"name": "masks"}]}, b"", "no such output"),
        ({"outputs": 1}, b"", "must be a list"),
    ],
)
def test_malformed_tensors_are_refused(changes, tail, message):
    outputs = {"outputs": changes.pop("outputs")} if "outputs" in changes else {}
    tensor = {"name": "images", "datatype": "UINT8", "shape": [1, 3, SIZE, SIZE], "data": [], **changes}
    text = json.dumps({"inputs": [tensor], **outputs}).encode()
    with pytest.raises(DataError, match=message):
        inference_protocol.read_request(text + tail, len(text) if tail else None, SIZE)
