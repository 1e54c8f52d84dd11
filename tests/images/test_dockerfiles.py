"""The rules of the Dockerfiles that can be read off them."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LABELS = {"base.digest", "title", "description", "version", "revision", "base.name"}


def instructions(name):
    """Return a Dockerfile's instructions as (name, arguments), continued lines joined."""
    text = (ROOT / "images" / f"{name}.Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if line and not line.startswith("#"))
    joined = lines.replace("\\\n", " ").splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in joined]


def stages(name):
    """Return the instructions of each stage, the final one last; what stands before the first is left out."""
    problems = []
    for word, rest in instructions(name):
        if word == "FROM":
            problems.append([])
        if problems:
            problems[-1].append((word, rest))
    return problems


@pytest.fixture(params=["trainer", "component"])
def image(request):
    return request.param


def test_it_runs_as_a_numeric_non_root_user(image):
    """A number: Kubernetes cannot tell whether a name is root."""
    users = [rest for word, rest in stages(image)[-1] if word == "USER"]
    assert users[-1] == "1000:1000"


def test_only_pip_and_the_compiler_script_download(image):
    words = {word for word, _ in instructions(image)}
    assert "ADD" not in words
    text = "\n".join(rest for _, rest in instructions(image))
    assert not re.search(
        r"https?://|\bcurl\b|\bwget\b|\bgit clone\b|apt-get|--(extra-)?index-url|--trusted-host", text
    )


def test_every_installation_is_pinned(image):
    runs = [rest for word, rest in instructions(image) if word == "RUN" and "pip install" in rest]
    assert runs
    for run in runs:
        locked = re.search(r"-r /plan/(build|torch|packages)\.txt", run) and "--no-deps" in run
        assert locked or "-c /plan/constraints.txt" in run or "--no-index" in run, run


def test_no_secret_is_an_argument_or_a_variable(image):
    for word, rest in instructions(image):
        if word in ("ARG", "ENV"):
            assert not re.search(r"(?i)password|token|secret|credential|access.?key", rest)
    mounts = [rest for word, rest in instructions(image) if "/run/secrets" in rest]
    assert mounts and all("--mount=type=secret,id=pipconf" in rest for rest in mounts)


def test_the_build_sees_only_what_is_allowed():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert allowed == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "deploy", "kubedet",
                       "trainer",
                       "components", "operations", "pipelines", "images/plan.py", "images/check.py",
                       "images/compiler.sh", "images/locks"}  # fmt: skip
    assert all((ROOT / path).exists() for path in allowed)
    assert rules[-2:] == ["**/.*", "**/__pycache__"]


DOCKER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/asked"
case "$*" in
  *RepoDigests*python*) echo "python@sha256:aaaa"; echo "mirror/python@sha256:bbbb" ;;
  *RepoDigests*) ;;
  *Id*) echo "sha256:cccc" ;;
esac
"""


def test_the_record_of_a_build_names_its_base_by_digest(tmp_path):
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "DOCKER": str(program), "BASE": "python:3.12-slim"}
    build = subprocess.run(
        [ROOT / "images" / "build.sh"], env=environment, capture_output=True, text=True, check=True
    )
    lines = [line for line in (tmp_path / "asked").read_text().splitlines() if line.startswith("build ")]
    assert "BASE=python:3.12-slim" in lines[0] and "BASE_DIGEST=sha256:aaaa " in lines[0]
    assert "BASE_DIGEST=sha256:cccc " in lines[1]  # Built here, and in no registry.
    assert "base image:      python:3.12-slim sha256:aaaa" in build.stdout
