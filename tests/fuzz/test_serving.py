"""Whatever is sent to the local server, it answers with 200, or 4xx and a reason, and goes on."""

import pytest
from bundles import SIZE, make_bundle
from hostile import as_json, damaged, deep, examples, odd_texts, spoiled, tried, values
from hypothesis import given
from hypothesis import strategies as st

from trainer.export import bundle
from trainer.export.predict import open_bundle

REQUEST = {
    "id": "1", "parameters": {"binary_data_output": True},
    "inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 3, SIZE, SIZE],
                "parameters": {"binary_data_size": 3 * SIZE * SIZE}}],
    "outputs": [{"name": "boxes", "parameters": {"binary_data": False}}, {"name": "num"}],
}  # fmt: skip
HEADER = "Inference-Header-Content-Length"
SMALL = REQUEST | {
    "inputs": [{"name": "images", "datatype": "UINT8", "shape": [1, 3, SIZE, SIZE], "data": [0, 1, 2]}]
}
"""As numbers within the JSON, too few of them."""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """What sends a request to a server in this process; gives the answer."""
    pytest.importorskip("starlette")
    testclient = pytest.importorskip("starlette.testclient")
    from trainer.export import server

    source = make_bundle(tmp_path_factory.mktemp("fuzz") / "model")
    predictor = open_bundle(bundle.load(source))
    app = server.WebServer(predictor, ["testserver"]).config.app
    with testclient.TestClient(app, raise_server_exceptions=True) as client:

        def send(path, content, headers=None):
            answer = tried(lambda: client.post(path, content=content, headers=headers or {}))
            assert answer.status_code in (200, 400, 404, 405, 413), answer.text
            assert answer.status_code == 200 or answer.text
            return answer

        yield send


@examples(60)
@given(st.one_of(spoiled(REQUEST), spoiled(SMALL)), st.booleans())
def test_requests(ask, tree, binary):
    text = as_json(tree)
    pixels = bytes(3 * SIZE * SIZE) if binary else b""
    ask("/v2/models/pets/infer", text + pixels, {HEADER: str(len(text))} if binary else {})


@examples(30)
@given(st.one_of(damaged(as_json(REQUEST)), deep.map(str.encode), values.map(as_json)))
def test_bytes_of_requests(ask, content):
    ask("/v2/models/pets/infer", content)


@examples(20)
@given(
    st.one_of(st.integers().map(str), st.sampled_from(["", "-1", "9" * 30, "9" * 5000, "1e3", "0x1", " 5"]))
)
def test_headers(ask, length):
    ask("/v2/models/pets/infer", as_json(REQUEST), {HEADER: length})


@examples(30)
@given(odd_texts)
def test_names_of_models(ask, name):
    from urllib.parse import quote

    ask(f"/v2/models/{quote(name.encode(errors='replace')[:500], safe='') or 'x'}/infer", b"{}")
