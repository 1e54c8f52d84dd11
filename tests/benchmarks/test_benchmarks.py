"""Every benchmark runs and ends with one line of JSON; how fast, is not for a test to say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = {
    "loss": ["--size", "128", "--images", "1"],
    "step": ["--cases", "5:128", "--images", "1"],
    "postprocess": ["--size", "128", "--images", "1"],
    "scaling": ["--size", "128", "--images", "1", "--classes", "3", "--steps", "1"],
    "checkpoint": ["--classes", "3"],
    "accuracy": ["--source", "sample:images=24,seed=3,size=96", "--epochs", "1", "--seeds", "1"],
}


def test_make_bench_runs_all_but_the_long_one():
    listed = subprocess.run(
        ["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    here = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    others_call = {"large_split", "slow_link", "slow_server"}
    assert set(re.findall(r"-m benchmarks\.(\w+)", listed)) == here - others_call - {"accuracy"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_last_line_is_the_result(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--rounds", "1", "--device", "cpu", "--no-compile"]
    done = subprocess.run(
        [*command, *CASES[name]], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["name"] == name and result["ratio"] > 0 and not result["compiled"]
    assert result["figures"] and result["versions"]["torch"] and result["device"]
    if name == "postprocess":
        assert result["figures"]["differing_images_601"] == result["figures"]["differing_images_91"] == 0
