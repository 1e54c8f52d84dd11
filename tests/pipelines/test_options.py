"""The options of a run: all problems in one error, and the command that repeats it."""

import os
import shlex

import pytest

from operations import costs
from pipelines import cli
from pipelines.commands import run
from pipelines.commands.run import Options, check
from trainer.base.errors import ConfigError


def test_all_problems_are_in_one_error():
    options = Options(
        "a/b", {"source": "/nonexistent", "recipe": "nope", "nproc": 0, "gate": "coco/AP >= x, coco/AP50 > y"}
    )
    with pytest.raises(ConfigError) as caught:
        check(options)
    lines = caught.value.message.splitlines()[1:]
    wrong = ["'a/b'", "--nproc", "/nonexistent does not exist", "no recipe 'nope'"]
    wrong += ["coco/AP >= x", "coco/AP50 > y"]
    assert len(lines) == len(wrong)
    assert all(part in line for part, line in zip(wrong, lines, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        Options("plain"),
        Options(
            "other",
            {"source": "voc:/data/my set", "recipe": "small", "nproc": 4, "data_root": "s3://bucket/root",
             "output": "/runs", "gate": "coco/AP50 >= 0.5",
             "overrides": {"train.epochs": 3, "data.classes": ["a b"], "export.name": "10",
                           "train.lr": 1e-4}},
        ),
    ],
)  # fmt: skip
def test_the_command_asks_for_the_same(options, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "run", lambda started: seen.append(started) or 0)
    words = shlex.split(options.command())
    if "nproc" not in options.given:
        words += ["--nproc", str(options["nproc"])]  # Its default on the command line depends on the machine.
    assert cli.main(words[1:]) == 0
    (again,) = seen
    assert again.name == options.name and again.arguments() == options.arguments()


def test_the_command_names_the_prices_which_the_steps_take_from_the_environment(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "run", lambda started: seen.append(started) or 0)
    monkeypatch.setenv(costs.VARIABLE, "")  # It is set, and must not stay.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("gpu_hour: 2")
    assert cli.main(["run", "--name", "dear", "--prices", "mine.yaml"]) == 0
    assert os.environ[costs.VARIABLE] == str(tmp_path / "mine.yaml")
    assert f"--prices {tmp_path}/mine.yaml" in seen[0].command()
    (tmp_path / "mine.yaml").write_text("gpu: 2")
    assert cli.main(["run", "--name", "dear", "--prices", "mine.yaml"]) == 2 and len(seen) == 1
