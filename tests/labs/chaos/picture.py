"""A picture of one seed: the faults, and what each process did meanwhile, as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tests.labs.chaos import schedule
from tests.labs.chaos.runner import Entry
from tests.labs.chaos.verdict import KILLS, Evidence, Execution
from tests.labs.comparison.contestants import OURS, PLAIN

WIDTH, LEFT, RIGHT = 1200, 16, 24
LANE, BAR = 11, 8
#: Above the lanes, for the faults' names; below them, for how many callers wait.
HEAD, FOOT = 150, 62
#: Between the names of two faults.
ROOM_FOR_NAME = 12
#: Pixels that even the shortest execution has.
LEAST = 1.6

FIRST, AGAIN, CUT, REJECTED = "#5b8db8", "#e8912d", "#9aa0a6", "#d0342c"
LEGEND = (
    (FIRST, "an execution that ran to the end of its body"),
    (AGAIN, "another of the same order: a doubled effect"),
    (CUT, "cut short by a fault, or to be tried again"),
    (REJECTED, "a doubled effect that was refused downstream, by its token"),
)
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}"
    ".title{font-size:15px;font-weight:600}.fault{font-size:10px;fill:#8a1c1c}"
    ".small{font-size:10px;fill:#777}"
)


def draw(seed: int, tasks: int, below: Path) -> Path:
    """Draw what has happened under `seed` to celery-idempotent and, if it was there, to Celery."""
    panels = []
    for contestant in (OURS.name, PLAIN.name):
        entry = Entry(seed, contestant, tasks)
        folder = entry.folder(below)
        if (folder / "seen.json").exists():
            part = f", one order of {entry.part}" if entry.part > 1 else ""
            title = f"{contestant}: {len(entry.planned.calls)} calls{part}"
            panels.append(_Panel(title, Evidence.read(folder)))
    path = below / "chaos.svg"
    shape = schedule.make(seed, tasks).shape
    path.write_text("\n".join(_svg(f"Seed {seed}: {shape}", panels)), encoding="utf-8")
    return path


@dataclass(frozen=True)
class _Panel:
    title: str
    evidence: Evidence

    @property
    def began_at(self) -> float:
        return float(self.evidence.seen["began_at"])

    @property
    def seconds(self) -> float:
        return float(self.evidence.seen["ended_at"]) - self.began_at

    def lanes(self) -> dict[int, int]:
        """A lane for each process; one that is over leaves its own to the next."""
        last: dict[int, float] = {}
        first: dict[int, float] = {}
        for each in self.evidence.executions:
            first.setdefault(each.pid, each.begun_at)
            last[each.pid] = max(last.get(each.pid, 0.0), each.done_at or each.begun_at)
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
    for colour, words in LEGEND:
        yield f'<rect x="{x}" y="34" width="14" height="{BAR}" fill="{colour}"/>'
        yield f'<text class="small" x="{x + 18}" y="42">{words}</text>'
        x += 34 + round(5.2 * len(words))
    top = 56
    for panel, tall in zip(panels, heights, strict=True):
        yield f'<g transform="translate({LEFT},{top})">'
        yield from _panel(panel, scale, tall)
        yield "</g>"
        top += tall
    yield "</svg>"


def _panel(panel: _Panel, scale: float, tall: int) -> Iterator[str]:
    floor = tall - FOOT
    yield f'<text class="title" x="0" y="16">{escape(panel.title)}</text>'
    named_at = 0.0
    for trigger in sorted(panel.evidence.strikes, key=lambda trigger: trigger.at):
        x = (trigger.at - panel.began_at) * scale
        wide = max(1.5, (trigger.until - trigger.at) * scale)
        yield (
            f'<rect x="{x:.1f}" y="{HEAD - 6}" width="{wide:.1f}" height="{floor - HEAD + 6}" '
            'fill="#d0342c" opacity=".10"/>'
        )
        yield f'<path d="M{x:.1f} {HEAD - 6}V{floor}" stroke="#d0342c" stroke-width=".7"/>'
        named_at = max(x + 3, named_at + ROOM_FOR_NAME)
        yield (
            f'<text class="fault" transform="translate({named_at:.1f},{HEAD - 9}) rotate(-50)">'
            f"{escape(trigger.kind)}</text>"
        )
    yield from _bars(panel, scale)
    yield from _waiting(panel, scale, floor)
    for second in range(0, int(panel.seconds) + 1, 5):
        x = second * scale
        yield f'<path d="M{x:.1f} {floor}v4" stroke="#999"/>'
        yield f'<text class="small" x="{x + 2:.1f}" y="{floor + 12}">{second} s</text>'


def _bars(panel: _Panel, scale: float) -> Iterator[str]:
    lanes = panel.lanes()
    deaths = {
        pid: trigger.at
        for trigger in panel.evidence.strikes
        if trigger.kind in KILLS
        for pid in trigger.pids
    }
    refused = {
        entry.execution
        for asked in panel.evidence.asked.values()
        for entry in asked
        if entry.receipt is not None and not entry.accepted
    }
    last = {each.pid: each for each in panel.evidence.executions}
    effects: Counter[str] = Counter()
    ordered = sorted(panel.evidence.executions, key=lambda each: each.done_at or each.begun_at)
    for each in ordered:
        effects[each.order] += each.done_at is not None
        until = each.done_at or _cut_at(each, last[each.pid], deaths)
        x = (each.begun_at - panel.began_at) * scale
        wide = max(LEAST, (until - each.begun_at) * scale)
        y = HEAD + LANE * lanes[each.pid]
        colour = FIRST if effects[each.order] == 1 else AGAIN
        if each.done_at is None:
            colour = CUT
        elif each.execution in refused:
            colour = REJECTED
        yield f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{colour}"/>'


def _cut_at(each: Execution, last: Execution, deaths: dict[int, float]) -> float:
    """When an execution ended that had no effect: with its process, if it was that one's last."""
    return max(each.begun_at, deaths.get(each.pid, 0.0)) if each is last else each.begun_at


def _waiting(panel: _Panel, scale: float, floor: int) -> Iterator[str]:
    """How many callers wait for their answer."""
    changes = [
        change
        for line in panel.evidence.seen["told"]
        for change in ((line["called_at"], 1), (line["at"], -1))
    ]
    changes += [(line["at"], 1) for line in panel.evidence.seen["untold"]]
    waiting = most = 0
    levels = []
    for at, change in sorted(changes):
        waiting += change
        most = max(most, waiting)
        levels.append(((at - panel.began_at) * scale, waiting))
    base, room = floor + FOOT - 8, FOOT - 26
    points = f"M0 {base}"
    shown = -2.0
    for x, level in levels:
        if x - shown >= 2:
            points += f"L{x:.0f} {base - room * level / max(most, 1):.1f}"
            shown = x
    end = panel.seconds * scale
    left = base - room * waiting / max(most, 1)
    yield f'<path d="{points}L{end:.0f} {left:.1f}L{end:.0f} {base}Z" fill="#cfd8e3"/>'
    words = f"callers waiting for their answer: {most} at most, {waiting} at the end"
    yield f'<text class="small" x="2" y="{base - 3}">{words}</text>'
