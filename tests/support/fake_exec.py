"""The exec of a fake cluster: a websocket behind which the command really runs, on this machine.

def test_something(fake_cluster):
    give_exec(fake_cluster)
"""

import base64
import fcntl
import hashlib
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from urllib.parse import parse_qs, urlsplit

from websocket import ABNF
from websocket._abnf import frame_buffer

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)


def give_exec(cluster):
    """Let a FakeApi answer pods/exec; what pods are asked to run is noted in `cluster.executed`."""
    cluster.executed = []
    server = cluster._server
    server.RequestHandlerClass = type("Handler", (_Exec, server.RequestHandlerClass), {})


class _Exec:
    """What a handler of the fake API server does with GET .../pods/NAME/exec."""

    def _answer(self, verb, body, fault):
        url = urlsplit(self.path)
        if not url.path.endswith("/exec"):
            return super()._answer(verb, body, fault)
        namespace, _, name, _ = url.path.split("/")[-4:]
        if ("create", "pods/exec") in self.cluster.denied:
            return self._error(403, 'pods "x" is forbidden: User "me" cannot create resource "pods/exec"')
        if self.cluster.pod(name, namespace) is None:
            return self._error(404, f'pods "{name}" not found')
        query = parse_qs(url.query)
        self.cluster.executed.append((name, query["container"], query["command"]))
        self._shake_hands()
        return _serve(self.connection, query["command"], query["tty"] == ["True"])

    def _shake_hands(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        for name, value in [
            ("Upgrade", "websocket"),
            ("Connection", "Upgrade"),
            ("Sec-WebSocket-Accept", accept),
            ("Sec-WebSocket-Protocol", "v4.channel.k8s.io"),
        ]:
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True


def _serve(connection, command, tty):
    """Run a command and carry its streams, as the kubelet does."""
    ends = _start(command, tty)
    if ends is None:
        message = f'exec: "{command[0]}": executable file not found in $PATH'
        _send(connection, ERROR, json.dumps({"status": "Failure", "message": message, "code": 500}).encode())
        return _send(connection, None, b"")
    process, stdin, outputs = ends
    incoming = frame_buffer(connection.recv, skip_utf8_validation=True)
    while outputs:
        ready, _, _ = select.select([connection, *outputs], [], [])
        if connection in ready:
            frame = incoming.recv_frame()
            if frame.opcode == ABNF.OPCODE_CLOSE:
                process.kill()
                break
            _take(frame.data, stdin)
        for end in set(ready) & set(outputs):
            try:
                data = os.read(end, 65536)
            except OSError:  # What a terminal says when its last user has gone.
                data = b""
            if data:
                _send(connection, outputs[end], data)
            else:
                del outputs[end]
    code = process.wait()
    status = {"status": "Success"}
    if code:
        cause = {"reason": "ExitCode", "message": str(code)}
        status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
    _send(connection, ERROR, json.dumps(status).encode())
    return _send(connection, None, b"")


def _start(command, tty):
    """Start a command; returns its process, where its stdin is, and its outputs' channels."""
    command = [sys.executable if command[0] == "python" else command[0], *command[1:]]
    try:
        if tty:
            ours, theirs = pty.openpty()
            process = subprocess.Popen(
                command,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
            os.close(theirs)
            return process, ours, {ours: STDOUT}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        return process, None, {process.stdout.fileno(): STDOUT, process.stderr.fileno(): STDERR}
    except FileNotFoundError:
        return None


def _take(data, stdin):
    channel, data = data[0], data[1:]
    if channel == STDIN:
        os.write(stdin, data)
    elif channel == RESIZE:
        size = json.loads(data)
        fcntl.ioctl(stdin, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0))


def _send(connection, channel, data):
    """Send data on a channel; channel None says goodbye."""
    opcode = ABNF.OPCODE_CLOSE if channel is None else ABNF.OPCODE_BINARY
    payload = struct.pack("!H", 1000) if channel is None else bytes([channel]) + data
    connection.sendall(ABNF(1, 0, 0, 0, opcode, 0, payload).format())
