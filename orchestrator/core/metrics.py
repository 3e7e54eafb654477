"""What a figure of a record means: its unit, which direction is better, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A figure by which networks are compared."""

    name: str
    """As in a record, behind the split: `accuracy` in `test/accuracy`."""
    unit: str
    """What stands behind a value as it is written."""
    better: Literal["higher", "lower"]
    margin: float
    """The loss, in the metric's own scale, that a match with dense may hide unless the user says otherwise."""
    format: str
    """Of the standard format language; what it writes ends in `unit`."""

    def written(self, value: float, sign: str = "") -> str:
        """Return `value` without its unit; `sign` is "+" where gains are to show one."""
        return format(value, sign + self.format).removesuffix(self.unit)


ACCURACY = Metric("accuracy", "%", "higher", margin=0.01, format=".2%")
"""The fraction of examples that are classified as they are labelled."""
