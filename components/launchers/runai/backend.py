"""Training jobs as workloads of Run:ai: `runai training standard` on one node, `pytorch` on several."""

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from components.launchers.backend import Backend, JobStatus, LogLine, Phase
from components.launchers.render import runai as words
from components.launchers.render.labels import LABEL_MANAGED, LABEL_SPEC, MANAGED_BY
from components.launchers.runai import cli_output
from components.launchers.runai.cli import AbsentError, Cli, FlagError
from components.launchers.spec import JobSpec
from components.launchers.timings import Timings
from trainer.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

_TIMINGS = Timings(poll=5.0)

KINDS = ("pytorch", "standard")
"""Kinds of trainings that kubedet submits, in the order in which a name is looked for."""

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ?")


@dataclass(frozen=True, order=True)
class _Stamp:
    """When a line was printed; of one container, so of one zone."""

    second: str
    fraction: str
    zone: str


_NEVER = _Stamp("", "", "")


class RunaiBackend(Backend):
    """Runs jobs through Run:ai's command line, in one project.

    Args:
        cli: the program and its project.
        timings: how long things may take.
    """

    def __init__(self, cli: Cli, timings: Timings = _TIMINGS) -> None:
        self.cli, self.timings = cli, timings
        self._kinds: dict[str, str] = {}

    def submit(self, job: JobSpec) -> str:
        """Start a job, or adopt the same one if it exists already; returns its name.

        One of the same name that has ended is deleted first, if kubedet made it.

        Raises:
            ConfigError: it is elastic, names no image or a namespace, or `runai` cannot be used.
            LaunchError: it was refused, or the name is taken.
        """
        job = self._complete(job)
        kind = words.kind(job)
        existing = self._describe(job.name)
        if existing is not None:
            if self._adopts(existing, job):
                return job.name
            self.stop(job.name)
        if ignored := words.left_out(job):
            logger.warning("Run:ai's command line has no option for: %s", ", ".join(ignored))
        managed_labels = {LABEL_MANAGED: MANAGED_BY, LABEL_SPEC: job.fingerprint}
        self.cli.ask(*words.command(job, managed_labels)[1:], seconds=self.timings.submit)
        self._kinds[job.name] = kind
        logger.info("submitted the %s training %s", kind, job.name)
        return job.name

    def status(self, name: str) -> JobStatus:
        """Return a job's status.

        Raises:
            ConfigError, LaunchError: Run:ai does not say.
        """
        workload = self._describe(name)
        return JobStatus(name, Phase.GONE) if workload is None else workload.status

    def list_jobs(self) -> list[cli_output.Listed]:
        """Return the trainings of the project, the newest first.

        Raises:
            ConfigError, LaunchError: Run:ai does not say.
        """
        by_name: dict[str, cli_output.Listed] = {}
        for kind in KINDS:
            for item in cli_output.workloads(self._ask("training", kind, "list", flags=("--json",))):
                by_name.setdefault(item.status.name, item)
        return sorted(by_name.values(), key=lambda item: item.status.created, reverse=True)

    def logs(self, name: str, *, follow: bool = True, pod: str = "") -> Iterator[LogLine]:
        """Yield the lines of one pod as they come; a stream that breaks is taken up where it broke.

        Args:
            name: the job's name.
            follow: go on until the job has ended; else only what is there now.
            pod: the pod's name; empty is the first node's.

        Raises:
            ConfigError, LaunchError: Run:ai does not say.
        """
        last = _NEVER
        while True:
            status = self.status(name)
            ended = status.phase.final
            if status.phase is Phase.GONE:
                return
            since = last  # A stream that is opened anew begins with lines of this second.
            try:
                for line in self._read(name, follow and not ended, pod, since):
                    stamp, text = _split(line)
                    if stamp is None or stamp > since:
                        last = max(last, stamp or last)
                        yield LogLine(pod or _first_pod(status), text)
            except LaunchError as error:
                # Its pods do not run yet, or no more; or the connection broke.
                if not follow:
                    raise
                if ended:
                    logger.warning("%s", error.message)
            if ended or not follow:
                return
            time.sleep(self.timings.poll)

    def tail(self, name: str, pod: str, lines: int) -> list[str]:
        """Return the last lines of a pod; none where Run:ai does not give them."""
        try:
            output = self.cli.ask(*self._about("logs", name), *_pod(pod), "--tail", str(lines))
        except LaunchError:
            return []
        return output.splitlines()

    def execute(self, name: str, command: list[str], *, pod: str = "", terminal: bool = False) -> int:
        """Run a command in a pod, on this process's output; returns its exit code.

        Args:
            name: the job's name.
            command: program and arguments.
            pod: the pod's name; empty is the first node's.
            terminal: give it this process's terminal.

        Raises:
            ConfigError: `runai` is not installed.
        """
        shell = ("--stdin", "--tty") if terminal else ()
        return self.cli.attach(*self._about("exec", name), *_pod(pod), *shell, "--", *command)

    def stop(self, name: str, *, wait: bool = True) -> None:
        """Delete a job and its pods; one that is gone already is no error.

        Args:
            name: its name.
            wait: until it is gone.

        Raises:
            LaunchError: somebody else made it, or it is not gone after Timings.removal.
        """
        workload = self._describe(name)
        if workload is None:
            return
        if workload.labels is not None and workload.labels.get(LABEL_MANAGED, "") != MANAGED_BY:
            raise _not_managed(name)
        try:
            self.cli.ask(*self._about("delete", name))
        except AbsentError:
            return
        end = time.monotonic() + self.timings.removal
        while wait and self._describe(name) is not None:
            if time.monotonic() > end:
                raise LaunchError(
                    f"the workload {name} was deleted, and is still there after {self.timings.removal:g} s",
                    fix="see what holds it: runai training list",
                )
            time.sleep(self.timings.poll)

    def _complete(self, job: JobSpec) -> JobSpec:
        """Put in the project, and refuse what Run:ai decides by itself."""
        project = job.runai_queue or self.cli.project
        if self.cli.project not in ("", project):
            raise ConfigError(
                f"the job's runai_queue is {project}, and the project is {self.cli.project}",
                fix="name the same one twice, or only once",
            )
        if job.namespace:
            raise ConfigError(
                "Run:ai puts a job into its project's namespace", fix="leave namespace out; name --project"
            )
        if not job.image:
            raise ConfigError("the job names no container image", fix="set image")
        self.cli = replace(self.cli, project=project)
        return replace(job, runai_queue=project)

    def _adopts(self, existing: cli_output.Workload, job: JobSpec) -> bool:
        """Decide on an existing workload of that name: True adopts it, False replaces it."""
        name, labels = job.name, existing.labels
        if labels is None:
            raise LaunchError(
                f"Run:ai has a workload {name} already, and this version does not tell whose it is",
                fix=f"kubedet job stop --backend runai {name}, or give the job another name",
            )
        if labels.get(LABEL_MANAGED) != MANAGED_BY:
            raise _not_managed(name)
        if labels.get(LABEL_SPEC) != job.fingerprint:
            logger.info("the workload %s is there with another specification: deleting it", name)
        elif existing.status.phase is Phase.FAILED:
            logger.info("the workload %s failed: deleting it, to start anew", name)
        else:
            logger.info("the workload %s is there already: taking it up", name)
            return True
        return False

    def _describe(self, name: str) -> cli_output.Workload | None:
        """Look for a workload among the kinds, first where it was last; None where there is none."""
        last_kind = self._kinds.get(name)
        for kind in sorted(KINDS, key=lambda kind: kind != last_kind):
            try:
                text = self._ask("training", kind, "describe", name, flags=("--output", "json"))
            except AbsentError:
                continue
            if workload := cli_output.workload(text, name):
                distributed = "pytorch" in workload.framework
                self._kinds[name] = ("pytorch" if distributed else "standard") if workload.framework else kind
                return workload
        return None

    def _ask(self, *arguments: str, flags: tuple[str, ...]) -> str:
        """Call the program with the options for JSON, and without them where a version has none."""
        try:
            return self.cli.ask(*arguments, *flags)
        except FlagError:
            return self.cli.ask(*arguments)

    def _read(self, name: str, follow: bool, pod: str, since: _Stamp) -> Iterator[str]:
        options = ["--timestamps", *_pod(pod)]
        options += ["--follow"] if follow else []
        options += ["--since-time", since.second + since.zone] if since.second else []
        return self.cli.stream(*self._about("logs", name), *options)

    def _about(self, verb: str, name: str) -> tuple[str, ...]:
        return ("training", self._kinds.get(name, KINDS[0]), verb, name)


def _pod(name: str) -> tuple[str, ...]:
    return ("--pod", name) if name else ()


def _first_pod(status: JobStatus) -> str:
    return min(status.pods, key=lambda pod: pod.rank).name if status.pods else status.name


def _split(line: str) -> tuple[_Stamp | None, str]:
    """Return a line's time and text; no time where the line does not begin with one."""
    match = _STAMP.match(line)
    if match is None:
        return None, line
    return _Stamp(match[1], (match[2] or "").ljust(9, "0"), match[3]), line[match.end() :]


def _not_managed(name: str) -> LaunchError:
    return LaunchError(
        f"the workload {name} was not made by kubedet, which leaves it alone",
        fix="give the job another name, or delete that one with runai",
    )
