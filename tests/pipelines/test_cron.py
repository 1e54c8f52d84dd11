"""Cron expressions: five fields or six, as Kubeflow Pipelines reads them."""

from datetime import datetime
from itertools import islice

import pytest

from pipelines.cron import parse
from trainer.base.errors import ConfigError

NOW = datetime(2026, 11, 21, 7, 30)


@pytest.mark.parametrize(
    ("text", "sent", "times"),
    [
        ("0 2 * * *", "0 0 2 * * *", ["2026-11-22 02:00:00", "2026-11-23 02:00:00"]),
        ("30 0 2 * * ?", "30 0 2 * * ?", ["2026-11-22 02:00:30"]),
        ("*/20 7-8 * * *", "0 */20 7-8 * * *",
         ["2026-11-21 07:40:00", "2026-11-21 08:00:00", "2026-11-21 08:20:00"]),
        ("0 3 * * mon,WED", "0 0 3 * * mon,WED", ["2026-11-23 03:00:00", "2026-11-25 03:00:00"]),
        ("0 0 1 * *", "0 0 0 1 * *", ["2026-12-01 00:00:00"]),
        # Both days: either is enough.
        ("0 0 1 * 0", "0 0 0 1 * 0", ["2026-11-22 00:00:00", "2026-11-29 00:00:00", "2026-12-01 00:00:00"]),
        ("0 0 29 FEB *", "0 0 0 29 FEB *", ["2028-02-29 00:00:00"]),
        ("45/5 7 * * *", "0 45/5 7 * * *",
         ["2026-11-21 07:45:00", "2026-11-21 07:50:00", "2026-11-21 07:55:00", "2026-11-22 07:45:00"]),
        ("0 0 ? * */7", "0 0 0 ? * */7", ["2026-11-22 00:00:00"]),
    ],
)  # fmt: skip
def test_when_it_comes_due(text, sent, times):
    cron = parse(text)
    assert cron.text == sent
    assert [str(time) for time in islice(cron.times(NOW), len(times))] == times


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@daily", "1 fields"),
        ("0 2 * *", "4 fields"),
        ("0 0 2 * * * 2027", "7 fields"),
        ("60 2 * * *", "minute"),
        ("61 0 2 * * *", "second"),
        ("0 2 * * 7", "7 for Sunday"),
        ("0 2 * * 1-7", "7 for Sunday"),
        ("0 2 0 * *", "day-of-month"),
        ("0 5-2 * * *", "hour"),
        ("*/0 2 * * *", "minute"),
        ("0 2 L * *", "L"),
        ("0 2 * * MON#1", "#"),
        ("1,,2 2 * * *", "minute"),
        ("0 0 31 2 *", "day-of-month"),
        ("*/" + "9" * 5000 + " * * * *", ""),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in str(caught.value) and caught.value.fix
