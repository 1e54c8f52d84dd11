"""Follows a run in a cluster to its end, and explains why its steps wait or fail.

Kubeflow Pipelines 2.17 shows RUNNING for a step whose pod is pending, and FAILED without a cause. So this
module reads the state of the pods. If it cannot reach the cluster's API, messages name the log.
"""

import re
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from components import jobs
from components.launchers import obstacles, output
from components.launchers.backend import Timings
from components.launchers.cluster.backend import ClusterBackend
from components.launchers.cluster.client import ApiError, Cluster, connect
from components.launchers.cluster.pods import find_reason, has_waited, list_pods, newest_failure
from components.launchers.obstacles import Obstacle, ObstacleTracker
from components.launchers.spec import START_TIMEOUT
from components.run_end import read_termination
from pipelines import CLEANUP_TITLE, SEARCH_TITLES, STEP_TITLES
from pipelines.kubeflow import ENDED_STATES, Server, ServiceUnavailable, is_cancelled
from trainer.base import events
from trainer.base.errors import ConfigError, LaunchError
from trainer.base.log import format_duration

POLL_SECONDS = 5.0  # Seconds between two requests.

MAX_OUTAGE_SECONDS = 900.0  # Seconds of an outage of Kubeflow Pipelines after which `follow_run` gives up.

_STEP_TITLES = STEP_TITLES | SEARCH_TITLES | CLEANUP_TITLE
_TITLES_BY_NAME = _STEP_TITLES | {title: title for title in _STEP_TITLES.values()}
"""Titles of the steps by name and by title, because Kubeflow shows either of them."""

_STATE_ORDER = ("FAILED", "CANCELING", "RUNNING", "PENDING")
"""A step with several pods has the first of these states that any of its pods has."""

_DRIVER = " (its driver)"  # Suffix of a step's title, for the pod of Kubeflow that prepares the step.
_LABEL = "pipeline/runid"  # Label of a run's pods, with the run's id.
_MAIN = "main"  # The container of a step's code.
_NODE = "workflows.argoproj.io/node-name"  # Annotation with the names of a pod's step and its graphs.
_STANDALONE = "kubeflow"  # Namespace of the runs if Kubeflow Pipelines is not for several users.
_TIMINGS = Timings(connect=3.0, read=10.0, patience=0.0)
_LINES = 200  # Lines at the end of a log to search for the error.
_SHOWN_LINES = 5  # Lines to show of a log without an error.
_REASON_LIMIT = 500  # Maximum length of a reason.
_FATAL = re.compile(r"F\d{4} \S+ +\d+ \S+\] KFP driver: (.*)")  # The last line of a driver that fails.
_FRAMEWORK_LINE = re.compile(
    r"[IWEF]\d{4} |time=\S+ level=|Error: exit status"
)  # Lines of Kubeflow and Argo.
_FIX_SEPARATOR = re.compile(r"\n\s*fix: ")  # Between the message and the remedy of a printed error.
_MEMORY_FIX = "raise step_memory; finished work is reused"


@dataclass(frozen=True)
class FailureCause:
    """Why a step failed."""

    step: str
    text: str
    fix: str = ""


