"""What is wrong with a run that is asked for, all of it at once and before anything is started."""

from collections.abc import Callable, Iterable

from trainer.errors import ConfigError, KubedetError


def refuse(checks: Iterable[Callable[[], object]]) -> None:
    """Make every check, and refuse the run if any of them fails.

    Args:
        checks: each raises a KubedetError where it finds something that cannot be used.

    Raises:
        ConfigError: naming all that they found.
    """
    problems = [line for check in checks for line in _problems(check)]
    if problems:
        raise ConfigError("this cannot be run:\n" + "\n".join(problems), fix="correct these")


def _problems(check: Callable[[], object]) -> list[str]:
    """Return what a check says, a line for each problem."""
    try:
        check()
    except KubedetError as error:
        lines = error.message.splitlines()
        if len(lines) > 1 and lines[1].startswith("  "):
            return lines[1:]  # Below a heading that says no more than ours.
        return [f"  {line}" for line in lines[:-1]] + [f"  {lines[-1]}{'; ' if error.fix else ''}{error.fix}"]
    return []
