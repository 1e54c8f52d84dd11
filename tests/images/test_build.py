"""Both images, really built and run. Needs docker or podman, minutes and 15 GB: only where asked for.

    KUBEDET_DOCKER=1 python -m pytest tests/images/test_build.py

The variables of images/build.sh (DOCKER, BASE, PIP_CONF, PIP_CA) hold here as well; what stands
in KUBEDET_DOCKER_OPTIONS goes to the builder, e.g. --network=host.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = os.environ.get("DOCKER") or shutil.which("docker") or shutil.which("podman") or "docker"
TAG = "build-test"
# As a cluster may run it: no network, nothing writable but /tmp, a user that the image does not know.
CAGED = (
    "--network=none",
    "--read-only",
    "--tmpfs=/tmp",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extra,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.environ.get("KUBEDET_DOCKER") != "1", reason="builds images: set KUBEDET_DOCKER=1"),
]


def docker(*arguments, check=True):
    return subprocess.run([DOCKER, *arguments], capture_output=True, text=True, check=check, timeout=900)


@pytest.fixture(scope="module")
def built():
    """Names of both images by what they are for; they are removed at the end."""
    options = shlex.split(os.environ.get("KUBEDET_DOCKER_OPTIONS", ""))
    environment = {**os.environ, "TAG": TAG, "REGISTRY": "", "PUSH": ""}
    command = [ROOT / "images" / "build.sh", *options]
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=3000
    )
    assert completed.returncode == 0, (completed.stdout + completed.stderr)[-4000:]
    names = {part: f"kubedet-{part}:{TAG}" for part in ("trainer", "component")}
    yield names
    docker("rmi", *names.values(), check=False)


@pytest.fixture(params=["trainer", "component"])
def image(request, built):
    return built[request.param]


@pytest.mark.parametrize("user", ["1000", "2000:2000"])
def test_it_runs_caged(image, user):
    help_text = docker("run", "--rm", *CAGED, f"--user={user}", image, "python", "-m", "trainer", "--help")
    assert "usage: python -m trainer" in help_text.stdout


def test_it_says_what_it_is(image):
    (found,) = json.loads(docker("inspect", image).stdout)
    labels = found["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == image.partition(":")[0]
    assert labels["org.opencontainers.image.revision"] not in ("", "unknown")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", labels["org.opencontainers.image.base.digest"])
    assert found["Config"]["User"] == "1000:1000"


def test_no_secret_stays_in_it(image):
    """The build's secrets were mounted, never copied; what an image remembers of its making names none."""
    find = ("find", "/run/secrets", "-type", "f", "-size", "+0")
    assert docker("run", "--rm", *CAGED, image, *find, check=False).stdout == ""
    remembered = docker("history", "--no-trunc", image).stdout + docker("inspect", image).stdout
    assert "index-url" not in remembered
    for name in ("PIP_CONF", "PIP_CA"):
        if os.environ.get(name):
            assert os.environ[name] not in remembered


def test_the_trainer_image_has_no_kfp(built):
    code = (
        "import importlib.util as u; print([n for n in ('kfp', 'kubernetes', 'kubeflow') if u.find_spec(n)])"
    )
    assert docker("run", "--rm", *CAGED, built["trainer"], "python", "-c", code).stdout.strip() == "[]"


def test_the_whole_pipeline_runs_in_a_cage(built):
    """Every step on the built-in sample, two training processes, nothing written outside of /tmp."""
    # Without a network a container cannot find the address of its own name, which torchrun asks for.
    cage = ("run", "--rm", *CAGED, "--hostname=localhost", "--user=2000:2000", "--shm-size=1g")
    folders = ("--data-root", "/tmp/data", "--output", "/tmp/runs")
    short = ("--source", "sample:images=48,size=96", "--set", "train.epochs=2")
    ran = docker(*cage, built["component"], "kubedet", "run", *folders, *short, check=False)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
