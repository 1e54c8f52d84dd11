"""How long a checkpoint stops the training loop: for a copy of the state, or for writing all of it.

    python -m benchmarks.checkpoint                        # to a local disk
    python -m benchmarks.checkpoint --folder s3://bucket/bench

`written` is the time to write the file, `held` what the loop waits for if a thread writes a copy.
"""

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common import arguments, interleaved, report
from trainer import storage
from trainer.config import parsing
from trainer.config.parsing import with_overrides
from trainer.config.schema import Config
from trainer.launching.distributed import World
from trainer.model import recipes
from trainer.trackers.training_log import TrainingLog
from trainer.training import checkpoint
from trainer.training.run_recorder import Recorder
from trainer.training.state import TrainState


def trained(config: Config, classes: int, device: torch.device) -> TrainState:
    """A state with all that the optimizer keeps."""
    state = TrainState(config, classes, World(0, 1, device))
    for parameter in state.parameters:
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    return state


def main() -> None:
    """Measure both in turn and print the ratio."""
    options = arguments(__doc__, classes=91, folder="")
    config = with_overrides(recipes.load("finetune"), {"model.weights": ""}, where="this benchmark")
    state = trained(config, options.classes, options.device)
    described = {
        "config": parsing.to_json(config),
        "categories": [],
        "fingerprint": "",
        "global_batch": 1,
        "epoch": 1,
    }
    with tempfile.TemporaryDirectory() as local:
        folder = options.folder or local
        log = TrainingLog(folder, 0)
        recorder = Recorder(config, folder, log, None)
        stalls: list[float] = []

        def plain() -> None:
            contents = {**described, **state.state_dict(), "best": {}}
            checkpoint.write_step(contents, storage.join(folder, "plain"), 1, keep=1)

        def ours() -> None:
            start = time.perf_counter()
            recorder.save({**described, **state.state_dict()})
            stalls.append(time.perf_counter() - start)
            recorder.wait()

        seconds = interleaved({"written": plain, "beside": ours}, options.rounds, options.device)
        size = Path(storage.local_copy(storage.join(folder, "plain", "step-00000001.pt"))).stat().st_size
        recorder.close()
        log.close()
    waiting = sorted(stalls[1:])[len(stalls[1:]) // 2]
    figures = {"megabytes": size / 1e6, "written_s": seconds["written"], "held_s": waiting}
    report("checkpoint", seconds["written"] / waiting, figures, options)


if __name__ == "__main__":
    main()
