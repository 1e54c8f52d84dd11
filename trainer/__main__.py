"""`python -m trainer VERB`: each step of a run as one process.

step      run one step of a run: step NAME --input FILE --output FILE (JSON files)
download  download a source's images into the data root
shard     clean annotations and write shards
train     train (in each process of torchrun)
launch    run download, shard, train or evaluate in several processes, on one or more machines:
          launch --nproc 2 -- train ...
evaluate  score a checkpoint and write the report
export    write the model for serving
weights   write a checkpoint's weights in the layout of torchvision or transformers
doctor    check whether this machine meets the requirements of a run
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from trainer.base import die_with_parent, log
from trainer.base.errors import EXIT_FAILURE, EXIT_RETRY, KubedetError, StorageError
from trainer.base.os_errors import translate_named_oserrors
from trainer.config import parsing
from trainer.config.schema import Config
from trainer.model import recipes

STEPS = ("download", "shard", "train", "evaluate", "export")
_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_MODELS_HELP = "folder with published weights and models (default: ./data_root)"
_OPTION_HELP = {
    "source": "images and boxes: sample, coco:URI, voc:URI, openimages: or the path of a folder",
    "data-root": "URI of the folder for data",
    "raw": "URI of the folder that `download` wrote",
    "shards": "URI of the folder that `shard` wrote",
    "checkpoint": "URI of a checkpoint, e.g. best.pt of a run",
    "output": "URI for the results",
}
"""Help texts of the required options."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code (see trainer.base.errors)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    die_with_parent.die_with_launcher()
    log.setup()
    try:
        with translate_named_oserrors():
            return int(options.run(options) or 0)
    except KubedetError as error:
        from trainer.launching.worker_failures import report_error

        report_error(error)
        return error.exit_code
    except RuntimeError as error:
        from trainer.launching.worker_failures import is_lost_peer, report_lost_peer

        if not is_lost_peer(error):
            raise
        # The failed process reports the cause; tracebacks of all others would bury it.
        report_lost_peer(error)
        return EXIT_RETRY
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_RETRY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add_verb(
        name: str, run: Callable[[argparse.Namespace], int | None], *options: str
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name)
        sub.set_defaults(run=run)
        if name not in ("step", "launch", "doctor", "weights"):
            sub.add_argument("--config", help="URI of a config.json (default: the recipe)")
            sub.add_argument("--recipe", default="debug", help="recipe, instead of --config (default: debug)")
            sub.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="KEY=VALUE",
                dest="overrides",
                help="override a configuration value, e.g. train.epochs=10; may be repeated",
            )
        for option in options:
            sub.add_argument(f"--{option}", required=True, metavar="URI", help=_OPTION_HELP[option])
        return sub

    step = add_verb("step", _run_step)
    step.add_argument("step", choices=STEPS, help="step of a run")
    step.add_argument("--input", required=True, metavar="FILE", help="JSON file with the step's arguments")
    step.add_argument("--output", required=True, metavar="FILE", help="file to write the manifest to")
    add_verb("download", _run_and_print, "source", "data-root")
    add_verb("shard", _run_and_print, "raw", "data-root")
    training = add_verb("train", _run_train, "shards", "output")
    evaluation = add_verb("evaluate", _run_and_print, "checkpoint", "shards", "output")
    for sub in (training, evaluation):
        sub.add_argument("--data-root", default="./data_root", metavar="URI", help=_MODELS_HELP)
    training.add_argument(
        "--predict",
        action="store_true",
        help="after training, predict the images that `evaluate` scores, on all processes",
    )
    training.add_argument(
        "--resume",
        choices=["auto", "none"],
        default="auto",
        help="auto: resume from the newest checkpoint; none: start from scratch (default: auto)",
    )
    add_verb("export", _run_and_print, "checkpoint", "shards", "output")
    add_verb("weights", _run_and_print, "checkpoint", "output")
    launch, doctor = add_verb("launch", _run_launch), add_verb("doctor", _run_doctor)
    launch.add_argument("--nproc", help="processes on this machine (default: PET_NPROC_PER_NODE)")
    launch.add_argument("--heartbeat", metavar="URI", help="file that the job's launcher updates regularly")
    launch.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=240,
        metavar="SECONDS",
        help="save a checkpoint and exit with code 75 if the heartbeat is older (default: 240)",
    )
    launch.add_argument("arguments", nargs="+", metavar="-- VERB ...", help="verb to run")
    doctor.add_argument("--gpus", type=int, default=0, help="number of GPUs to require")
    doctor.add_argument("--rdma", action="store_true", help="require RDMA and unlimited locked memory")
    return parser


