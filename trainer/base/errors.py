"""Errors that a user can cause, and the exit codes of kubedet's processes.

Commands print these errors without a traceback. Any other exception is a bug and is printed with one.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.safe_text import format_message, has_userinfo, redact

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
EXIT_FAILURE = 1  # a failure that the user did not cause; a traceback is printed
EXIT_USAGE = 2  # the input, configuration or environment is wrong; running again does not help
EXIT_RETRY = 143
"""Stopped by SIGTERM after saving (128 + 15): running the same command again continues the work.

A PyTorchJob with restartPolicy ExitCode restarts pods with exit codes of 128 and above.
"""


def install_command(extra: str) -> str:
    """Return the command that installs an optional extra; kubedet is not on a package index."""
    return f"in a checkout of kubedet: pip install '.[{extra}]'"


class KubedetError(Exception):
    """Base of all errors with a message for the user.

    `message` names the problem and its location, `fix` the remedy. Secrets in addresses are redacted.
    """

    exit_code = EXIT_USAGE
    transient = False  # whether a retry may succeed: a server was unavailable, a process was killed

    def __init__(self, message: str, *, fix: str = "", transient: bool | None = None) -> None:
        self.message = redact(message)
        super().__init__(self.message)
        self.fix = redact(fix)
        if transient is not None:
            self.transient = transient

    def __str__(self) -> str:
        return format_message(f"{self.message}\n  fix: {self.fix}" if self.fix else self.message)


class ConfigError(KubedetError):
    """A recipe, key, value or command-line argument that cannot be used."""


class DataError(KubedetError):
    """A source, annotation, image or shard that cannot be used."""


class FormatError(DataError):
    """A file of kubedet with unexpected content."""


class StorageError(KubedetError):
    """A URI that cannot be read or written: missing, refused, full, corrupt."""


class MissingError(StorageError):
    """A URI that does not exist: retrying does not help."""


class AccessDeniedError(StorageError):
    """A file that a web server refuses: the token is missing or wrong."""


class DamagedError(StorageError):
    """A file whose bytes do not match their hash."""


class ResourceError(StorageError):
    """Memory or file descriptors ran out while data was read; the data itself may be intact."""


class CheckpointError(KubedetError):
    """A checkpoint or weights file that does not fit the model or the run."""


class TrainingError(KubedetError):
    """Training that cannot continue, e.g. because of a non-finite loss or a lost rank."""

    exit_code = EXIT_FAILURE


class EvaluationError(KubedetError):
    """Predictions, ground truth or gate rules that cannot be scored."""


class ExportError(KubedetError):
    """A model that cannot be exported, or whose exported file gives different results."""

    exit_code = EXIT_FAILURE


class LaunchError(KubedetError):
    """A training job that could not be started, or failed."""

    exit_code = EXIT_FAILURE


class Interrupted(KubedetError):
    """Work that was stopped; running the same command again continues it."""

    exit_code = EXIT_RETRY
    transient = True


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def wrap_exceptions(kind: type[KubedetError], message: str, *, fix: str) -> Iterator[None]:
    """Convert any exception of a library to a KubedetError; KubedetErrors pass unchanged."""
    try:
        yield
    except KubedetError:
        raise
    except Exception as error:
        raise kind(f"{message}: {first_line(error)}", fix=fix) from error


def refuse_userinfo(text: str, where: str) -> None:
    """Refuse an address that contains credentials, which process lists, logs and reports would show."""
    if has_userinfo(text):
        raise ConfigError(
            f"{where}: an address with a name or password in it (://...@) is not allowed, because it "
            "would be visible",
            fix="remove it from the address; store keys come from the environment or a Secret "
            "(AWS_ACCESS_KEY_ID, ...); files behind a password belong in a bucket or a folder",
        )


def check_name(name: str, noun: str, reserved: str = "") -> None:
    """Refuse a name that is reserved or cannot be part of a file name; `noun` says what it names."""
    if not _NAME.fullmatch(name) or name == reserved:
        raise ConfigError(
            f"the {noun} {name!r} is not a valid name",
            fix="begin with a letter or digit; use at most 100 letters, digits, '.', '_' and '-'",
        )
