"""Every benchmark runs and ends with one line of JSON; how fast, is not for a test to say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as runner

ROOT = Path(__file__).parents[2]
CASES = {
    "loss": ["--size", "128", "--images", "1"],
    "step": ["--cases", "5:128,4:96:mlperf", "--images", "1"],
    "postprocess": ["--size", "128", "--images", "1"],
    "scaling": ["--size", "128", "--images", "1", "--classes", "3", "--steps", "1"],
    "checkpoint": ["--classes", "3"],
    "accuracy": ["--source", "sample:images=24,seed=3,size=96", "--epochs", "1", "--seeds", "1"],
}


OTHERS_CALL = {"large_split", "slow_link", "slow_server"}
NOT_ON_A_BARE_MACHINE = (
    "kfp", "kubeflow", "kubernetes", "minio", "pyarrow", "simplejpeg", "pycocotools", "hotcoco", "ijson",
    "tensorboard", "matplotlib", "jinja2", "rich", "onnx", "onnxruntime", "openvino", "urllib3", "certifi",
)  # fmt: skip


def test_make_bench_runs_all_but_the_long_one():
    listed = subprocess.run(
        ["make", "-n", "bench", "ARGS=loss"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m benchmarks loss" in listed
    here = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert runner.SETS["cpu"].keys() == here - OTHERS_CALL - {"accuracy", "__main__"}
    assert runner.SETS["gpu"].keys() <= here


def test_a_gpus_benchmarks_need_little_more_than_torch():
    code = f"""
import importlib, importlib.machinery, sys
class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.split(".")[0] in {NOT_ON_A_BARE_MACHINE}
        return None if missing else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Bare
for name in {list(runner.SETS["gpu"])}:
    importlib.import_module("benchmarks." + name).main
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


BROKEN = {
    "fails": "import json; print(json.dumps(dict(name='fails', ratio=1.0))); raise SystemExit(3)",
    "silent": "print('no result')",
    "other": "import json; print(json.dumps(dict(name='loss', ratio=1.0)))",
    "hangs": "import subprocess; subprocess.run(['sleep', '60'])",
    "good": "import json, sys; print(json.dumps(dict(name='good', ratio=float(sys.argv[1]))))",
}


def test_a_benchmark_that_fails_is_told_and_the_others_run(monkeypatch, tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()
    for name, code in BROKEN.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(code)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "LIMIT", 2)
    monkeypatch.setattr(runner, "SETS", {"cpu": dict.fromkeys(BROKEN, "1.5")})
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert runner.main() == 1
    shown = capsys.readouterr()
    assert shown.err == "failed: fails, silent, other, hangs\n"
    assert re.search(r"^fails +FAILED", shown.out, re.M) and re.search(r"^good +1\.50", shown.out, re.M)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "good"])
    assert runner.main() == 0
    monkeypatch.setattr(sys, "argv", ["benchmarks", "unknown"])
    with pytest.raises(SystemExit):
        runner.main()
    assert "not in the set cpu: unknown" in capsys.readouterr().err


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
