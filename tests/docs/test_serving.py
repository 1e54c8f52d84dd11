"""The guide to serving: its commands and its code work, and what it names is there."""

import re
import shlex
from pathlib import Path

import pytest
from bundles import make_bundle
from PIL import Image

from pipelines import cli
from trainer.config import ExportConfig
from trainer.export import models
from trainer.export.formats import FORMATS

GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the guide's commands start from."""
    monkeypatch.chdir(tmp_path)
    for version, run in (("v1", "a"), ("v2", "b")):
        made = make_bundle(tmp_path / "runs" / run / "model", version=version, name="detector")
        models.publish(made, str(tmp_path / "data_root"), "detector")
    (tmp_path / "images").mkdir()
    Image.new("RGB", (192, 96), "white").save(tmp_path / "images" / "a.jpg")
    return tmp_path


def test_its_commands_work(folder, capsys):
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) >= 8
    for command in commands:
        assert cli.main(shlex.split(command)[1:]) == 0, command
    assert (folder / "serving" / "kserve.yaml").is_file()


def test_its_code_works(folder, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(code, "docs/serving.md", "exec"), {"__name__": "guide"})
    assert re.match(r"dog <b> 0\.72\d* \[24\. 12\. 96\. 60\.\]", capsys.readouterr().out.strip())


def test_its_tables_are_whole():
    for name, kind in FORMATS.items():
        assert f"| `{name}` |" in GUIDE
        assert all(f"`{file}`" in GUIDE for file in kind.files)
    for key in re.findall(r"`export\.(\w+)`", GUIDE):
        assert hasattr(ExportConfig(), key), key
    limits = ExportConfig()
    assert (
        f"at most {limits.max_ap_change:g} " in GUIDE and f"at most {limits.max_ap_change_int8:g} " in GUIDE
    )
    assert f"({limits.check_images};" in GUIDE and f"{limits.min_match:.0%}".replace("%", " %") in GUIDE


def test_its_links_lead_somewhere():
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in GUIDE.splitlines()
        if line.startswith("## ")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", GUIDE)) <= headings
