"""The command line `kubedet COMMAND`: the functions of `kubedet.api` as commands."""

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Annotated, Any

import typer

from kubedet import api
from kubedet.commands import Builders, Docstring, Option, make_command, read_options
from kubedet.display import data, jobs, make_printer, models, runs
from kubedet.interface import check_text, translate_errors
from kubedet.job_menu import job_menu
from pipelines import Access, JobTarget
from pipelines.pipeline_run import CompileOptions, PipelineRun
from trainer.base import log
from trainer.base.errors import EXIT_FAILURE, EXIT_USAGE, KubedetError
from trainer.base.safe_text import format_message

TITLE = "Train an object detector on Kubeflow, or on one machine, with one pipeline."
EXIT_CODES = "Exit codes: 0 for success; 2 for invalid options or data; 143 if stopped; 1 otherwise."
_COMPLETION = "_KUBEDET_COMPLETE"  # Environment variable that the shell sets to request completions.


@dataclass(frozen=True)
class Command:
    """A command: a function of the API, and the function that prints its result."""

    function: Callable[..., Any]
    show: Callable[..., int | None]
    logs: bool = False  # Whether to set up logging.


def show_nothing(result: object) -> None:
    """Print nothing, because the command has printed its results itself."""


def return_code(code: int) -> int:
    """Return the exit code that the function returned."""
    return code


GROUPS = {
    "schedule": "Run the pipeline on a schedule in Kubeflow.",
    "recipes": "List the recipes, and explain their keys.",
    "weights": "Fetch the published weights that recipes start from.",
    "data": "Inspect, verify, preview, merge and prune data.",
    "model": "List, promote and verify published models.",
    "job": "Submit, list, watch and stop training jobs.",
    "cluster": "Write the manifests and the compiled pipeline for a cluster.",
}
"""Help of the commands that have subcommands."""

COMMANDS: Mapping[str, Command] = {
    "run": Command(api.run, show_nothing),
    "submit": Command(api.submit, runs.show_run),
    "schedule create": Command(api.schedule_create, runs.show_schedule),
    "schedule list": Command(api.schedule_list, runs.show_schedules),
    "schedule history": Command(api.schedule_history, runs.show_history),
    "schedule run": Command(
        api.schedule_run, make_printer("schedule {name}: started the run {result[0]}\n{result[1]}")
    ),
    "schedule delete": Command(api.schedule_delete, make_printer("schedule {name}: deleted")),
    "tune": Command(api.tune, show_nothing),
    "recipes list": Command(api.recipes_list, models.show_recipes),
    "recipes show": Command(api.recipes_show, models.show_config),
    "recipes space": Command(api.recipes_space, jobs.show_text),
    "recipes explain": Command(api.recipes_explain, models.show_explanations),
    "weights fetch": Command(api.weights_fetch, models.show_weights, logs=True),
    "data inspect": Command(api.data_inspect, data.show_report),
    "data verify": Command(api.data_verify, data.show_verification),
    "data preview": Command(api.data_preview, data.show_preview),
    "data merge": Command(api.data_merge, data.show_merge_result),
    "data prune": Command(api.data_prune, data.show_pruning),
    "evaluate": Command(api.evaluate, models.show_evaluation, logs=True),
    "predict": Command(api.predict, models.show_predictions),
    "serve": Command(api.serve, show_nothing),
    "model list": Command(api.model_list, models.show_models),
    "model show": Command(api.model_show, models.show_model_card),
    "model verify": Command(api.model_verify, models.show_verification),
    "model promote": Command(api.model_promote, make_printer("current version of {name}: {result}")),
    "job submit": Command(api.job_submit, jobs.show_submitted),
    "job render": Command(api.job_render, jobs.show_text),
    "job fields": Command(api.job_fields, models.show_explanations),
    "job list": Command(api.job_list, jobs.show_jobs),
    "job status": Command(api.job_status, jobs.show_status),
    "job logs": Command(api.job_logs, jobs.show_lines),
    "job stop": Command(api.job_stop, make_printer("deleted {name} and its pods")),
    "job exec": Command(api.job_exec, return_code),
    "job menu": Command(job_menu, show_nothing),
    "cluster manifests": Command(api.cluster_manifests, make_printer("wrote {result}: see its README.md")),
    "cluster compile": Command(api.compile, make_printer("wrote {result}")),
    "doctor": Command(api.doctor, jobs.show_checks),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 2 for user errors, 143 if it was stopped and can be continued, otherwise 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # File names may be undecodable.
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        check_text(words, "the command line")
        with translate_errors():
            return make_app(words)(words, prog_name="kubedet", standalone_mode=False) or 0
    except KubedetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except typer.TyperException as error:
        return _report_usage_error(error)
    except BrokenPipeError:  # E.g. `kubedet recipes list | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _report_usage_error(error: typer.TyperException) -> int:
    """Print an error in the command line and the command's usage; return the exit code."""
    context, text = getattr(error, "ctx", None), error.format_message()
    if context and text == context.get_help():  # No command was given.
        print(text, file=sys.stderr)
        return EXIT_USAGE
    if context:
        print(context.get_usage(), file=sys.stderr)
        text += f"\n  fix: see `{context.command_path} --help`"
    print(f"error: {format_message(text)}", file=sys.stderr)
    return EXIT_USAGE


def make_app(words: Sequence[str] | None = None) -> typer.Typer:
    """Return Typer's application; to start fast, only the command that `words` begin with has options."""
    settings: dict[str, Any] = {
        "rich_markup_mode": None,
        "pretty_exceptions_enable": False,
        "no_args_is_help": True,
        "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 120},
    }
    app = typer.Typer(name="kubedet", help=TITLE, callback=_main_callback, **settings)
    groups: dict[str, typer.Typer] = {}
    for name, entry in COMMANDS.items():
        group, _, verb = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(name=group, help=GROUPS[group], **settings)
            app.add_typer(groups[group])
        parts = name.split()
        is_needed = words is None or words[: len(parts)] == parts or _COMPLETION in os.environ
        command = _wrap_command(entry) if is_needed else show_nothing
        text = Docstring.parse(entry.function).text
        (groups[group] if group else app).command(verb, help=text, epilog=EXIT_CODES)(command)
    return app


def command_options(entry: Command) -> dict[str, list[Option]]:
    """Return the options of a command by parameter, of its function and of the function that prints."""
    groups = read_options(entry.function, _builders_for(entry.function))
    return groups | read_options(entry.show, {}, only_keywords=True)


def _builders_for(function: Callable[..., Any]) -> Builders:
    builders: Builders = {item: item for item in (Access, CompileOptions, JobTarget, PipelineRun)}
    if any(item.annotation == "JobSpec" for item in signature(function).parameters.values()):
        from components.launchers.job_options import read_job

        builders |= {"JobSpec": read_job}
    return builders


def _wrap_command(entry: Command) -> Callable[..., int]:
    builders, readers = _builders_for(entry.function), {"overrides": _read_overrides, "job": _read_job}
    command = make_command(entry.function, entry.show, builders, readers)

    @wraps(command)
    def run(**given: Any) -> int:
        if entry.logs:
            log.setup()
        try:
            code: int = command(**given)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        return code

    return run


def _read_overrides(texts: list[str]) -> dict[str, Any]:
    from trainer.config.parsing import parse_overrides

    return parse_overrides(texts)


def _read_job(texts: list[str]) -> dict[str, Any]:
    from components.launchers.job_options import parse_fields

    return parse_fields(texts)


def _print_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version

        print(f"kubedet {version('kubedet')}")
        raise typer.Exit


def _main_callback(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


if __name__ == "__main__":
    sys.exit(main())
