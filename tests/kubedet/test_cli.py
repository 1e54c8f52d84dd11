"""The command line: help, mistakes, completion, and what a command has of its function."""

import inspect
import os
import subprocess
import sys
from itertools import chain

import pytest

from kubedet import api, cli

COMMANDS = pytest.mark.parametrize("name", cli.COMMANDS)


def test_the_help_is_quick_and_loads_neither_torch_nor_kfp():
    code = "import sys, time; from kubedet import cli; cli.main(['--help'])\n"
    code += "print({'torch', 'kfp', 'numpy'} & {*sys.modules}, time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    *lines, measured = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 30
    loaded, seconds = measured.rsplit(" ", 1)
    assert loaded == "set()" and float(seconds) < 0.3  # CPU seconds.


@COMMANDS
def test_every_option_is_explained(kubedet, name):
    code, out, _ = kubedet(*name.split(), "--help")
    assert code == 0
    out = "".join(out.split())
    for option in chain(*cli.command_options(cli.COMMANDS[name]).values()):
        assert option.help and option.help.replace(" ", "") in out
        assert all(flag in out for flag in option.flags)


def test_every_function_of_the_interface_is_a_command():
    functions = {name for name, item in vars(api).items() if hasattr(item, "__wrapped__")}
    assert functions - {"load"} == {
        entry.function.__name__ for name, entry in cli.COMMANDS.items() if name != "job menu"
    }
    for name in functions:
        kinds = {item.kind for item in inspect.signature(getattr(api, name)).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, name


@pytest.mark.parametrize(
    ("words", "usage", "remedy"),
    [
        (["evalute"], "kubedet [", "'evaluate'"),
        (["data", "inspct"], "kubedet data [", "'inspect'"),
        (["job", "submit", "--imge", "x", "--", "echo"], "kubedet job submit ", "--image"),
        (["job", "list", "--backend", "slurm"], "kubedet job list ", "'trainjob'"),
        (["data", "preview", "x", "--count", "two"], "kubedet data preview ", "--count"),
        (["predict", "x", "y"], "kubedet predict ", "--output"),
        (["job", "stop", "a\x1b[31m", "b"], "kubedet job stop ", "--help"),
    ],
)
def test_a_mistake_has_usage_and_remedy(kubedet, words, usage, remedy):
    code, out, err = kubedet(*words)
    assert (code, out) == (2, "") and err.startswith(f"Usage: {usage}")
    assert "\nerror: " in err and "\n  fix: " in err and remedy in err and "\x1b" not in err


@pytest.mark.parametrize("words", [[], ["job"], ["data"], ["model"]])
def test_without_a_command_the_commands_are_listed(kubedet, words):
    code, out, err = kubedet(*words)
    assert (code, out) == (2, "") and "Commands:" in err and "error" not in err


def test_output_may_be_cut_off():
    command = f"{sys.executable} -m kubedet.cli recipes explain | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and done.stderr == "" and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kubedet eva", ["evaluate"]),
        ("kubedet data pre", ["preview"]),
        ("kubedet job submit --ima", ["--image"]),
        ("kubedet evaluate --split ", ["test", "train", "val"]),
    ],
)
def test_commands_options_and_choices_are_completed(line, words):
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "kubedet.cli"],
        env=os.environ | asked | {"_KUBEDET_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == words
