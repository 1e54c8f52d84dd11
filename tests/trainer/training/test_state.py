"""What the processes of a run have in common."""

import pytest
import torch

from trainer.base.errors import ConfigError
from trainer.launching.distributed import SINGLE, World
from trainer.training.state import TrainState


def test_synchronized_batchnorm_has_no_effect_with_one_process(tiny, caplog):
    TrainState(tiny(model__sync_batchnorm=True), 3, SINGLE)
    assert "model.sync_batchnorm has no effect" in caplog.text


def test_synchronized_batchnorm_on_several_cpus_is_refused(tiny):
    with pytest.raises(ConfigError, match="sync_batchnorm needs GPUs"):
        TrainState(tiny(model__sync_batchnorm=True), 3, World(0, 2, torch.device("cpu")))
