"""A difference between two models, and how sure it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A difference of average precision, new less baseline, and where it lies with 95 % confidence."""

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
