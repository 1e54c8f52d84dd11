"""Listings of folders: files are found by name."""

from trainer.data.sources.files import Folders


def test_the_exact_name_comes_before_one_of_another_case(tmp_path):
    for name, size in {"B.jpg": 1, "a.JPG": 2, "a.jpg": 3}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "d.jpg").touch()
    folders = Folders()
    for requested, name, size in (("a.jpg", "a.jpg", 3), ("A.JPG", "a.JPG", 2), ("b.JPG", "B.jpg", 1)):
        stamp = (tmp_path / name).stat().st_mtime_ns
        assert folders.find(str(tmp_path), requested) == (str(tmp_path / name), f"{size} {stamp}")
    assert folders.find(str(tmp_path), "d.jpg") is None
    assert folders.find(str(tmp_path / "gone"), "a.jpg") is None
