"""The wheel is complete and runs without the checkout, on the packages of its extras."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
import zipfile
from email import message_from_bytes

import pytest
from installed import ROOT, view
from PIL import Image, ImageDraw

FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = ("deploy", "kubedet", "trainer", "components", "operations", "pipelines")
ELSEWHERE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Without the checkout, which pip would take for an installation."""
TINY = (
    "--nproc", "1", "--gate", "coco/AP50 >= 0", "--set", "train.epochs=1", "--set", "loader.image_size=96",
    "--set", "train.minutes=0", "--set", "model.weights=none",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.extra, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from the source distribution as `make dist` builds both."""
    source = tmp_path_factory.mktemp("source")
    for name in FILES:  # A build writes beside its sources; other tests read those.
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", source]
    made = subprocess.run(command, env=ELSEWHERE, capture_output=True, text=True, check=False, timeout=300)
    assert made.returncode == 0, (made.stdout + made.stderr)[-4000:]
    assert "Warning" not in made.stderr, made.stderr
    (path,) = (source / "dist").glob("*.whl")
    assert [item.name for item in (source / "dist").glob("*.tar.gz")] == [
        f"{path.name.partition('-py3')[0]}.tar.gz"
    ]
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Folder of an environment with the wheel and the packages of `train` only."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python3*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
    command += ["--no-index", "--no-deps", wheel]
    subprocess.run(command, env=ELSEWHERE, cwd=folder, check=True, timeout=120)
    view(["client", "train"], packages)
    return folder


@pytest.fixture(scope="module")
def client(wheel, tmp_path_factory):
    """Folder of an environment in which pip installed the wheel alone, from the package index."""
    folder = tmp_path_factory.mktemp("client")
    venv.create(folder, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet"]
    command += ["-c", ROOT / "constraints.txt", wheel]
    ran = subprocess.run(
        command, env=ELSEWHERE, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    if "No matching distribution found" in ran.stderr:
        pytest.skip(f"no package index here: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    size = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())
    assert size < 170e6  # Compiled bytecode included.
    return folder


def run(installed, cwd, *words, timeout=900):
    kept = {
        name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ
    }
    kept["KUBECONFIG"] = str(cwd / "none")  # A machine may have a cluster.
    program = installed / "bin" / words[0]
    return subprocess.run(
        [program, *words[1:]], cwd=cwd, env=kept, capture_output=True, text=True, check=False, timeout=timeout
    )


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_it_contains_all_files_of_the_packages_and_of_deploy(wheel):
    ours = {
        f"{package}/{name}": data for package in FOLDERS[1:] for name, data in tree(ROOT / package).items()
    }
    ours |= {f"pipelines/deploy/{name}": data for name, data in tree(ROOT / "deploy").items()}
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert held == ours and "kubedet/py.typed" in held
    assert "trainer/report/evaluation_page.html.jinja" in held and "pipelines/deploy/base/role.yaml" in held


def test_metadata_and_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        said = message_from_bytes(archive.read(name))
        assert archive.read(name.replace("METADATA", "licenses/LICENSE")) == (ROOT / "LICENSE").read_bytes()
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Version"] == wheel.name.split("-")[1]
    assert said["Description-Content-Type"] == "text/markdown"


def photographs(folder):
    """Write a labeling tool's export and photographs without labels where the commands expect them."""
    (folder / "Downloads").mkdir()
    (folder / "here" / "photos").mkdir(parents=True)
    with zipfile.ZipFile(folder / "Downloads" / "cards.zip", "w") as archive:
        archive.writestr("data.yaml", "names: [ace, king]\ntrain: train/images\nval: valid/images\n")
        for number in range(30):
            x, place = 10 + number, "valid" if number > 23 else "train"
            drawn, file = Image.new("RGB", (96, 72), "green"), io.BytesIO()
            ImageDraw.Draw(drawn).rectangle((x, 20, x + 30, 60), fill=("white", "red")[number % 2])
            drawn.save(file, "JPEG")
            archive.writestr(f"{place}/images/{number}.jpg", file.getvalue())
            box = f"{number % 2} {(x + 15) / 96:.4f} {40 / 72:.4f} {30 / 96:.4f} {40 / 72:.4f}\n"
            archive.writestr(f"{place}/labels/{number}.txt", box)
    (folder / "here" / "photos" / "new.jpg").write_bytes(file.getvalue())
    return folder / "here"


def test_the_seven_documented_commands_work(installed, tmp_path):
    """Those of docs/data.md; the fixture is the first."""
    part = (ROOT / "docs" / "data.md").read_text().partition("## Bring your own data")[2]
    lines = part.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert len(lines) == 7 and lines[1] == "cp ~/Downloads/cards.zip ."
    install, _, inspect, preview, training, predict, serve = map(shlex.split, lines)
    assert install[-1] == "./kubedet[train]"  # What the fixture has.
    here = photographs(tmp_path)
    shutil.copy(tmp_path / "Downloads" / "cards.zip", here)
    told = run(installed, here, *inspect)
    assert told.returncode == 0 and f"--source {training[3]}".split(":")[0] in told.stdout, told.stderr
    assert run(installed, here, *preview).returncode == 0 and (here / "sheet.png").stat().st_size > 10_000
    ran = run(installed, here, *training, *TINY)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert json.loads((here / "runs/first/summary.json").read_text())["status"] == "succeeded"
    assert (here / "runs/first/evaluation/report.html").stat().st_size > 10_000
    told = run(installed, here, *predict)
    assert told.returncode == 0 and (here / "predictions" / "new.jpg").is_file(), told.stderr
    with subprocess.Popen(
        [installed / "bin" / serve[0], *serve[1:], "--port", "0"],
        cwd=here,
        env={"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as served:
        try:
            address = next(
                found[0] for line in served.stdout if (found := re.search(r"http://\S+\d/?", line))
            )
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert b"<html" in answer.read()
            with urllib.request.urlopen(f"{address.rstrip('/')}/model.json", timeout=60) as answer:
                assert json.load(answer)["name"] == "cards"
            served.send_signal(signal.SIGINT)
            assert served.wait(60) == 0
        finally:
            served.kill()
    made = {".kubedet-files", "cards.zip", "photos", "sheet.png", "predictions", "runs", "data_root"}
    assert {path.name for path in here.iterdir()} == made


def test_doctor_finds_nothing_missing(installed, tmp_path):
    ran = run(installed, tmp_path, "kubedet", "doctor", "--local")
    assert ran.returncode == 0, ran.stdout + ran.stderr


ROOT_URI = "--data-root s3://bucket/root --source coco:s3://bucket/set"


@pytest.mark.parametrize(
    ("line", "code", "text", "made"),
    [
        (f"submit --dry-run {ROOT_URI}", 0, "nothing was sent", ""),
        (f"schedule create --cron '0 2 * * *' --dry-run {ROOT_URI}", 0, "nothing was sent", ""),
        ("cluster compile -o pipeline.yaml", 0, "wrote pipeline.yaml", "pipeline.yaml"),
        ("cluster manifests", 0, "wrote deploy", "deploy/trainer/runtime.yaml"),
        ("job render --name x --image y --nodes 2 -- python -m trainer", 0, "kind: PyTorchJob", ""),
        ("job menu", 2, "fix: ", ""),  # It needs a cluster and a terminal.
        ("job fields", 0, "grace_seconds = 60", ""),
        ("doctor", 1, "missing  cluster", ""),
        ("doctor --local", 1, "'.[train]'", ""),
        ("recipes show coco_r50", 0, "calibration_images", ""),
        ("run", 2, "needs torch", ""),
        ("--version", 0, "kubedet 0.", ""),
    ],
)
def test_the_client_runs_its_commands(client, tmp_path, line, code, text, made):
    ran = run(client, tmp_path, "kubedet", *shlex.split(line))
    assert ran.returncode == code and text in ran.stdout + ran.stderr, ran.stdout + ran.stderr
    assert not made or (tmp_path / made).is_file()
    heavy = {"torch", "numpy", "pyarrow", "matplotlib"}
    assert not [path for path in client.glob("lib/python3*/site-packages/*") if path.name in heavy]
