"""``make redelivery FAULTS=1``: each fault of a worker, with Redis and RabbitMQ.

A worker with two processes has two messages that run, four prefetched ones, and two that wait for
their ETA. Counts how many begin on another worker, and when, and how many end where they were.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import Pool
from typing import Any

from labs.redelivery.site import SURVIVOR, RedeliverySite
from labs.rig.processes import children_of
from tests.faults.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis_server import RedisServer
from tests.waiting import eventually

#: Seconds.
LEASE = REDELIVER_AFTER = 5.0
#: RabbitMQ closes a silent connection after two of them; Celery's default is 120.
HEARTBEAT = 10
#: Duration of the tasks that run, countdown of those with an ETA, and the longest wait.
LONG, COUNTDOWN, LONGEST_WAIT = 20.0, 4.0, 60.0

#: `idempotency_redeliver_after` by broker: RabbitMQ needs none.
SIDES: tuple[tuple[str, float | None], ...] = (
    ("Redis", None),
    ("Redis", REDELIVER_AFTER),
    ("RabbitMQ", None),
)


def kill(pid: int, proxies: list[Proxy]) -> None:
    os.killpg(pid, signal.SIGKILL)


def freeze_main(pid: int, proxies: list[Proxy]) -> None:
    os.kill(pid, signal.SIGSTOP)


def freeze_child(pid: int, proxies: list[Proxy]) -> None:
    os.kill(children_of(pid)[0], signal.SIGSTOP)


def cut_network(pid: int, proxies: list[Proxy]) -> None:
    for proxy in proxies:
        proxy.black_hole()


FAULTS: dict[str, Callable[[int, list[Proxy]], None]] = {
    "kill -9 of all": kill,
    "SIGSTOP of the main process": freeze_main,
    "SIGSTOP of a child": freeze_child,
    "network cut": cut_network,
}


def main() -> None:
    """Prints a line for each broker and fault."""
    cells = [(broker, seconds, fault) for fault in FAULTS for broker, seconds in SIDES]
    # Each in a process of its own, with an app that has no connection to another broker.
    with Pool(3, maxtasksperchild=1) as pool:
        runs = {cell: pool.apply_async(run, cell) for cell in cells}
        for (broker, seconds, fault), counted in runs.items():
            print(f"{fault}, {broker}, redeliver_after {seconds}: {counted.get()}", flush=True)


def run(broker: str, seconds: float | None, fault: str) -> str:
    """Returns what became of the messages."""
    with RedisServer.start(config={"databases": "2"}) as server, ExitStack() as stack:
        broker_url = server.url
        if broker != "Redis":
            broker_url = stack.enter_context(RabbitMQ.start()).url
        addresses = dict.fromkeys((server.url, broker_url))
        proxies = [stack.enter_context(Proxy(address)) for address in addresses]
        settings = {
            "broker_url": broker_url,
            "broker_heartbeat": HEARTBEAT,
            "idempotency_redis_url": server.url,
            "idempotency_lease": LEASE,
            "idempotency_redeliver_after": seconds,
        }
        site = stack.enter_context(RedeliverySite(settings, server=server))
        victim = site.start(
            *("victim", "held", "--concurrency", "2"),
            broker_url=proxies[-1].url,
            idempotency_redis_url=proxies[0].url,
        )
        kinds = _publish(site, "running", 2, LONG)
        eventually(lambda: site.have("starts", kinds), "they run")
        kinds |= _publish(site, "prefetched", 4, 0.1)
        kinds |= _publish(site, "ETA", 2, 0.1, countdown=COUNTDOWN)
        eventually(lambda: site.have("deliveries", kinds), "received")
        FAULTS[fault](victim.process.pid, proxies)
        at = time.time()
        site.let_survivor_consume("held")
        return _count(site, kinds, at)


def _publish(
    site: RedeliverySite, kind: str, number: int, seconds: float, **options: Any
) -> dict[str, str]:
    """Publishes calls with different keys; returns `kind` by task id."""
    names = [f"{kind} {each}" for each in range(number)]
    return {site.publish("held", name, seconds, **options): kind for name in names}


def _count(site: RedeliverySite, kinds: dict[str, str], at: float) -> str:
    elsewhere: dict[str, float] = {}
    in_place: set[str] = set()
    while time.time() < at + LONGEST_WAIT and len(elsewhere.keys() | in_place) < len(kinds):
        for task_id in kinds.keys() - elsewhere.keys():
            for start in site.redis.lrange(f"starts:{task_id}", 0, -1):
                if start.endswith(SURVIVOR):
                    elsewhere[task_id] = float(start.split()[0]) - at
        ended = {task_id for task_id in kinds if site.redis.exists(f"ended:{task_id}")}
        in_place |= ended - elsewhere.keys()
        time.sleep(0.1)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for task_id, kind in kinds.items():
        if task_id in elsewhere:
            found[kind, "elsewhere"].append(elsewhere[task_id])
        else:
            where = "in place" if task_id in in_place else f"not within {LONGEST_WAIT:g} s"
            found[kind, where].append(0.0)
    texts = [
        f"{kind}: {len(delays)} {where}" + (f" after {max(delays):.1f} s" if any(delays) else "")
        for (kind, where), delays in found.items()
    ]
    again = sum(site.redis.llen(f"starts:{task_id}") > 1 for task_id in kinds)
    return "; ".join([*texts, f"begun twice: {again}"])


if __name__ == "__main__":
    main()
