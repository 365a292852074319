"""A share of right answers, and how far off it may be by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959963984540054  # the middle 95 % of a normal distribution


@dataclass(frozen=True)
class Share:
    """A share from 0 to 1, and the number of answers that it stands on."""

    value: float
    count: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Wilson (1927), which holds near 0 and 1 and for few answers too."""
        n, p = self.count, self.value
        middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        return max(0.0, middle - half), min(1.0, middle + half)


def mean(shares: Sequence[Share]) -> Share:
    """Return the mean of shares, each of the same weight; of equal counts it stands on all answers together."""
    value = sum(share.value for share in shares) / len(shares)
    return Share(value, len(shares) ** 2 / sum(1 / share.count for share in shares))
