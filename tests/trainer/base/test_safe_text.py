"""No user name or password of an address is printed; other people's text fits into one line."""

import logging
import string
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubedet import cli
from trainer import storage
from trainer.base import log
from trainer.base.errors import ConfigError, KubedetError, refuse_userinfo
from trainer.base.safe_text import (
    align,
    display_width,
    has_userinfo,
    parse_yaml,
    redact,
    to_one_line,
)
from trainer.data import source_names, sources

VISIBLE = "".join(sorted(set(string.printable) - set(string.whitespace))) + "äß日"
SECRET = "qZx7"
"""Begins each password, so that no other part of an address equals it."""

names = st.text(string.ascii_letters + string.digits + ".-_@%", min_size=0, max_size=8)
passwords = st.text(VISIBLE, max_size=12).map(lambda rest: f"{SECRET}{rest}")
schemes = st.sampled_from(["http", "https", "s3", "minio", "gs", "coco:http", "base=https"])
hosts = st.sampled_from(["host", "host:9000", "127.0.0.1", "[::1]:8080", "b.example.org", "bucket"])
paths = st.text(string.ascii_letters + "/._-", max_size=12).map(lambda path: f"/{path}" if path else "")
addresses = st.builds(
    lambda scheme, name, password, host, path: f"{scheme}://{name}:{password}@{host}{path}",
    schemes,
    names,
    passwords,
    hosts,
    paths,
)
around = st.sampled_from(["cannot read {}", "{}: no such file", "['{}']", "a {} b", '"{}",', "{}"])
keys = st.sampled_from(
    ["X-Amz-Signature", "X-Amz-Credential", "x-goog-signature", "X-Amz-Security-Token", "Signature", "sig",
     "token", "access_token"]
)  # fmt: skip
signatures = st.text(string.ascii_letters + string.digits + "%+/=_-.~:", max_size=20)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(addresses, around)
def test_no_error_or_log_line_contains_a_password(address, text):
    error = KubedetError(text.format(address), fix=f"give another address than {address}")
    assert SECRET not in str(error) + repr(error) + str(error.args) + error.fix and "***@" in error.message
    assert redact(error.message) == error.message
    try:
        raise OSError(text.format(address))
    except OSError:
        failure = sys.exc_info()
    record = logging.LogRecord("urllib3.x", logging.WARNING, "x.py", 1, text.format(address), (), failure)
    line = log._Formatter().format(record)
    assert SECRET not in line and "Traceback" in line


@settings(max_examples=100, deadline=None, derandomize=True)
@given(hosts, keys, signatures, st.booleans(), around)
def test_no_error_contains_a_signature(host, key, rest, first, text):
    query = f"{key}={SECRET}{rest}" if first else f"a=b&{key}={SECRET}{rest}&c=d"
    error = KubedetError(
        text.format(f"https://{host}/x.zip?{query}"), fix=f"not {query}" if not first else ""
    )
    assert SECRET not in str(error) and key in str(error)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(addresses)
def test_addresses_with_a_password_are_refused_everywhere(address):
    assert has_userinfo(address)
    uri = address.removeprefix("coco:").removeprefix("base=")
    doors = [
        lambda: refuse_userinfo(address, "x"),
        lambda: sources.parse(f"coco:{uri}"),
        lambda: sources.parse(f"openimages:base={uri}"),
        lambda: source_names.source_uris(uri),
        lambda: storage.state(uri),
        lambda: storage.read_bytes(uri),
        lambda: storage.check_uri(uri),
    ]
    for door in doors:
        with pytest.raises(KubedetError, match="name or password") as caught:
            door()
        assert SECRET not in str(caught.value) and caught.value.fix


@pytest.mark.parametrize(
    "uri",
    [
        "http://host:9000/a@b", "https://host/p@th", "s3://bucket/a:b@c", "http://[::1]:80/x@y", "NAME@v1",
        "openimages:base=http://a:1/x,pixels=https://b/y@2", "mail me@example.org about http://a/b",
        "https://h/x?a=b",
    ],
)  # fmt: skip
def test_addresses_without_secrets_are_unchanged(uri):
    assert redact(uri) == uri and not has_userinfo(uri)


