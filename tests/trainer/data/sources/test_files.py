"""Listings of folders: files are found by name, in little memory."""

import os
import sys

import pytest

from trainer.data.sources import files
from trainer.data.sources.files import Folder


def test_the_very_name_comes_before_one_that_counts_as_equal(tmp_path):
    for name, size in {"B.jpg": 1, "a.JPG": 2, "a.jpg": 3, "c.txt": 4}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "d.jpg").touch()
    folder = Folder(str(tmp_path), str.lower, lambda name: not name.endswith(".txt"))
    assert list(folder.names()) == ["B.jpg", "a.JPG", "a.jpg"] and len(folder) == 3
    for requested, name, size in (("a.jpg", "a.jpg", 3), ("A.JPG", "a.JPG", 2), ("b.JPG", "B.jpg", 1)):
        stamp = (tmp_path / name).stat().st_mtime_ns
        assert folder.find(requested) == (name, f"{size} {stamp}")
    assert folder.find("", "a.jpg") == folder.find("A.jpg")
    assert folder.find("c.txt") is None and folder.find("d.jpg") is None


def test_a_folder_that_is_missing_has_no_files(tmp_path):
    folder = Folder(str(tmp_path / "gone"), str)
    assert len(folder) == 0 and folder.find("a.jpg") is None and list(folder.names()) == []


def test_names_that_hash_alike_are_told_apart(tmp_path):
    (tmp_path / "a.jpg").touch()
    (tmp_path / "b.jpg").touch()

    class Alike(str):
        def __hash__(self) -> int:
            return 7

    folder = Folder(str(tmp_path), Alike)
    assert [folder.find(name) and folder.find(name)[0] for name in ("b.jpg", "a.jpg", "c.jpg")] == [
        "b.jpg", "a.jpg", None,
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes there")
def test_names_that_are_no_text_and_more_than_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BATCH", 3)
    names = [b"\xff.jpg", *(b"%d.jpg" % number for number in range(8))]
    for name in names:
        open(os.path.join(os.fsencode(tmp_path), name), "w").close()
    folder = Folder(str(tmp_path), str.lower)
    assert sorted(map(os.fsencode, folder.names())) == sorted(names)
    assert folder.find(os.fsdecode(b"\xff.JPG"))[0] == os.fsdecode(b"\xff.jpg")
