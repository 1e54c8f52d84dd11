"""What a user does with a cluster, and what is really there beside it."""

import contextlib
import json
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass

import pytest

KUBEDET = [sys.executable, "-m", "kubedet.cli"]
PATIENCE = 300.0
"""Seconds that a test waits for anything: image pulls included."""


def until(condition, what, seconds=PATIENCE):
    """Ask until there is an answer that counts; returns it."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)
    return answer


@dataclass(frozen=True)
class Kind:
    """A kind of training jobs as its own API has it, beside what kubedet knows of it."""

    name: str
    """Its launcher, and its backend of `kubedet job`."""
    title: str
    group: str
    version: str
    plural: str
    of_job: str
    """Label of a pod that names its job."""
    index: str
    """Label with the rank of a pod, from 0."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "pytorchjob",
            "PyTorchJob",
            "kubeflow.org",
            "v1",
            "pytorchjobs",
            "training.kubeflow.org/job-name",
            "training.kubeflow.org/replica-index",
        ),
        Kind(
            "trainjob",
            "TrainJob",
            "trainer.kubeflow.org",
            "v1alpha1",
            "trainjobs",
            "jobset.sigs.k8s.io/jobset-name",
            "batch.kubernetes.io/job-completion-index",
        ),
    )
}


class Running:
    """A `kubedet` command that goes on while the test looks at it."""

    def __init__(self, arguments, env=None):
        self._lines, self._errors, self.times = [], [], []
        self._process = subprocess.Popen(
            [*KUBEDET, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, self._lines), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, self._errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, into):
        for line in stream:
            into.append((time.time(), line.rstrip("\n")))

    @property
    def lines(self):
        """What it has said so far, on stdout."""
        return [text for _, text in self._lines]

    @property
    def errors(self):
        """What it has said so far, on stderr."""
        return "\n".join(text for _, text in self._errors)

    def heard(self, text):
        """When the first line that holds a text arrived, in seconds of the clock; 0 if it did not."""
        return next((when for when, line in list(self._lines) if text in line), 0.0)

    def wait_for(self, text, seconds=PATIENCE):
        """Wait until it has said something; returns when, in seconds of the clock."""

        def answer():
            gone = self._process.poll() is not None and not any(r.is_alive() for r in self._readers)
            return self.heard(text) or (gone and -1.0)

        when = until(answer, f"{text!r} in the output:\n{self}", seconds)
        assert when > 0, f"ended with {self._process.returncode} and never said {text!r}:\n{self}"
        return when

    def signal(self, number):
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self, seconds=PATIENCE):
        """Wait for its end; returns the exit code."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds:.0f} s:\n{self}")
        for reader in self._readers:
            reader.join(10)
        return code

    def kill(self):
        """End it without a word, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def __str__(self):
        return "\n".join([*self.lines[-60:], "--- stderr:", *self.errors.splitlines()[-40:]])


@dataclass(frozen=True)
class Cluster:
    """The API as the tests see it, beside the launcher: what is really there."""

    core: object
    custom: object
    namespace: str
    kind: Kind

    @property
    def _place(self):
        return self.kind.group, self.kind.version, self.namespace, self.kind.plural

    def job(self, name):
        """The job of that name, or None."""
        from kubernetes.client import ApiException

        try:
            return self.custom.get_namespaced_custom_object(*self._place, name)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def pods(self, name):
        """The pods of a job."""
        return self.core.list_namespaced_pod(
            self.namespace, label_selector=f"{self.kind.of_job}={name}"
        ).items

    def running(self, name, count):
        """Wait until that many pods of a job run; returns them by name."""

        def those():
            up = {pod.metadata.name: pod for pod in self.pods(name) if _runs(pod)}
            return up if len(up) == count else None

        return until(those, f"{count} running pods of {name}: {[p.status.phase for p in self.pods(name)]}")

    def rank(self, pod):
        """The number of a pod's node."""
        return int(pod.metadata.labels[self.kind.index])

    def pod(self, name, rank):
        """The name of a job's running pod of a rank; waits for it."""
        matches = until(
            lambda: [pod for pod in self.pods(name) if _runs(pod) and self.rank(pod) == rank],
            f"a running pod of {name} with rank {rank}",
        )
        return matches[0].metadata.name

    def delete_pod(self, name):
        """Take a pod away at once, as a node that is lost."""
        self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

    def remove(self, name):
        """Delete a job, if it is there, and wait until its pods are gone."""
        from kubernetes.client import ApiException

        with contextlib.suppress(ApiException):
            self.custom.delete_namespaced_custom_object(*self._place, name)
        until(lambda: not self.pods(name), f"the pods of {name} are gone")


def _runs(pod):
    return pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None


class User:
    """Jobs of unique names, submitted and looked after with `kubedet job`."""

    def __init__(self, cluster, common, folder):
        self._cluster, self._common, self._folder = cluster, common, folder
        self._names, self._commands = [], []

    def name(self):
        """A name that no other job has, removed with all that is in it at the end."""
        self._names.append(f"kubedet-test-{uuid.uuid4().hex[:8]}")
        return self._names[-1]

    def spec(self, command, **fields):
        """Write a specification file; returns its path and the job's name."""
        fields = {"name": fields.pop("name", None) or self.name(), **self._common, **fields}
        path = self._folder / f"{fields['name']}.json"
        path.write_text(json.dumps({**fields, "command": command}))
        return path, fields["name"]

    def python(self, code, *arguments, **fields):
        """Specification of a job whose every pod runs a few lines of Python, with nothing to save."""
        return self.spec(["python", "-u", "-c", code, *arguments], **{"grace_seconds": 5.0, **fields})

    def starts(self, *arguments):
        """Start `kubedet ARGUMENTS` in the tests' namespace; returns at once."""
        if arguments[0] == "job":
            where = ("--namespace", self._cluster.namespace, "--backend", self._cluster.kind.name)
            arguments = (*arguments[:2], *where, *arguments[2:])
        self._commands.append(Running(arguments))
        return self._commands[-1]

    def runs(self, *arguments, seconds=PATIENCE):
        """Run `kubedet ARGUMENTS` to its end; returns it and its exit code."""
        command = self.starts(*arguments)
        return command, command.end(seconds)

    def leave(self):
        """End every command, remove every job."""
        for command in self._commands:
            command.kill()
        for name in self._names:
            self._cluster.remove(name)
