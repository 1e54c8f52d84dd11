"""The errors a user can cause, and the exit codes of every kubedet process.

Each error says what was wrong and where; `fix` says what to do about it. A command
prints the message without a traceback; anything else that is raised is a bug of ours
and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.masking import has_userinfo, masked

EXIT_FAILURE = 1
"""Something broke that is not the user's doing: a traceback was printed."""

EXIT_USAGE = 2
"""Input, configuration or environment is wrong; running again gives the same answer."""

EXIT_RETRY = 143
"""Stopped by SIGTERM after saving: run the same command again and it goes on.

128 + 15, so that a PyTorchJob with restartPolicy ExitCode recreates the pod (the
operator takes exit codes >= 128 as worth a retry).
"""


class KubedetError(Exception):
    """Base of all errors with a message for the user.

    `message` names the thing and the place; `fix` is the remedy, in the imperative; `passing` says
    whether to try again by itself has a point. Names, passwords and signatures in addresses are
    left out: messages go to logs.
    """

    exit_code = EXIT_USAGE
    passing = False
    """Whether the same may go well a little later: a server was away, a process was killed."""

    def __init__(self, message: str, *, fix: str = "", passing: bool | None = None) -> None:
        self.message = masked(message)
        super().__init__(self.message)
        self.fix = masked(fix)
        if passing is not None:
            self.passing = passing

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class ConfigError(KubedetError):
    """A recipe, key, value or command-line argument that cannot be used."""


class DataError(KubedetError):
    """A source, annotation, image or shard that cannot be used."""


class FormError(DataError):
    """A file of ours whose content is not of the form that such a file has."""


class StorageError(KubedetError):
    """A URI that cannot be read or written: missing, refused, full, corrupt."""


class MissingError(StorageError):
    """A URI with nothing behind it: asking again gives the same answer."""


class RefusedError(StorageError):
    """A file that a web server does not give to whoever asks: without a token, or with another's."""


class DamagedError(StorageError):
    """A file whose bytes are not those that were written, as its hash says."""


class WantError(StorageError):
    """Bytes that could not be read for want of memory, open files or the like: nothing is wrong with them."""


class CheckpointError(KubedetError):
    """A checkpoint or weights file that does not fit the model or the run."""


class TrainingError(KubedetError):
    """Training that cannot go on: a non-finite loss, too many processes, a lost rank."""

    exit_code = EXIT_FAILURE


class EvaluationError(KubedetError):
    """Predictions, ground truth or gate rules that cannot be scored."""


class ExportError(KubedetError):
    """A model that cannot be exported, or whose exported form does not match it."""

    exit_code = EXIT_FAILURE


class LaunchError(KubedetError):
    """A training job that could not be started, or ended other than well."""

    exit_code = EXIT_FAILURE


class Interrupted(KubedetError):
    """Work that was stopped from outside and can be continued by running it again."""

    exit_code = EXIT_RETRY
    passing = True


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of a library says; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def translated(kind: type[KubedetError], message: str, *, fix: str) -> Iterator[None]:
    """Raise what a library raises in the block as an error of ours: many libraries have no common error.

    Raises:
        KubedetError: of the kind, with the message and the library's first line; ours stay as they are.
    """
    try:
        yield
    except KubedetError:
        raise
    except Exception as error:
        raise kind(f"{message}: {first_line(error)}", fix=fix) from error


def refuse_userinfo(text: str, where: str) -> None:
    """Refuse an address with a name or password: it would stand in lists of processes, logs and reports.

    Args:
        text: an address, or a text that may hold some.
        where: what it is, for the message.

    Raises:
        ConfigError: without the address.
    """
    if has_userinfo(text):
        raise ConfigError(
            f"{where}: an address with a name or password in it (://...@) is not taken: all could read it",
            fix="leave it out of the address; keys of stores come from the environment or a Secret "
            "(AWS_ACCESS_KEY_ID, ...), and what a web server guards belongs in a bucket or a folder",
        )
