"""Renders pages with Jinja, and JSON documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from celery_idempotent.dashboard.history import HEIGHT, RANGES, STEP, WIDTH, Range
from celery_idempotent.dashboard.index import STATES, TaskTotals
from celery_idempotent.events.table import REFUSED_FOR, WOULD_REFUSE_FOR
from celery_idempotent.monitoring import formatting
from celery_idempotent.monitoring.statistics import double_executions
from celery_idempotent.printable import plural
from celery_idempotent.signals import SHADOW

#: Has an entry for every finding.
RUNBOOK = "https://celery-idempotent.readthedocs.io/en/stable/runbook.html"
FOLDER = Path(__file__).parent
#: Decisions counted in each chart and column, by title.
DECISIONS = {
    "Executions": ("run", "takeover"),
    "Replays": ("replay",),
    "Conflicts": ("conflict",),
    "Takeovers": ("takeover",),
    "Refusals": ("refused",),
}

_environment = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Returns a page; `values` are the template's variables."""
    root = request.state.root

    def url(path: str, **parameters: Any) -> str:
        given = {name: value for name, value in parameters.items() if value}
        return f"{root}{path}" + (f"?{urlencode(given)}" if given else "")

    page = _environment.get_template(template).render(
        url=url,
        path=request.url.path.removeprefix(root),
        access=request.state.access,
        now=datetime.now(timezone.utc),
        **values,
    )
    return HTMLResponse(page, status)


def is_api(request: Request) -> bool:
    """Whether a request is for a JSON document."""
    return request.url.path.startswith(f"{request.state.root}/api/")


def json_response(
    document: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns `document` as JSON; values without a JSON form become text."""
    text = json.dumps(document, default=str)
    return Response(f"{text}\n", status, headers, media_type="application/json")


class TaskRow(NamedTuple):
    """A task on the overview."""

    name: str
    #: Numbers by column title.
    columns: dict[str, float | None]

    @classmethod
    def of(cls, name: str, records: TaskTotals | None, history: Range) -> TaskRow:
        """Returns the row of a task.

        Args:
            records: its records.
            history: counts of the chosen range.
        """
        records, counts = records or TaskTotals(), history.tasks.get(name, Counter())
        columns: dict[str, float | None] = {
            state.capitalize(): records.states[state] for state in STATES
        }
        for title, names in DECISIONS.items():
            columns[title] = sum(counts[each] for each in names)
        minutes = max(history.seen, STEP) / 60
        return cls(
            name,
            columns
            | {
                "A minute": (counts["run"] + counts["takeover"]) / minutes,
                "Median": records.quantile(0.5),
                "95 %": records.quantile(0.95),
                "Saved": counts["replay"] * records.mean,
            },
        )


def key_path(key: object) -> str:
    """Returns the path of a record's page."""
    return f"/records/{quote(str(key), safe='')}"


def _counts(counter: Mapping[str, int]) -> dict[str, tuple[int, str]]:
    """Returns each counter; refusals are broken down by reason."""
    rows = {}
    for name, prefix in (("refused", REFUSED_FOR), ("would_refuse", WOULD_REFUSE_FOR)):
        parts = {n.removeprefix(prefix): c for n, c in counter.items() if n.startswith(prefix)}
        rows[name] = ", ".join(f"{reason.replace('_', ' ')} {n:,}" for reason, n in parts.items())
    return {
        name: (number, rows.get(name, ""))
        for name, number in sorted(counter.items())
        if not name.startswith((REFUSED_FOR, WOULD_REFUSE_FOR))
    }


_environment.filters.update(
    ago=formatting.relative_time,
    epoch_ms=lambda moment: int(moment.timestamp() * 1000),
    key_path=key_path,
    # The link's title has the whole digest.
    short_key=lambda key: f"{str(key).rpartition(':')[2][:10]}…",
    number=lambda number: f"{number:,}",
    seconds=formatting.duration,
    counts=_counts,
    run_time=formatting.run_time,
)
_environment.globals.update(
    plural=plural,
    ranges=RANGES,
    runbook=RUNBOOK,
    states=STATES,
    shadow=SHADOW,
    double_executions=double_executions,
    chart_width=WIDTH,
    chart_height=HEIGHT,
)
