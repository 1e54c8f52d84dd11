"""Renders a job's specification as manifests or command lines: pure functions, no requests."""

import shlex
from typing import Any

import yaml

from components.launchers.spec import JobSpec
from trainer.base.errors import ConfigError

TARGETS = ("pytorchjob", "trainjob", "indexed-job", "runai", "runai-submit-dist", "runai-submit-pytorch")
"""A PyTorchJob of the Training Operator, a TrainJob of Kubeflow Trainer, a plain indexed Job, and Run:ai's
commands: of 2.20 and later, of 2.13 to 2.19, and before."""


def render(target: str, job: JobSpec) -> str:
    """Render a job for a cluster, as text that can be applied or pasted.

    Args:
        target: one of TARGETS.
        job: the job.

    Returns:
        YAML documents, or a command line for a POSIX shell.

    Raises:
        ConfigError: there is no such target, or it cannot run this job.
    """
    if target not in TARGETS:
        raise ConfigError(f"no target {target!r}", fix=f"use one of: {', '.join(TARGETS)}")
    if not job.image:
        raise ConfigError("the job names no container image", fix="set image")
    if target == "pytorchjob":
        from components.launchers.render import pytorchjob

        return _documents([pytorchjob.manifest(job)])
    if target == "trainjob":
        from components.launchers.render import trainjob

        return _documents(trainjob.manifests(job))
    if target == "indexed-job":
        from components.launchers.render import indexed_job

        return _documents(indexed_job.manifests(job))
    from components.launchers import runai

    unsupported = runai.left_out(job, target)
    notes = [f"# Run:ai's command line has no option for: {', '.join(unsupported)}"] if unsupported else []
    return "\n".join([*notes, _wrapped(runai.command(job, target))]) + "\n"


def _documents(manifests: list[dict[str, Any]]) -> str:
    return yaml.safe_dump_all(manifests, sort_keys=False, width=110)


def _wrapped(command: list[str]) -> str:
    """One option a line; what follows `--` stays together, for it is another program's."""
    options = command[: command.index("--")]
    lines = [options[0]]
    for word in options[1:]:
        if word.startswith("--") and word != "--name":
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    lines[-1] += " -- " + shlex.join(command[len(options) + 1 :])
    return " \\\n".join(lines)