class Pods:
    """The pods of one run, by default in the namespace `kubeflow`, or in the kubeconfig's or this pod's."""

    def __init__(self, run_id: str, namespace: str) -> None:
        self._run_id = run_id
        self._clusters: list[Cluster] = []
        try:
            cluster = connect(namespace, timings=_TIMINGS)
        except ConfigError:
            return
        names = [cluster.namespace] if namespace else [_STANDALONE, cluster.namespace]
        self._clusters = [cluster.in_namespace(name) for name in dict.fromkeys(names)]

    def step_obstacles(self) -> list[Obstacle]:
        """Return the obstacles that keep pods of steps from starting."""
        found = []
        for cluster, pod in self._last_pods():
            if pod.status.phase == "Pending":
                reason, text, _ = find_reason(pod)
                if not reason and has_waited(pod.metadata.creation_timestamp, cluster.clock.now()):
                    reason, text = newest_failure(cluster, [("Pod", pod.metadata.name)])
                found += [Obstacle(_step_of_pod(pod), reason, _abbreviate(text))] if reason else []
        return found

    def training_obstacles(self) -> list[Obstacle] | None:
        """Return the obstacles that keep the job's pods from starting; None if the job has ended."""
        for cluster in self._clusters[:1] if self._last_pods() else ():
            with suppress(LaunchError, ConfigError):  # The log of the launcher also shows it.
                job = ClusterBackend(cluster).status(jobs.job_name(self._run_id))
                if not job.phase.final:
                    title = STEP_TITLES["train"]
                    return [
                        item._replace(name=f"{title}: {item.name}") for item in obstacles.find_obstacles(job)
                    ]
        return None

    def failure_causes(self) -> Iterator[FailureCause]:
        """Yield the cause of failure of each step whose last pod failed."""
        for cluster, pod in self._last_pods():
            if text := _describe_failure(cluster, pod):
                yield FailureCause(_step_of_pod(pod), *_FIX_SEPARATOR.split(text, maxsplit=1))

    def recorded_outcomes(self) -> Iterator[str]:
        """Yield the texts that steps recorded in their pods' status: the outcome, or the best trial."""
        for _, pod in self._last_pods():
            ended = read_termination(pod)
            if ended and ended.exit_code == 0 and ended.message:
                yield f"{_step_of_pod(pod)}: {'; '.join(ended.message.splitlines())}"

    def find_namespace(self) -> str:
        """Return the namespace of the run's pods; empty if unknown."""
        return next((cluster.namespace for cluster, _ in self._last_pods()), "")

    def _last_pods(self) -> list[tuple[Cluster, Any]]:
        """Return the last pod (V1Pod) of every step."""
        pods = sorted(self._list_pods(f"{_LABEL}={self._run_id}"), key=lambda item: _creation_time(item[1]))
        last = {re.sub(r"\(\d+\)$", "", _node_path(pod)): (cluster, pod) for cluster, pod in pods}
        return list(last.values())

    def _list_pods(self, label: str) -> Iterator[tuple[Cluster, Any]]:
        for cluster in list(self._clusters):
            try:
                pods = list_pods(cluster, label)
            except ApiError as error:
                if not error.transient:
                    self._clusters.remove(cluster)
                continue
            if pods:
                self._clusters = [cluster]
                yield from ((cluster, pod) for pod in pods)
                return


def step_title(node: str) -> str:
    """Return the title of the step of a workflow node, e.g. `run(0).root(0).train(0).executor(0)`."""
    names = [part.partition("(")[0] for part in node.split(".")]
    driver = _DRIVER if names[-1].endswith("-driver") else ""
    plain = [name.removesuffix("-driver") for name in names]
    known = next((_TITLES_BY_NAME[name] for name in reversed(plain) if name in _TITLES_BY_NAME), "")
    other = plain[-2] if plain[-1] == "executor" and len(plain) > 1 else plain[-1]
    return (known or other) + driver


def _step_of_pod(pod: Any) -> str:
    return step_title(_node_path(pod) or pod.metadata.name)


def _node_path(pod: Any) -> str:
    return str((pod.metadata.annotations or {}).get(_NODE, ""))


def _creation_time(pod: Any) -> float:
    return float(pod.metadata.creation_timestamp.timestamp())


def _abbreviate(text: str | None) -> str:
    return " ".join((text or "").split())[:_REASON_LIMIT]


