"""Pods, and what may happen in them: a life is a function of its pod.

def dies(pod):
    pod.run()
    pod.say("error: out of luck")
    pod.exit(1)
"""

import contextlib


class Gone(Exception):
    """The pod has ended or was removed: its life is over."""


def fine(pod):
    pod.run()
    pod.say(f"hello from {pod.name}")
    pod.exit(0)


def endless(pod):
    pod.run()
    pod.say(f"hello from {pod.name}")
    pod.sleep(10**6)


def ends(code, *lines, reason="", after=0.0):
    def life(pod):
        pod.run()
        pod.say(*lines)
        pod.sleep(after)
        pod.exit(code, reason)

    return life


class Pod:
    image_id = ""  # Of the image that its container runs.

    def __init__(self, cluster, body):
        self.cluster, self.body = cluster, body
        self.name, self.uid = body["metadata"]["name"], body["metadata"]["uid"]
        self.base = self.name  # Without the random end, if it has one.
        self.containers = [[]]
        """Log lines (nanoseconds, bytes) of each container that ran in it, the newest last."""
        self.gone = False

    @property
    def phase(self):
        return self.body["status"].get("phase")

    @property
    def ended(self):
        return self.phase in ("Succeeded", "Failed") or self.gone

    @property
    def leaving(self):
        """Whether it was asked to end, and is in its grace period."""
        return "deletionTimestamp" in self.body["metadata"]

    @property
    def container(self):
        return next((item["name"] for item in self.body["spec"].get("containers", [])), "pytorch")

    @property
    def exit_code(self):
        """The exit code of its container; None if it has none."""
        states = self.body["status"].get("containerStatuses") or [{"state": {}}]
        return states[0]["state"].get("terminated", {}).get("exitCode")

    def run(self, node="node-1"):
        """Be scheduled to a node, and start the container."""
        self.body["spec"]["nodeName"] = node
        self._set("Running", {"running": {"startedAt": self.cluster.time()}})

    def wait(self, reason, message=""):
        self._set("Pending", {"waiting": {"reason": reason, "message": message}})

    def unschedulable(self, message):
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self._put({"phase": "Pending", "conditions": [condition]})
        self.cluster.event(self.name, "FailedScheduling", message, count=7)

    def say(self, *lines, at=None, end=b"\n"):
        """Print lines, str or bytes; `at` is their time in nanoseconds if it is not now."""
        at = int(self.cluster.clock.now().timestamp() * 1e9) if at is None else at
        self.containers[-1] += [
            (at, (line.encode() if isinstance(line, str) else line) + end) for line in lines
        ]
        self.cluster.notify()

    def rotate(self):
        """Lose the beginning of the log, as when the kubelet starts a new file."""
        self.containers[-1].clear()

    def exit(self, code, reason="", message=""):
        reason = reason or ("Completed" if code == 0 else "Error")
        ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": self.cluster.time()}
        self._set("Succeeded" if code == 0 else "Failed", {"terminated": ended})

    def restart(self, code, reason="Error"):
        last = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": self.cluster.time()}}
        self.containers.append([])
        self._set("Running", {"running": {"startedAt": self.cluster.time()}}, last)

    def evict(self, message="The node was low on resource: memory."):
        """Be removed from the node: no container reports an end."""
        lost = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
        self._put({"phase": "Failed", "reason": "Evicted", "message": message, "conditions": lost})

    def sleep(self, seconds):
        self.until(lambda: False, seconds)

    def until(self, holds, seconds=3600.0):
        """Wait until something holds that follows from a change of the cluster, or the time is over."""
        with self.cluster.news:
            self.cluster.news.wait_for(lambda: self.ended or holds(), seconds)
        if self.ended:
            raise Gone

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
        self._put({"phase": phase, "containerStatuses": [container], "startTime": self.cluster.time()})

    def _put(self, status):
        if self.ended:
            raise Gone
        self.body["status"] = status
        self.cluster.changed("MODIFIED", self.body, "pods")
        self.cluster.reconcile_owner(self)

    def live(self, life):
        with contextlib.suppress(Gone):
            life(self)
