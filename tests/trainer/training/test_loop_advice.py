"""What is advised after a training."""

import pytest

from trainer.training.loop import train_longer


def rows(*scores):
    trained = {"kind": "train", "step": 1, "loss": 1.0}
    return [trained, *({"kind": "val", "step": step, "coco/AP50": ap} for step, ap in enumerate(scores))]


def test_where_ap50_was_still_rising_more_epochs_are_advised():
    advice = train_longer(rows(0.2, 0.41, 0.4, 0.46), epochs=45)
    assert advice == (
        "AP50 was still rising at the last validation (0.410, then 0.460): train longer: "
        "--set train.epochs=90"
    )


@pytest.mark.parametrize(
    "scores", [(), (0.4,), (0.2, 0.4, 0.4), (0.2, 0.4, 0.41), (0.5, 0.3, 0.45), (-1, -1)]
)
def test_where_it_was_not_there_is_no_advice(scores):
    assert train_longer(rows(*scores), epochs=45) == ""
