"""No name or password of an address is printed, whatever it is made of."""

import json
import logging
import os
import string
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import cli, run
from pipelines.display import RunProgress
from trainer import storage
from trainer.base import log
from trainer.base.errors import ConfigError, KubedetError, StorageError, refuse_userinfo
from trainer.base.masking import has_userinfo, masked
from trainer.data import sources

VISIBLE = "".join(sorted(set(string.printable) - set(string.whitespace))) + "äß日"
SECRET = "qZx7"
"""Begins each password, so that no other part of an address is taken for one."""

names = st.text(string.ascii_letters + string.digits + ".-_@%", min_size=0, max_size=8)
passwords = st.text(VISIBLE, max_size=12).map(lambda rest: f"{SECRET}{rest}")
schemes = st.sampled_from(["http", "https", "s3", "minio", "gs", "az", "coco:http", "base=https"])
hosts = st.sampled_from(["host", "host:9000", "127.0.0.1", "[::1]:8080", "b.example.org", "bucket"])
paths = st.text(string.ascii_letters + "/._-", max_size=12).map(lambda path: f"/{path}" if path else "")
addresses = st.builds(
    lambda scheme, name, password, host, path: f"{scheme}://{name}:{password}@{host}{path}",
    schemes, names, passwords, hosts, paths,
)  # fmt: skip
around = st.sampled_from(["cannot read {}", "{}: no such file", "['{}']", "a {} b", '"{}",', "{}"])


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(addresses, around)
def test_no_password_is_printed(address, text):
    shown = masked(text.format(address))
    assert SECRET not in shown and "***@" in shown
    assert masked(shown) == shown


@settings(max_examples=300, deadline=None, derandomize=True)
@given(addresses, around)
def test_no_error_tells_one(address, text):
    error = KubedetError(text.format(address), fix=f"give another address than {address}")
    assert SECRET not in str(error) + repr(error) + str(error.args) + error.fix


keys = st.sampled_from(
    ["X-Amz-Signature", "X-Amz-Credential", "x-goog-signature", "X-Amz-Security-Token", "Signature", "sig",
     "token", "access_token"]
)  # fmt: skip
signatures = st.text(string.ascii_letters + string.digits + "%+/=_-.~:", max_size=20)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(hosts, keys, signatures, st.booleans(), around)
def test_no_signature_is_printed(host, key, rest, first, text):
    query = f"{key}={SECRET}{rest}" if first else f"a=b&{key}={SECRET}{rest}&c=d"
    error = KubedetError(
        text.format(f"https://{host}/x.zip?{query}"), fix=f"not {query}" if not first else ""
    )
    assert SECRET not in str(error) and key in str(error)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(addresses, around)
def test_no_line_of_a_log_tells_one(address, text):
    """Nor a traceback in it: libraries print addresses, a proxy's with its password above all."""
    try:
        raise OSError(text.format(address))
    except OSError:
        failure = sys.exc_info()
    record = logging.LogRecord("urllib3.x", logging.WARNING, "x.py", 1, text.format(address), (), failure)
    line = log._Formatter().format(record)
    assert SECRET not in line and "Traceback" in line


@settings(max_examples=50, deadline=None, derandomize=True)
@given(addresses, around)
def test_no_summary_of_a_run_tells_one(address, text):
    with TemporaryDirectory() as folder:
        progress = RunProgress(Path(folder) / "progress.jsonl")
        record = run.begin({}, "x")
        ended = run.complete(record, progress, Path(folder), broken=repr(OSError(text.format(address))))
    assert SECRET not in json.dumps(ended) and ended["error"]["message"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(addresses)
def test_addresses_with_a_password_are_refused_wherever_they_come_in(address):
    assert has_userinfo(address)
    uri = address.removeprefix("coco:").removeprefix("base=")
    doors = [
        lambda: refuse_userinfo(address, "x"), lambda: sources.parse(f"coco:{uri}"),
        lambda: sources.parse(f"openimages:base={uri}"), lambda: sources.places(uri),
        lambda: storage.state(uri), lambda: storage.read_bytes(uri), lambda: storage.check_place(uri),
    ]  # fmt: skip
    for door in doors:
        with pytest.raises(KubedetError) as caught:
            door()
        assert SECRET not in str(caught.value)
        assert "name or password" in caught.value.message and caught.value.fix


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(VISIBLE + " \n", max_size=60))
def test_what_has_no_address_stays_as_it_is(text):
    text = text.replace("@", "").replace("=", "")
    assert masked(text) == text and not has_userinfo(text)


@pytest.mark.parametrize(
    "uri",
    [
        "http://host:9000/a@b", "https://host/p@th", "s3://bucket/a:b@c", "http://[::1]:80/x@y", "NAME@v1",
        "openimages:base=http://a:1/x,pixels=https://b/y@2", "mail me@example.org about http://a/b",
    ],
)  # fmt: skip
def test_addresses_as_they_should_be_are_taken_and_shown(uri):
    assert masked(uri) == uri and not has_userinfo(uri)


def test_a_token_alone_is_a_secret_too():
    assert (
        masked("https://ghp_qZx7@host/x https://qZx7:x-oauth-basic@h/") == "https://***@host/x https://***@h/"
    )


def test_a_bucket_error_tells_it_nowhere():
    with pytest.raises(KubedetError) as caught:
        storage.read_bytes("s3://user:pa/qZx7@bucket/key")
    assert "qZx7" not in str(caught.value) and "pa/" not in str(caught.value)
    assert "qZx7" not in str(StorageError("x", fix="try s3://user:pa/qZx7@bucket/key"))


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--source", "{}"],
        ["data", "inspect", "{}"],
        ["no-command", "{}"],
        ["submit", "--data-root", "{}", "--host", "x"],
        ["job", "run", "--name", "{}"],
    ],
)
def test_no_command_takes_or_tells_one(command, capsys):
    for address in ("coco:http://user:pa/qZx7@127.0.0.1:1/x.json", "s3://qZx7@bucket/x"):
        code = cli.main([word.format(address) for word in command])
        shown = capsys.readouterr()
        assert code == 2 and "qZx7" not in shown.out + shown.err and "fix:" in shown.err


def test_an_endpoint_with_a_password_is_refused(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:qZx7/x@127.0.0.1:1")
    with pytest.raises(ConfigError, match="endpoint") as caught:
        storage.read_bytes("s3://bucket/key")
    assert "qZx7" not in str(caught.value)


def test_it_does_not_take_long_for_what_is_long():
    assert masked("://" * 100_000 + "@") and masked("://a:b" * 50_000) and masked("@" * 300_000 + "://")


def test_masking_needs_nothing_else():
    code = "import trainer.base.masking, sys; assert not {'torch', 'obstore'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
