"""What grows in processes that are busy for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from statistics import median
from uuid import uuid4

import httpx
from redis import Redis

from labs.benchmarks.environments import OURS_BY_DEFAULT, Entries, start_environments
from labs.benchmarks.figure import Figure, MeasureResult
from labs.benchmarks.measure import Measure
from labs.benchmarks.usage import processes_of_group
from labs.comparison.app import NAME
from labs.comparison.contestants import OURS, PLAIN
from labs.comparison.environment import Environment
from tests.dashboard.conftest import dashboard
from tests.http.drivers.web_server import WebServer, serving
from tests.servers.redis_server import RedisServer
from tests.worker.harness import REPOSITORY

#: Seconds for which results and records are kept, so that their number does not grow.
RETENTION = 20
#: Seconds between the requests to each web process; one request in this many is a duplicate.
REQUEST_INTERVAL, DUPLICATES = 0.1, 4
#: Seconds for which the server is frozen.
FREEZE = 2.0

MB = 1_000_000
LOAD = "labs.benchmarks.soak_load"
WORKER, PUBLISHER, WEB, DASHBOARD = "worker", "publisher", "web", "dashboard"

#: The values at each sample, by what they are.
Series = dict[str, list[float]]


class Soak(Measure):
    """Plain Celery and celery-idempotent side by side, under the same load and faults.

    Each has a worker with two processes, a publisher, and an ASGI application that publishes;
    celery-idempotent also has its middleware and its dashboard. Every fourth call is a duplicate.
    Results and records are kept for 20 seconds. Every half minute, in turn, connections are cut,
    scripts flushed, Redis frozen, Redis killed and restarted, or a process of each pool killed.

    The figures below the calls are growths, from the second to the last quarter of the time.
    """

    name = "soak"
    title = "load and faults"
    section = "soak"

    MINUTES = float(os.environ.get("SOAK_MINUTES", "10"))
    timeout = 60 * MINUTES + 300
    #: In seconds.
    FAULT_INTERVAL, SAMPLE_INTERVAL = 30.0, 10.0

    def measure(self) -> MeasureResult:
        with (
            RedisServer.start(config={"appendonly": "yes"}) as server,
            server.client() as client,
            start_environments(server, _entries(), concurrency=2) as environments,
            ExitStack() as stack,
        ):
            load = _Load(environments, stack)
            faults = cycle(_faults(server, client, environments))
            series: Series = defaultdict(list)
            started_at = time.monotonic()
            ends_at = started_at + 60 * self.MINUTES
            fault_at = started_at + self.FAULT_INTERVAL
            sample_at = started_at + self.SAMPLE_INTERVAL
            injected = restarts = 0
            while (now := time.monotonic()) < ends_at:
                if now >= fault_at:
                    next(faults)()
                    injected, fault_at = injected + 1, fault_at + self.FAULT_INTERVAL
                restarts += sum(each.restart_exited() for each in environments.values())
                if now >= sample_at:
                    load.sample(series)
                    info = client.info()
                    series["connections to Redis"].append(info["connected_clients"])
                    series["memory of Redis"].append(info["used_memory"] / MB)
                    sample_at += self.SAMPLE_INTERVAL
                load.send_requests()
            calls = {name: each.log().count(" received") for name, each in environments.items()}
        return MeasureResult(
            [
                Figure("faults", injected),
                Figure("workers that exited", restarts),
                *(Figure(f"calls, {name}", number) for name, number in calls.items()),
                *_growths(series),
            ]
        )


class _Load:
    """The processes beside the workers, and the requests to them."""

    def __init__(self, environments: Mapping[str, Environment], stack: ExitStack) -> None:
        self._environments = environments
        self._publishers: dict[str, subprocess.Popen[bytes]] = {}
        self._webs: dict[str, WebServer] = {}
        for name, each in environments.items():
            variables = each.environment
            publisher = subprocess.Popen(
                [sys.executable, "-m", LOAD],
                cwd=REPOSITORY,
                env={**os.environ, **variables},
                start_new_session=True,
            )
            self._publishers[name] = stack.enter_context(publisher)
            stack.callback(publisher.kill)
            self._webs[name] = stack.enter_context(serving(f"{LOAD}:api", **variables))
        ours = environments[OURS.name].environment
        url, self._dashboard = stack.enter_context(dashboard(NAME, **ours))
        self._pages = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        self._number = 0

    def send_requests(self) -> None:
        """Sends a request to each process, and waits until the next ones are due."""
        due = time.monotonic() + REQUEST_INTERVAL
        self._number += 1
        order = "duplicate" if self._number % DUPLICATES == 0 else uuid4().hex
        with suppress(httpx.TransportError):
            for web in self._webs.values():
                web.client.post(f"/orders/{order}", headers={"Idempotency-Key": order})
        if self._number % 10 == 0:
            with suppress(httpx.TransportError):
                self._pages.get(("/", "/records", "/api/stats")[self._number // 10 % 3])
        time.sleep(max(0.0, due - time.monotonic()))

    def sample(self, series: Series) -> None:
        """Adds the state of each process with its children."""
        for name, environment in self._environments.items():
            leaders = {
                WORKER: environment.worker_pid,
                PUBLISHER: self._publishers[name].pid,
                WEB: self._webs[name].pid,
            }
            if name == OURS.name:
                leaders[DASHBOARD] = self._dashboard.pid
            groups = {role: [*processes_of_group(pid)] for role, pid in leaders.items()}
            for role, group in groups.items():
                series[f"{role}, {name}"].append(sum(each.memory for each in group) / MB)
            every = [each for group in groups.values() for each in group]
            series[f"descriptors, {name}"].append(sum(each.descriptors for each in every))
            series[f"threads, {name}"].append(sum(each.threads for each in every))


def _faults(
    server: RedisServer, client: Redis, environments: Mapping[str, Environment]
) -> Sequence[Callable[[], object]]:
    def cut() -> None:
        client.client_kill_filter(_type="normal", skipme=True)

    def freeze() -> None:
        server.pause()
        time.sleep(FREEZE)
        server.resume()

    def restart() -> None:
        server.kill()
        server.restart()

    def kill_children() -> None:
        for each in environments.values():
            children = [p for p in processes_of_group(each.worker_pid) if p.pid != each.worker_pid]
            if children:
                os.kill(min(children, key=lambda child: child.cpu).pid, signal.SIGKILL)

    return (cut, client.script_flush, freeze, restart, kill_children)


def _growths(series: Series) -> Iterator[Figure]:
    growths = {label: _growth(values) for label, values in series.items()}
    for role in (WORKER, PUBLISHER, WEB, DASHBOARD):
        plain, ours = (
            growths.pop(f"{role}, {PLAIN.name}", None),
            growths.pop(f"{role}, {OURS.name}"),
        )
        if plain is not None:
            yield Figure(f"{role}, {PLAIN.name}", plain, "MB")
        yield Figure(f"{role}, {OURS.name}", ours, "MB")
        yield Figure(f"{role}, difference", ours - (plain or 0.0), "MB", 1)
    yield Figure("memory of Redis", growths.pop("memory of Redis"), "MB", 1)
    yield Figure("connections to Redis", growths.pop("connections to Redis"), goal=0)
    for label, growth in growths.items():
        yield Figure(label, growth)


def _growth(values: Sequence[float]) -> float:
    quarter = len(values) // 4
    return median(values[-quarter:]) - median(values[quarter : 2 * quarter])


def _entries() -> Entries:
    settings = {
        "result_expires": RETENTION,
        "broker_connection_max_retries": None,
        # Without these, a fault can stop a worker, which then no longer grows: it waits without a
        # limit for a reply, or failed acknowledgements have filled all of its prefetch slots.
        "broker_transport_options": {"socket_timeout": 10},
        "worker_prefetch_multiplier": 100,
        # Celery 5.7 ends a worker whose connection of remote control is cut.
        "worker_enable_remote_control": False,
    }
    name, options = OURS_BY_DEFAULT[OURS.name]
    ours = {**options["settings"], **settings, "idempotency_result_ttl": RETENTION}
    return {
        PLAIN.name: (PLAIN.name, {"settings": settings}),
        OURS.name: (name, {"settings": ours}),
    }
