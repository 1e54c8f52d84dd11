"""Reads from the pods of a run why a step is pending or failed.

Kubeflow Pipelines shows RUNNING for a step whose pod is pending, and FAILED without a cause. If the cluster's
API cannot be reached, a run has no pods here.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from components import jobs
from components.launchers import output
from components.launchers.backend import Timings
from components.launchers.cluster.client import ApiError, Cluster, connect
from components.launchers.cluster.pods import events
from components.launchers.pod_template import LABEL_NAME
from trainer.base.errors import ConfigError

LABEL = "pipeline/runid"
"""Label of a run's pods, with the run's id."""

MAIN = "main"
"""The container of a step's code."""

_NODE = "workflows.argoproj.io/node-name"  # Annotation with the names of a pod's step and its graphs.
_STANDALONE = "kubeflow"  # Namespace of the runs if Kubeflow Pipelines is not for several users.
_TIMINGS = Timings(connect=3.0, read=10.0, patience=0.0)
_SLOW = 30.0  # Seconds after which the events of a starting pod are read.
_USUAL = (None, "PodInitializing", "ContainerCreating")
_LINES = 200  # Of a log, which are searched for the error.
_LAST = 5  # Lines to show of a log without an error.
_REASON_LIMIT = 500  # Characters of a reason.
_FATAL = re.compile(r"F\d{4} \S+ +\d+ \S+\] KFP driver: (.*)")  # The last line of a driver that fails.
_AROUND = re.compile(r"[IWEF]\d{4} |time=\S+ level=|Error: exit status")  # Lines of Kubeflow and Argo.
_FIX = re.compile(r"\n\s*fix: ")
_MEMORY = "use a larger --size (or step_memory); finished work is reused"


@dataclass(frozen=True)
class Step:
    """A step, or the pod of Kubeflow Pipelines that prepares it."""

    title: str
    driver: bool = False

    def __str__(self) -> str:
        return f"{self.title} (its driver)" if self.driver else self.title


@dataclass(frozen=True)
class Cause:
    """Why a step failed."""

    step: Step
    text: str
    fix: str = ""

    @classmethod
    def of(cls, step: Step, printed: str) -> "Cause":
        """Split a printed error into its message and its fix."""
        return cls(step, *_FIX.split(printed, maxsplit=1))


@dataclass(frozen=True)
class Wait:
    """Why a step does not start."""

    step: Step
    reason: str
    text: str


class Pods:
    """The pods of one run; `titles` are those of the steps by name.

    An empty namespace is that of the kubeconfig or of this pod, or `kubeflow`.
    """

    def __init__(self, run_id: str, namespace: str, titles: dict[str, str]) -> None:
        self._run_id, self._titles = run_id, titles
        self._places: list[Cluster] = []
        try:
            cluster = connect(namespace, timings=_TIMINGS)
        except ConfigError:
            return
        names = [cluster.namespace] if namespace else [_STANDALONE, cluster.namespace]
        self._places = [cluster.within(name) for name in dict.fromkeys(names)]

    def waiting(self) -> list[Wait]:
        """Return why pods of the run and of its training job do not start."""
        pods = [(cluster, pod, self._step(pod)) for cluster, pod in self._newest()]
        training = self._titles.get("train", "train")
        for cluster, pod in self._all(f"{LABEL_NAME}={jobs.name_of(self._run_id)}") if pods else ():
            pods.append((cluster, pod, Step(f"{training}: pod {pod.metadata.name}")))
        return [wait for cluster, pod, step in pods for wait in _waits(cluster, pod, step)]

    def failed(self) -> list[Cause]:
        """Return why steps failed: those whose last pod failed."""
        found = ((pod, _failure_of(cluster, pod)) for cluster, pod in self._newest())
        return [Cause.of(self._step(pod), text) for pod, text in found if text]

    def without_secret(self, name: str) -> str:
        """Return the run's namespace if the Secret is missing there; empty if it exists, or if unknown."""
        for cluster in self._places[:1]:
            read = partial(cluster.core.read_namespaced_secret, name, cluster.namespace)
            try:
                cluster.call("get", "secrets", read)
            except ApiError as error:
                return cluster.namespace if error.status == 404 else ""
        return ""

    def namespace(self) -> str:
        """Return the namespace of the run's pods; empty if unknown."""
        return next((cluster.namespace for cluster, _ in self._newest()), "")

    def _newest(self) -> list[tuple[Cluster, Any]]:
        """Return the last pod (V1Pod) of every step."""
        newest: dict[str, tuple[Cluster, Any]] = {}
        for cluster, pod in self._all(f"{LABEL}={self._run_id}"):
            node = re.sub(r"\(\d+\)$", "", _node(pod))
            before = newest.get(node)
            if before is None or _created(before[1]) <= _created(pod):
                newest[node] = cluster, pod
        return list(newest.values())

    def _all(self, label: str) -> Iterator[tuple[Cluster, Any]]:
        for cluster in list(self._places):
            listing = partial(cluster.core.list_namespaced_pod, cluster.namespace, label_selector=label)
            try:
                pods = cluster.call("list", "pods", listing).items
            except ApiError as error:
                if not error.passing:
                    self._places.remove(cluster)
                continue
            if pods:
                self._places = [cluster]
                yield from ((cluster, pod) for pod in pods)
                return

    def _step(self, pod: Any) -> Step:
        return step_of(_node(pod) or pod.metadata.name, self._titles)


