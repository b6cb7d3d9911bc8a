"""What the workers have counted over the last hour, as far as this process has seen it: charts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Seconds that one point of a chart covers, and the number of points.
STEP, STEPS = 30, 120
#: Of the drawing, in its own units; the page stretches it.
WIDTH, HEIGHT = 600, 80
_GAP = 1


class History:
    """Differences of the workers' counters, which begin at zero when a worker starts."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], Mapping[str, int]] = {}
        #: Number of the step, and what happened in it.
        self._steps: deque[tuple[int, Counter[str]]] = deque(maxlen=STEPS)

    def add(self, now: float, counts: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Adds the counters of each worker, by task.

        Args:
            now: seconds of a clock that never goes back.
        """
        step = int(now // STEP)
        if not self._steps or self._steps[-1][0] != step:
            self._steps.append((step, Counter()))
        current = self._steps[-1][1]
        for worker, by_task in counts.items():
            is_new = not any(name == worker for name, _ in self._seen)
            for task, counter in by_task.items():
                # What a worker counted before it was first seen happened at an unknown time.
                before = self._seen.get((worker, task), counter if is_new else {})
                for name, number in counter.items():
                    # A smaller number is that of a restarted worker.
                    last = before.get(name, 0)
                    current[name] += number - last if number >= last else number
                self._seen[worker, task] = counter

    def numbers(self, names: Sequence[str], now: float) -> list[int]:
        """Returns by how much these counters grew in each of the last steps, the oldest first."""
        last = int(now // STEP)
        by_step = {step: sum(counter[name] for name in names) for step, counter in self._steps}
        return [by_step.get(step, 0) for step in range(last - STEPS + 1, last + 1)]


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
