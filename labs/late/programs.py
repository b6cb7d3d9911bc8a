"""The programs: each is played in rounds, at several sites at once, with keys of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from celery.result import AsyncResult

from labs.late.app import NAME, make_app
from labs.rig.late import Late
from labs.rig.site import Site
from labs.rig.worker import plans_of
from tests.waiting import eventually

#: Keys of a round in which Redis is frozen, and processes of each worker.
KEYS, WORKERS = 3, ("w0", "w1")
#: Longest wait for a result, in seconds.
TIMEOUT = 300.0
#: Publishes of which one must run.
PUBLISHES = 5
#: Seconds for which a packet is late: longer than the timeout of its sender.
LATE_SECONDS = 4.0


class LateSite(Site):
    """A broker, a store, workers, and the app that publishes."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(NAME)
        self.number = 0
        self.late = self.enter_context(Late(plans_of(self.settings), lambda packet: None))
        self.store = self.server()
        url = self.server().url
        self.settings |= {
            "broker_url": url,
            "result_backend": url,
            "idempotency_redis_url": self.store.url,
            "worker_prefetch_multiplier": 1,
            "lab_options": dict(options),
        }
        self.app: Any = make_app(self.settings)
        self.job = self.app.tasks["job"]
        for name in WORKERS:
            self.worker(name, "--concurrency", str(KEYS), "--queues", f"celery,{name}")
        self.wait_until_ready()

    def key(self) -> str:
        """Returns a new key."""
        self.number += 1
        return f"key {self.number}"

    def runs(self, key: str) -> list[dict[str, Any]]:
        """Returns the executions of a key that have begun."""
        return [line for line in self.ledger.read("started") if line["key"] == key]

    def wait_for_runs(self, key: str, number: int = 1) -> None:
        """Waits until so many executions have ended."""
        eventually(
            lambda: sum(line["key"] == key for line in self.ledger.read("ended")) >= number,
            f"{key} has run {number} times",
        )

    def publishes_run(self, *args: Any) -> bool:
        """Whether one of several publishes of a key that has ended runs."""
        before = len(self.runs(args[0]))
        for _ in range(PUBLISHES):
            self.job.delay(*args)
            time.sleep(1.5)
        return len(self.runs(args[0])) > before


#: Yields the broken promises of a round.
Round = Callable[[LateSite], Iterator[str]]


@dataclass(frozen=True)
class Program:
    """One row of the table."""

    title: str
    play: Round
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Sites at once.
    sites: int = 4


def outcome(result: AsyncResult) -> str:
    """Returns the result of a call, or the name of its error."""
    value = result.get(timeout=TIMEOUT, propagate=False)
    return type(value).__name__ if isinstance(value, Exception) else str(value)


def frozen_store(site: LateSite, lease: float, freeze: float) -> Iterator[str]:
    """Redis is frozen for less than a lease while executions run and duplicates begin."""
    for warm in [site.job.delay(site.key(), 0.2) for _ in range(4 * KEYS)]:
        warm.get(timeout=TIMEOUT)  # each process has a connection
    keys = [site.key() for _ in range(KEYS)]
    calls = {key: [site.job.delay(key, 1.7 * lease)] for key in keys}
    eventually(lambda: all(site.runs(key) for key in keys), "all run")
    time.sleep(random.uniform(lease / 3, 0.9 * lease))
    site.store.pause()
    for key in keys:
        calls[key].append(site.job.delay(key, 1.7 * lease))
    time.sleep(freeze)
    site.store.resume()
    for key, results in calls.items():
        outcomes = {outcome(result) for result in results}
        if len(site.runs(key)) != 1 or len(outcomes) != 1:
            yield f"{key}: {len(site.runs(key))} executions, outcomes {outcomes}"


def late_reserve(site: LateSite, fails: bool) -> Iterator[str]:
    """The first copy of a publish's reservation arrives when the message has ended."""
    key, until = site.key(), site.folder / f"until-{site.number}"
    until.touch()
    call = (key, 0, str(until)) if fails else (key, 0)
    site.late.plan("queue", LATE_SECONDS)
    site.job.delay(*call)
    if fails:
        eventually(Path(f"{until}.failed").exists, "the call has failed")
    else:
        site.wait_for_runs(key)
    eventually(lambda: not site.late.holds(), "the packet is delivered")
    if not site.publishes_run(*call):
        yield f"{key}: every publish is swallowed"


