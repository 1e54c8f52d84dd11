"""Run:ai's program `runai`: called with lists of words, never through a shell; its refusals as errors.

Source: NVIDIA Run:ai, CLI reference (v2.20 and later).
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.errors import ConfigError, KubedetError, LaunchError

_SECONDS = 120.0
"""For an answer: a submission alone may wait a minute for its workload (`--wait-for-submit`)."""
_LAST_LINES = 10

_ABSENT = re.compile(
    r"not[ _-]?found|(?:no such|could not find|cannot find)[^.\n]*(?:workload|training|job)"
    r"|no (?:workloads?|trainings?|jobs?) found|does(?: not|n't) exist|\b404\b",
    re.I,
)
_STRANGER = re.compile(
    r"not logged in|log ?in (?:again|first|to)|runai login|unauthori[sz]ed|unauthenticated|\b401\b"
    r"|(?:token|session)[^.\n]*(?:expired|invalid|missing)",
    re.I,
)
_NO_PROJECT = re.compile(
    r"project(?:(?!workload|training|job)[^.\n])*(?:not[ _]found|required|missing|not set|not exist)"
    r"|no default project",
    re.I,
)
_OLD = re.compile(r"unknown command", re.I)
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
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"{_told(words)} does not answer within {seconds:g} s",
                fix="see whether Run:ai's control plane can be reached (`runai whoami`), then try again",
            ) from None
        if done.returncode:
            raise refusal(words, done.returncode, _text(done.stderr) or _text(done.stdout))
        return _text(done.stdout)

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
            said = _text(process.stderr.read())
        if process.returncode:
            raise refusal(words, process.returncode, said)

    def attach(self, *words: str) -> int:
        """Run the program on this process's own input and output; returns its exit code."""
        return subprocess.run(self._command(words), check=False).returncode

    def _command(self, words: tuple[str, ...]) -> list[str]:
        """Return the command line, with the project before a `--` and what follows it."""
        found = shutil.which(self.program)
        if found is None:
            raise ConfigError(
                f"the program {self.program} is not on the PATH",
                fix="install Run:ai's command line (in its web interface: Help, Researcher Command Line "
                "Interface), or leave out --backend runai and set runai_queue",
            )
        cut = words.index("--") if "--" in words else len(words)
        named = ["--project", self.project] if self.project and "--project" not in words[:cut] else []
        return [found, *words[:cut], *named, *words[cut:]]


def refusal(words: tuple[str, ...], code: int, said: str) -> KubedetError:
    """Make an error of a call that failed, by what the program said.

    Args:
        words: the command line without the program.
        code: its exit code.
        said: what it printed.
    """
    lines = "\n".join(said.splitlines()[-_LAST_LINES:]) or f"exit code {code}"
    text = f"{_told(words)} failed: {lines}"
    if _OLD.search(said):
        return ConfigError(
            f"this runai has no command `{' '.join(words[:3])}`: {lines}",
            fix="install the command line of v2.20 or later; for the older one, print the command: "
            "kubedet job render --target runai-submit-dist",
        )
    if _NO_FLAG.search(said):
        return FlagError(text, fix="install a newer command line of Run:ai")
    if _STRANGER.search(said):
        return ConfigError(text, fix="log in: `runai login`, or in a program `runai login application`")
    if _NO_PROJECT.search(said):
        return ConfigError(text, fix="name a --project that `runai project list` shows")
    if _ABSENT.search(said):
        return AbsentError(text, fix="see `kubedet job list --backend runai`")
    return LaunchError(text, fix="do what it says; `runai training list` shows what there is")


def _told(words: tuple[str, ...]) -> str:
    """Name a call by its verb and object: options may hold values that belong in no log."""
    return "`runai " + " ".join(words[: min(4, len(words))]) + "`"


def _text(data: bytes) -> str:
    return data.decode(errors="replace").strip()
