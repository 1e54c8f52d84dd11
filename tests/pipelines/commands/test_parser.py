"""Mistakes on the command line: the usage of the command, and a suggestion."""

import argparse
import subprocess
import sys

import pytest

from pipelines import cli
from trainer.__main__ import _parser as trainer_parser


def error_text(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main([*words])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage", "guess"),
    [
        (["run", "--sorce", "x"], "kubedet run ", "--source"),
        (["job", "submitt"], "kubedet job ", "submit"),
        (["job", "submit", "--imge", "x", "--", "echo"], "kubedet job submit ", "--image"),
        (["data", "inspect", "x", "-o", "jsn"], "kubedet data inspect ", "json"),
    ],
)
def test_a_slip_is_recognized(words, usage, guess, capsys):
    text = error_text(capsys, *words)
    assert text.startswith(f"usage: {usage}")
    assert text.endswith(f"\n  fix: did you mean {guess}?\n")


@pytest.mark.parametrize(("word", "guess"), [("runn", "did you mean run?"), ("zzz", "'zzz'")])
def test_a_command_that_does_not_exist(word, guess, capsys):
    assert cli.main([word]) == 2
    assert guess in capsys.readouterr().err


def test_the_help_fits_a_small_screen_and_loads_no_command():
    code = "import sys; from pipelines import cli; cli.main(['--help'])\n"
    code += "import time; print('argparse' in sys.modules and 'yaml' in sys.modules, time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    *lines, measured = done.stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(f"  {name} " in done.stdout for name in cli.SUMMARIES)
    loaded, seconds = measured.split()
    assert loaded == "False" and float(seconds) < 0.3


@pytest.mark.parametrize("words", [["job"], ["data"], ["model"], ["schedule"]])
def test_a_command_without_a_verb_lists_its_verbs(words, capsys):
    text = error_text(capsys, *words)
    assert "positional arguments:" in text and "error" not in text


def parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


@pytest.mark.parametrize("top", [cli.make_parser, trainer_parser])
def test_every_option_of_every_command_is_explained(top):
    bare = [
        f"{parser.prog}: {'/'.join(action.option_strings) or action.dest}"
        for parser in parsers(top())
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert bare == []
