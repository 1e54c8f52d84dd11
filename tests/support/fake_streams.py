"""What an API server sends bit by bit: watches of objects, and the logs of pods."""

import contextlib
import json
import time
from datetime import UTC, datetime


class Streams:
    def watch(self, resource, namespace, query):
        """Those that are there, or what came since a version, then every change, until the client goes."""
        since = int(query.get("resourceVersion", 0))
        if 0 < since < self.cluster.forgotten:
            return self._error(410, "too old resource version")
        index = since or len(self.cluster.changes)
        objects = list(self.cluster.objects.items())
        pending = [("ADDED", body, resource) for key, body in objects if key[0] == resource]
        pending = [] if since else pending
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while not self.cluster.closed:
                for kind, body, changed in pending:
                    meta = body["metadata"]
                    labels = meta.get("labels", {})
                    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
                    if (
                        (changed, meta["namespace"]) == (resource, namespace)
                        and selected(query.get("labelSelector", ""), labels.get)
                        and name in ("", meta["name"])
                    ):
                        self._chunk(json.dumps({"type": kind, "object": body}).encode() + b"\n")
                time.sleep(0.01)
                pending = self.cluster.changes[index:]
                index += len(pending)
        self.hang_up()

    def log(self, pod, query, fault):
        states = pod.body["status"].get("containerStatuses", [{"state": {"waiting": {}}}])
        if query.get("previous") == "true":
            if len(pod.containers) < 2:
                return self._error(
                    400, f'previous terminated container "{pod.container}" in pod "{pod.name}" not found'
                )
            lines, follow = pod.containers[-2], False
        else:
            if "waiting" in states[0]["state"]:
                return self._error(
                    400, f'container "{pod.container}" in pod "{pod.name}" is waiting to start'
                )
            lines, follow = pod.containers[-1], query.get("follow") == "true"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(pod, lines, follow, query, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.hang_up()

    def _stream(self, pod, lines, follow, query, fault):
        since = datetime.fromisoformat(query["sinceTime"]).timestamp() * 1e9 if "sinceTime" in query else 0
        sent, index = 0, max(0, len(lines) - int(query.get("tailLines", len(lines))))
        limit = max(fault.cut, fault.end)
        while True:
            over = not follow or pod.ended or lines is not pod.containers[-1]
            for at, data in lines[index:]:
                index += 1
                if at < since:
                    continue
                piece = (_stamp(at) if query.get("timestamps") == "true" else b"") + data
                if 0 <= limit <= sent + len(piece):
                    self._chunk(piece[: limit - sent])
                    time.sleep(fault.stall)
                    return self._chunk(b"") if fault.end >= 0 else self.hang_up()
                sent += len(piece)
                self._chunk(piece)
            if over:
                return self._chunk(b"")
            time.sleep(0.01)

    def _chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def hang_up(self):
        self.close_connection = True


def _stamp(nanoseconds):
    seconds, rest = divmod(int(nanoseconds), 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09}Z ".encode()


def selected(selector, value):
    """Whether each `key=value`, `key!=value` or `key` of a selector holds."""
    pairs = [part.partition("=") for part in selector.split(",") if part]
    return all(
        (value(key.removesuffix("!")) == expected.lstrip("=")) != key.endswith("!") if equals else value(key)
        for key, equals, expected in pairs
    )
