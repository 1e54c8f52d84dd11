"""Every benchmark runs in its smallest form and ends with one line of JSON."""

import importlib
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from trainer.data.sources import openimages

ROOT = Path(__file__).parents[2]
TRAINS = ["--no-compile"]
CASES = {
    "loss": ["--size", "128", "--images", "1", *TRAINS],
    "step": ["--cases", "5:128,4:96:mlperf@2", "--images", "1", *TRAINS],
    "detr_step": ["--cases", "4:128:dfine_small@1", "--images", "1", *TRAINS],
    "postprocess": ["--size", "128", "--images", "1"],
    "scaling": ["--size", "128", "--images", "1", "--classes", "3", "--steps", "1", *TRAINS],
    "checkpoint": ["--classes", "3"],
    "accuracy": ["--source", "sample:images=48,seed=3,size=96", "--epochs", "4", "--seeds", "1", *TRAINS],
    "same_time": [
        *("--source", "sample:images=48,seed=3,size=96", "--image-size", "96", "--seconds", "2"),
        *("--sides", "debug; debug train.lr=2e-3 train.ema_decay=0.9", "--seeds", "1"),
    ],
    "peers": [
        *("--source", "sample:images=48,seed=3,size=96", "--image-size", "96", "--seconds", "2"),
        *("--ours", "debug train.lr=2e-3", "--peers", "fasterrcnn_mobilenet_v3_large_320_fpn"),
    ],
    "loader": ["--cases", "", "--images", "16", "--cold-images", "16", "--workers", "1"],
    "download": ["--images", "20", "--connections", "4"],
    "storage": ["--megabytes", "17", "--small", "20"],
    "conversion": ["--images", "20", "--rows", "2000"],
    "openimages_csv": ["--boxes", "1000"],
    "evaluation": ["--part", "metrics", "--images", "40"],
    "export": ["--size", "96"],
}
"""The smallest form of each."""
OTHERS_CALL = {"large_split", "local_store", "slow_link", "slow_server"}
LONG = {"accuracy", "peers", "same_time"}
"""What `make bench` leaves out."""


def test_make_bench_runs_all_but_the_long_ones():
    listed = subprocess.run(
        ["make", "-n", "bench", "ARGS=loss"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m benchmarks loss" in listed
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert runner.SETS["cpu"].keys() == modules - OTHERS_CALL - LONG - {"__main__"}
    assert CASES.keys() == runner.SETS["cpu"].keys() | LONG
    assert runner.SETS["gpu"].keys() <= modules
    assert runner.SETS["gpu"].keys() >= {"loss", "step", "detr_step", "postprocess", "scaling", "loader"}


BROKEN = {
    "fails": "import json; print(json.dumps(dict(name='fails', ratio=1.0))); raise SystemExit(3)",
    "silent": "print('no result')",
    "other": "import json; print(json.dumps(dict(name='loss', ratio=1.0)))",
    "hangs": "import subprocess; subprocess.run(['sleep', '60'])",
    "good": """
import json, sys
goals = [
    {"figure": "speed", "goal": ">= 3", "reached": True}, {"figure": "size", "goal": "<= 2", "reached": False}
]
print(json.dumps(dict(name="good", ratio=float(sys.argv[1]), figures=dict(speed=4, size=2.5), goals=goals)))
""",
}


@pytest.mark.slow
def test_a_failing_benchmark_is_reported_and_the_others_run(monkeypatch, tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()
    for name, code in BROKEN.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(code)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "LIMIT", 2)
    monkeypatch.setattr(runner, "SETS", {"cpu": dict.fromkeys(BROKEN, "1.5")})
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert runner.main() == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "failed: fails: exit code 3",
        "failed: silent: the last line is not its result",
        "failed: other: the last line is not its result",
        "failed: hangs: killed after 2 s",
    ]
    assert re.search(r"^fails +FAILED", shown.out, re.M) and re.search(r"^good +1\.50", shown.out, re.M)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "good"])
    assert runner.main() == 0, "a goal that is not reached is no failure"
    assert "goals: 1 of 2 reached:\n  good size 2.5, not <= 2\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["benchmarks", "unknown"])
    with pytest.raises(SystemExit):
        runner.main()
    assert "not in the set cpu: unknown" in capsys.readouterr().err


@pytest.fixture
def printed(monkeypatch, capsys):
    """Run a benchmark's program in this process; gives what it prints."""
    monkeypatch.setattr(openimages, "_SORT_BYTES", openimages._SORT_BYTES)

    def run(name, arguments):
        monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / f"{name}.py"), *arguments])
        importlib.import_module(f"benchmarks.{name}").main()
        return capsys.readouterr().out

    return run


@pytest.mark.slow
@pytest.mark.extra
# Peers installs packages and trains four detectors: minutes on two cores.
@pytest.mark.parametrize("name", [name for name in CASES if name != "peers"])
def test_the_last_line_is_the_result(name, printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Where one of them leaves its results.
    output = printed(name, ["--rounds", "1", "--device", "cpu", *CASES[name]])
    result = runner._result(name, output.splitlines()[-1])
    assert result, "the runner would take it for broken"
    assert result["versions"].keys() == {"python", "torch", "torchvision"} and all(
        result["versions"].values()
    )
    assert result["device"] and result["date"] and not result["compiled"]
    assert result["command"].startswith(f"python -m benchmarks.{name} --rounds 1")
    assert all(math.isfinite(value) for value in result["figures"].values() if isinstance(value, float))
    for goal in result["goals"]:
        value, (sign, limit) = result["figures"][goal["figure"]], goal["goal"].split()
        assert goal["reached"] == (value >= float(limit) if sign == ">=" else value <= float(limit))
    for same in ("differing_images_91", "differing_images_601", "largest_difference"):
        assert result["figures"].get(same, 0) == 0
