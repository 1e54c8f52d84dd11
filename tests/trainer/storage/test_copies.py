"""Where copies are kept, how much of them, and what of a folder is theirs; eviction: test_shard_cache.py."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.base.errors import ConfigError, StorageError
from trainer.storage import cache
from trainer.storage.cache import FOLDER, LIMIT, Copies, Full

NAMES = [f"{digit:064x}.tar" for digit in range(4)]


def add(kept, name, size=1000, **options):
    os.close(kept.add(name, size, lambda path: path.write_bytes(bytes(size)), **options))


def test_the_environment_says_where_and_how_much(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(LIMIT, "1.5")
    assert Copies().folder == tmp_path and Copies().limit() == 1_500_000_000
    monkeypatch.delenv(LIMIT)
    assert 0 < Copies().limit() <= 100 * 10**9
    for wrong in ("many", "-1", "inf"):
        monkeypatch.setenv(LIMIT, wrong)
        with pytest.raises(ConfigError, match=LIMIT):
            Copies()


@pytest.mark.parametrize(("free", "alone", "in_a_pod"), [(400, 100, 100), (150, 75, 50), (90, 45, 9)])
def test_a_pod_leaves_its_node_what_keeps_it_from_evicting(monkeypatch, tmp_path, free, alone, in_a_pod):
    disk = SimpleNamespace(total=500 * 10**9, free=free * 10**9)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: disk)
    monkeypatch.delenv(LIMIT, raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert Copies(tmp_path).limit() == alone * 10**9
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert Copies(tmp_path).limit() == in_a_pod * 10**9
    assert Copies(tmp_path, 80).limit() == 80, "what was asked for is taken as it is"


def test_only_copies_are_evicted(tmp_path):
    """A user may name a folder that holds other things."""
    mine = [tmp_path / "train-00000.tar", tmp_path / "notes.part" / "file"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(5000))
        os.utime(path, (5, 5))
    kept = Copies(tmp_path, 1000)
    for name in NAMES[:2]:
        add(kept, name)
    assert all(path.is_file() for path in mine)
    assert not kept.path(NAMES[0]).exists() and kept.path(NAMES[1]).exists()


def test_a_nearly_full_disk_counts_before_the_limit(monkeypatch, tmp_path):
    kept = Copies(tmp_path, 10**12)
    add(kept, NAMES[0])
    disk = SimpleNamespace(total=10**6, free=0)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: disk)
    with pytest.raises(Full):
        kept.add(NAMES[1], 1000, lambda path: path.write_bytes(bytes(1000)))
    assert not kept.path(NAMES[0]).exists()


def test_what_is_needed_goes_above_the_limit_and_is_the_first_to_go(tmp_path):
    kept = Copies(tmp_path, 10)
    with pytest.raises(Full):
        add(kept, NAMES[0])
    add(kept, NAMES[0], needed=True)
    add(kept, NAMES[1], needed=True)
    assert [path.name for path in tmp_path.glob("*.tar")] == [NAMES[1]]


def test_a_copy_that_is_evicted_while_it_is_opened_is_none(monkeypatch, tmp_path):
    kept = Copies(tmp_path, 10**6)
    add(kept, NAMES[0])
    flock = cache.fcntl.flock

    def evicted(descriptor, kind):
        kept.path(NAMES[0]).unlink()
        flock(descriptor, kind)

    with monkeypatch.context() as patched:
        patched.setattr(cache.fcntl, "flock", evicted)
        assert kept.open(NAMES[0], 1000) is None


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    kept = Copies(tmp_path, 10**6)

    def write(path):
        path.write_bytes(b"half")
        raise StorageError("the line is cut")

    with pytest.raises(StorageError, match="cut"):
        kept.add(NAMES[0], 1000, write)
    assert os.listdir(tmp_path) == ["locks"]


def test_a_default_folder_of_another_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = Copies().folder
    assert folder.parent == tmp_path
    folder.mkdir()
    assert Copies().folder == folder
    theirs = os.getuid() + 1
    monkeypatch.setattr(cache.os, "getuid", lambda: theirs)
    folder.rename(Path(tmp_path, f"kubedet-cache-{theirs}"))
    with pytest.raises(StorageError, match="belongs to another user") as caught:
        Copies()
    assert FOLDER in str(caught.value)


def test_others_do_not_see_into_a_folder_that_is_made_here(tmp_path):
    add(Copies(tmp_path / "new" / "cache"), NAMES[0])
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o077 == 0
