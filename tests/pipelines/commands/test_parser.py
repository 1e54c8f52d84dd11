"""Mistakes on the command line: the usage of the command that is wrong, and what was perhaps meant."""

import argparse

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
        (["runn"], "kubedet [-h]", "run"),
        (["run", "--sorce", "x"], "kubedet run ", "--source"),
        (["run", "--sorce=x"], "kubedet run ", "--source"),
        (["job", "submitt"], "kubedet job ", "submit"),
        (["job", "submit", "--imge", "x", "--", "echo"], "kubedet job submit ", "--image"),
        (["data", "inspect", "x", "-o", "jsn"], "kubedet data inspect ", "json"),
    ],
)
def test_a_slip_is_recognised(words, usage, guess, capsys):
    text = error_text(capsys, *words)
    assert text.startswith(f"usage: {usage}")
    assert text.endswith(f"\n  fix: did you mean {guess}?\n")


@pytest.mark.parametrize("words", [["run", "extra"], ["run", "--zzz"], ["zzz"]])
def test_nothing_is_made_up(words, capsys):
    text = error_text(capsys, *words)
    assert "did you mean" not in text and words[-1] in text


def test_an_abbreviation_is_no_option(capsys):
    assert "unrecognized arguments: --sour x" in error_text(capsys, "run", "--sour", "x")


@pytest.mark.parametrize("words", [[], ["job"], ["data"], ["model"]])
def test_a_command_alone_tells_what_there_is(words, capsys):
    text = error_text(capsys, *words)
    assert "positional arguments:" in text and "error" not in text


def test_a_missing_argument_is_named(capsys):
    assert "required: URI" in error_text(capsys, "data", "inspect")


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


def test_every_command_says_what_it_does():
    assert [parser.prog for parser in parsers(cli.make_parser()) if not parser.description] == []
