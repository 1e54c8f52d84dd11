"""Runs a command in a pod, interactively if there is a terminal.

Kubernetes' exec is a websocket with numbered channels: 0 stdin, 1 stdout, 2 stderr, 3 the exit status, 4 the
terminal's size. Source: kubernetes/apimachinery, `util/remotecommand` (v4).
"""

import json
import os
import re
import select
import ssl
import sys
from collections.abc import Sequence
from contextlib import suppress

from kubernetes.client import ApiException
from kubernetes.stream import stream, ws_client
from websocket import ABNF, WebSocketException

from components.launchers.backend import PodStatus
from components.launchers.cluster.client import Cluster
from components.launchers.cluster.roles import permission_fix
from trainer.base.errors import ConfigError, LaunchError

_TICK_SECONDS = 0.25  # Seconds between two checks of the terminal's size.


def run_attached(cluster: Cluster, pod: PodStatus, command: Sequence[str]) -> int:
    """Run a command in a pod with this process's output and terminal, if any; return its exit code."""
    terminal = sys.stdin.fileno() if sys.stdin.isatty() and sys.stdout.isatty() else None
    try:
        client: ws_client.WSClient = stream(
            cluster.core.connect_get_namespaced_pod_exec,
            pod.name,
            cluster.namespace,
            container=pod.container,
            command=list(command),
            stdin=terminal is not None,
            stdout=True,
            stderr=terminal is None,
            tty=terminal is not None,
            binary=True,
            _preload_content=False,
        )
    except ApiException as error:
        # The client reports a refused handshake as one text.
        reason = str(error.reason or error)
        handshake = re.search(r"Handshake status (\d+)", reason)
        status = handshake[1] if handshake else ""
        body = re.search(r"\{.*\}", reason.rpartition("-+-+-")[2])
        with suppress(ValueError, LookupError):
            reason = json.loads(body[0])["message"] if body else reason
        if status in ("401", "403"):
            fix = permission_fix("pods/exec", ["create", "get"], cluster.namespace)
            raise ConfigError(f"not allowed to run commands in {pod.name}: {reason}", fix=fix) from None
        text = f"cannot run a command in {pod.name}: {reason}"
        if status in ("400", "404"):
            raise ConfigError(text, fix="choose a running pod") from None
        raise LaunchError(text, fix="try again") from None
    if terminal is not None:
        import termios  # Windows has neither.
        import tty

        attributes = termios.tcgetattr(terminal)
    try:
        if terminal is not None:
            tty.setraw(terminal, termios.TCSADRAIN)  # Keys typed earlier also go to the pod.
        ended = _forward_streams(client, terminal)
    except (OSError, WebSocketException) as error:
        raise LaunchError(f"lost the connection to {pod.name}: {error}", fix="run it again") from None
    finally:
        if terminal is not None:
            termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
        with suppress(OSError, WebSocketException):
            client.close()
    return _exit_code(ended, pod.name, command)


def _forward_streams(client: ws_client.WSClient, terminal: int | None) -> bytes:
    """Forward input and output until the command has ended; return its Status. TLS may have read ahead."""
    outputs = {ws_client.STDOUT_CHANNEL: sys.stdout.buffer, ws_client.STDERR_CHANNEL: sys.stderr.buffer}
    size: os.terminal_size | None = None
    status = b""
    while True:
        if terminal is not None:
            if (now := os.get_terminal_size(terminal)) != size:
                size = now
                client.write_channel(
                    ws_client.RESIZE_CHANNEL, json.dumps({"Width": now.columns, "Height": now.lines})
                )
            if select.select([terminal], [], [], 0)[0]:
                client.write_channel(ws_client.STDIN_CHANNEL, os.read(terminal, 4096))
        socket = client.sock.sock
        is_read = isinstance(socket, ssl.SSLSocket) and socket.pending()
        watched = [socket] if terminal is None else [socket, terminal]
        if not is_read and socket not in select.select(watched, [], [], _TICK_SECONDS)[0]:
            continue
        opcode, frame = client.sock.recv_data_frame(control_frame=True)
        if opcode == ABNF.OPCODE_CLOSE:
            return status
        if opcode in (ABNF.OPCODE_TEXT, ABNF.OPCODE_BINARY) and frame.data:
            channel, data = frame.data[0], frame.data[1:]
            if channel == ws_client.ERROR_CHANNEL:
                status += data
            elif data:
                outputs[channel].write(data)
                outputs[channel].flush()


def _exit_code(status: bytes, pod: str, command: Sequence[str]) -> int:
    try:
        result = json.loads(status)
    except ValueError:
        raise LaunchError(
            f"{pod} closed the connection before the command ended",
            fix="check whether the pod is still running",
        ) from None
    if result.get("status") == "Success":
        return 0
    for cause in (result.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise ConfigError(
        f"{pod} cannot run {command[0]}: {result.get('message', '')}", fix="use a program in the pod's image"
    )
