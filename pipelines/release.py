"""Which Kubeflow Pipelines this is, and what follows from that."""

import re
from dataclasses import dataclass

from trainer.base.errors import ConfigError

TESTED = "2.17.0"
"""The version that runs of this pipeline were tried on."""

OLDEST = (2, 16)
"""Earlier ones refuse the compiled pipeline: since then the specification has lists of values (`literals`),
and a Secret that need not exist since 2.15."""

_ORPHANS = (2, 16)
"""From here on the runs of a recurring run can outlive it."""

_TAG = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:[-+.].*)?")


@dataclass(frozen=True)
class Release:
    """The version of a server."""

    tag: str = ""
    """As the server names itself; a build of one's own says nothing, or anything."""

    @property
    def number(self) -> tuple[int, ...]:
        """Its numbers; empty where the tag has none."""
        match = _TAG.fullmatch(self.tag)
        return tuple(int(part or 0) for part in match.groups()) if match else ()

    @property
    def orphans(self) -> bool:
        """Whether a recurring run can be deleted such that its runs go on."""
        return self.number >= _ORPHANS

    @property
    def tested(self) -> bool:
        """Whether it is the one that was tried."""
        return self.number == Release(TESTED).number and self.tag.removeprefix("v") == TESTED

    def refuse(self) -> None:
        """Refuse a server that would refuse the pipeline.

        Raises:
            ConfigError: it is too old.
        """
        if self.number and self.number < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise ConfigError(
                f"Kubeflow Pipelines is {self.tag} there: before {oldest} it refuses this pipeline",
                fix=f"upgrade it to {TESTED}, on which this was tried; `kubedet job` trains without it",
            )

    def remark(self) -> str:
        """Return what is to be said of it although it is taken; nothing of the one that was tried."""
        if self.tested:
            return ""
        if not self.number:
            known = f"it says {self.tag!r}" if self.tag else "it says nothing"
            return f"version not known ({known}); this was tried on {TESTED}"
        return f"is {self.tag}; this was tried on {TESTED} alone"