def step_of(node: str, titles: dict[str, str]) -> Step:
    """Return the step of a workflow node, e.g. `run(0).root(0).exit-handler-1(0).train(0).executor(0)`."""
    names = [part.partition("(")[0] for part in node.split(".")]
    driver = names[-1].endswith("-driver")
    plain = [name.removesuffix("-driver") for name in names]
    known = next((titles[name] for name in reversed(plain) if name in titles), "")
    return Step(known or (plain[-2] if plain[-1] == "executor" and len(plain) > 1 else plain[-1]), driver)


def _waits(cluster: Cluster, pod: Any, step: Step) -> Iterator[Wait]:
    if pod.status.phase != "Pending":
        return
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            yield Wait(step, condition.reason or "Unschedulable", _short(condition.message))
            return
    for item in _containers(pod):
        waiting = item.state and item.state.waiting
        if waiting and waiting.reason not in _USUAL:
            # Kubernetes alternates between the two names of the same problem.
            reason = waiting.reason.replace("ErrImagePull", "ImagePullBackOff")
            yield Wait(step, reason, _short(waiting.message))
            return
    if time.time() - _created(pod) > _SLOW:
        recent_events = [line.partition(": ") for line in events(cluster, "Pod", pod.metadata.name)]
        for reason, _, text in recent_events[-1:]:
            if reason.startswith("Failed"):
                yield Wait(step, reason.partition(" ")[0], _short(text))


def _node(pod: Any) -> str:
    return (pod.metadata.annotations or {}).get(_NODE, "")


def _created(pod: Any) -> float:
    return pod.metadata.creation_timestamp.timestamp()


def _containers(pod: Any) -> list[Any]:
    return [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]


def _short(text: str | None) -> str:
    return " ".join((text or "").split())[:_REASON_LIMIT]


def _failure_of(cluster: Cluster, pod: Any) -> str:
    if pod.status.phase == "Failed" and pod.status.reason:  # Evicted, NodeLost, ...
        return f"{pod.status.reason}: {_short(pod.status.message)}"
    ended = [(item.name, item.state.terminated) for item in _containers(pod) if item.state]
    bad = [(name, state) for name, state in ended if state and state.exit_code != 0]
    container, state = next((item for item in bad if item[0] == MAIN), bad[0] if bad else ("", None))
    name, namespace = pod.metadata.name, cluster.namespace
    if state is None:
        return f"the pod {name} failed" if pod.status.phase == "Failed" else ""
    if state.reason == "OOMKilled":
        return f"it used too much memory and was killed (OOMKilled)\n  fix: {_MEMORY}"
    if state.message and state.message.strip():
        return state.message.strip().removeprefix("error: ")
    read = partial(
        cluster.core.read_namespaced_pod_log, name, namespace, container=container, tail_lines=_LINES
    )
    try:
        printed = error_of_log(cluster.call("get", "pods/log", read))
    except ApiError:
        printed = ""
    reason = "" if state.reason in (None, "Error") else f" ({state.reason})"
    command = f"kubectl -n {namespace} logs {name} -c {container}"
    return printed or f"{container} ended with exit code {state.exit_code}{reason}; see `{command}`"


def error_of_log(log: str) -> str:
    """Return the error at the end of a log, or else its last lines."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    if message := output.own_message(lines):
        return message
    if fatal := [match[1] for line in lines if (match := _FATAL.match(line))]:
        return fatal[-1].rpartition(") failed: ")[2]
    of_step = [line for line in lines if not _AROUND.match(line)]
    return "\n".join((of_step or lines)[-_LAST:])
