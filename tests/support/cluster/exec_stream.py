"""The exec of a simulated cluster: a websocket behind which the command really runs, on this machine."""

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

from websocket import ABNF
from websocket._abnf import frame_buffer

STDIN, STDOUT, STDERR, ERROR, RESIZE = range(5)


def shake_hands(handler):
    """Accept a websocket on a handler of HTTP requests."""
    key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    handler.send_response(101)
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept}
    for name, value in (headers | {"Sec-WebSocket-Protocol": "v4.channel.k8s.io"}).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.close_connection = True


def serve(connection, command, tty):
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
            except OSError:  # A terminal whose last user has gone.
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
    """Send data on a channel; channel None closes it."""
    opcode = ABNF.OPCODE_CLOSE if channel is None else ABNF.OPCODE_BINARY
    payload = struct.pack("!H", 1000) if channel is None else bytes([channel]) + data
    connection.sendall(ABNF(1, 0, 0, 0, opcode, 0, payload).format())
