"""Cron expressions as Kubeflow Pipelines reads them.

Kubeflow's controller takes six fields, seconds first. People write five, so those get `0` for the seconds.
cronsim reads the fields. Kubeflow's parser rejects `L`, `#` and 7 for Sunday, and allows `?` for `*`:
https://pkg.go.dev/github.com/robfig/cron@v1.2.0
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from cronsim import CronSim, CronSimError

from trainer.base.errors import ConfigError

_UNKNOWN_DAYS = re.compile(r"[Ll#]|(?<![\d/])7(?!\d)")


@dataclass(frozen=True)
class Cron:
    """A schedule."""

    text: str
    """With six fields, seconds first: what is sent to Kubeflow."""

    def times(self, after: datetime) -> Iterator[datetime]:
        """Return the times at which it is due, in order.

        Args:
            after: yields times later than this, in the cluster's time zone, which is mostly UTC.
        """
        return CronSim(self.text.replace("?", "*"), after)


def parse(text: str) -> Cron:
    """Read a cron expression.

    Args:
        text: five fields (minute, hour, day of the month, month, day of the week), or six with
            the second before them.

    Raises:
        ConfigError: it cannot be read, or is never due.
    """
    fields = text.split()
    if len(fields) not in (5, 6):
        raise ConfigError(
            f"the cron expression {text!r} has {len(fields)} fields, not 5 or 6",
            fix="write minute, hour, day of the month, month and day of the week: '0 2 * * *' is "
            "every night at 2 (UTC, mostly)",
        )
    cron = Cron(" ".join(["0", *fields] if len(fields) == 5 else fields))
    try:
        if _UNKNOWN_DAYS.search(fields[-1]) or "L" in fields[-3].upper():
            raise CronSimError("Kubeflow supports neither L, # nor 7 for Sunday")
        next(cron.times(datetime(2000, 1, 1)))
    except (CronSimError, ValueError, StopIteration) as error:
        raise ConfigError(
            f"the cron expression {text!r} cannot be used: {error}",
            fix="use numbers, *, lists (1,3), ranges (1-5) and steps (*/10), days from 0 (Sunday) to 6, and "
            "a date that exists",
        ) from None
    return cron
