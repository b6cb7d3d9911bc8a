"""A schedule: what is called when, and what is struck when. A function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal
from uuid import UUID

#: Calls a second.
PACE = 50.0
#: One call of so many repeats an earlier one; half of those one that is probably under way.
REPEATS = 5
RECENT = 12
#: Seconds: less than a fault can take, more than a failover does.
LEASE = 6.0
#: Seconds of calm before the first fault and after the last one has begun.
CALM = 1.0
#: Seconds between two faults, on average.
PAUSE = 1.4

Broker = Literal["redis", "rabbitmq"]
Store = Literal["single", "sentinel", "cluster"]


@dataclass(frozen=True)
class Shape:
    """What a seed's processes are."""

    broker: Broker
    store: Store
    #: Replicas that celery-idempotent waits for.
    wait_replicas: int
    workers: int
    #: Of each worker's pool.
    children: int

    def __str__(self) -> str:
        waits = ", wait_replicas" if self.wait_replicas else ""
        return f"{self.broker}, {self.store}{waits}, {self.workers} × {self.children}"


@dataclass(frozen=True)
class Call:
    """One call of a task."""

    at: float
    order: str
    #: How long the task takes.
    seconds: float
    #: How it ends: "returns", "retries" once and then returns, or is "declined" (an error).
    ending: str
    task_id: str


@dataclass(frozen=True)
class Fault:
    """One fault."""

    at: float
    kind: str
    #: From 0 to 1: which of the workers, children or masters that there are at that moment.
    aim: float
    #: How long it lasts.
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """All that happens to a contestant."""

    seed: int
    shape: Shape
    calls: tuple[Call, ...]
    blows: tuple[Fault, ...]

    @property
    def orders(self) -> int:
        """How many different ones are called for."""
        return len({call.order for call in self.calls})

    def part(self, of: int) -> Schedule:
        """The same with one order of so many, and all its calls."""
        orders = dict.fromkeys(call.order for call in self.calls)
        kept = set(list(orders)[::of])
        return replace(self, calls=tuple(call for call in self.calls if call.order in kept))


#: Likelihood, and how long it lasts: from, to (seconds).
_EVERYWHERE = {
    "child killed": (3, 0, 0),
    "worker killed": (2, 0, 0),
    "parent killed": (1, 0, 0),
    "child frozen past the lease": (2, LEASE + 2, LEASE + 4),
    "worker frozen past the lease": (1, LEASE + 2, LEASE + 4),
    "worker frozen": (1, 0.3, 1.5),
    "worker told to stop": (1, 0, 0),
    "store connections cut": (1, 0.1, 0.4),
    "store frozen": (1, 0.3, 0.9),
    "scripts flushed": (1, 0.2, 0.8),
    "broker connections cut": (1, 0, 0.2),
    "broker in a black hole": (1, 0.3, 1.5),
}
#: A store that is one server stands behind a proxy, and goes by a clock of its own.
_SINGLE = {
    "store in a black hole": (1, 0.3, 1.2),
    "store replies delayed": (1, 0, 0),
    "store replies lost": (2, 0, 0),
    "store clock set back": (1, 0, 0),
    "store clock set forward": (1, 0, 0),
}
_REDIS_BROKER = {"publish replies lost": (1, 0, 0)}

STORE_KILLED = "store killed"


def make(seed: int, tasks: int) -> Schedule:
    """The schedule of `seed`, with so many calls."""
    chance = random.Random(seed)
    shape = shape_of(seed, chance)
    calls = tuple(_calls(tasks, chance))
    blows = tuple(sorted(_blows(shape, calls[-1].at, chance), key=lambda blow: blow.at))
    return Schedule(seed, shape, calls, blows)


def shape_of(seed: int, chance: random.Random) -> Shape:
    """Twelve seeds in a row have every combination of broker, store and `wait_replicas`."""
    stores: tuple[Store, ...] = ("single", "sentinel", "cluster")
    store = stores[seed % 3]
    return Shape(
        broker="rabbitmq" if seed % 2 else "redis",
        store=store,
        wait_replicas=int(store != "single" and seed // 6 % 2 == 0),
        workers=2,
        children=chance.choice((3, 4)),
    )


def _calls(number: int, chance: random.Random) -> Iterator[Call]:
    made: list[Call] = []
    for place in range(1, number + 1):
        at = place / PACE
        task_id = str(UUID(int=chance.getrandbits(128), version=4))
        if place % REPEATS or not made:
            order = f"order-{place}"
            ending = chance.choices(("returns", "retries", "declined"), (88, 6, 6))[0]
            made.append(Call(at, order, _duration(chance), ending, task_id))
            yield made[-1]
        else:
            first = chance.choice(made[-RECENT:] if chance.random() < 0.5 else made)
            yield replace(first, at=at, task_id=task_id)


def _duration(chance: random.Random) -> float:
    """Most take no time; some outlast a third of the lease, after which it is extended."""
    least, most = chance.choices(((0.005, 0.05), (0.1, 0.5), (0.5, 3.0)), (91, 6, 3))[0]
    return round(chance.uniform(least, most), 3)


def _blows(shape: Shape, ends_at: float, chance: random.Random) -> Iterator[Fault]:
    likely = dict(_EVERYWHERE)
    if shape.store == "single":
        likely |= _SINGLE
    if shape.broker == "redis":
        likely |= _REDIS_BROKER
    last = max(ends_at - CALM, CALM + 0.1)
    number = max(2, round((last - CALM) / PAUSE))
    discovery = chance.choices(
        list(likely), [weight for weight, _, _ in likely.values()], k=number - 2
    )
    for kind in (*discovery, "worker killed"):
        _, least, most = likely[kind]
        seconds = round(chance.uniform(least, most), 2)
        yield Fault(round(chance.uniform(CALM, last), 2), kind, chance.random(), seconds)
    # Once in the middle: what comes while a master is replaced must not miss it.
    middle = chance.uniform(0.3, 0.6) * ends_at
    yield Fault(round(middle, 2), STORE_KILLED, chance.random(), round(chance.uniform(0.2, 0.8), 2))
