"""torchrun with meaningful exit codes and messages.

torchrun exits with code 1 and a traceback for any failure of its workers. `launch` exits with the code of the
failure that caused the others, and prints its message once. Code 143 means that the node can be restarted: it
was stopped after saving, or another node is gone. torchrun restarts the workers (PET_MAX_RESTARTS) after
failures that are not permanent.
"""

import logging
import os
import signal
import sys
import time
import uuid
from contextlib import nullcontext
from types import FrameType
from typing import Any, NoReturn

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args, parse_min_max_nnodes

from trainer.base import die_with_parent, events
from trainer.base.errors import EXIT_RETRY, ConfigError, LaunchError
from trainer.base.temporary_folders import temporary_folder
from trainer.base.worker_pool import threads_per_process
from trainer.launching import heartbeat, worker_failures
from trainer.launching.stop_signals import exit_on_signal, signal_handler

_DEFAULT_PORT = 29500
_exit_codes: dict[int, int] = {
    signal.SIGTERM: EXIT_RETRY,
    signal.SIGINT: EXIT_RETRY,
    heartbeat.SIGNAL: heartbeat.EXIT_ABANDONED,
}
"""Exit code of this node for each signal that stops it."""
_THREADS_UNSET = "set by the launcher"
"""Value of OMP_NUM_THREADS until the number of processes is known. If unset, torchrun warns and sets 1."""


def launch(arguments: list[str], torchrun_arguments: list[str], watch: heartbeat.Watch | None = None) -> int:
    """Run `python -m trainer ARGUMENTS` in every process of this node, and wait.

    torchrun reads options that are not in `torchrun_arguments` from the PET_* variables, which the Training
    Operator sets. `watch` watches the launcher's heartbeat, if the job has one.

    Returns:
        0, or the exit code of the failure that caused the others; 143 if this node was stopped or only lost
        its peers; EXIT_ABANDONED if the launcher is gone; 128 + n for signal n.
    """
    os.environ[die_with_parent.LAUNCHER] = str(os.getpid())
    for name in list(logging.root.manager.loggerDict):  # Each logger has its own level. We print failures.
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with temporary_folder() as folder, signal_handler(_on_hangup, (heartbeat.SIGNAL,)):
            config, program, program_arguments = _parse_settings(
                [*torchrun_arguments, "-m", "trainer", *arguments], str(folder)
            )
            with watch.signal_on_expiry() if watch else nullcontext():
                if config.max_nodes > 1:
                    rendezvous = f"{_format_nodes(config)} to meet at {config.rdzv_endpoint}"
                    print(f"launch: waiting for {rendezvous}", file=sys.stderr)
                code = _run_and_report(config, program, program_arguments)
    except SignalException as error:
        print(f"stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        code = _exit_codes.get(signal.Signals(error.sigval), 128 + int(error.sigval))
    return watch.wait_for_exit_code(code) if watch else code


def _on_hangup(number: int, frame: FrameType | None) -> NoReturn:
    raise SignalException("the launcher is gone", sigval=signal.Signals(number))


def _run_and_report(config: LaunchConfig, program: Any, program_arguments: list[str]) -> int:
    """Run the workers, print how they ended and return the exit code."""
    code = EXIT_RETRY
    try:
        result = _run(config, program, program_arguments)
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise LaunchError(
                f"another program on this machine is listening at {config.rdzv_endpoint}",
                fix="choose another port (PET_MASTER_PORT, or PET_RDZV_ENDPOINT), or stop that program",
            ) from None
        cause = worker_failures.first_sentence(error.__cause__ or error)
        if isinstance(error, RendezvousClosedError):
            cause = "the other nodes ended the run"
        elif isinstance(error, RendezvousTimeoutError):
            cause = "some nodes did not arrive in time"
        message = (
            f"stopped: {_format_nodes(config)} did not connect at {config.rdzv_endpoint}: {cause}\n"
            "  fix: check that all of them run and can reach that address, and run the same command again"
        )
    else:
        message = "stopped: the other nodes ended the run before this node was needed"
        if result is not None:
            if not result.is_failed():
                # When the first Worker pod succeeds, the operator deletes all others. The pod of rank 0
                # has the log, so it must end first.
                if 0 not in result.return_values and "PET_RDZV_ENDPOINT" in os.environ:
                    _wait_for_peers(config)
                return 0
            rank, failure = worker_failures.first_cause(result.failures)
            message, code = worker_failures.explain(rank, failure), worker_failures.exit_code(failure)
            if not worker_failures.caused_by_lost_peer(failure):
                if not events.is_file_set():
                    print(message, file=sys.stderr, flush=True)
                text = message.removeprefix("error: ")
                events.emit(events.ProcessFailed(message=text, exit_code=code))
                return code
    print(message, file=sys.stderr, flush=True)
    _wait_for_peers(config)
    return code


def _wait_for_peers(config: LaunchConfig) -> None:
    """Wait, so that the node whose exit code decides how the job ends exits first; SIGTERM ends the wait."""
    if config.max_nodes > 1:
        with exit_on_signal(_exit_codes):
            time.sleep(worker_failures.node_grace())


def _parse_settings(arguments: list[str], folder: str) -> tuple[LaunchConfig, Any, list[str]]:
    """Parse torchrun's options into configuration, program and its arguments; set OMP_NUM_THREADS.

    Workers write error files to `folder`, because torchrun does not delete its own folder.
    """
    threads = os.environ.setdefault("OMP_NUM_THREADS", _THREADS_UNSET)
    try:
        options = parse_args(arguments)
        # As in torchrun's main, a single node uses a free port.
        static = options.rdzv_backend == "static" and not options.rdzv_endpoint
        if static and options.master_port is None and parse_min_max_nnodes(options.nnodes)[1] == 1:
            options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
            options.rdzv_id = str(uuid.uuid4())
        options.master_port = options.master_port or _DEFAULT_PORT
        options.log_dir = options.log_dir or folder
        config, program, program_arguments = config_from_args(options)
        config.rdzv_configs["timeout"] = int(config.rdzv_configs["timeout"])
        if config.nproc_per_node < 1:
            raise ValueError(f"{config.nproc_per_node} processes")
    except (ValueError, RuntimeError, AssertionError) as error:
        raise _settings_error(error) from None
    finally:
        if threads == _THREADS_UNSET:
            del os.environ["OMP_NUM_THREADS"]
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(config.nproc_per_node)))
    return config, program, program_arguments


