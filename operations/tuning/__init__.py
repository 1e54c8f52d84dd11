"""Hyper-parameter search: `kubedet tune`, on one machine or as a run of Kubeflow with a pod for each trial.

<data_root>/tuning/NAME/study.json         what is searched
optuna.log         Optuna's journal, on a disk or a volume
trials/00000.json  a trial that has ended, in a bucket
ended.json         written when all trials have ended
best.yaml, tuning.html
"""

import re

from trainer.base.errors import ConfigError

ENDED = "ended.json"


def check_name(name: str) -> str:
    """Return the name of a run or search; raise ConfigError if no folder can have it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ConfigError(
            f"the name {name!r} cannot be a folder's",
            fix="use letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    return name


def study_name(name: str, recipe: str) -> str:
    """Return the name of a search, by default that of its recipe; see `check_name`."""
    return check_name(name or f"tune-{recipe}")
