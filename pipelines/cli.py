"""The operator's command line: `kubedet run | compile | recipes`."""

import argparse
import os
import sys
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from trainer import config, recipes
from trainer.errors import EXIT_FAILURE, ConfigError, KubedetError


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit code: 0, 2 for the user's mistakes, 1 for other failures, 143 when it was
        stopped and the same command goes on.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except KubedetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # The reader of a pipe has gone, as in `kubedet recipes | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kubedet",
        description="Train an object detector on Kubeflow, or on one machine, with one pipeline.",
    )
    parser.add_argument("--version", action="version", version=f"kubedet {version('kubedet')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)

    compiling = commands.add_parser("compile", help="write the pipeline as a cluster takes it")
    compiling.add_argument("-o", "--output", default="pipeline.yaml", metavar="FILE", help="%(default)s")
    compiling.set_defaults(command=_compile)

    listing = commands.add_parser("recipes", help="list the named configurations")
    listing.add_argument("--show", metavar="NAME", help="print one with all its keys, as JSON")
    listing.set_defaults(command=_recipes)
    return parser


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser(
        "run",
        help="run the whole pipeline on this machine",
        description="Download, shard, train, evaluate, and export on this machine. Stopped with Ctrl-C or "
        "killed, the same command with the same --name goes on. Exit code: 0, also where the gate held the "
        "export back; 2 for a mistake in what was asked or given; 143 when stopped; 1 otherwise.",
    )
    run.add_argument(
        "--source", default="sample", metavar="URI",
        help="sample (drawn by the program), coco:PATH, voc:PATH (default: %(default)s)",
    )  # fmt: skip
    run.add_argument(
        "--recipe", default="debug", metavar="NAME", help="see `kubedet recipes` (default: debug)"
    )
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="change one value of the recipe, e.g. train.lr=0.01; may be given again",
    )  # fmt: skip
    run.add_argument("--nproc", type=int, default=2, metavar="N", help="training processes (default: 2)")
    run.add_argument(
        "--data-root", default="./data_root", metavar="URI", help="where data is kept (default: %(default)s)"
    )
    run.add_argument("--output", default="./runs", metavar="DIR", help="where runs go (default: %(default)s)")
    run.add_argument("--name", default="", help="name of the run (default: the recipe and the time)")
    run.add_argument(
        "--gate", default="", metavar="RULE",
        help="what a model must reach to be exported, e.g. 'coco/AP50 >= 0.5' (default: the recipe's)",
    )  # fmt: skip
    run.add_argument("--verbose", action="store_true", help="show the local runner's own log too")
    run.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from pipelines.run import Options, run

    return run(
        Options(
            name=options.name or f"{options.recipe}-{datetime.now():%Y%m%d-%H%M%S}",
            source=options.source,
            recipe=options.recipe,
            overrides=_overrides(options.overrides),
            nproc=options.nproc,
            data_root=options.data_root,
            output=options.output,
            gate=options.gate,
            verbose=options.verbose,
        )
    )


def _overrides(pairs: list[str]) -> dict[str, object]:
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {pair!r} is not key=value", fix="write it like --set train.epochs=10")
        overrides[key.strip()] = config.parse_value(value)
    return overrides


def _compile(options: argparse.Namespace) -> int:
    from pipelines.compile import compile_pipeline

    compile_pipeline(Path(options.output))
    print(f"wrote {options.output}")
    return 0


def _recipes(options: argparse.Namespace) -> int:
    if options.show:
        print(config.to_json(recipes.load(options.show)), end="")
        return 0
    width = max(map(len, recipes.RECIPES))
    for name, recipe in recipes.RECIPES.items():
        print(f"{name:<{width}}  {(recipe.__doc__ or '').splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
