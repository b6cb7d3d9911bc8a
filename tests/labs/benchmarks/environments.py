"""Apps and workers of several contestants on one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from celery_idempotent.testing.server import RedisServer
from tests.labs.benchmarks.bench import private_server
from tests.labs.benchmarks.figure import Figure, Goal, Spread
from tests.labs.benchmarks.interleaving import Rounds
from tests.labs.benchmarks.measure import MissingDependency
from tests.labs.comparison.contestants import CONTESTANTS, OURS, PLAIN
from tests.labs.comparison.environment import DATABASES_EACH, Environment

#: A second instance of plain Celery: its distance from the first one shows the noise.
CONTROL = "celery (control)"
DEDUPE = "celery-idempotent with dedupe_publish"

#: By the name in the table: the contestant, and the arguments of its environment.
Entries = Mapping[str, tuple[str, Mapping[str, Any]]]
CONTESTANTS_ONLY: Entries = {each.name: (each.name, {}) for each in CONTESTANTS}
WITH_CONTROL: Entries = {**CONTESTANTS_ONLY, CONTROL: (PLAIN.name, {})}
WITH_CONTROL_AND_DEDUPE: Entries = {
    **WITH_CONTROL,
    DEDUPE: (OURS.name, {"task_options": {"idempotency_dedupe_publish": True}}),
}


@contextmanager
def start_environments(
    server: RedisServer, entries: Entries, *, concurrency: int = 1
) -> Iterator[dict[str, Environment]]:
    """Starts an environment with its worker for each entry, on its own databases of `server`.

    Raises:
        MissingDependency: if a contestant is not installed.
    """
    with server.client() as client:
        client.flushall()
    try:
        environments = {
            name: Environment(contestant, server.url, number, concurrency=concurrency, **options)
            for number, (name, (contestant, options)) in enumerate(entries.items())
        }
    except ImportError as error:
        raise MissingDependency(
            f"{error.name} is not installed: pip install -e '.[bench]'"
        ) from None
    with ExitStack() as stack, ThreadPoolExecutor(len(environments)) as pool:
        list(pool.map(stack.enter_context, environments.values()))
        yield environments


def server_for(entries: Entries) -> RedisServer:
    """Starts a server with enough databases for `entries`."""
    return private_server(databases=str(1 + len(entries) * DATABASES_EACH))


def ratio_figures(times: Rounds, goals: Mapping[str, Goal]) -> list[Figure]:
    """Returns the ratio of each contestant to the mean of both instances of plain Celery."""
    plain = _plain(times)
    figures = [
        Figure.from_spread(
            f"{name} / celery", Spread.from_ratios(each, plain), "×", goals.get(name)
        )
        for name, each in times.items()
        if name not in (PLAIN.name, CONTROL)
    ]
    noise = Spread.from_ratios(times[CONTROL], times[PLAIN.name])
    figures.append(Figure.from_spread(f"{CONTROL} / celery (noise)", noise, "×"))
    figures.append(Figure.from_spread("celery, absolute", Spread.from_values(plain), "µs"))
    return figures


def relative_to_celery(times: Rounds) -> dict[str, Spread]:
    """Returns the ratios of all contestants to plain Celery, for a plot."""
    plain = _plain(times)
    return {name: Spread.from_ratios(each, plain) for name, each in times.items()}


def _plain(times: Rounds) -> list[float]:
    return [sum(pair) / 2 for pair in zip(times[PLAIN.name], times[CONTROL], strict=True)]
