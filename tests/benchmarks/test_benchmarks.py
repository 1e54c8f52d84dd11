"""Every benchmark runs as its documented command does, in small, and ends with one line of JSON."""

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks import gpu

ROOT = Path(__file__).parents[2]
SMALL = "--rounds 1 --device cpu"
CASES = {
    "loss": "--size 128 --images 1",
    "step": "--cases 5:128,4:96:mlperf@2 --images 1",
    "detr_step": "--cases 4:128:dfine_small@1 --images 1 --clock cpu",
    "loop": "--recipe debug --size 96 --images 2 --samples 16 --epochs 2 --network off",
    "postprocess": "--size 128 --images 1",
    "scaling": "--size 128 --images 1 --classes 3 --steps 1",
    "accuracy": "--source sample:images=48,seed=3,size=96 --epochs 4 --seeds 1",
    "peers": "--source sample:images=48,seed=3,size=96 --image-size 96 --seconds 2"
    " --output OUT/compared --ours 'debug train.lr=2e-3' --peers fasterrcnn_mobilenet_v3_large_320_fpn",
    "loader": "--cases 128x96:96 --images 16 --cold-images 16 --workers 1",
    "download": "--images 20 --connections 4",
    "storage": "--megabytes 17 --small 20",
    "conversion": "--images 20 --rows 2000",
    "evaluation": "--part metrics --images 40",
    "export": "--size 96",
}
"""The smallest form of each."""
OTHERS_CALL = {"large_split", "local_store", "slow_link", "slow_server"}
LONG = {"accuracy", "peers"}
"""What `make bench` leaves out."""


def test_make_bench_runs_all_but_the_long_ones():
    listed = subprocess.run(
        ["make", "-n", "bench", "ARGS=loss"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m benchmarks loss" in listed
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert runner.BENCHMARKS.keys() == modules - OTHERS_CALL - LONG - {"__main__", "gpu"}
    assert CASES.keys() == runner.BENCHMARKS.keys() | LONG


def test_the_small_forms_use_the_options_that_the_documentation_names():
    text = (ROOT / "docs/performance.md").read_text()
    named = re.findall(r"python -m benchmarks\.(\w+)((?: --[\w-]+(?: (?!--)[^\s`]+)?)*)", text)
    named += runner.BENCHMARKS.items()
    assert len(named) > 20
    for name, options in named:
        if name in CASES:
            given = {*shlex.split(CASES[name]), *SMALL.split()}
            assert set(re.findall(r"--[a-z-]+", options)) <= given, name


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
    monkeypatch.setattr(runner, "TIMEOUT", 2)
    monkeypatch.setattr(runner, "BENCHMARKS", dict.fromkeys(BROKEN, "1.5"))
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
    assert runner.main() == 0, "a missed goal is not a failure"
    assert "goals: 1 of 2 reached:\n  good size 2.5, not <= 2\n" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["benchmarks", "unknown"])
    with pytest.raises(SystemExit):
        runner.main()
    assert "unknown: unknown" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("name", CASES)
def test_the_last_line_is_the_result(name, tmp_path):
    arguments = [word.replace("OUT", str(tmp_path)) for word in shlex.split(CASES[name])]
    run = runner.run(name, [*SMALL.split(), *arguments])
    result = run.result
    assert result, run.failure
    assert result["versions"].keys() == {"python", "torch", "torchvision"} and all(
        result["versions"].values()
    )
    assert result["device"] and result["date"]
    assert result["command"].startswith(f"python -m benchmarks.{name} --rounds 1")
    assert all(math.isfinite(value) for value in result["figures"].values() if isinstance(value, float))
    for goal in result["goals"]:
        value, (sign, limit) = result["figures"][goal["figure"]], goal["goal"].split()
        assert goal["reached"] == (value >= float(limit) if sign == ">=" else value <= float(limit))
    for same in ("differing_images_91", "differing_images_601", "largest_difference"):
        assert result["figures"].get(same, 0) == 0


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.timeout(1800)
def test_the_stages_for_a_gpu_run_in_small_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--run", "--small", "--device", "cpu"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    rows = [
        line.split(" | ")
        for line in (tmp_path / "table.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    assert {row[0].strip("| ") for row in rows[2:]} == gpu.STAGES.keys()
    figures = {row[1]: float(row[2]) for row in rows[2:] if len(row) > 3 and row[1]}
    assert figures["ratio_to_bf16_5_96px"] > 0 and figures["evaluation_images_per_second"] > 0
    assert figures["ap_difference"] == 0 and figures["loop_images_per_second"] > 0


def test_a_stage_that_fails_or_hangs_is_in_the_table(tmp_path, monkeypatch, capfd):
    stages = {
        "fails": gpu.Stage(10, "", "-c raise(SystemExit(3))"),
        "hangs": gpu.Stage(0, "", "-c import(time)"),
        "passes": gpu.Stage(10, "", "-c print(1)"),
    }
    monkeypatch.setattr(gpu, "STAGES", stages)
    monkeypatch.setattr(sys, "argv", ["gpu", "--run", "--small", "--out", str(tmp_path)])
    assert gpu.main() == 1
    table = (tmp_path / "table.md").read_text()
    assert "exit code 3, see fails.log" in table and "killed after 0 s" in table and "passed" in table
    assert (tmp_path / "passes.log").read_text() == "1\n" and table in capfd.readouterr().out
