"""Apps and workers of several contestants beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from celery_idempotent.testing.server import RedisServer
from tests.labs.benchmarks.bench import own_server
from tests.labs.benchmarks.figure import Figure, Goal, Spread
from tests.labs.benchmarks.measure import Missing
from tests.labs.benchmarks.turns import Rounds
from tests.labs.comparison.contestants import CONTESTANTS, OURS, PLAIN
from tests.labs.comparison.environment import DATABASES_EACH, Arena

#: Plain Celery once more: how far it is from itself tells what the figures are worth.
AGAIN = "celery again"
DEDUPE = "celery-idempotent with dedupe_publish"

#: Who takes part: the contestant's name, and what its arena takes besides.
Entries = Mapping[str, tuple[str, Mapping[str, Any]]]
ALONE: Entries = {each.name: (each.name, {}) for each in CONTESTANTS}
ENTRIES: Entries = {**ALONE, AGAIN: (PLAIN.name, {})}
WITH_DEDUPE: Entries = {
    **ENTRIES,
    DEDUPE: (OURS.name, {"task_options": {"idempotency_dedupe_publish": True}}),
}


@contextmanager
def arenas(
    server: RedisServer, entries: Entries, *, concurrency: int = 1
) -> Iterator[dict[str, Arena]]:
    """An arena for each entry, with databases of its own on `server`, and its worker.

    Raises:
        Missing: if a contestant is not installed.
    """
    with server.client() as client:
        client.flushall()
    try:
        made = {
            name: Arena(contestant, server.url, number, concurrency=concurrency, **given)
            for number, (name, (contestant, given)) in enumerate(entries.items())
        }
    except ImportError as error:
        raise Missing(f"{error.name} is not installed: pip install -e '.[bench]'") from None
    with ExitStack() as stack, ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(stack.enter_context, made.values()))
        yield made


def server_for(entries: Entries) -> RedisServer:
    """One with databases enough."""
    return own_server(databases=str(1 + len(entries) * DATABASES_EACH))


def ratios(times: Rounds, goals: Mapping[str, Goal]) -> list[Figure]:
    """Each contestant's to plain Celery, round by round; plain Celery is in the race twice."""
    plain = [sum(pair) / 2 for pair in zip(times[PLAIN.name], times[AGAIN], strict=True)]
    figures = [
        Figure.spread_of(f"{name} / celery", Spread.of_ratios(each, plain), "×", goals.get(name))
        for name, each in times.items()
        if name not in (PLAIN.name, AGAIN)
    ]
    itself = Spread.of_ratios(times[AGAIN], times[PLAIN.name])
    figures.append(Figure.spread_of(f"{AGAIN} / celery (what chance does)", itself, "×"))
    figures.append(Figure.spread_of("celery itself", Spread.of(plain), "µs"))
    return figures


def in_units_of_plain(times: Rounds) -> dict[str, Spread]:
    """For a plot."""
    plain = [sum(pair) / 2 for pair in zip(times[PLAIN.name], times[AGAIN], strict=True)]
    return {name: Spread.of_ratios(each, plain) for name, each in times.items()}
