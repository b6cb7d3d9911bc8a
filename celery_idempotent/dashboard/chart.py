"""Bar charts as SVG paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Of the drawing, in its own units; the page stretches it.
WIDTH, HEIGHT = 600, 80
_GAP = 1


class Chart(NamedTuple):
    """A chart that a template draws."""

    title: str
    #: Of the numbers.
    total: int
    highest: int
    #: The bars, as an SVG path.
    path: str


def chart(title: str, numbers: Sequence[int]) -> Chart:
    """Returns the chart of `numbers`."""
    highest = max(numbers, default=0)
    width = WIDTH / max(1, len(numbers))
    bars = []
    for position, number in enumerate(numbers):
        if number:
            height = max(2.0, number / highest * HEIGHT)
            left, top = position * width, HEIGHT - height
            bars.append(f"M{left:.1f} {top:.1f}h{width - _GAP:.1f}V{HEIGHT}h-{width - _GAP:.1f}z")
    return Chart(title, sum(numbers), highest, "".join(bars))
