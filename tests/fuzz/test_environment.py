"""Commands end with a message and a remedy, whatever environment variables hold."""

import re
from pathlib import Path

import pytest
from hostile import examples, odd_texts, refused
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
VARIABLES = sorted(
    {
        name
        for folder in ("kubedet", "trainer", "components", "operations", "pipelines")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(
            r'"((?:AWS|MINIO|KUBEDET|HF|PET|GOOGLE|WANDB|MLFLOW|OMP)_[A-Z_]+)"', path.read_text()
        )
    }
    | {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "TMPDIR", "HOME", "COLUMNS", "TERM", "LANG", "XDG_CACHE_HOME"}
)
"""Those that the code names, and common ones."""

COMMANDS = (
    ("data", "inspect", "s3://bucket/x.json"), ("data", "inspect", "minio://bucket/x.json"),
    ("data", "inspect", "gs://bucket/x.json"),
    ("data", "inspect", "coco:http://127.0.0.1:9/x.json"), ("recipes", "list"), ("recipes", "show", "small"),
    ("model", "list", "--data-root", "s3://bucket/x"), ("run", "--source", "/nowhere/at/all"),
    ("job", "render", "--name", "a", "--image", "b", "--", "c"), ("data", "inspect", "sample:images=3"),
)  # fmt: skip


@pytest.fixture
def no_network(monkeypatch, hurried):
    """Stores and servers have a closed port."""
    for name in ("AWS_ENDPOINT_URL", "MINIO_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for kind in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "MINIO_ACCESS_KEY", "MINIO_SECRET_KEY"):
        monkeypatch.setenv(kind, "key")
    hurried(first=0.01, connect=0.2, total=0.5)


@pytest.mark.slow
def test_variables(no_network, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usable = odd_texts.filter(lambda text: "\0" not in text and "\ud800" not in text)

    @examples(60)
    @given(st.sampled_from(VARIABLES), usable, st.sampled_from(COMMANDS))
    def run(name, value, command):
        with monkeypatch.context() as changed:
            try:
                changed.setenv(name, value)
            except UnicodeEncodeError:
                return
            refused(*command, capsys=capsys)

    run()
