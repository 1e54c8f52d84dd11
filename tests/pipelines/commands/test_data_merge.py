"""`kubedet data merge`: from what it prints to a set that is inspected and trained on."""

import shlex

import pytest

from pipelines import cli
from tests.trainer.data.test_merging import CATEGORIES, jpeg, write_set, write_zip
from trainer.data.sources import name_of


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs a command line where cards/ and corrections.zip are; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    images = [("a.jpg", [(3, [1, 2, 10, 10])]), ("b.jpg", [(9, [3, 4, 12, 9])])]
    write_set(tmp_path / "cards", {"train": images}, data={"a.jpg": jpeg(1), "b.jpg": jpeg(2)})
    corrected = [("x.jpg", [(4, [5, 5, 9, 9])]), ("n.jpg", [(3, [0, 0, 9, 9])])]
    classes = [*CATEGORIES, {"id": 4, "name": "fox"}]
    write_zip(tmp_path / "corrections.zip", corrected, classes, {"x.jpg": jpeg(1), "n.jpg": jpeg(9)})

    def go(*words):
        return cli.main(list(words)), *capsys.readouterr()

    return go


def test_it_tells_what_it_did_and_how_to_train_on_it(run):
    code, out, err = run("data", "merge", "coco:cards", "corrections.zip", "-o", "more/cards")
    assert (code, err) == (0, "")
    assert "train: 3 images with 3 boxes, 1 corrected" in out and "1 image of the corrections added" in out
    assert "1 classes that the set did not have:\n  fox" in out
    command = out.splitlines()[-1].partition("kubedet ")[2]
    options = cli.make_parser().parse_args(shlex.split(command))
    assert options.source == "coco:more/cards" and name_of(options.source) == "cards"
    code, out, _ = run("data", "inspect", options.source)
    assert code == 0 and "no problems" in out


def test_what_cannot_be_merged_is_named(run):
    code, _, err = run("data", "merge", "cards", "nowhere.zip", "-o", "more")
    assert code == 2 and "nowhere.zip" in err and "Traceback" not in err
    code, _, err = run("data", "merge", "cards", "corrections.zip", "-o", "cards")
    assert code == 2 and "is there already" in err and "fix: name a new folder" in err
