"""Starts Python processes by forking one that has imported torch, which takes 5 seconds of a processor.

The fixture `forked_processes` lets subprocess.Popen fork wherever the test, or the product in it, starts
`python -m trainer ...` and the like. The process is the caller's own child, with its environment, folder and
files, and has run nothing but imports before. Everything else is started as always. It is not for tests
that look at a process's memory or imports.

The caller makes itself a "child subreaper" for a moment, and the server forks twice: the process whose
parent ends at once becomes the caller's child.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy.random

REAL_PROCESSES = "KUBEDET_REAL_PROCESSES"
_PR_SET_CHILD_SUBREAPER = 36
_HEAVY = re.compile(r"\b(torch|trainer|pipelines|components|kfp)\b")
_KFP = "kfp.dsl.executor_main"
_STARTS_OTHERS = re.compile(r"trainer launch|pipelines\.(cli|local) |executor_main|from kfp import")
_LOOKS = re.compile(r"sys\.(modules|meta_path)")
_READ_AT_IMPORT = (
    "PYTHON",
    "LD_",
    "LANG",
    "LC_",
    "OMP_",
    "MKL_",
    "KMP_",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR",
)
_READ_LATER = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
_ROOM = 4000
"""Bytes of the server's own command line, for that of a process."""
_start = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_lock = threading.Lock()
_server: socket.socket | None = None
_environment: dict[str, str] = {}
"""What the server has read from its environment."""


def execute_child(self: Any, args: Any, executable: Any, *others: Any) -> None:
    """Fork what imports torch, in place of `subprocess.Popen._execute_child`; start the rest as always."""
    preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, *rest = others
    pipes, (_, gid, gids, uid, umask, session, group) = rest[:6], rest[6:]
    words = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (env or os.environ).items()}
    same = _read_at_import(environment)
    if words[:1] == ["sh"] and _KFP in words[2]:
        words, environment["_KFP_RUNTIME"] = _without_shell(words), "true"
    plain = not (executable or preexec_fn or shell or gid or gids or uid) and close_fds and umask == -1
    forked = plain and _is_heavy(words) and REAL_PROCESSES not in environment and os.path.isdir(cwd or ".")
    if not (forked and _connect() and same == _environment):
        return _start(self, args, executable, *others)
    p2cread, _, _, c2pwrite, _, errwrite = pipes
    files = [given if given != -1 else std for std, given in enumerate((p2cread, c2pwrite, errwrite))]
    request = {
        "words": words,
        "cwd": os.path.abspath(cwd or "."),
        "environment": environment,
        "keep": pass_fds,
        "session": session,
        "group": group,
        "parent": os.getpid(),
    }
    self.pid = _ask(request, [*files, *pass_fds])
    self._child_created = True
    self._close_pipe_fds(*pipes)
    return None


def _ask(request: dict[str, Any], files: list[int]) -> int:
    """Return the id of a process that the server has forked, and that is a child of this one now."""
    server, data, libc = _connect(), pickle.dumps(request), ctypes.CDLL(None)
    with _lock:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [len(data).to_bytes(8, "big")], files)
            server.sendall(data)
            pid = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert pid, f"the server of tests/support/fork_server.py has ended; no {request['words']}"
    return pid


def _without_shell(words: list[str]) -> list[str]:
    """Return the command of kfp's local runner without its shell, which writes the component into a file."""
    path = Path(tempfile.mkdtemp()) / "ephemeral_component.py"
    path.write_text(words[3])
    return [sys.executable, "-m", _KFP, "--component_module_path", str(path), *words[4:]]


def _is_heavy(words: list[str]) -> bool:
    """Whether a command imports what the server has imported, and does not look at that."""
    if not words or words[0] != sys.executable:
        return False
    words = words[2:] if words[1:2] == ["-u"] else words[1:]
    return words[0] in ("-m", "-c") and bool(_HEAVY.search(words[1])) and not _LOOKS.search(words[1])


