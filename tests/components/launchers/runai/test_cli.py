"""Calling `runai`: what is passed, and what its refusals mean."""

import pytest

from components.launchers.runai.cli import AbsentError, Cli, FlagError, refusal
from trainer.errors import ConfigError, LaunchError


def test_words_go_through_no_shell_and_the_project_stands_before_the_command(runai):
    runai.change("train")
    words = ("training", "standard", "exec", "train", "--", "printf", "%s|", "$(id)", "a b; c")
    assert Cli("team").attach(*words) == 0
    assert runai.calls == [[*words[:4], "--project", "team", *words[4:]]]
    assert Cli().attach("training", "standard", "exec", "train", "--", "sh", "-c", "exit 7") == 7
    assert runai.calls[-1][-4:] == ["--", "sh", "-c", "exit 7"]


def test_a_program_that_is_not_there(runai, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ConfigError, match="the program runai is not on the PATH") as error:
        Cli().ask("training", "standard", "list")
    assert "install Run:ai's command line" in error.value.fix


def test_a_program_that_does_not_answer(runai):
    (runai.folder / "runai").write_text("#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(LaunchError, match=r"does not answer within 0\.2 s"):
        Cli().ask("training", "standard", "list", seconds=0.2)


@pytest.mark.parametrize(
    ("said", "kind", "fix"),
    [
        ("Error: you are not logged in", ConfigError, "runai login"),
        ("failed: 401 Unauthorized", ConfigError, "runai login"),
        ("token has expired", ConfigError, "runai login"),
        ('Error: unknown command "training" for "runai"', ConfigError, "--target runai-submit-dist"),
        ("Error: unknown flag: --json", FlagError, "newer"),
        ("Error: project x was not found", ConfigError, "runai project list"),
        ("Error: workload train was not found in project team", AbsentError, "job list"),
        ("Project team: the workload train does not exist", AbsentError, "job list"),
        ("the project is not set, please specify one", ConfigError, "runai project list"),
        ("Error: quota exceeded", LaunchError, "do what it says"),
        ("", LaunchError, "do what it says"),
    ],
)
def test_refusals(said, kind, fix):
    error = refusal(("training", "pytorch", "submit", "train", "-e", "KEY=secret"), 1, said)
    assert type(error) is kind
    assert fix in error.fix
    assert (said or "exit code 1") in error.message
    assert "secret" not in str(error)  # Values of options are in no message.


def test_a_stream_that_is_left_ends_its_program(runai):
    runai.change("train")
    lines = Cli().stream("training", "standard", "logs", "train", "--follow")
    assert next(lines) == "hello from train-0-0"
    lines.close()  # Would wait for 20 seconds else.
