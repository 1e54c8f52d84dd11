"""Which node of several ends first: whoever runs them decides by the code of that one."""

import os
import signal
import subprocess
import sys
import time

import pytest

NODE = """
import sys
from trainer.launching import launch
settings = launch._parse_settings
launch._parse_settings = lambda *given: (settings(*given)[0], sys.executable, ["-c", sys.argv[1]])
sys.exit(launch.launch(["train"], ["--nproc-per-node", "2", *sys.argv[2:]]))
"""

SPARED = """
import os, sys, time
from trainer.base import die_with_parent
die_with_parent.die_with_launcher()
print("up", flush=True)
while not ("FAILS" in os.environ and os.path.exists(GO)):
    time.sleep(0.1)
sys.exit(3)
"""

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"up\\n")  # At once, or two of them mix.
time.sleep(600)
"""


@pytest.fixture
def nodes(tmp_path):
    """Start nodes of two workers that run a code, given torchrun's options and variables."""
    started = []

    def start(code, *options, **environment):
        log = tmp_path / f"node-{len(started)}.log"
        with log.open("w") as file:
            each = subprocess.Popen(
                [sys.executable, "-c", NODE, code, *options],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        each.output = log.read_text
        started.append(each)
        return each

    yield start
    for each in started:
        each.kill()
        each.wait()


def wait_until(true, nodes):
    limit = time.monotonic() + 240
    while not true():
        assert time.monotonic() < limit, "\n".join(each.output() for each in nodes)
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_workers_that_ignore_sigterm_do_not_hold_up_a_node_that_is_stopped(nodes):
    node = nodes(STUBBORN)
    wait_until(lambda: node.output().count("up") == 2, [node])
    begun = time.monotonic()
    node.send_signal(signal.SIGTERM)
    assert node.wait(120) == 143
    assert time.monotonic() - begun < 50


@pytest.mark.slow
def test_a_node_that_was_never_needed_does_not_say_that_all_went_well(nodes, port, tmp_path):
    """Two of at most two work; a third waits for a place, and sees that the run is over."""
    code = SPARED.replace("GO", repr(str(tmp_path / "go")))
    place = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    place += ["--nproc-per-node", "1"]
    late = "last_call_timeout=60"
    host = nodes(code, *place, "--rdzv-conf", f"is_host=1,{late}")
    failing = nodes(code, *place, "--rdzv-conf", f"is_host=0,{late}", FAILS="1")
    pair = [host, failing]
    wait_until(lambda: all(each.output().count("up") == 1 for each in pair), pair)
    spare = nodes(code, *place, "--rdzv-conf", f"is_host=0,{late}")
    wait_until(lambda: "waiting for 1 to 2 nodes" in spare.output(), [spare])
    time.sleep(1)  # Now it is in the list of those without a place.
    (tmp_path / "go").touch()
    assert failing.wait(240) == 3
    assert spare.poll() is None, "it did not wait"
    assert spare.wait(240) == 143
    assert "stopped: the other nodes ended the run before this node was needed" in spare.output()
