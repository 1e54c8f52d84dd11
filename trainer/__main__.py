"""`python -m trainer VERB`: every stage of the work, one process each.

download  bring a source's images under the data root
shard     clean annotations, write shards
train     train (in each process of torchrun)
launch    run another verb in several processes: launch --nproc 2 -- train ...
evaluate  score a checkpoint and write the report
export    write the model for serving
"""

import argparse
import json
import sys
from typing import Any

from trainer import config as configuration
from trainer import log, recipes, storage
from trainer.config import Config
from trainer.errors import EXIT_FAILURE, EXIT_RETRY, KubedetError


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code (see trainer.errors)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    log.setup()
    try:
        return _VERBS[options.verb](options) or 0
    except KubedetError as error:
        from trainer.launch import report_error

        report_error(error)
        return error.exit_code
    except RuntimeError as error:
        from trainer.launch import lost_peer

        if not lost_peer(error):
            raise
        # The process that is gone tells why; a traceback of every other one would bury it.
        print("stopped: another process of this run is gone", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_RETRY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, *options: str) -> None:
        sub = verbs.add_parser(name)
        if name != "launch":
            sub.add_argument("--config", help="URI of a config.json; without it the recipe counts")
            sub.add_argument("--recipe", default="debug", help="recipe, where no --config is given")
        for option in options:
            sub.add_argument(f"--{option}", required=True)

    verb("download", "source", "data-root")
    verb("shard", "raw", "data-root")
    verb("train", "shards", "output")
    verb("evaluate", "checkpoint", "shards", "output")
    verb("export", "checkpoint", "shards", "output")
    verb("launch")
    choices = verbs.choices
    choices["train"].add_argument("--resume", choices=["auto", "none"], default="auto")
    choices["launch"].add_argument("--nproc", help="processes on this machine (else PET_NPROC_PER_NODE)")
    choices["launch"].add_argument("arguments", nargs="+", metavar="-- VERB ...", help="what to run in each")
    return parser


def _config(options: argparse.Namespace) -> Config:
    if not options.config:
        return recipes.load(options.recipe)
    return configuration.from_json(storage.read_bytes(options.config), where=options.config)


def _show(result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=2, default=str))


def _download(options: argparse.Namespace) -> None:
    from trainer.data.download import download

    _show(download(options.source, options.data_root, _config(options).data))


def _shard(options: argparse.Namespace) -> None:
    from trainer.data.shards import shard

    raw = storage.read_json(storage.join(options.raw, "manifest.json"))
    _show(shard(raw, options.data_root, _config(options).data))


def _train(options: argparse.Namespace) -> None:
    from trainer.loop import train

    train(_config(options), options.shards, options.output, resume=options.resume)


def _evaluate(options: argparse.Namespace) -> None:
    from trainer.evaluation.evaluate import evaluate

    _show(evaluate(options.checkpoint, options.shards, options.output, _config(options)))


def _export(options: argparse.Namespace) -> None:
    from trainer.export.export import export

    _show(export(options.checkpoint, options.shards, options.output, _config(options)))


def _launch(options: argparse.Namespace) -> int:
    from trainer.launch import launch

    return launch(options.arguments, ["--nproc-per-node", options.nproc] if options.nproc else [])


_VERBS = {
    "download": _download,
    "shard": _shard,
    "train": _train,
    "evaluate": _evaluate,
    "export": _export,
    "launch": _launch,
}

if __name__ == "__main__":
    sys.exit(main())
