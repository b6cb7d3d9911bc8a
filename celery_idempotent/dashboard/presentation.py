"""Renders pages with Jinja, and JSON documents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from itertools import islice
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from kombu.utils.encoding import safe_repr
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from celery_idempotent.core.printable import plural
from celery_idempotent.core.record import layout
from celery_idempotent.dashboard.history import RANGES, STEP
from celery_idempotent.dashboard.index import STATES, TaskTotals
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.calls.statistics import OTHER_NAMES, double_executions
from celery_idempotent.signals import SHADOW

#: The page of the documentation with an entry for every finding.
FINDINGS = "https://celery-idempotent.readthedocs.io/en/stable/reference/findings.html"
#: Limits of a result that is shown as a tree: levels, parts in total, children of one part, and
#: characters of a text.
MAX_DEPTH, MAX_PARTS, MAX_CHILDREN, MAX_TEXT = 8, 1000, 100, 2000
#: Decisions counted in each chart and column, by title.
DECISIONS = {
    "Executions": ("run", "takeover"),
    "Replays": ("replay",),
    "Conflicts": ("conflict",),
    "Takeovers": ("takeover",),
    "Refusals": ("refused",),
}

environment = Environment(
    loader=PackageLoader("celery_idempotent.dashboard"),
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

    page = environment.get_template(template).render(
        url=url,
        path=request.url.path.removeprefix(root),
        access=request.state.access,
        now=datetime.now(timezone.utc),
        **values,
    )
    # An argument or a result may contain a lone surrogate, which UTF-8 cannot encode.
    return HTMLResponse(page.encode(errors="backslashreplace"), status)


def is_api(request: Request) -> bool:
    """Whether a request is for a JSON document."""
    return request.url.path.startswith(f"{request.state.root}/api/")


def json_response(
    document: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns `document` as JSON; values without a JSON form become text."""
    text = json.dumps(document, default=str)
    return Response(f"{text}\n", status, headers, media_type="application/json")


def task_columns(records: TaskTotals, counts: Counter[str], seconds: int) -> dict[str, Any]:
    """Returns what the overview shows about a task, by column title; numbers or None.

    Args:
        counts: its counts in the chosen range.
        seconds: the part of that range in which the dashboard counted.
    """
    return {
        **{state.capitalize(): records.states[state] for state in STATES},
        **{title: sum(counts[each] for each in names) for title, names in DECISIONS.items()},
        "A minute": (counts["run"] + counts["takeover"]) * 60 / max(seconds, STEP),
        "Median": records.quantile(0.5),
        "95 %": records.quantile(0.95),
        "Saved": counts["replay"] * records.mean,
    }


def key_path(key: object) -> str:
    """Returns the path of a record's page."""
    return f"/records/{quote(str(key), safe='')}"


def _kind(value: Any) -> str:
    """Returns the kind of a value in a tree, or the name of another type."""
    kinds: tuple[tuple[str, Any], ...] = (
        ("object", Mapping),
        ("array", (list, tuple, set, frozenset)),
        ("string", str),
        ("constant", (bool, type(None))),
        ("number", (int, float)),
    )
    return next((kind for kind, types in kinds if isinstance(value, types)), type(value).__name__)


def _children(value: Any) -> list[tuple[str, Any]]:
    """Returns the names and values of the first children of a collection."""
    children = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [(_shortened(name), child) for name, child in islice(children, MAX_CHILDREN)]


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else safe_repr(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"


environment.filters.update(
    kind=_kind,
    children=_children,
    shortened=_shortened,
    ago=formatting.relative_time,
    became=formatting.became_text,
    epoch_ms=lambda moment: int(moment.timestamp() * 1000),
    key_path=key_path,
    # The link's title has the whole digest.
    short_key=lambda key: f"{str(key).rpartition(':')[2][:10]}…",
    number=lambda number: f"{number:,}",
    seconds=formatting.duration,
    deaths=formatting.deaths,
    is_poisoned=layout.is_poisoned,
    run_time=formatting.run_time,
)
environment.globals.update(
    max_depth=MAX_DEPTH,
    max_parts=MAX_PARTS,
    plural=plural,
    ranges=RANGES,
    reference=FINDINGS,
    states=STATES,
    shadow=SHADOW,
    double_executions=double_executions,
    other_names=OTHER_NAMES,
)
