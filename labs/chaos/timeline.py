"""Draws the timeline of one seed as SVG: faults, executions by process, and waiting callers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from labs.chaos import schedule
from labs.chaos.evidence import Evidence, Execution
from labs.chaos.runner import RunSpec
from labs.chaos.verdict import KILLS
from labs.comparison.contestants import OURS, PLAIN

WIDTH, LEFT, RIGHT = 1200, 16, 24
LANE, BAR = 11, 8
#: Height above the lanes, for the names of faults, and below them, for waiting callers.
HEAD, FOOT = 150, 62
#: Minimum distance between the names of two faults.
NAME_DISTANCE = 12
#: Minimum width of an execution.
MIN_WIDTH = 1.6

FIRST, DUPLICATE, INTERRUPTED, REJECTED = "#5b8db8", "#e8912d", "#9aa0a6", "#d0342c"
LEGEND = (
    (FIRST, "first execution with an effect"),
    (DUPLICATE, "another one of the same order: a duplicate effect"),
    (INTERRUPTED, "killed, or retried later"),
    (REJECTED, "duplicate effect, rejected downstream by its token"),
)
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}"
    ".title{font-size:15px;font-weight:600}.fault{font-size:10px;fill:#8a1c1c}"
    ".small{font-size:10px;fill:#777}"
)


def draw(seed: int, tasks: int, root: Path) -> Path:
    """Draws the runs of celery-idempotent and, if available, of plain Celery; returns the path."""
    panels = []
    for contestant in (OURS.name, PLAIN.name):
        spec = RunSpec(seed, contestant, tasks)
        folder = spec.folder(root)
        if (folder / "observations.json").exists():
            share = f", one order in {spec.orders_one_in}" if spec.orders_one_in > 1 else ""
            title = f"{contestant}: {len(spec.schedule.calls)} calls{share}"
            panels.append(_Panel(title, Evidence.read(folder)))
    path = root / "chaos.svg"
    shape = schedule.make(seed, tasks).shape
    path.write_text("\n".join(_svg(f"Seed {seed}: {shape}", panels)), encoding="utf-8")
    return path


@dataclass(frozen=True)
class _Panel:
    title: str
    evidence: Evidence

    @property
    def started_at(self) -> float:
        return float(self.evidence.observations["started_at"])

    @property
    def seconds(self) -> float:
        return float(self.evidence.observations["ended_at"]) - self.started_at

    def lanes(self) -> dict[int, int]:
        """Returns the lane of each process; lanes are reused after a process has ended."""
        last: dict[int, float] = {}
        first: dict[int, float] = {}
        for each in self.evidence.executions:
            first.setdefault(each.pid, each.started_at)
            last[each.pid] = max(last.get(each.pid, 0.0), each.done_at or each.started_at)
        free_at: list[float] = []
        lanes: dict[int, int] = {}
        for pid in sorted(first, key=first.__getitem__):
            lane = next((n for n, at in enumerate(free_at) if at < first[pid]), len(free_at))
            free_at[lane : lane + 1] = [last[pid]]
            lanes[pid] = lane
        return lanes


def _svg(title: str, panels: Sequence[_Panel]) -> Iterator[str]:
    seconds = max(panel.seconds for panel in panels)
    scale = (WIDTH - LEFT - RIGHT) / seconds
    heights = [HEAD + LANE * (max(panel.lanes().values()) + 1) + FOOT for panel in panels]
    height = 56 + sum(heights)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">'
    yield f"<style>{STYLE}</style>"
    yield f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    yield f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>'
    x = LEFT
    for colour, label in LEGEND:
        yield f'<rect x="{x}" y="34" width="14" height="{BAR}" fill="{colour}"/>'
        yield f'<text class="small" x="{x + 18}" y="42">{label}</text>'
        x += 34 + round(5.2 * len(label))
    top = 56
    for panel, panel_height in zip(panels, heights, strict=True):
        yield f'<g transform="translate({LEFT},{top})">'
        yield from _panel(panel, scale, panel_height)
        yield "</g>"
        top += panel_height
    yield "</svg>"


def _panel(panel: _Panel, scale: float, height: int) -> Iterator[str]:
    bottom = height - FOOT
    yield f'<text class="title" x="0" y="16">{escape(panel.title)}</text>'
    name_x = 0.0
    for fault in sorted(panel.evidence.faults, key=lambda fault: fault.at):
        x = (fault.at - panel.started_at) * scale
        width = max(1.5, (fault.until - fault.at) * scale)
        yield (
            f'<rect x="{x:.1f}" y="{HEAD - 6}" width="{width:.1f}" height="{bottom - HEAD + 6}" '
            'fill="#d0342c" opacity=".10"/>'
        )
        yield f'<path d="M{x:.1f} {HEAD - 6}V{bottom}" stroke="#d0342c" stroke-width=".7"/>'
        name_x = max(x + 3, name_x + NAME_DISTANCE)
        yield (
            f'<text class="fault" transform="translate({name_x:.1f},{HEAD - 9}) rotate(-50)">'
            f"{escape(fault.kind)}</text>"
        )
    yield from _bars(panel, scale)
    yield from _waiting(panel, scale, bottom)
    for second in range(0, int(panel.seconds) + 1, 5):
        x = second * scale
        yield f'<path d="M{x:.1f} {bottom}v4" stroke="#999"/>'
        yield f'<text class="small" x="{x + 2:.1f}" y="{bottom + 12}">{second} s</text>'


def _bars(panel: _Panel, scale: float) -> Iterator[str]:
    lanes = panel.lanes()
    deaths = {
        pid: fault.at
        for fault in panel.evidence.faults
        if fault.kind in KILLS
        for pid in fault.pids
    }
    rejected = {
        request.execution
        for requests in panel.evidence.requests.values()
        for request in requests
        if request.receipt is not None and not request.accepted
    }
    last = {each.pid: each for each in panel.evidence.executions}
    effects: Counter[str] = Counter()
    ordered = sorted(panel.evidence.executions, key=lambda each: each.done_at or each.started_at)
    for each in ordered:
        effects[each.order] += each.done_at is not None
        until = each.done_at or _interrupted_at(each, last[each.pid], deaths)
        x = (each.started_at - panel.started_at) * scale
        width = max(MIN_WIDTH, (until - each.started_at) * scale)
        y = HEAD + LANE * lanes[each.pid]
        colour = FIRST if effects[each.order] == 1 else DUPLICATE
        if each.done_at is None:
            colour = INTERRUPTED
        elif each.execution in rejected:
            colour = REJECTED
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'


def _interrupted_at(each: Execution, last: Execution, deaths: dict[int, float]) -> float:
    """Returns the end of an execution without an effect: the death of its process, if last."""
    return max(each.started_at, deaths.get(each.pid, 0.0)) if each is last else each.started_at


def _waiting(panel: _Panel, scale: float, bottom: int) -> Iterator[str]:
    """Draws the number of callers that wait for a result."""
    changes = [
        change
        for line in panel.evidence.observations["results"]
        for change in ((line["called_at"], 1), (line["at"], -1))
    ]
    changes += [(line["at"], 1) for line in panel.evidence.observations["unanswered"]]
    waiting = maximum = 0
    levels = []
    for at, change in sorted(changes):
        waiting += change
        maximum = max(maximum, waiting)
        levels.append(((at - panel.started_at) * scale, waiting))
    base, height = bottom + FOOT - 8, FOOT - 26
    points = f"M0 {base}"
    last_x = -2.0
    for x, level in levels:
        if x - last_x >= 2:
            points += f"L{x:.0f} {base - height * level / max(maximum, 1):.1f}"
            last_x = x
    end = panel.seconds * scale
    last_y = base - height * waiting / max(maximum, 1)
    yield f'<path d="{points}L{end:.0f} {last_y:.1f}L{end:.0f} {base}Z" fill="#cfd8e3"/>'
    label = f"callers waiting for a result: {maximum} at most, {waiting} at the end"
    yield f'<text class="small" x="2" y="{base - 3}">{label}</text>'