def _describe_failure(cluster: Cluster, pod: Any) -> str:
    if pod.status.phase == "Failed" and pod.status.reason:  # Evicted, NodeLost, ...
        return f"{pod.status.reason}: {_abbreviate(pod.status.message)}"
    statuses = [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]
    ended = [(item.name, item.state.terminated) for item in statuses if item.state]
    bad = [(name, state) for name, state in ended if state and state.exit_code != 0]
    container, state = next((item for item in bad if item[0] == _MAIN), bad[0] if bad else ("", None))
    name, namespace = pod.metadata.name, cluster.namespace
    if state is None:
        return f"the pod {name} failed" if pod.status.phase == "Failed" else ""
    if state.reason == "OOMKilled":
        return f"the step used too much memory and was killed (OOMKilled)\n  fix: {_MEMORY_FIX}"
    if state.message and state.message.strip():
        return str(state.message).strip().removeprefix("error: ")
    read = cluster.core.read_namespaced_pod_log
    options: Any = {"container": container, "tail_lines": _LINES}
    try:
        printed = find_error(cluster.call("get", "pods/log", read, name, namespace, **options))
    except ApiError:
        printed = ""
    reason = "" if state.reason in (None, "Error") else f" ({state.reason})"
    command = f"kubectl -n {namespace} logs {name} -c {container}"
    return printed or f"{container} ended with exit code {state.exit_code}{reason}; see `{command}`"


def find_error(log: str) -> str:
    """Return the error at the end of a log, or its last lines if there is none."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    if message := output.failure_message(lines):
        return message
    if fatal := [match[1] for line in lines if (match := _FATAL.match(line))]:
        return fatal[-1].rpartition(") failed: ")[2]
    step_lines = [line for line in lines if not _FRAMEWORK_LINE.match(line) and not events.parse(line)]
    return "\n".join((step_lines or lines)[-_SHOWN_LINES:])


def follow_run(
    server: Server,
    run_id: str,
    *,
    deadline: int = 0,
    conditional: bool = False,
    start_timeout: float = START_TIMEOUT,
) -> None:
    """Print the states of a run and its steps, and reasons for waiting, until it has ended.

    `deadline` is in seconds (0: none); a `conditional` run may skip training. If a step's pod cannot start
    and only a user can fix that, the run is stopped, like a job, after a part of `start_timeout`.
    """
    shown: dict[str, str] = {}
    step_tracker, training_tracker = ObstacleTracker(), ObstacleTracker()
    pods = Pods(run_id, server.namespace)
    start = last_answer = time.monotonic()
    away = has_ended = False

    def show(text: str) -> None:
        print(f"{format_duration(time.monotonic() - start):>8}  {text}", flush=True)

    while True:
        try:
            run = server.read_run(run_id)
        except ServiceUnavailable as error:
            if time.monotonic() - last_answer > MAX_OUTAGE_SECONDS:
                raise
            if not away:
                show(f"no response, trying again: {error.message}")
            away = True
            time.sleep(POLL_SECONDS)
            continue
        if away:
            show("Kubeflow Pipelines responds again")
        last_answer, away = time.monotonic(), False
        states = _step_states(run)
        # Kubeflow records the end of a run slightly before the end of its last steps.
        if run.state in ENDED_STATES and not has_ended and {"PENDING", "RUNNING"} & {*states.values()}:
            has_ended = True
            time.sleep(POLL_SECONDS)
            continue
        for name, state in states.items():
            if state and state != shown.get(name):
                shown[name] = state
                # The steps of a stopped run fail.
                show(f"{name}: {'stopped' if state == 'FAILED' and is_cancelled(run) else state.lower()}")
        if run.state in ENDED_STATES:
            raise_if_failed(server, run, pods, deadline)
            for text in _closing_lines(pods, skipped=conditional and STEP_TITLES["train"] not in shown):
                show(text)
            return
        training = pods.training_obstacles()
        news = training_tracker.report_changes(training) if training is not None else ()
        for line in (*step_tracker.report_changes(pods.step_obstacles()), *news):
            show(line)
        _stop_if_blocked(server, run, step_tracker, start_timeout / obstacles.USER_OBSTACLE_DIVISOR)
        time.sleep(POLL_SECONDS)


def _step_states(run: Any) -> dict[str, str]:
    """Return the states of a run's steps by title, without drivers and inner graphs, and of the run."""
    found: dict[str, set[str]] = {}
    for item in _tasks(run):
        if item.display_name in _TITLES_BY_NAME and item.state:
            found.setdefault(_TITLES_BY_NAME[item.display_name], set()).add(item.state)
    states = {name: next((one for one in _STATE_ORDER if one in of), min(of)) for name, of in found.items()}
    return states | {"run": run.state or ""}


