"""Apps and workers of several contestants on one server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from labs.benchmarks.figure import Cost, Figure, Spread
from labs.benchmarks.interleaving import Rounds
from labs.comparison.contestants import (
    CONTESTANTS,
    OURS,
    PEERS_IN_ENVIRONMENTS,
    PLAIN,
)
from labs.comparison.environment import DATABASES_EACH, Environment
from tests.servers.redis_server import RedisServer

#: A second instance of plain Celery: its distance from the first one is chance.
CONTROL = "celery, again"
DEDUPE = "celery-idempotent with dedupe_publish"
UNFUSED = "celery-idempotent without fused completion"

#: By the name in the table: the contestant, and the arguments of its environment.
Entries = Mapping[str, tuple[str, Mapping[str, Any]]]
#: celery-idempotent keeps its records in the result backend, as by default, and writes Celery's
#: result with them.
_DEFAULT = {"idempotency_redis_url": None}
_NOT_FUSED = {**_DEFAULT, "idempotency_fused_completion": False}
_DEDUPED = {"idempotency_dedupe_publish": True}
OURS_BY_DEFAULT: Entries = {OURS.name: (OURS.name, {"settings": _DEFAULT})}
WITH_CONTROL: Entries = {
    **{each.name: (each.name, {}) for each in CONTESTANTS if each not in PEERS_IN_ENVIRONMENTS},
    **OURS_BY_DEFAULT,
    CONTROL: (PLAIN.name, {}),
}
WITH_UNFUSED: Entries = {**WITH_CONTROL, UNFUSED: (OURS.name, {"settings": _NOT_FUSED})}
WITH_CONTROL_AND_DEDUPE: Entries = {
    **WITH_CONTROL,
    DEDUPE: (OURS.name, {"settings": _DEFAULT, "task_options": _DEDUPED}),
}


@contextmanager
def start_environments(
    server: RedisServer, entries: Entries, *, concurrency: int = 1, broker: str = ""
) -> Iterator[dict[str, Environment]]:
    """Starts an environment with its worker for each entry, on its own databases of `server`.

    Args:
        broker: URL of the server of the brokers, if it is another one.
    """
    with server.client() as client:
        client.flushall()
    environments = {
        name: Environment(
            contestant, server.url, number, concurrency=concurrency, broker=broker, **options
        )
        for number, (name, (contestant, options)) in enumerate(entries.items())
    }
    if OURS.name in environments:
        configuration = environments[OURS.name].task("no_op").idempotency_configuration
        assert not configuration.fusion_obstacle, configuration.fusion_obstacle
    with ExitStack() as stack, ThreadPoolExecutor(len(environments)) as pool:
        list(pool.map(stack.enter_context, environments.values()))
        yield environments


def server_for(entries: Entries) -> RedisServer:
    """Starts a server with enough databases for `entries`."""
    databases = 1 + len(entries) * DATABASES_EACH
    return RedisServer.start(config={"databases": str(databases)})


def ratio_figures(times: Rounds, goals: Mapping[str, float]) -> list[Figure]:
    """Returns the ratio of each contestant to the mean of both instances of plain Celery."""
    of_celery = plain(times)
    others = {name: each for name, each in times.items() if name not in (PLAIN.name, CONTROL)}
    # Those with a goal come first.
    figures = [
        Figure.from_spread(
            f"{name} / celery", Spread.from_ratios(others[name], of_celery), "×", goals.get(name)
        )
        for name in sorted(others, key=lambda name: name not in goals)
    ]
    chance = Spread.from_ratios(times[CONTROL], times[PLAIN.name])
    figures.append(Figure.from_spread(f"{CONTROL} / celery (chance)", chance, "×"))
    return figures


def plain(times: Rounds) -> list[float]:
    """Returns the mean of both instances of plain Celery, by round."""
    return [sum(pair) / 2 for pair in zip(times[PLAIN.name], times[CONTROL], strict=True)]


def cost_of(label: str, unit: str, rounds: Rounds) -> Cost:
    """Returns a line of the table of costs from the values of each round, by contestant."""
    ours, of_celery = rounds[OURS.name], plain(rounds)
    return Cost(
        label,
        unit,
        Spread.from_values(of_celery).median,
        Spread.from_values(ours).median,
        Spread.from_values([more - less for more, less in zip(ours, of_celery, strict=True)]),
        Spread.from_values(rounds[UNFUSED]).median if UNFUSED in rounds else None,
    )
