"""Copies of remote files: the least recently used make room, but none that a process still uses."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from web_server import WebServer

from trainer import storage
from trainer.base.errors import ConfigError, StorageError
from trainer.storage import cache
from trainer.storage.cache import FOLDER_VARIABLE, LIMIT_VARIABLE, CopyCache

SIZE = 100_000
NAMES = [f"{digit:064x}.tar" for digit in range(4)]


@pytest.fixture
def server():
    """A web server with a file of SIZE bytes for each digit; collects the paths of GET requests."""

    gets = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", str(SIZE))
            self.send_header("ETag", '"one"')
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            gets.append(self.path)
            self.wfile.write(self.path[-1].encode() * SIZE)

    with WebServer(Handler) as server:
        yield server.url, gets


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of copies, with room for two and a half."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "copies"))
    monkeypatch.setenv(LIMIT_VARIABLE, str(2.5 * SIZE / 1e9))
    yield tmp_path / "copies"
    let_go()


def let_go():
    while cache._locked_copies:
        os.close(cache._locked_copies.popitem()[1])


def kept(folder):
    return {path.name[65:] for path in folder.iterdir() if path.name != "lock"}


def add(copies, name, size=1000, **options):
    os.close(copies.add(name, size, lambda path: path.write_bytes(bytes(size)), **options))


def test_the_least_recently_used_make_room(server, folder):
    uri, gets = server
    for age, name in enumerate("12"):
        path = storage.local_copy(f"{uri}/{name}.tar{name}")
        assert path.parent == folder and path.name.endswith(f"-{name}.tar{name}")
        os.utime(path, (age, age))
    assert storage.local_copy(f"{uri}/1.tar1").read_bytes() == b"1" * SIZE and len(gets) == 2
    let_go()
    storage.local_copy(f"{uri}/3")
    assert kept(folder) == {"1.tar1", "3"}


def test_what_a_process_got_stays_even_above_the_limit(server, folder):
    uri, _ = server
    names = "12" + "3" * 40 + "4"  # One that is asked for again takes no other's place.
    paths = dict.fromkeys(storage.local_copy(f"{uri}/{name}") for name in names)
    assert [path.read_bytes()[:1] for path in paths] == [b"1", b"2", b"3", b"4"]
    let_go()
    storage.local_copy(f"{uri}/5")
    assert kept(folder) == {"4", "5"}, "afterwards the limit holds again"


def test_another_process_keeps_what_it_uses(server, folder):
    uri, _ = server
    script = (
        "import sys; from trainer import storage\n"
        "print(storage.local_copy(sys.argv[1]), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, f"{uri}/1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline()
        for name in "234":
            storage.local_copy(f"{uri}/{name}")
            let_go()
        assert kept(folder) == {"1", "4"}
        other.kill()
    storage.local_copy(f"{uri}/5")
    assert kept(folder) == {"4", "5"}, "a killed process uses nothing"


def test_many_that_want_one_file_fetch_it_once(server, folder):
    uri, gets = server
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: storage.local_copy(f"{uri}/1"), range(16)))
    assert len(paths) == 1 and len(gets) == 1


def test_copies_are_private(server, folder):
    storage.local_copy(f"{server[0]}/1")
    assert folder.stat().st_mode & 0o077 == 0


def test_settings_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(LIMIT_VARIABLE, "1.5")
    assert CopyCache().folder == tmp_path and CopyCache().limit() == 1_500_000_000
    monkeypatch.delenv(LIMIT_VARIABLE)
    assert 0 < CopyCache().limit() <= 100 * 10**9
    for wrong in ("many", "-1", "inf"):
        monkeypatch.setenv(LIMIT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=LIMIT_VARIABLE):
            CopyCache()


@pytest.mark.parametrize(("free", "alone", "in_a_pod"), [(400, 100, 100), (150, 75, 50), (90, 45, 9)])
def test_a_pod_leaves_its_node_enough_disk(monkeypatch, tmp_path, free, alone, in_a_pod):
    disk = SimpleNamespace(total=500 * 10**9, free=free * 10**9)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: disk)
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert CopyCache(tmp_path).limit() == alone * 10**9
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert CopyCache(tmp_path).limit() == in_a_pod * 10**9


def test_only_copies_are_evicted(tmp_path):
    """A user may name a folder that holds other files."""
    mine = [tmp_path / "train-00000.tar", tmp_path / "notes.part" / "file"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5000))
        os.utime(path, (5, 5))
    copies = CopyCache(tmp_path, 1000)
    for name in NAMES[:2]:
        add(copies, name)
    assert all(path.is_file() for path in mine)
    assert not (tmp_path / NAMES[0]).exists() and (tmp_path / NAMES[1]).exists()


def test_a_nearly_full_disk_counts_before_the_limit(monkeypatch, tmp_path):
    copies = CopyCache(tmp_path, 10**12)
    add(copies, NAMES[0])
    disk = SimpleNamespace(total=10**6, free=0)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: disk)
    with pytest.raises(OSError, match="the limit is reached"):
        add(copies, NAMES[1])
    assert not (tmp_path / NAMES[0]).exists()


def test_needed_copies_exceed_the_limit_and_are_the_first_to_go(tmp_path):
    copies = CopyCache(tmp_path, 10)
    with pytest.raises(OSError, match="the limit is reached"):
        add(copies, NAMES[0])
    add(copies, NAMES[0], needed=True)
    add(copies, NAMES[1], needed=True)
    assert [path.name for path in tmp_path.glob("*.tar")] == [NAMES[1]]


def test_a_failed_write_leaves_nothing(tmp_path):
    def write(path):
        path.write_bytes(b"half")
        raise StorageError("the line is cut")

    with pytest.raises(StorageError, match="cut"):
        CopyCache(tmp_path, 10**6).add(NAMES[0], 1000, write)
    assert os.listdir(tmp_path) == ["lock"]


def test_a_default_folder_of_another_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = CopyCache().folder
    assert folder.parent == tmp_path
    theirs = os.getuid() + 1
    monkeypatch.setattr(cache.os, "getuid", lambda: theirs)
    Path(tmp_path, f"kubedet-cache-{theirs}").mkdir()
    with pytest.raises(StorageError, match="belongs to another user") as caught:
        CopyCache()
    assert FOLDER_VARIABLE in str(caught.value)
