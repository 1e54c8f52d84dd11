"""The evaluation of a model on this machine, in one process or several."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from components.launchers.guarded_process import GuardedProcess
from trainer import storage
from trainer.base.errors import EvaluationError, Interrupted
from trainer.config import parsing
from trainer.data.shard_index import data_root_of
from trainer.evaluation.gate import check_rules
from trainer.evaluation.metrics import SUMMARY
from trainer.evaluators.shards import RESULT_FILES, evaluate
from trainer.export import loading
from trainer.launching.stop_signals import stop_request
from trainer.storage import outputs

_CONFIG = "config.json"
_GRACE_SECONDS = 10.0  # Grace period of stopped processes, which have nothing to save.


def evaluate_model(
    model: str,
    shards: str,
    output: str,
    overrides: dict[str, object],
    rules: Sequence[str],
    processes: int | None,
) -> dict[str, Any]:
    """Score a model with the configuration of its training; return the content of metrics.json.

    `processes` share the images (None: one per GPU, or one). A single evaluation runs in this process.
    """
    check_rules(rules)
    trained = parsing.from_json(json.dumps(loading.read_training_config(model)), where=model)
    config = parsing.with_overrides(trained, overrides, where="overrides")
    outputs.claim(output, [*RESULT_FILES, _CONFIG], [model, config.evaluation.baseline])
    import torch

    data_root = data_root_of(shards)
    processes = processes or torch.cuda.device_count() or 1
    if processes == 1:
        return evaluate(model, shards, output, config, data_root=data_root)
    uri = storage.join(output, _CONFIG)
    parsing.write(uri, config)
    command = [sys.executable, "-m", "trainer", "launch", "--nproc", str(processes), "--"]
    command += ["evaluate", "--checkpoint", model, "--shards", shards, "--data-root", data_root]
    command += ["--output", output, "--config", uri]
    with (
        stop_request() as stop,
        GuardedProcess(
            command, grace_seconds=_GRACE_SECONDS, stdout=subprocess.DEVNULL, stderr=None
        ) as process,
        stop.raise_immediately(lambda: Interrupted("the evaluation was stopped", fix="start it again")),
    ):
        code = process.wait()
    if code:
        error = EvaluationError(f"an evaluation process exited with code {code}", fix="see the error above")
        error.exit_code = code
        raise error
    summary: dict[str, Any] = storage.read_json(storage.join(output, SUMMARY))
    return summary