def _closing_lines(pods: Pods, *, skipped: bool) -> Iterator[str]:
    """Yield the last lines to print about a successful run, which trained nothing if `skipped` is true."""
    if skipped:
        yield "nothing new: nothing was trained (see the step that prepares the data)"
    yield from pods.recorded_outcomes()


def _stop_if_blocked(server: Server, run: Any, step_tracker: ObstacleTracker, seconds: float) -> None:
    """Stop a run and raise LaunchError if an obstacle that only a user can remove has lasted for longer."""
    if obstacle := step_tracker.find_lasting(seconds):
        server.stop_run(run.run_id)
        name, again = run.display_name or run.run_id, "then start the run again: it reuses finished work"
        raise LaunchError(
            f"the run {name} was stopped after {seconds:.0f} s: {obstacle.name} cannot start: {obstacle}",
            fix=f"{obstacle.fix}; {again}",
        )


def _tasks(run: Any) -> list[Any]:
    return (run.run_details.task_details if run.run_details else None) or []


def raise_if_failed(server: Server, run: Any, pods: Pods, deadline: int) -> None:
    """Raise an error unless a run, which must have ended, has succeeded."""
    if run.state == "SUCCEEDED":
        return
    name = f"the run {run.display_name or run.run_id}"
    if is_cancelled(run):
        again = "a new run, or `Retry` in the UI, reuses finished work"
        raise LaunchError(f"{name} was stopped", fix=f"start the run again: {again}")
    if run.state != "FAILED":
        raise LaunchError(f"{name} ended with the state {run.state.lower()}")
    took = (run.finished_at - run.created_at).total_seconds() if run.created_at and run.finished_at else 0.0
    if deadline and took >= deadline:
        raise LaunchError(
            f"{name} reached its deadline of {deadline} s",
            fix="raise --deadline: a new run reuses finished work",
        )
    causes, lines = _failure_causes(run, pods), []
    for cause in causes:
        first, *rest = f"{cause.step}: {cause.text.strip()}".splitlines()
        rest = textwrap.dedent("\n".join(rest)).splitlines()
        # A single cause determines the fix of the error.
        rest += [f"fix: {cause.fix}"] if cause.fix and len(causes) > 1 else []
        lines += [f"  {first}", *(f"    {line}" for line in rest)]
    if len(causes) == 1 and causes[0].fix:
        remedy = causes[0].fix
    elif causes and all(cause.fix for cause in causes):
        remedy = "see the steps above"
    else:
        steps = " and ".join(dict.fromkeys(cause.step for cause in causes)) or "the step that failed"
        namespace = pods.find_namespace() or server.namespace or "kubeflow"
        remedy = (
            f"look at the log of {steps}: in the UI at {server.link('runs', run.run_id)}, or "
            f"`kubectl -n {namespace} logs -l {_LABEL}={run.run_id} -c {_MAIN} --prefix --tail 50`"
        )
    raise LaunchError("\n".join([f"{name} failed", *lines]), fix=remedy)


def _failure_causes(run: Any, pods: Pods) -> list[FailureCause]:
    """Return the causes of failed steps, from Kubeflow's API and the pods."""
    failed = [item for item in _tasks(run) if item.state == "FAILED"]
    steps: dict[str, Any] = {}
    for item in failed:  # Skip the graphs around steps, and single attempts.
        plain = (item.display_name or "").removesuffix("-driver")
        driver = _DRIVER if plain != item.display_name else ""
        if driver or plain in _TITLES_BY_NAME:
            steps[_TITLES_BY_NAME.get(plain, plain) + driver] = item
    causes = {cause.step: cause for cause in pods.failure_causes()}
    for step, task in steps.items():
        if message := _error_message(task.error):
            causes[step] = FailureCause(step, *_FIX_SEPARATOR.split(message, maxsplit=1))
    if message := _error_message(run.error):
        causes["run"] = FailureCause("run", message)
    causes |= {step: FailureCause(step, "failed") for step in steps if step not in causes}
    return list(causes.values())


def _error_message(error: Any) -> str:
    return (getattr(error, "message", None) or "").strip()