def _read_at_import(environment: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def _connect() -> socket.socket:
    global _server
    with _lock:
        if _server is None:
            _server, theirs = socket.socketpair()
            _environment.update(_read_at_import(os.environ))
            here, number = Path(__file__), theirs.fileno()
            code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import fork_server"
            subprocess.Popen(
                [sys.executable, "-c", f"{code}; fork_server.main({number})", "-" * _ROOM],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=here.parents[2],
                env={**os.environ, REAL_PROCESSES: "1"},
            )
            theirs.close()
        return _server


def main(number: int) -> None:
    """Import, and serve the socket of a number."""
    _environment.update(_read_at_import(os.environ))  # Before torch adds to it.
    sys.path.pop(0)
    for module in (
        "kfp.local",
        "torch.distributed.run",
        "trainer.evaluators.shards",
        "trainer.training.loop",
    ):
        importlib.import_module(module)

    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=number))


def _serve(connection: socket.socket) -> NoReturn:
    """Fork a process for each request, until the caller has gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # They may be for the whole group.
        signal.signal(number, signal.SIG_IGN)
    while True:
        head, files, _, _ = socket.recv_fds(connection, 8, 64)
        if not head:
            os._exit(0)
        request = pickle.loads(connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                connection.close()
                _await_parent(request["parent"])
                _become(request, files)
                _run(request["words"])
            os.write(write, child.to_bytes(8, "big"))
            os._exit(0)
        for file in (write, *files):
            os.close(file)
        os.waitpid(between, 0)
        connection.sendall(os.read(read, 8))
        os.close(read)


def _await_parent(pid: int) -> None:
    end = time.monotonic() + 10
    while os.getppid() != pid:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.0005)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Take over files, environment, folder and group."""
    _take_files(files, [0, 1, 2, *request["keep"]])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    tempfile.tempdir = None
    time.tzset()
    numpy.random.seed()
    words = request["words"]
    _serve_below(words, request["keep"])
    _show_as(words)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _open_standard_files(unbuffered="-u" in words[1:2] or bool(os.environ.get("PYTHONUNBUFFERED")))


def _show_as(words: list[str]) -> None:
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Give files the numbers that they are to have, and close all others."""
    first = max(numbers) + 1
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, first) for file in files]
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number)
    open_ones = {int(name) for name in os.listdir("/proc/self/fd")}
    for number in open_ones - set(numbers):
        with contextlib.suppress(OSError):
            os.close(number)


def _open_standard_files(*, unbuffered: bool) -> None:
    for number, name, mode in ((0, "stdin", "rb"), (1, "stdout", "wb"), (2, "stderr", "wb")):
        before = getattr(sys, f"__{name}__")
        file = io.TextIOWrapper(
            open(number, mode, buffering=0 if unbuffered and number else -1, closefd=False),  # noqa: SIM115
            encoding=before.encoding,
            errors=before.errors,
            write_through=unbuffered and number > 0,
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _serve_below(words: list[str], keep: list[int]) -> None:
    """Give a process that starts others a server as its child."""
    global _server
    _server = None
    if not _STARTS_OTHERS.search(" ".join(words[2:4])):
        return
    _server, theirs = socket.socketpair()
    if os.fork() == 0:
        _server.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2, *keep):
            os.dup2(nothing, number)
        _serve(theirs)
    theirs.close()
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _run(words: list[str]) -> NoReturn:
    """Do what `python WORDS` does, without freeing the memory in the end."""
    code = 0
    try:
        _execute(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255)


def _execute(words: list[str]) -> None:
    sys.orig_argv = words
    main = sys.modules["__main__"].__dict__
    main.pop("fork_server", None)
    words = words[2:] if words[1] == "-u" else words[1:]
    sys.argv = [words[0], *words[2:]]
    if words[0] == "-m":
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        exec(compile(words[1], "<string>", "exec"), main)
