"""Any command line ends with an exit code, a message and a remedy."""

import os
import subprocess
import sys

import pytest
from hostile import deep, examples, odd_texts, refused, tried, values
from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.schedules import parse_cron
from trainer.base.errors import ConfigError, EvaluationError
from trainer.config.parsing import parse_overrides
from trainer.evaluation import gate
from trainer.model import recipes

NOWHERE = "/nowhere/at/all"
LONG = "a" * 6000
KEYS = (
    "train.lr", "model.architecture", "model.anchor_sizes", "evaluation.gate", "loader.sizes",
    "data.allow_hosts", "model.weights", "export.formats", "a.b", "",
)  # fmt: skip
texts = st.one_of(odd_texts, deep, st.builds(repr, values))


@pytest.mark.slow
@examples(75)
@given(st.sampled_from(KEYS), texts)
@example("train.lr", "[" * 100_000)
@example("train.lr", "[" * 900 + "]" * 900)
@example("train.lr", "9" * 5000)
@example("train.lr", "Infinity")
def test_overrides(key, value):
    def load():
        return recipes.load("small", parse_overrides([f"{key}={value}"]))

    error = tried(load)
    assert not isinstance(error, Exception) or error.fix


BLANKS = " " * 30_000


@pytest.mark.slow
@examples(75)
@given(texts)
@example(f"coco/AP{BLANKS}> {BLANKS}b")
@example(f"coco/AP{BLANKS}b")
@example(f"AP[{BLANKS}")
@example("," * 30_000)
@example("AP[," * 10_000)
@example("coco/AP >= 0.1," * 3000)
@example("coco/AP >= " + "9" * 20_000)
def test_gates(text):
    error = tried(lambda: gate.check_rules(gate.split_rules(text)))
    assert error is None or (isinstance(error, EvaluationError) and error.fix)


@examples(75)
@given(st.one_of(texts, st.lists(st.text("0123456789*/-,?JANSUN ", max_size=8), max_size=6).map(" ".join)))
@example("*/" + "9" * 5000 + " * * * *")
@example("0-" + "9" * 5000 + " * * * *")
@example("²  * * * *")
def test_schedules(text):
    error = tried(lambda: parse_cron(text))
    assert not isinstance(error, Exception) or (isinstance(error, ConfigError) and error.fix)


SOURCES = (
    "{}", "coco:{}", "voc:{}", "yolo:{}", "openimages:{}", "openimages:base={}", "sample:{}",
    "sample:images={}", "coco:2017,base={}", "coco:2017,{}", "{}.zip", "coco:{}.tar.gz", "file://{}",
)  # fmt: skip


@pytest.fixture
def nothing_here(tmp_path, monkeypatch, hurried):
    """An empty working folder without a store or network."""
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_ENDPOINT_URL", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    hurried(first=0.01, connect=0.2)


@pytest.mark.slow
@examples(60)
@given(st.sampled_from(SOURCES), odd_texts)
def test_sources(nothing_here, capsys, form, text):
    refused("run", "--source", form.format(text), "--recipe", NOWHERE, capsys=capsys, codes=(2,))


COMMANDS = (
    ("run", "--recipe", "{}", "--source", NOWHERE),
    ("run", "--name", "{}", "--source", NOWHERE),
    ("run", "--source", NOWHERE, "--data-root", "{}"),
    ("run", "--source", NOWHERE, "--output", "{}"),
    ("run", "--source", "{}", "--recipe", NOWHERE),
    ("run", "--source", NOWHERE, "--nproc", "{}"),
    ("cluster", "compile", "--parallelism", "{}"),
    ("cluster", "compile", "--parallelism", "1", "-o", "{}"),
    ("recipes", "show", "{}"),
    ("recipes", "explain", "{}"),
    ("data", "inspect", "{}"),
    ("data", "verify", "{}"),
    ("data", "preview", "{}"),
    ("data", "inspect", "coco:{}"),
    ("data", "preview", NOWHERE, "-o", "{}"),
    ("data", "merge", "{}", NOWHERE, "-o", NOWHERE),
    ("evaluate", "{}", "--shards", NOWHERE, "-o", NOWHERE),
    ("evaluate", "{}.pt", "--shards", NOWHERE, "-o", NOWHERE),
    ("predict", "{}", NOWHERE, "-o", NOWHERE),
    ("predict", NOWHERE, "{}", "-o", NOWHERE),
    ("model", "list", "--data-root", "{}"),
    ("model", "show", "{}"),
    ("model", "verify", "{}"),
    ("model", "show", "x", "--data-root", "{}"),
    ("model", "promote", "{}", "v1"),
    ("model", "promote", "x", "{}"),
    ("serve", "{}", "--port", "0"),
    ("serve", NOWHERE, "--port", "{}"),
    ("job", "render", "--spec", "{}"),
    ("job", "render", "--target", "{}", "--name", "a", "--image", "b", "--", "c"),
    ("job", "render", "--name", "{}", "--image", "b", "--", "c"),
    ("job", "render", "--name", "a", "--image", "{}", "--", "c"),
    ("job", "render", "--name", "a", "--image", "b", "--env", "{}", "--", "c"),
    ("job", "render", "--name", "a", "--image", "b", "--mount", "{}", "--", "c"),
    ("job", "render", "--name", "a", "--image", "b", "--set", "nodes={}", "--", "c"),
    ("job", "render", "--name", "a", "--image", "b", "--set", "mounts.{}=x", "--", "c"),
    ("job", "fields", "{}"),
    ("cluster", "manifests", "-o", "{}"),
    ("{}",),
    ("weights", "{}"),
)


@pytest.mark.slow
@examples(80)
@given(st.sampled_from(COMMANDS), odd_texts)
def test_odd_arguments_of_commands(nothing_here, capsys, command, text):
    refused(*(word.replace("{}", text) for word in command), capsys=capsys)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_path_of_6000_characters(nothing_here, capsys, command):
    refused(*(word.replace("{}", LONG) for word in command), capsys=capsys)


@pytest.mark.slow
def test_a_folder_name_that_is_not_utf_8(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    command = [sys.executable.encode(), b"-m", b"kubedet.cli", b"data", b"inspect", folder]
    ended = subprocess.run(command, capture_output=True, timeout=100, check=False)
    assert ended.returncode == 2 and b"is not UTF-8" in ended.stderr and b"Traceback" not in ended.stderr
