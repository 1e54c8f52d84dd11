"""Copies of remote files: the least recently used make room, and none that a process still uses."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trainer import storage
from trainer.base.errors import StorageError
from trainer.storage import cache
from trainer.storage.cache import FOLDER, LIMIT

SIZE = 100_000


@pytest.fixture
def server():
    """A web server with a file of SIZE bytes for each number; notes the GETs that are no look at the size."""

    gets = []

    class Numbers(BaseHTTPRequestHandler):
        def do_HEAD(self):
            if "missing" in self.path:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(SIZE))
            self.send_header("ETag", '"one"')
            self.end_headers()

        def do_GET(self):
            is_look = self.headers.get("Range") == "bytes=0-0"
            self.do_HEAD()
            if not is_look:
                gets.append(self.path)
                self.wfile.write(content(self.path))

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Numbers) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}", gets
        http.shutdown()
        thread.join()


def content(path):
    return path[-1].encode() * SIZE


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of copies, with room for two and a half; nothing is held of other tests."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "copies"))
    monkeypatch.setenv(LIMIT, str(2.5 * SIZE / 1e9))
    yield tmp_path / "copies"
    let_go()


def let_go():
    while cache._held:
        os.close(cache._held.popitem()[1])


def kept(folder):
    return {path.name[65:] for path in folder.iterdir() if path.is_file()}


def test_a_file_is_copied_once(server, folder):
    uri, gets = server
    path = storage.local_copy(f"{uri}/a1")
    assert path.parent == folder and path.read_bytes() == b"1" * SIZE
    let_go()
    assert storage.local_copy(f"{uri}/a1") == path and len(gets) == 1
    assert path.name.endswith("-a1"), "some readers go by the name's end"


def test_the_least_recently_used_make_room(server, folder):
    uri, _ = server
    for age, name in enumerate("12"):
        os.utime(storage.local_copy(f"{uri}/{name}"), (age, age))
    storage.local_copy(f"{uri}/1")  # now the second was not used for longest
    let_go()
    storage.local_copy(f"{uri}/3")
    assert kept(folder) == {"1", "3"}


def test_what_a_process_was_given_stays_even_above_the_limit(server, folder):
    uri, _ = server
    paths = [storage.local_copy(f"{uri}/{name}") for name in "1234"]
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
    assert kept(folder) == {"4", "5"}, "what a killed process used is free"


def test_many_that_want_one_file_fetch_it_once(server, folder):
    uri, gets = server
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: storage.local_copy(f"{uri}/1"), range(16)))
    assert len(paths) == 1 and len(gets) == 1


def test_a_folder_of_the_callers_own_keeps_all_and_holds_nothing(server, folder, tmp_path):
    uri, _ = server
    for name in "1234":
        storage.local_copy(f"{uri}/{name}", tmp_path / "mine")
    assert len(kept(tmp_path / "mine")) == 4 and not cache._held


def test_a_folder_that_cannot_be_written_is_named(server, folder):
    folder.touch()
    with pytest.raises(StorageError, match=f"cannot write {folder}") as caught:
        storage.local_copy(f"{server[0]}/1")
    assert caught.value.fix
