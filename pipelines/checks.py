"""Makes all checks of a run before it starts, and reports every problem in one error."""

from collections.abc import Callable, Iterable

from trainer.base.errors import ConfigError, KubedetError


def make_all(checks: Iterable[Callable[[], object]]) -> None:
    """Make every check; each raises a KubedetError if it finds a problem.

    Raises:
        ConfigError: with all problems.
    """
    problems = [line for check in checks for line in _problems(check)]
    if problems:
        raise ConfigError("this cannot be run:\n" + "\n".join(problems), fix="correct these")


def _problems(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except KubedetError as error:
        lines = error.message.splitlines()
        if len(lines) > 1 and lines[1].startswith("  "):
            return lines[1:]  # Without its heading.
        return [f"  {line}" for line in lines[:-1]] + [f"  {lines[-1]}{'; ' if error.fix else ''}{error.fix}"]
    return []
