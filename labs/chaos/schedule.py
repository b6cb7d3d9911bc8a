"""Schedules: the times of calls and faults, as a function of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal
from uuid import UUID

from labs.rig.late import PLAIN, SCRIPTS

CALLS_PER_SECOND = 50.0
#: Every n-th call duplicates an earlier one; half of these a recent one that is probably running.
DUPLICATE_EVERY = 5
RECENT = 12
#: In seconds: shorter than some faults, longer than a failover.
LEASE = 6.0
#: Seconds without faults at the beginning and at the end.
QUIET_PERIOD = 1.0
#: Mean seconds between faults.
FAULT_INTERVAL = 1.4

Broker = Literal["redis", "rabbitmq"]
Store = Literal["single", "sentinel", "cluster"]


@dataclass(frozen=True)
class Shape:
    """The processes of a schedule."""

    broker: Broker
    store: Store
    wait_replicas: int
    workers: int
    #: Pool size of each worker.
    children: int
    #: Whether Celery's results are on the store's server, so that one script writes both.
    results_in_store: bool = False
    #: Whether effects are rows in PostgreSQL, written in the transaction of the outcome.
    transaction: bool = False
    #: Whether tasks run while the store is unavailable: the row alone protects them.
    runs_without_store: bool = False
    #: Whether PostgreSQL ends transactions of processes that are frozen past the lease.
    idle_timeout: bool = False

    def __str__(self) -> str:
        waits = ", wait_replicas" if self.wait_replicas else ""
        results = " with results" if self.results_in_store else ""
        runs = ", on_store_error=run" if self.runs_without_store else ""
        idle = ", idle timeout" if self.idle_timeout else ""
        store = f"{self.store}{results}{waits}"
        return f"{self.broker}, {store}, {self.workers} × {self.children}{runs}{idle}"


@dataclass(frozen=True)
class Call:
    """One call of a task."""

    at: float
    order: str
    #: Duration of the task.
    seconds: float
    #: "returns", "retries" (once, then returns) or "declined" (raises an error).
    ending: str
    task_id: str


@dataclass(frozen=True)
class Fault:
    """One fault."""

    at: float
    kind: str
    #: From 0 to 1: selects one of the workers, children or masters that exist at that time; the
    #: share of the calls that must have ended before a deployment or rollback.
    target: float
    #: Its duration.
    seconds: float = 0.0


@dataclass(frozen=True)
class LatePacket:
    """From `at` on, the first call of a script that the store executes late."""

    at: float
    #: As in `labs.rig.late`.
    name: str
    #: How long it is held back, and whether its sender is killed meanwhile.
    seconds: float
    kills: bool


@dataclass(frozen=True)
class Schedule:
    """The calls and faults of a run, and for celery-idempotent the late packets."""

    seed: int
    shape: Shape
    calls: tuple[Call, ...]
    faults: tuple[Fault, ...]
    late: tuple[LatePacket, ...]

    @property
    def orders(self) -> int:
        """The number of different orders."""
        return len({call.order for call in self.calls})

    def with_orders(self, one_in: int) -> Schedule:
        """Returns the schedule with every n-th order only."""
        orders = dict.fromkeys(call.order for call in self.calls)
        kept = set(list(orders)[::one_in])
        return replace(self, calls=tuple(call for call in self.calls if call.order in kept))


#: Weight, shortest and longest duration in seconds.
_ALWAYS = {
    "child killed": (3, 0, 0),
    "worker killed": (2, 0, 0),
    "parent killed": (1, 0, 0),
    "child frozen past the lease": (2, LEASE + 2, LEASE + 4),
    "worker frozen past the lease": (1, LEASE + 2, LEASE + 4),
    "worker frozen": (1, 0.3, 1.5),
    "worker stopped": (1, 0, 0),
    "store connections cut": (1, 0.1, 0.4),
    "store frozen": (1, 0.3, 0.9),
    "scripts flushed": (1, 0.2, 0.8),
    "broker connections cut": (1, 0, 0.2),
    "broker in a black hole": (1, 0.3, 1.5),
}
#: A store on a single server has a proxy and its own clock.
_SINGLE_SERVER = {
    "store in a black hole": (1, 0.3, 1.2),
    "store replies delayed": (1, 0, 0),
    "store replies lost": (2, 0, 0),
    "store clock set back": (1, 0, 0),
    "store clock set forward": (1, 0, 0),
}
_REDIS_BROKER = {"publish replies lost": (1, 0, 0)}
#: Added where effects are in the database: number, shortest and longest duration in seconds.
_WITH_TRANSACTION = {
    "store flushed": (2, 0, 0),
    "database killed": (1, 0.2, 0.8),
    "database connections cut": (1, 0, 0.2),
    "commit replies lost": (2, 0, 0),
    "broker killed": (1, 0.2, 0.8),
    "result backend killed": (1, 0.2, 0.8),
    "result backend frozen": (1, 0.3, 1.5),
}

#: How long a packet is late, in seconds, and whether its sender is killed: it arrives soon after
#: the resend was answered; after a lease has ended; after its sender has died.
_LATE = ((0.3, 1.5, False), (1.1 * LEASE, 1.1 * LEASE + 3, False), (0.3, 1.1 * LEASE + 2, True))
#: Mean seconds between late packets of one name.
_LATE_INTERVAL = 7.0

STORE_KILLED = "store killed"
ROLLED_FORWARD, ROLLED_BACK = "rolled forward", "rolled back"


def make(seed: int, tasks: int, *, transaction: bool = False, versions: bool = False) -> Schedule:
    """Returns the schedule of `seed` with `tasks` calls.

    Args:
        transaction: whether effects are rows in PostgreSQL. The calls are the same, and the faults
            are the same and some more.
        versions: whether to mix two versions: workers of both run the first third of the calls,
            workers of this version the second one, after a deployment, and workers of the other
            version the last one, after a rollback.
    """
    generator = random.Random(seed)
    shape = shape_of(seed, generator)
    calls = tuple(_calls(tasks, generator))
    ends_at = calls[-1].at
    last = max(ends_at - QUIET_PERIOD, QUIET_PERIOD + 0.1)
    faults = list(_faults(shape, ends_at, last, generator))
    if transaction:
        shape = replace(
            shape,
            transaction=True,
            runs_without_store=seed % 5 < 2,
            idle_timeout=seed // 2 % 2 == 0,
        )
        faults += _faults_with_transaction(last, generator)
    if versions:
        faults += [
            Fault(share * ends_at, kind, share)
            for share, kind in ((1 / 3, ROLLED_FORWARD), (2 / 3, ROLLED_BACK))
        ]
    faults.sort(key=lambda fault: fault.at)
    late = tuple(_late(ends_at, last, generator))
    return Schedule(seed, shape, calls, tuple(faults), late)


def shape_of(seed: int, generator: random.Random) -> Shape:
    """Twelve consecutive seeds have every combination of broker, store and `wait_replicas`.

    A single server has the results in the seeds in which another store has `wait_replicas`.
    """
    stores: tuple[Store, ...] = ("single", "sentinel", "cluster")
    store = stores[seed % 3]
    return Shape(
        broker="rabbitmq" if seed % 2 else "redis",
        store=store,
        wait_replicas=int(store != "single" and seed // 6 % 2 == 0),
        results_in_store=store == "single" and seed // 6 % 2 == 0,
        workers=2,
        children=generator.choice((3, 4)),
    )


def _calls(number: int, generator: random.Random) -> Iterator[Call]:
    calls: list[Call] = []
    for position in range(1, number + 1):
        at = position / CALLS_PER_SECOND
        task_id = str(UUID(int=generator.getrandbits(128), version=4))
        if position % DUPLICATE_EVERY or not calls:
            order = f"order-{position}"
            ending = generator.choices(("returns", "retries", "declined"), (88, 6, 6))[0]
            calls.append(Call(at, order, _duration(generator), ending, task_id))
            yield calls[-1]
        else:
            original = generator.choice(calls[-RECENT:] if generator.random() < 0.5 else calls)
            yield replace(original, at=at, task_id=task_id)


def _duration(generator: random.Random) -> float:
    """Returns a short duration mostly, sometimes one after which the lease is extended."""
    shortest, longest = generator.choices(((0.005, 0.05), (0.1, 0.5), (0.5, 3.0)), (91, 6, 3))[0]
    return round(generator.uniform(shortest, longest), 3)


def _faults(shape: Shape, ends_at: float, last: float, generator: random.Random) -> Iterator[Fault]:
    options = dict(_ALWAYS)
    if shape.store == "single":
        options |= _SINGLE_SERVER
    if shape.broker == "redis":
        options |= _REDIS_BROKER
    number = max(2, round((last - QUIET_PERIOD) / FAULT_INTERVAL))
    kinds = generator.choices(
        list(options), [weight for weight, _, _ in options.values()], k=number - 2
    )
    for kind in (*kinds, "worker killed"):
        _, shortest, longest = options[kind]
        seconds = round(generator.uniform(shortest, longest), 2)
        yield Fault(
            round(generator.uniform(QUIET_PERIOD, last), 2), kind, generator.random(), seconds
        )
    # Once in the middle, so that calls arrive during the failover.
    middle = generator.uniform(0.3, 0.6) * ends_at
    yield Fault(
        round(middle, 2), STORE_KILLED, generator.random(), round(generator.uniform(0.2, 0.8), 2)
    )


def _late(ends_at: float, last: float, generator: random.Random) -> Iterator[LatePacket]:
    for name in (*SCRIPTS, PLAIN):
        moments = generator.sample(_LATE, len(_LATE))
        for number in range(max(1, round(ends_at / _LATE_INTERVAL))):
            shortest, longest, kills = moments[number % len(moments)]
            at = round(generator.uniform(QUIET_PERIOD, last), 2)
            yield LatePacket(at, name, round(generator.uniform(shortest, longest), 2), kills)


def _faults_with_transaction(last: float, generator: random.Random) -> Iterator[Fault]:
    for kind, (number, shortest, longest) in _WITH_TRANSACTION.items():
        for _ in range(number):
            at = round(generator.uniform(QUIET_PERIOD, last), 2)
            seconds = round(generator.uniform(shortest, longest), 2)
            yield Fault(at, kind, generator.random(), seconds)
