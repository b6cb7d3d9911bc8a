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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from labs.redelivery import app as lab
from labs.redelivery.__main__ import Site
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
    with ExitStack() as stack:
        url = stack.enter_context(RedisServer.start(config={"databases": "2"})).url
        broker_url = url if broker == "Redis" else stack.enter_context(RabbitMQ.start()).url
        proxies = [Proxy(address) for address in dict.fromkeys((url, broker_url))]
        for proxy in proxies:
            stack.callback(proxy.stop)
        settings = {
            "broker_url": broker_url,
            "broker_heartbeat": HEARTBEAT,
            "broker_connection_retry_on_startup": True,
            "idempotency_redis_url": url,
            "idempotency_lease": LEASE,
            "idempotency_redeliver_after": seconds,
            "lab_url": url,
        }
        lab.app.conf.update(settings)
        folder = Path(stack.enter_context(TemporaryDirectory()))
        site = Site(url, folder, settings)
        stack.callback(site.stop)
        victim = site.start(
            *("victim", "held", "--concurrency", "2"),
            broker_url=proxies[-1].url,
            idempotency_redis_url=proxies[0].url,
        )
        kinds = _publish("running", 2, LONG)
        eventually(lambda: all(site.redis.exists(f"starts:{each}") for each in kinds), "they run")
        kinds |= _publish("prefetched", 4, 0.1)
        kinds |= _publish("ETA", 2, 0.1, countdown=COUNTDOWN)
        eventually(
            lambda: all(site.redis.exists(f"deliveries:{each}") for each in kinds), "received"
        )
        FAULTS[fault](victim.process.pid, proxies)
        at = time.time()
        site.control.add_consumer("held", destination=["survivor@here"])
        counted = _count(site, kinds, at)
        if fault.startswith("SIGSTOP"):
            os.killpg(victim.process.pid, signal.SIGCONT)
    return counted


def _publish(kind: str, number: int, seconds: float, **options: Any) -> dict[str, str]:
    """Publishes calls with different keys; returns `kind` by task id."""
    calls = [(f"{kind} {each}", seconds) for each in range(number)]
    ids = [lab.work.apply_async(call, queue="held", **options).id for call in calls]
    return dict.fromkeys(ids, kind)


def _count(site: Site, kinds: dict[str, str], at: float) -> str:
    elsewhere: dict[str, float] = {}
    in_place: set[str] = set()
    while time.time() < at + LONGEST_WAIT and len(elsewhere.keys() | in_place) < len(kinds):
        for task_id in kinds.keys() - elsewhere.keys():
            for start in site.redis.lrange(f"starts:{task_id}", 0, -1):
                if start.endswith("survivor@here"):
                    elsewhere[task_id] = float(start.split()[0]) - at
        ended = {task_id for task_id in kinds if site.redis.exists(f"ended:{task_id}")}
        in_place |= ended - elsewhere.keys()
        time.sleep(0.1)
    texts = []
    for kind in dict.fromkeys(kinds.values()):
        found: dict[str, list[float]] = defaultdict(list)
        for task_id in (each for each, of in kinds.items() if of == kind):
            if task_id in elsewhere:
                found["elsewhere"].append(elsewhere[task_id])
            else:
                where = "in place" if task_id in in_place else f"not within {LONGEST_WAIT:g} s"
                found[where].append(0.0)
        parts = [
            f"{len(delays)} {where}" + (f" after {max(delays):.1f} s" if any(delays) else "")
            for where, delays in found.items()
        ]
        texts.append(f"{kind}: {', '.join(parts)}")
    again = sum(site.redis.llen(f"starts:{task_id}") > 1 for task_id in kinds)
    return "; ".join([*texts, f"begun twice: {again}"])


if __name__ == "__main__":
    main()
