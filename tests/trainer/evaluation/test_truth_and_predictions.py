"""Predictions as a file: what is read are the numbers that were written, or an error."""

import random

import numpy as np

from trainer.base.errors import EvaluationError
from trainer.evaluation.truth_and_predictions import Predictions

MADE_OF = {"fingerprint": "f00d", "split": "test"}


def test_no_flipped_bit_is_believed(tmp_path):
    chance = np.random.default_rng(1)
    found = Predictions(
        np.arange(40), np.arange(40) % 3, chance.uniform(0, 90, (40, 4)), chance.uniform(0, 1, 40)
    )
    path = tmp_path / "predictions.parquet"
    found.write(str(path), MADE_OF)
    data, random_bits = path.read_bytes(), random.Random(2)
    read, made_of = Predictions.read(str(path))
    assert made_of == MADE_OF and read.to_coco() == found.to_coco()
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[random_bits.randrange(len(data))] ^= 1 << random_bits.randrange(8)
        path.write_bytes(damaged)
        try:
            assert Predictions.read(str(path))[0].to_coco() == found.to_coco()
        except EvaluationError as error:
            refused += 1
            assert path.name in error.message
    assert refused > 100
