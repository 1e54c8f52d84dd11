"""A pod of a FakeCluster, and lives that it may have."""

import contextlib
import threading
import time
from datetime import UTC, datetime


class Gone(Exception):
    """The pod was deleted: its life is over."""


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def fine(pod):
    pod.run()
    pod.say(f"hello from {pod.name}")
    pod.exit(0)


def endless(pod):
    pod.run()
    pod.say(f"hello from {pod.name}")
    pod.sleep(3600)


def ends(code, *lines, reason=""):
    def life(pod):
        pod.run()
        pod.say(*lines)
        pod.exit(code, reason)

    return life


class FakePod:
    image_id = ""  # What the cluster says that its container runs.

    def __init__(self, cluster, body, base=""):
        self.cluster, self.body = cluster, body
        self.name, self.uid = body["metadata"]["name"], body["metadata"]["uid"]
        self.base = base or self.name  # The part of its name that others of its place have too.
        self.containers = [[]]
        """Log lines (nanoseconds, bytes) of each container that ran in it, the newest last."""
        self.deleted = threading.Event()

    @property
    def ended(self):
        return self.body["status"]["phase"] in ("Succeeded", "Failed") or self.deleted.is_set()

    @property
    def container(self):
        return next((item["name"] for item in self.body["spec"].get("containers", [])), "pytorch")

    def run(self, node="node-1"):
        """Be placed on a node, and let the container run."""
        self.body["spec"]["nodeName"] = node
        self._set("Running", {"running": {"startedAt": now()}})
        self.cluster.running(self)

    def wait(self, reason, message=""):
        self._set("Pending", {"waiting": {"reason": reason, "message": message}})

    def unschedulable(self, message):
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self.body["status"] = {"phase": "Pending", "conditions": [condition]}
        self.cluster.changed("MODIFIED", self.body)
        self.cluster.event(self.name, "FailedScheduling", message, count=7)

    def say(self, *lines, at=None, end=b"\n"):
        """Print lines, str or bytes; `at` is their time in nanoseconds, and now without it."""
        for line in lines:
            data = line.encode() if isinstance(line, str) else line
            self.containers[-1].append((at if at is not None else time.time_ns(), data + end))

    def rotate(self):
        """Lose the beginning of the log, as when the kubelet begins a new file."""
        self.containers[-1].clear()

    def exit(self, code, reason="", message=""):
        reason = reason or ("Completed" if code == 0 else "Error")
        ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": now()}
        self._set("Succeeded" if code == 0 else "Failed", {"terminated": ended})
        self.cluster.reconcile(self)

    def restart(self, code, reason="Error"):
        last = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}}
        self.containers.append([])
        self._set("Running", {"running": {"startedAt": now()}}, last)

    def evict(self, message="The node was low on resource: memory."):
        """Be thrown off the node: no container tells of an end."""
        lost = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
        self.body["status"] = {"phase": "Failed", "reason": "Evicted", "message": message, "conditions": lost}
        self.cluster.changed("MODIFIED", self.body)
        self.cluster.reconcile(self)

    def sleep(self, seconds):
        if self.deleted.wait(seconds):
            raise Gone

    def until(self, event, seconds=60):
        """Wait for an event of the test."""
        for _ in range(int(seconds / 0.01)):
            self.sleep(0)
            if event.wait(0.01):
                return
        raise TimeoutError(f"{self.name} waited in vain")

    def _set(self, phase, state, last=None):
        container = {
            "name": self.container,
            "state": state,
            "lastState": last or {},
            "image": "i",
            "imageID": self.image_id,
            "restartCount": len(self.containers) - 1,
            "ready": "running" in state,
        }
        self.body["status"] = {"phase": phase, "containerStatuses": [container], "startTime": now()}
        self.cluster.changed("MODIFIED", self.body)

    def live(self, life):
        with contextlib.suppress(Gone):
            life(self)
