"""Machines without a cluster: where they meet, and a training over two of them, bare or under Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.base.errors import ConfigError
from trainer.launching.launch import rendezvous_options
from trainer.training import checkpoint

ENDPOINT = ["--rdzv-endpoint", "first:29500", "--rdzv-backend"]


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ((None, None, None), []),
        (("1", None, None), ["--nnodes", "1"]),
        (("2", 1, "first"), ["--nnodes", "2", "--node-rank", "1", *ENDPOINT, "static"]),
        (("2", None, "first:29500"), ["--nnodes", "2", *ENDPOINT, "c10d"]),
        (("1:4", None, "first:29500"), ["--nnodes", "1:4", *ENDPOINT, "c10d"]),
    ],
)
def test_where_machines_meet(variables, options, no_pet):
    nnodes, node_rank, endpoint = variables
    assert rendezvous_options(nnodes=nnodes, node_rank=node_rank, endpoint=endpoint) == options


def test_variables_tell_what_is_not_given(no_pet):
    no_pet.setenv("PET_NNODES", "2")
    no_pet.setenv("PET_NODE_RANK", "1")
    assert rendezvous_options(nnodes=None, node_rank=None, endpoint="first") == [*ENDPOINT, "static"]
    no_pet.setenv("PET_MASTER_ADDR", "first")
    assert rendezvous_options(nnodes="2", node_rank=None, endpoint=None) == ["--nnodes", "2"]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (("2", 0, None), "2 machines need a rendezvous endpoint"),
        (("2", 2, "first"), "--node-rank 2 is not one of 2 machines"),
        (("1:4", 0, "first"), r"machines of an elastic run \(1:4\) do not have fixed numbers"),
    ],
)
def test_machines_that_would_never_meet(variables, said, no_pet):
    nnodes, node_rank, endpoint = variables
    with pytest.raises(ConfigError, match=said) as error:
        rendezvous_options(nnodes=nnodes, node_rank=node_rank, endpoint=endpoint)
    assert error.value.fix


@pytest.fixture
def no_pet(monkeypatch):
    """Without the variables of an operator."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.slow
def test_two_machines_meet_without_a_cluster(node, port):
    options = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc", "1"]
    pair = [node(["doctor"], *options) for _ in range(2)]
    assert [each.wait() for each in pair] == [0, 0], pair[0].output + pair[1].output
    for each in pair:
        assert f"waiting for 2 nodes to meet at 127.0.0.1:{port}" in each.output
        assert "shared memory" in each.output


SLURM = Path(__file__).parents[3] / "deploy" / "examples" / "slurm" / "train.sbatch"
FAKE_SLURM = {
    "scontrol": """#!/bin/sh
echo "$*" >> "$SLURM_CALLS"
[ "$1" = show ] && printf 'localhost\\nnode-b\\n'
exit 0
""",
    # Starts the task once for each machine, and ends with the highest code.
    "srun": """#!/bin/bash
shift
for id in 0 1; do SLURM_NODEID=$id setsid "$@" & done
if [ -n "${TERM_AFTER:-}" ]; then
  until ls "$TERM_AFTER"/step-*[1-9].pt > /dev/null 2>&1; do sleep 0.1; done  # not that of step 0
  for job in $(jobs -p); do kill -TERM -- "-$job"; done
fi
worst=0
for job in $(jobs -p); do wait "$job"; code=$?; [ $code -gt $worst ] && worst=$code; done
exit $worst
""",
}


@pytest.fixture
def sbatch(tmp_path, port, no_pet):
    """Runs the batch script as on the first of two machines; its result, and the calls of scontrol."""
    programs = tmp_path / "slurm"
    programs.mkdir()
    for name, text in FAKE_SLURM.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    calls = programs / "calls"

    def run(*arguments, **environment):
        variables = {
            **os.environ,
            "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            "SLURM_NNODES": "2",
            "SLURM_JOB_ID": "17",
            "SLURM_CALLS": str(calls),
            "PORT": str(port),
            "NPROC": "1",
            **environment,
        }
        done = subprocess.run(
            ["bash", str(SLURM), *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        return done, calls.read_text().splitlines()

    return run


@pytest.mark.parametrize(
    ("codes", "ended", "again"),
    [
        ("143 143", 143, ["requeue 17"]),
        ("143 2", 2, []),  # One has a mistake to mend, and the other lost it.
        ("2 143", 2, []),
        ("143 137", 1, []),
        ("0 0", 0, []),
    ],
)
def test_slurm_is_asked_to_run_a_stopped_training_again(sbatch, tmp_path, codes, ended, again):
    python = tmp_path / "slurm" / "python"
    python.write_text(f'#!/bin/bash\ncodes=({codes})\nexit "${{codes[$SLURM_NODEID]}}"\n')
    python.chmod(0o755)
    done, calls = sbatch("train")
    assert (done.returncode, calls[1:]) == (ended, again)


@pytest.mark.slow
@pytest.mark.extra
def test_slurms_signal_lets_the_training_save(sbatch, training):
    """As srun does, to the launcher and the shell around it."""
    arguments, output = training
    done, calls = sbatch(*arguments(train__epochs=200), TERM_AFTER=f"{output}/checkpoints")
    assert done.returncode == 143, done.stdout + done.stderr
    assert calls[1:] == ["requeue 17"]
    assert checkpoint.read_latest(f"{output}/checkpoints")["step"] >= 2
