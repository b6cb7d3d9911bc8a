"""Renders pages with Jinja."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from celery_idempotent.dashboard.history import HEIGHT, WIDTH
from celery_idempotent.monitoring import formatting
from celery_idempotent.monitoring.statistics import double_executions
from celery_idempotent.record.record import State
from celery_idempotent.signals import SHADOW

FOLDER = Path(__file__).parent
#: Titles of the charts and columns, and the decisions that they count.
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


def render(
    request: Request, template: str, *, status: int = 200, live: str = "", **values: Any
) -> HTMLResponse:
    """Returns a page.

    Args:
        live: the parameters of /live that announce the page's changes; empty if it has none.
        values: for the template.
    """
    root = request.state.root

    def url(path: str, **parameters: Any) -> str:
        given = {name: value for name, value in parameters.items() if value}
        return f"{root}{path}" + (f"?{urlencode(given)}" if given else "")

    page = _environment.get_template(template).render(
        url=url,
        path=request.url.path.removeprefix(root),
        access=request.state.access,
        live_url=url("/live") + f"?{live}" if live else "",
        **values,
    )
    return HTMLResponse(page, status)


def key_path(key: object) -> str:
    """Returns the path of a record's page."""
    return f"/records/{quote(str(key), safe='')}"


_environment.filters.update(
    ago=formatting.relative_time,
    at=formatting.absolute_time,
    epoch_ms=lambda moment: int(moment.timestamp() * 1000),
    key_path=key_path,
    # The whole digest is in the link's title.
    short_key=lambda key: f"{str(key).rpartition(':')[2][:10]}…",
    number=lambda number: f"{number:,}",
    seconds=formatting.duration,
    counted=lambda counter, names: sum(counter.get(name, 0) for name in names),
)
_environment.tests["has_any"] = lambda task, *by_task: any(found.get(task) for found in by_task)
_environment.tests["in_shadow"] = lambda task, counts, names: any(
    counts.get(task, {}).get(name) for name in names
)
_environment.globals.update(
    plural=formatting.plural,
    states=[state.value for state in State],
    decisions=DECISIONS,
    shadow=SHADOW,
    double_executions=double_executions,
    chart_width=WIDTH,
    chart_height=HEIGHT,
)