def test_a_token_alone_is_a_secret_too():
    text = "https://ghp_qZx7@host/x https://qZx7:x-oauth-basic@h/"
    assert redact(text) == "https://***@host/x https://***@h/"


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--source", "{}"],
        ["data", "inspect", "{}"],
        ["no-command", "{}"],
        ["submit", "--data-root", "{}", "--host", "x"],
        ["job", "stop", "{}"],
    ],
)
def test_no_command_accepts_or_prints_one(command, capsys):
    for address in ("coco:http://user:pa/qZx7@127.0.0.1:1/x.json", "s3://qZx7@bucket/x"):
        code = cli.main([word.format(address) for word in command])
        shown = capsys.readouterr()
        assert code == 2 and "qZx7" not in shown.out + shown.err and "fix:" in shown.err


def test_an_endpoint_with_a_password_is_refused(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:qZx7/x@127.0.0.1:1")
    with pytest.raises(ConfigError, match="endpoint") as caught:
        storage.read_bytes("s3://bucket/key")
    assert "qZx7" not in str(caught.value)


def test_long_texts_take_little_time():
    assert redact("://" * 100_000 + "@") and redact("://a:b" * 50_000) and redact("@" * 300_000 + "://")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tab\tname", "tab name"),
        ("two\nlines\r", "two lines "),
        ("\x1b[31mred", " [31mred"),
        ("turned \u202eback", "turned  back"),
        ("e\u0301le\u0300ve", "élève"),
        ("چای\u200cخانه", "چای\u200cخانه"),
        ("猫 🐈", "猫 🐈"),
    ],
)
def test_control_characters_become_spaces(text, line):
    assert to_one_line(text) == line


def test_no_name_in_a_message_controls_the_terminal_or_looks_like_another_message(capfd):
    name = "\x1b[31ma\nerror: b\u202e.jpg"
    error = ConfigError(f"{name} is damaged\n  - a list", fix=name)
    log.setup()
    logging.getLogger("trainer.x").warning("read %s", name)
    assert cli.main(["recipes", name]) == 2
    lines = f"{error}\n{capfd.readouterr().err}".splitlines()
    assert not any(character in "".join(lines) for character in "\x1b\u202e")
    assert sum(line.startswith("error:") for line in lines) == 1 and "  - a list" in lines


@pytest.mark.parametrize("text", ["cat", "猫", "a\tb", "very long name of a class", "猫猫猫猫猫猫猫", ""])
@pytest.mark.parametrize("right", [False, True])
def test_aligned_text_has_the_width(text, right):
    cell = align(text, 10, right=right)
    assert display_width(cell) == 10 and ("…" in cell) == (display_width(text) > 10)
    assert (cell.startswith(" ") if right else cell.endswith(" ")) or display_width(text) >= 9


def test_yaml_has_the_values_of_json_and_dates_are_text():
    assert parse_yaml("a: [2020-01-02, 1.5, null, true, x]", 100) == {
        "a": ["2020-01-02", 1.5, None, True, "x"]
    }
    assert parse_yaml("a: [no, 1, null]", 100, plain_text=True) == {"a": ["no", "1", "null"]}
    for text in (
        "!!binary YWJj",
        "!!set {a}",
        "{1: a}",
        "{a: 1, a: 2}",
        "!!timestamp 2020-01-02",
        "{? [a] : b}",
    ):
        with pytest.raises(ValueError):
            parse_yaml(text, 100)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a:\n\tb: 1", ("line 2", "spaces")),
        ("names: [ok]\nx: [caf\u00e9]".encode("latin-1"), ("line 2", "UTF-8")),
        ("a: 1\nb: [1\n", ("line 3", "line 2")),
        ("{a: 1, a: 2}", ("line 1", "'a'")),
    ],
)
def test_yaml_errors_name_the_line_and_the_remedy(text, parts):
    with pytest.raises(ValueError) as caught:
        parse_yaml(text, 100)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


def test_aliases_are_refused():
    with pytest.raises(ValueError, match="line 2: aliases"):
        parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}", 100)


@pytest.mark.slow
def test_the_time_for_many_keys_is_linear():
    text = "\n".join(f"{number}: name" for number in range(36_000))
    start = time.process_time()
    assert len(parse_yaml(text, 10**6, plain_text=True)) == 36_000
    assert time.process_time() - start < 20  # A comparison of all pairs took 101.
