"""The change of a metric between two models, with its confidence interval."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A change of average precision, new minus baseline, with its 95 % confidence interval."""

    base: float
    new: float
    low: float
    high: float

    @property
    def delta(self) -> float:
        """The difference itself."""
        return self.new - self.base

    @property
    def sure(self) -> int:
        """1 if it is better with that confidence, -1 if worse, else 0."""
        return int(self.low > 0) - int(self.high < 0)
