"""Metrics: their names, units, better direction, margins and number formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from orchestrator.core.plain_data import Margin

Name = Annotated[str, Meta(pattern=r"\A[A-Za-z]\w{0,39}\Z")]
MetricUnit = Annotated[str, Meta(max_length=16)]
NumberFormat = Annotated[str, Meta(pattern=r"\A\.[0-9][%efg]\Z")]

MOST_DECIMALS = 6
"""Maximum number of decimals that an interval's half-width can ask for."""


@dataclass(frozen=True)
class Metric:
    """Metric by which networks are compared. Records carry it, so that readers can interpret their figures."""

    name: Name
    """Name in a record, after the split: `rmse` in `test/rmse`."""
    unit: MetricUnit
    """Unit printed after a value."""
    better: Literal["higher", "lower"]
    margin: Margin
    """Largest loss, in the metric's own scale, that still counts as a match with the dense network by default."""
    format: NumberFormat = ".4f"
    """Format specification of Python, as in `.4f` or `.2%`."""

    @property
    def title(self) -> str:
        """Name for people: `mean iou` for `mean_iou`."""
        return self.name.replace("_", " ")

    @property
    def heading(self) -> str:
        """Title with the unit, for the head of a column."""
        return f"{self.title} {self.unit}".rstrip()

    @property
    def scale(self) -> float:
        """Factor by which a value is multiplied for printing: 100 for a percentage, else 1."""
        return 100.0 if self.format.endswith("%") else 1.0

    @property
    def loss(self) -> str:
        """Loss that a match rules out, as in `a loss of 0.02 in rmse or more`, or `any loss of rmse`."""
        if not self.margin:
            return f"any loss of {self.title}"
        unit = " points of" if self.scale != 1 else f" {self.unit} of" if self.unit else " in"
        return f"a loss of {self.written(self.margin)}{unit} {self.title} or more"

    def written(self, value: float, sign: str = "", width: float | None = None) -> str:
        """Return `value` without its unit, see `in_format`."""
        return in_format(value, self.format, sign, width)

    def said(self, value: float) -> str:
        """Return `value` with its unit."""
        unit = self.unit if self.unit in ("", "%") else f" {self.unit}"
        return f"{self.written(value)}{unit}"

    def gain(self, value: float, reference: float) -> float:
        """Return how much better `value` is than `reference`; negative if it is worse."""
        return value - reference if self.better == "higher" else reference - value


def margin_fault(metric: Metric, margin: float) -> str:
    """Return the fault of a margin as the rest of a sentence; empty if the margin is valid."""
    return "" if metric.scale == 1 else fraction_fault(metric.title, margin)


def fraction_fault(title: str, margin: float) -> str:
    """Return the fault of a margin of a metric that is a fraction, as the rest of a sentence; empty if it is valid."""
    return "" if margin < 1 else f"must lie in [0, 1): {title} is a fraction; pass 0.01 for one point."


def in_format(value: float, form: str, sign: str = "", width: float | None = None) -> str:
    """Write a metric's value, without a unit; never as negative zero.

    Args:
        value: value in the metric's own scale; a form with % multiplies it by 100
        form: format of the standard format language: `.2%`, `.4f`, `.4g`, `.3e`
        sign: "+" to show the sign of gains
        width: half-width of the value's interval. A form that does not fix its decimals (g, e) then gets those at which
            the width has two significant digits: 0.393 and 0.010 for a width of 0.009971
    """
    if width and form[-1] in "ge" and (decimals := _decimals(width)) <= MOST_DECIMALS:
        form = f".{decimals}f"
    return format(value, f"{sign}z{form}").removesuffix("%")


def _decimals(width: float) -> int:
    """Return the decimals at which a width has two significant digits; 0 for large ones."""
    exponent = f"{width:.1e}".partition("e")[2]
    return max(0, 1 - int(exponent)) if exponent and math.isfinite(width) else MOST_DECIMALS + 1
