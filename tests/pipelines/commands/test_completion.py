"""`kubedet completion`, as bash calls it."""

import contextlib
import shlex
import shutil
import subprocess

import pytest

from pipelines import cli
from pipelines.commands.completion import SHELLS
from trainer.model.recipes import RECIPES

ASK = """
source {script}
COMP_WORDS=({words}) COMP_CWORD={last} COMP_LINE={line} COMP_POINT={point} COMP_TYPE=9 COMP_KEY=9
COMPREPLY=()
read -r -a how <<< "$(complete -p kubedet)"
for at in "${{!how[@]}}"; do [[ ${{how[at]}} == -F ]] && function=${{how[at + 1]}}; done
$function kubedet {current} {before}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
"""What bash does when the key is pressed; the last word may be the beginning of one, or empty."""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")

    def written(shell):
        path = folder / f"kubedet.{shell}"
        with path.open("w") as file, contextlib.redirect_stdout(file):
            assert cli.main(["completion", shell]) == 0
        return path

    return written


@pytest.fixture(scope="module")
def completed(script):
    """Returns what a bash without any settings offers for a line."""
    path = script("bash")

    def ask(line, cwd="/"):
        words = [*shlex.split(line), *([""] if line.endswith(" ") else [])]
        text = ASK.format(
            script=path,
            words=shlex.join(words),
            last=len(words) - 1,
            line=shlex.quote(line),
            point=len(line),
            current=shlex.quote(words[-1]),
            before=shlex.quote(words[-2]),
        )
        bash = ["bash", "--noprofile", "--norc", "-c", text]
        done = subprocess.run(bash, cwd=cwd, check=True, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return sorted(done.stdout.split())

    return ask


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kubedet comp", ["compare", "completion"]),
        ("kubedet run --rec", ["--recipe"]),
        ("kubedet run --recipe ", sorted(RECIPES)),
        ("kubedet recipes --show coco", ["coco_r50"]),
    ],
)
def test_commands_options_and_recipes_are_completed(completed, line, words):
    assert completed(line) == words


def test_paths_are_completed(completed, tmp_path):
    (tmp_path / "model_a").mkdir()
    (tmp_path / "model.yaml").write_text("")
    assert completed("kubedet serve mod", tmp_path) == ["model.yaml", "model_a"]
    assert [path.rstrip("/") for path in completed("kubedet run --output mod", tmp_path)] == ["model_a"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_what_its_shell_reads(script, shell):
    if not (program := shutil.which(shell)):
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n", script(shell)], check=True, timeout=60)