def _settings_error(error: Exception) -> ConfigError:
    return ConfigError(
        f"the processes cannot be started with these settings: {error}",
        fix="correct the option of `launch` or the PET_* variable named above",
    )


class _Agent(LocalElasticAgent):
    """torchrun's agent, but stops immediately on signals and does not restart after permanent failures."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # No worker is running yet, and the wait for other nodes may be long.
        with exit_on_signal(_exit_codes):
            super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        # By default, workers that ignore SIGTERM are killed after 30 s, but this node may have less time.
        context, grace = self._pcontext, worker_failures.worker_grace()
        assert context is not None
        close = context.close

        def stop(death_sig: signal.Signals | None = None, timeout: int = grace) -> None:
            # Workers save their state on SIGTERM.
            close(signal.SIGTERM if death_sig == heartbeat.SIGNAL else death_sig, timeout)

        context.close = stop  # type: ignore[method-assign]
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            rank, failure = worker_failures.first_cause(result.failures)
            if not worker_failures.is_retryable(failure):
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                message = worker_failures.explain(rank, failure).splitlines()[0]
                restarts = f"{self._remaining_restarts - 1} more restarts"
                print(f"launch: {message}; continuing with the remaining nodes ({restarts})", file=sys.stderr)
        return result


def _run(config: LaunchConfig, program: Any, program_arguments: list[str]) -> RunResult | None:
    """Join the rendezvous, run the workers and wait; None if the run ended without this node."""
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    static = config.rdzv_backend == "static"
    if not static:
        # With a shared store, a node that comes back would wait forever, and workers would read old values.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    end, handler = time.monotonic() + config.rdzv_configs["timeout"], None
    with exit_on_signal(_exit_codes):
        while handler is None:  # The node that hosts the rendezvous may start minutes later than this one.
            try:
                handler = get_rendezvous_handler(parameters)
            except ValueError as error:
                raise _settings_error(error) from None
            except RendezvousConnectionError:
                if time.monotonic() > end:
                    raise
    address, _, port = config.rdzv_endpoint.rpartition(":")
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(program_arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        # Otherwise the rendezvous finds a free port of the node with rank 0.
        master_addr=address if static else None,
        master_port=int(port) if static else None,
        local_addr=config.local_addr,
        numa_options=config.numa_options,
    )
    assert config.logs_specs is not None
    seconds = getattr(config, "shutdown_timeout", None)  # Since torch 2.12.
    grace = {} if seconds is None else {"shutdown_timeout": seconds}
    agent = _Agent(spec, config.logs_specs, start_method=config.start_method, **grace)
    stopped = False
    try:
        result: RunResult = agent.run()
        return result
    except SignalException:
        stopped = True
        raise
    finally:
        # `shutdown` closes the rendezvous for all nodes, but a stopped node may come back.
        if not stopped:
            handler.shutdown()


def _format_nodes(config: LaunchConfig) -> str:
    if config.min_nodes == config.max_nodes:
        return f"{config.max_nodes} nodes"
    return f"{config.min_nodes} to {config.max_nodes} nodes"
