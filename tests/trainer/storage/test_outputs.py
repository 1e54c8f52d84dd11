"""Which files a command may replace."""

import pytest

from trainer.base.errors import ConfigError
from trainer.storage.outputs import claim, claim_file, require_new


def test_only_files_that_were_claimed_may_be_replaced(tmp_path):
    folder, mine = str(tmp_path), tmp_path / "a.jpg"
    mine.write_bytes(b"mine")
    (tmp_path / "run").mkdir()
    for refuse in (require_new, lambda uri: claim(uri, ["a.jpg"])):
        with pytest.raises(ConfigError, match=str(mine)):
            refuse(folder)
    claim(folder, ["b.jpg", "run"])
    (tmp_path / "b.jpg").touch()
    (tmp_path / "run" / "c.jpg").touch()
    for _ in range(2):
        claim(folder, ["b.jpg", "run"])
        claim_file(f"{folder}/b.jpg")
    with pytest.raises(ConfigError, match=str(mine)):
        claim(folder, ["a.jpg", "b.jpg"])
    assert mine.read_bytes() == b"mine"


def test_an_input_is_not_replaced_even_if_it_was_claimed(tmp_path):
    claim(str(tmp_path / "out"), ["b.jpg"])
    (tmp_path / "out" / "b.jpg").touch()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for read in (tmp_path / "link" / "b.jpg", tmp_path / "link"):
        with pytest.raises(ConfigError, match="input"):
            claim(str(tmp_path / "out"), ["b.jpg"], [str(read)])
    claim(str(tmp_path / "out"), ["b.jpg"], ["", str(tmp_path / "b.jpg")])