def _load_config(options: argparse.Namespace) -> Config:
    overrides = parsing.parse_overrides(options.overrides)
    if not options.config:
        return recipes.load(options.recipe, overrides)
    config = parsing.read(options.config)
    return parsing.with_overrides(config, overrides, where="--set")


def _run_step(options: argparse.Namespace) -> None:
    """Run `python -m trainer step`."""
    from trainer.steps import program

    program.run(options.step, options.input, options.output)


def _run_and_print(options: argparse.Namespace) -> None:
    """Run any other verb in this process, and print its result as JSON."""
    from trainer import storage
    from trainer.storage import outputs

    result: dict[str, Any] = {}
    if options.verb == "download":
        from trainer.data.download import download

        result = download(options.source, options.data_root, _load_config(options).data).to_dict()
    elif options.verb == "shard":
        from trainer.data.raw_folder import read_manifest
        from trainer.data.shards import shard

        result = shard(read_manifest(options.raw), options.data_root, _load_config(options).data).to_dict()
    elif options.verb == "evaluate":
        from trainer.evaluators.shards import RESULT_FILES, evaluate

        config = _load_config(options)
        outputs.claim(options.output, RESULT_FILES, [options.checkpoint])
        result = evaluate(
            options.checkpoint, options.shards, options.output, config, data_root=options.data_root
        )
    elif options.verb == "export":
        from trainer.export import bundle
        from trainer.export.export import export

        # `claim` would add a file that the bundle's checksums do not list.
        if not storage.exists(storage.join(options.output, bundle.METADATA)):
            outputs.require_new(options.output)
        result = export(options.checkpoint, options.shards, options.output, _load_config(options))
    else:
        from trainer.training.checkpoint import write_weights

        outputs.claim_file(options.output, [options.checkpoint])
        result = write_weights(options.checkpoint, options.output)
    if result and os.environ.get("RANK", "0") == "0":
        print(json.dumps(result, indent=2, default=str))


def _run_train(options: argparse.Namespace) -> None:
    # A launcher on this machine has already checked the output.
    if die_with_parent.LAUNCHER not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        _check_output(options.output)
    from trainer.evaluators.predictions import predict_after_training
    from trainer.launching.distributed import process_group
    from trainer.training.loop import train

    config = _load_config(options)
    with process_group():
        result = train(
            config, options.shards, options.output, resume=options.resume, data_root=options.data_root
        )
        if options.predict:
            predict_after_training(result["checkpoint"], options.shards, config, options.data_root)


def _check_output(uri: str) -> None:
    """Check that a folder is writable before waiting for other machines."""
    from trainer.storage import check_writable

    try:
        check_writable(uri)
    except StorageError as error:
        message = f"the results cannot be written to {uri}: {error.message}"
        raise StorageError(message, fix=error.fix) from None


def _run_launch(options: argparse.Namespace) -> int:
    options_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options_parser.add_argument("--output")
    output = options_parser.parse_known_args(options.arguments)[0].output
    if options.arguments[0] == "train" and output:
        _check_output(output)
    # PyTorch reads this variable on import. Without it, waiting for other nodes prints C++ stack traces.
    chosen = os.environ.get(_CPP_LOG_LEVEL)
    os.environ[_CPP_LOG_LEVEL] = chosen or "FATAL"
    from trainer.launching.heartbeat import Watch
    from trainer.launching.launch import launch

    if not chosen:
        del os.environ[_CPP_LOG_LEVEL]  # Workers use PyTorch's default.
    nproc = ["--nproc-per-node", options.nproc] if options.nproc else []
    watch = None
    if options.heartbeat:
        watch = Watch(options.heartbeat, options.heartbeat_timeout)
    return launch(options.arguments, nproc, watch)


def _run_doctor(options: argparse.Namespace) -> int:
    from trainer.launching import machine_checks

    checks = machine_checks.print_results(
        machine_checks.check_training_machine(options.gpus, rdma=options.rdma)
    )
    return EXIT_FAILURE if any(check.state == "missing" for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
