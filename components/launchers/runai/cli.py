"""Calls Run:ai's program `runai` without a shell, and turns its refusals into errors.

Source: NVIDIA Run:ai, CLI reference (v2.20 and later).
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.errors import ConfigError, KubedetError, LaunchError

_SECONDS = 120.0
"""Time limit of a call: a submission alone may wait a minute for its workload (`--wait-for-submit`)."""
_LAST_LINES = 10

_ABSENT = re.compile(
    r"not[ _-]?found|(?:no such|could not find|cannot find)[^.\n]*(?:workload|training|job)"
    r"|no (?:workloads?|trainings?|jobs?) found|does(?: not|n't) exist|\b404\b",
    re.I,
)
_NO_LOGIN = re.compile(
    r"not logged in|log ?in (?:again|first|to)|runai login|unauthori[sz]ed|unauthenticated|\b401\b"
    r"|(?:token|session)[^.\n]*(?:expired|invalid|missing)",
    re.I,
)
_NO_PROJECT = re.compile(
    r"project(?:(?!workload|training|job)[^.\n])*(?:not[ _]found|required|missing|not set|not exist)"
    r"|no default project",
    re.I,
)
_NO_COMMAND = re.compile(r"unknown command", re.I)
_NO_FLAG = re.compile(r"unknown (?:shorthand )?flag", re.I)


class AbsentError(LaunchError):
    """Run:ai has no workload of that name, kind and project."""


class FlagError(LaunchError):
    """The program has no such option in this version."""


@dataclass(frozen=True)
class Cli:
    """The program, for one project."""

    project: str = ""
    """Run:ai's project; empty is the one that `runai project set` chose."""
    program: str = "runai"
    """Name or path of the program."""

    def ask(self, *words: str, seconds: float = _SECONDS) -> str:
        """Run the program and return what it printed.

        Raises:
            ConfigError: it is not installed, too old, not logged in, or has no such project.
            AbsentError: what is asked for is not there.
            FlagError: it has no such option.
            LaunchError: it refused, or does not answer.
        """
        command = self._command(words)
        try:
            result = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"{_call_name(words)} does not answer within {seconds:g} s",
                fix="see whether Run:ai's control plane can be reached (`runai whoami`), then try again",
            ) from None
        if result.returncode:
            raise refusal(words, result.returncode, _text(result.stderr) or _text(result.stdout))
        return _text(result.stdout)

    def stream(self, *words: str) -> Iterator[str]:
        """Run the program and yield its lines as they come, without their ends.

        To leave it early ends the program.

        Raises:
            ConfigError, AbsentError, LaunchError: as `ask`, when it has ended.
        """
        command = self._command(words)
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                for line in process.stdout:
                    yield line.decode(errors="replace").rstrip("\r\n")
            except BaseException:
                process.kill()
                raise
            error_output = _text(process.stderr.read())
        if process.returncode:
            raise refusal(words, process.returncode, error_output)

    def attach(self, *words: str) -> int:
        """Run the program on this process's own input and output; returns its exit code."""
        return subprocess.run(self._command(words), check=False).returncode

    def _command(self, words: tuple[str, ...]) -> list[str]:
        """Return the command line, with the project before a `--` and what follows it."""
        path = shutil.which(self.program)
        if path is None:
            raise ConfigError(
                f"the program {self.program} is not on the PATH",
                fix="install Run:ai's command line (in its web interface: Help, Researcher Command Line "
                "Interface), or leave out --backend runai and set runai_queue",
            )
        options_end = words.index("--") if "--" in words else len(words)
        project_option = (
            ["--project", self.project] if self.project and "--project" not in words[:options_end] else []
        )
        return [path, *words[:options_end], *project_option, *words[options_end:]]


def refusal(words: tuple[str, ...], code: int, output: str) -> KubedetError:
    """Make an error of a failed call from the program's output.

    Args:
        words: the command line without the program.
        code: its exit code.
        output: what it printed.
    """
    lines = "\n".join(output.splitlines()[-_LAST_LINES:]) or f"exit code {code}"
    text = f"{_call_name(words)} failed: {lines}"
    if _NO_COMMAND.search(output):
        return ConfigError(
            f"this runai has no command `{' '.join(words[:3])}`: {lines}",
            fix="install the command line of v2.20 or later; for the older one, print the command: "
            "kubedet job render --target runai-submit-dist",
        )
    if _NO_FLAG.search(output):
        return FlagError(text, fix="install a newer command line of Run:ai")
    if _NO_LOGIN.search(output):
        return ConfigError(text, fix="log in: `runai login`, or in a program `runai login application`")
    if _NO_PROJECT.search(output):
        return ConfigError(text, fix="name a --project that `runai project list` shows")
    if _ABSENT.search(output):
        return AbsentError(text, fix="see `kubedet job list --backend runai`")
    return LaunchError(text, fix="do what it says; `runai training list` shows what there is")


def _call_name(words: tuple[str, ...]) -> str:
    """Return a call's verb and object for messages: options may hold values that belong in no log."""
    return "`runai " + " ".join(words[: min(4, len(words))]) + "`"


def _text(data: bytes) -> str:
    return data.decode(errors="replace").strip()