def late_begin(site: LateSite, lease: float) -> Iterator[str]:
    """A begin is answered `held`; its first copy arrives when the key is free."""
    key, until = site.key(), site.folder / f"until-{site.number}"
    first = site.job.apply_async((key, 0, str(until)), queue="w0")
    eventually(lambda: site.runs(key), "the first call runs")
    site.late.plan("begin", 0.75 * lease)
    second = site.job.apply_async((key, 0, str(until)), queue="w1")
    eventually(site.late.holds, "the begin is held back")
    time.sleep(0.7 * lease)
    until.touch()
    outcome(first)
    result = outcome(second)
    runs = [(line["task_id"], line["attempt"]) for line in site.runs(key)]
    if runs != [(first.id, 1), (second.id, 1)] or result != second.id:
        yield f"{key}: {runs}, {result}"


def late_forget(site: LateSite, force: bool) -> Iterator[str]:
    """The first copy of a forget arrives while, or after, the next execution runs."""
    key = site.key()
    outcome(site.job.delay(key, 3))
    site.late.plan("forget", LATE_SECONDS)
    site.job.idempotency_forget(key, 3, **({"force": True} if force else {}))
    results = [site.job.delay(key, 3)]
    eventually(lambda: not site.late.holds(), "the packet is delivered")
    results += [site.job.delay(key, 3) for _ in range(2)]
    outcomes = {outcome(result) for result in results}
    if len(site.runs(key)) != 2 or len(outcomes) != 1:
        yield f"{key}: {len(site.runs(key)) - 1} executions after a forget, outcomes {outcomes}"


def run_unprotected(site: LateSite) -> Iterator[str]:
    """A reserved message runs while Redis is frozen; its reservation must not outlive it."""
    key, queue = site.key(), f"q{site.number}"
    site.job.apply_async((key, 0), queue=queue)
    site.store.pause()
    site.app.control.add_consumer(queue, destination=["w0@here"])
    site.wait_for_runs(key)
    time.sleep(2)
    site.store.resume()
    time.sleep(3)
    if not site.publishes_run(key, 0):
        yield f"{key}: every publish is swallowed"


FAST = {"idempotency_lease": 6.0, "idempotency_redis_timeout": 1.0}
COLLAPSED = {"idempotency_dedupe_publish": True, "ignore_result": True}
_LEASE = 8.0
PROGRAMS = (
    Program("frozen for 5 of 6 s", partial(frozen_store, lease=6, freeze=5), FAST),
    Program(
        "frozen for 5 of 6 s, max_attempts = 1",
        partial(frozen_store, lease=6, freeze=5),
        {**FAST, "idempotency_max_attempts": 1},
    ),
    Program(
        "frozen for 52 of 60 s, defaults", partial(frozen_store, lease=60, freeze=52), sites=10
    ),
    Program(
        "frozen for 52 of 60 s, max_attempts = 1",
        partial(frozen_store, lease=60, freeze=52),
        {"idempotency_max_attempts": 1},
        sites=10,
    ),
    *(
        Program(
            f"late reserve, {mode}{', the call fails' if fails else ''}",
            partial(late_reserve, fails=fails),
            {**COLLAPSED, "idempotency_until": mode},
        )
        for fails in (False, True)
        for mode in ("started", "finished")
    ),
    Program(
        "late begin after held",
        partial(late_begin, lease=_LEASE),
        {"idempotency_lease": _LEASE, "idempotency_max_attempts": 1},
    ),
    Program("late forget", partial(late_forget, force=False)),
    Program("late forget, force", partial(late_forget, force=True)),
    *(
        Program(
            f"run without the store, {mode}",
            run_unprotected,
            {
                **COLLAPSED,
                "idempotency_until": mode,
                "idempotency_on_store_error": "run",
                "idempotency_redis_timeout": 1.0,
            },
        )
        for mode in ("started", "finished")
    ),
)


def play_at_a_site(program: Program, rounds: int) -> list[str]:
    """Plays the rounds of a program one after the other; returns the broken promises."""
    with LateSite(program.options) as site:
        return [each for _ in range(rounds) for each in program.play(site)]


def play(program: Program, rounds: int) -> list[str]:
    """Plays the rounds of a program; returns the broken promises."""
    sites = min(program.sites, rounds)
    numbers = [rounds // sites + (number < rounds % sites) for number in range(sites)]
    # Each in a process, since a process hands all of its packets over.
    with ProcessPoolExecutor(sites, get_context("spawn")) as pool:
        every = pool.map(partial(play_at_a_site, program), numbers)
        return [each for found in every for each in found]
