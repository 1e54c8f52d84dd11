"""What is chosen of a run that says how long it may take, and that it stays so."""

import json
import time

import pytest
from small_index import index

from components.auto_schedule import choose, measure, planned
from components.jobs import Request
from components.training import prepare
from trainer.base.errors import DamagedError
from trainer.config import parsing
from trainer.model import recipes
from trainer.training.time_limit import STARTED, SplitSizes

SMALL = recipes.load("small")
PHOTOGRAPHS = SplitSizes(300, 60, 30)


def never(config):
    raise AssertionError("the speed is measured where nobody asks for it")


def machine(rate, side=320):
    """A machine that trains so many images a second of that side, and others by their area."""
    return lambda config: rate * (side / config.loader.image_size) ** 2


def test_a_fast_machine_trains_the_recipe_as_it_stands():
    assert choose(SMALL, {}, PHOTOGRAPHS, 2, machine(500.0)) == (SMALL, 500.0)


@pytest.mark.parametrize(
    ("rate", "minutes", "side"),
    [(2.0, 4, 192), (2.0, 40, 192), (25.0, 4, 192), (4.5, 30, 256), (25.0, 40, 320)],
)
def test_a_slow_machine_trains_smaller_images(rate, minutes, side):
    """The training itself stops in time: 45 epochs are the most."""
    config = recipes.load("small", {"train.minutes": minutes})
    plan, at_size = choose(config, {}, PHOTOGRAPHS, 1, machine(rate))
    assert (plan.loader.image_size, at_size) == (side, rate * (320 / side) ** 2)
    assert (plan.train, plan.model) == (config.train, config.model)


def test_few_images_are_seen_more_often_in_smaller_batches():
    few, fewest, many = (
        choose(SMALL, {}, SplitSizes(count, 20), 2, machine(1000.0))[0].train for count in (60, 6, 6000)
    )
    assert (few.epochs, few.validate_every, few.batch_size) == (101, 20, 3)
    assert (fewest.epochs, fewest.batch_size) == (135, 1)
    assert (many.epochs, many.batch_size) == (45, 4)
    # A recipe of one global batch for any number of processes has a smaller one.
    shared = choose(recipes.load("dfine_finetune"), {}, SplitSizes(40), 4, machine(1000.0))[0].train
    assert (shared.global_batch, shared.batch_size) == (4, 1)


def test_what_somebody_set_stays():
    overrides = {
        "train.epochs": 7, "train.minutes": 30, "train.batch_size": 2, "train.validate_every": 4,
        "loader.image_size": 256,
    }  # fmt: skip
    config = recipes.load("small", overrides)
    assert choose(config, overrides, PHOTOGRAPHS, 2, machine(0.1))[0] == config


def test_a_run_that_goes_on_keeps_its_plan_on_a_machine_of_another_speed(tmp_path, capsys):
    first = planned(SMALL, {}, PHOTOGRAPHS, 2, str(tmp_path), machine(4.5))
    assert first.loader.image_size == 256
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "measuring the speed of this machine",
        "300 images: up to 45 epochs at 256 pixels, batches of 4",
        "as many as fit into 30 minutes; --quick for 4 minutes",
    ]
    assert all(len(line) <= 76 for line in shown)  # `kubedet run` indents them
    kept = json.loads((tmp_path / "plan.json").read_text())["training"]
    assert kept["chosen"]["train.epochs"] == 45 and kept["minutes"] == 30
    assert planned(SMALL, {}, PHOTOGRAPHS, 2, str(tmp_path), never) == first
    # More epochs than were planned may be asked for: nothing else changes.
    longer = recipes.load("small", {"train.epochs": 90, "train.minutes": 30})
    assert planned(longer, {"train.epochs"}, PHOTOGRAPHS, 2, str(tmp_path), never).loader == first.loader
    # Asked for otherwise it is another plan.
    quick = recipes.load("small", {"train.minutes": 4})
    other = planned(quick, {"train.minutes"}, PHOTOGRAPHS, 2, str(tmp_path), machine(12.0))
    assert other.loader.image_size == 192
    assert "--quick" not in capsys.readouterr().out
    fast = planned(quick, {"train.minutes"}, SplitSizes(300), 2, str(tmp_path / "fast"), machine(500.0))
    assert fast.loader.image_size == 320 and "about 1:02 at 500.0 images/s" in capsys.readouterr().out


@pytest.mark.parametrize(("before", "minutes"), [(30, 3.5), (1000, 3.0)])
def test_the_steps_before_the_training_count_for_at_most_a_quarter(before, minutes, tmp_path, monkeypatch):
    monkeypatch.setenv(STARTED, str(time.time() - before))
    quick = recipes.load("small", {"train.minutes": 4})
    plan = planned(quick, {}, PHOTOGRAPHS, 2, str(tmp_path), machine(500.0))
    assert plan.train.minutes == pytest.approx(minutes, abs=0.02)


def test_a_run_that_was_begun_without_a_plan_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert planned(SMALL, {}, PHOTOGRAPHS, 2, str(tmp_path), never) == SMALL


def test_a_damaged_plan_is_made_anew_unless_the_run_was_begun(tmp_path):
    first = planned(SMALL, {}, PHOTOGRAPHS, 2, str(tmp_path), machine(7.0))
    path = tmp_path / "plan.json"
    whole = path.read_bytes()
    for damaged in (whole.replace(b"320", b"321", 1), whole[:-9], b"[]", b'{"training": 7}'):
        path.write_bytes(damaged)
        assert planned(SMALL, {}, PHOTOGRAPHS, 2, str(tmp_path), machine(7.0)) == first
    path.write_bytes(whole[:-9])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DamagedError, match=r"plan\.json is not JSON") as caught:
        planned(SMALL, {}, PHOTOGRAPHS, 2, str(tmp_path), never)
    assert "another name" in caught.value.fix


def test_a_machine_that_is_too_slow_to_measure_trains_the_smallest_images(tmp_path, capsys):
    plan = planned(SMALL, {}, PHOTOGRAPHS, 2, str(tmp_path), lambda config: 0.0)
    assert plan.loader.image_size == 192 and "as many as fit into 30 minutes" in capsys.readouterr().out


@pytest.fixture
def indexed(tmp_path):
    form = index({"train": 300, "val": 60}, source="coco:/data/cards", categories=[{"id": 1, "name": "ace"}])
    (tmp_path / "index.json").write_text(json.dumps(form))
    return tmp_path


def test_the_train_step_writes_what_was_chosen(indexed, monkeypatch, capsys):
    monkeypatch.setattr(
        "components.auto_schedule.measure", lambda config, classes, processes, timeout: 2.25 * processes
    )
    prepare(str(indexed), str(indexed), "small", {}, Request(own={"nproc": 2}))
    config = parsing.read(str(indexed / "config.json"))
    expected, _ = choose(SMALL, {}, SplitSizes(300, 60), 2, lambda config: 4.5)
    assert (config.train.epochs, config.loader) == (expected.train.epochs, expected.loader)
    assert "300 images: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.extra
def test_the_speed_is_that_of_processes_side_by_side():
    config = recipes.load("debug", {"loader.image_size": 96, "train.batch_size": 2})
    assert measure(config, 2, processes=2, timeout=180) > 0
