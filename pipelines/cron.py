"""When a schedule comes due: cron expressions as Kubeflow Pipelines reads them.

Kubeflow's controller takes six fields, seconds first; of five it thinks that the last one, the
day of the week, is missing. People write five, minutes first, so those get `0` for the seconds.
Grammar: https://pkg.go.dev/github.com/robfig/cron@v1.2.0 (Sunday is 0, and 7 is nothing).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from trainer.errors import ConfigError

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_ITEM = re.compile(r"(?:(?P<all>[*?])|(?P<first>\w+)(?:-(?P<last>\w+))?)(?:/(?P<step>\d+))?")
_YEARS = 8
"""How far to look for the next time: from one 29 February to the next but one, at most."""


@dataclass(frozen=True)
class _Field:
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


_FIELDS = (
    _Field("second", 0, 59),
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of the week", 0, 6, _DAYS),
)


@dataclass(frozen=True)
class Cron:
    """A schedule."""

    text: str
    """With six fields, seconds first: what is sent to Kubeflow."""
    values: tuple[frozenset[int], ...]
    """Of each field, the numbers at which it comes due."""

    def times(self, after: datetime) -> Iterator[datetime]:
        """Yield the times at which it comes due, in order, for the next years.

        Args:
            after: yields times later than this; of the cluster's time zone, mostly UTC.
        """
        seconds, minutes, hours, *_ = map(sorted, self.values)
        midnight = after.replace(hour=0, minute=0, second=0, microsecond=0)
        for number in range(366 * _YEARS):
            day = midnight + timedelta(days=number)
            if not self._on(day):
                continue
            for hour in hours:
                for minute in minutes:
                    for second in seconds:
                        time = day.replace(hour=hour, minute=minute, second=second)
                        if time > after:
                            yield time

    def _on(self, day: datetime) -> bool:
        of_month, month, of_week = self.values[3:]
        fits = (day.day in of_month, day.isoweekday() % 7 in of_week)
        # Where both are given either is enough: on the 1st, and on Mondays.
        free = [text[0] in "*?" for text in (self.text.split()[3], self.text.split()[5])]
        return day.month in month and (all(fits) if any(free) else any(fits))


def parse(text: str) -> Cron:
    """Read a cron expression.

    Args:
        text: five fields (minute, hour, day of the month, month, day of the week), or six with
            the second before them.

    Raises:
        ConfigError: naming every field that cannot be read, or that it never comes due.
    """
    words = text.split()
    if len(words) not in (5, 6):
        raise ConfigError(
            f"the cron expression {text!r} has {len(words)} fields, not 5 or 6",
            fix="write minute, hour, day of the month, month and day of the week: '0 2 * * *' is "
            "every night at 2 (UTC, mostly)",
        )
    fields = ["0", *words] if len(words) == 5 else words
    values, problems = [], []
    for field, item in zip(_FIELDS, fields, strict=True):
        try:
            values.append(frozenset(number for part in item.split(",") for number in _range(field, part)))
        except ValueError as error:
            problems.append(f"  {field.name}: {error}")
    if problems:
        raise ConfigError(
            f"the cron expression {text!r} cannot be read:\n" + "\n".join(problems),
            fix="use numbers, *, and lists (1,3), ranges (1-5) and steps (*/10) of them",
        )
    cron = Cron(" ".join(fields), tuple(values))
    if next(cron.times(datetime(2000, 1, 1)), None) is None:
        raise ConfigError(f"the cron expression {text!r} never comes due", fix="choose a day that there is")
    return cron


def _range(field: _Field, text: str) -> range:
    """Return the numbers of one item of a field's list."""
    match = _ITEM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is neither a number, * nor a range")
    if match["all"]:
        first, last = field.low, field.high
    else:
        first = _number(field, match["first"])
        last = _number(field, match["last"]) if match["last"] else field.high if match["step"] else first
    if first > last:
        raise ValueError(f"{text!r} ends before it begins")
    if match["step"] and int(match["step"]) < 1:
        raise ValueError(f"{text!r} has a step of 0")
    return range(first, last + 1, int(match["step"] or 1))


def _number(field: _Field, text: str) -> int:
    if text.upper() in field.names:
        return field.low + field.names.index(text.upper())
    if not text.isdecimal() or not field.low <= int(text) <= field.high:
        low = f"{field.low} (Sunday)" if field.names is _DAYS else field.low
        raise ValueError(f"{text} is not a number from {low} to {field.high}")
    return int(text)
