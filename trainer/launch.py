"""torchrun with exit codes and messages that can be trusted.

torchrun ends with code 1 and a traceback whatever happened to its workers. Here the code
of the first worker that failed is kept (143: stopped after saving, run me again) and its
message is printed once.
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from trainer.errors import EXIT_FAILURE, EXIT_RETRY, KubedetError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with which torchrun tells each worker where its error goes."""
_EXIT_CODE = "exit_code"
"""Key of an error file that `report_error` wrote: what the process ends with, if it is let."""
_SYMPTOM = {EXIT_FAILURE: 1, -signal.SIGTERM: 2}
"""Exit codes of workers that only follow another: a lost peer, and torchrun's own SIGTERM."""


def launch(arguments: list[str], torchrun_arguments: list[str]) -> int:
    """Run `python -m trainer ARGUMENTS` in every process of this node, and wait.

    Args:
        arguments: verb and options, e.g. ["train", "--config", URI].
        torchrun_arguments: options of torchrun, e.g. ["--nproc-per-node", "2"]. What is not
            given torchrun takes from PET_* variables, as the Training Operator sets them.

    Returns:
        0, or the exit code of the first worker that failed; 128 + n for signal n.
    """
    # torchrun warns of it and sets it to 1; which is right, for the loader has its own threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args([*torchrun_arguments, "-m", "trainer", *arguments]))
    except SignalException as error:
        print(f"stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return EXIT_RETRY if error.sigval in (signal.SIGTERM, signal.SIGINT) else 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = _first_cause(error.failures)
        reported = failure.error_file_data.get(_EXIT_CODE)
        if reported is not None:
            print(f"error: {failure.message}", file=sys.stderr)
            return reported
        print(_explain(rank, failure.exitcode), file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


def _first_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The failure that others follow from: one with a message, else not one that torchrun caused."""
    return min(
        failures.items(),
        key=lambda item: (_EXIT_CODE not in item[1].error_file_data, _SYMPTOM.get(item[1].exitcode, 0)),
    )


def _explain(rank: int, exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            f"error: the training process of rank {rank} was killed (SIGKILL); all others were stopped\n"
            "  fix: mostly memory ran out: lower train.batch_size or loader.image_size, or give more memory; "
            "the same command goes on from the last checkpoint"
        )
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return (
            f"error: the training process of rank {rank} died of {name}; all others were stopped\n"
            "  fix: look at the lines above; the same command goes on from the last checkpoint"
        )
    return (
        f"error: the training process of rank {rank} failed with exit code {exit_code}; see the lines above"
    )


def report_error(error: KubedetError) -> None:
    """Tell the user of an error: through torchrun where it runs this process, else on stderr."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    # The form that torchrun reads (torch.distributed.elastic.multiprocessing.errors).
    contents = {"message": str(error), "timestamp": int(time.time()), _EXIT_CODE: error.exit_code}
    Path(path).write_text(json.dumps(contents))


def lost_peer(error: Exception) -> bool:
    """Whether an error only says that another process of the run is gone."""
    known = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return ERROR_FILE in os.environ and any(text in str(error) for text in known)
