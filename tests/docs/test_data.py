"""What the page about data says is what the program does."""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from pipelines import cli
from trainer.config.parsing import parse_overrides
from trainer.data import sources
from trainer.model import recipes

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
]
SHARDS = "data_root/shards/0123abcd"


@pytest.fixture
def folder(tmp_path, monkeypatch, shards):
    """A folder in which the page's names are: COCO, VOC and YOLO sets, one in a zip, and shards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "VOCdevkit" / "VOC2012").mkdir(parents=True)
    (tmp_path / "VOCdevkit" / "VOC2012" / "x").touch()
    (tmp_path / "cards").mkdir()
    picture = io.BytesIO()
    Image.new("RGB", (40, 30)).save(picture, "JPEG")
    with zipfile.ZipFile(tmp_path / "cards.zip", "w") as archive:
        archive.writestr("data.yaml", "names: [ace]\ntrain: images\n")
        archive.writestr("images/a.jpg", picture.getvalue())
        archive.writestr("labels/a.txt", "0 0.5 0.5 0.5 0.5\n")
    corrected = {
        "images": [{"id": 1, "file_name": "b.jpg", "width": 40, "height": 30}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [20, 10, 9, 9]}],
        "categories": [{"id": 1, "name": "ace"}],
    }
    with zipfile.ZipFile(tmp_path / "corrections.zip", "w") as archive:
        archive.writestr("annotations/instances_train.json", json.dumps(corrected))
        archive.writestr("images/b.jpg", picture.getvalue())
    (tmp_path / "cards" / "data.yaml").write_text("names: [ace]\ntrain: images\n")
    (tmp_path / "mine" / "annotations").mkdir(parents=True)
    image = {"id": 1, "file_name": "a.jpg", "width": 9, "height": 9, "coco_url": "http://x/a.jpg"}
    box = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}
    form = {"images": [image], "annotations": [box], "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "mine" / "annotations" / "instances_train.json").write_text(json.dumps(form))
    shutil.copytree(shards, tmp_path / SHARDS)
    return tmp_path


def test_runs_name_sources_recipes_and_keys_that_exist(folder):
    seen = []
    for command in COMMANDS:
        words = shlex.split(command)
        if words[:3] == ["kubedet", "data", "merge"]:  # What it writes is trained on.
            assert cli.main(words[1:]) == 0
        if words[:2] in (["kubedet", "run"], ["kubedet", "submit"]):
            options = cli.make_parser().parse_args(words[1:])
            seen.append(sources.parse(options.source))
            recipes.load(options.recipe, parse_overrides(options.overrides))
    assert len(seen) >= 17 and len({type(source) for source in seen}) == 7


def test_commands_that_look_at_data_work(folder, capsys):
    looked = [shlex.split(command) for command in COMMANDS if command.startswith("kubedet data")]
    assert len(looked) == 10
    for words in looked:
        assert cli.main(words[1:]) == 0, words
    assert (folder / "sheet.png").stat().st_size > 1000
    assert "all is well" in capsys.readouterr().out


def test_shards_are_read_by_other_programs(folder):
    (listing,) = (command for command in COMMANDS if command.startswith("tar "))
    names = subprocess.run(shlex.split(listing), check=True, capture_output=True, text=True).stdout.split()
    assert [Path(name).suffix for name in names] == [".jpg", ".json"] * (len(names) // 2)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) > 20
