"""What grows in processes that are busy for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
from redis import Redis

from labs.benchmarks.bench import private_server
from labs.benchmarks.environments import OURS_BY_DEFAULT, Entries, start_environments
from labs.benchmarks.figure import Curves, Figure, Goal, MeasureResult, Spread
from labs.benchmarks.measure import Measure, ProgressCallback
from labs.benchmarks.usage import processes_of_group
from labs.comparison.app import CONFIG_VARIABLE
from labs.comparison.contestants import OURS, PLAIN
from labs.comparison.environment import DATABASES_EACH, REPOSITORY, Environment
from tests.dashboard.conftest import dashboard
from tests.http.drivers.web_server import WebServer, serving
from tests.servers.redis_server import RedisServer

#: Seconds for which results and records are kept, so that their number does not grow.
RETENTION = 20
#: Seconds between the requests to each web process; one request in this many is a duplicate.
REQUEST_INTERVAL, DUPLICATES = 0.1, 4
#: Seconds for which the server is frozen.
FREEZE = 2.0

MB = 1_000_000
#: Points of a curve, at least.
POINTS = 100
LOAD = "labs.benchmarks.soak_load"
WORKER, PUBLISHER, WEB, DASHBOARD = "worker", "publisher", "web", "dashboard"


class Sample(NamedTuple):
    """The state of a process with its children."""

    memory: float
    descriptors: int
    threads: int


class ServerSample(NamedTuple):
    """The state of Redis."""

    connections: int
    memory: float
    #: Of each contestant.
    keys: Mapping[str, int]


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

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        with (
            private_server(appendonly="yes") as server,
            server.client() as client,
            start_environments(server, _entries(), concurrency=2) as environments,
            ExitStack() as stack,
        ):
            load = _Load(environments, stack)
            faults = cycle(_faults(server, client, environments))
            started_at = time.monotonic()
            ends_at = started_at + 60 * self.MINUTES
            fault_at, sample_at = (
                started_at + self.FAULT_INTERVAL,
                started_at + self.SAMPLE_INTERVAL,
            )
            samples: list[tuple[float, dict[tuple[str, str], Sample], ServerSample]] = []
            injected = restarts = 0
            while (now := time.monotonic()) < ends_at:
                if now >= fault_at:
                    next(faults)()
                    injected, fault_at = injected + 1, fault_at + self.FAULT_INTERVAL
                restarts += sum(each.restart_exited() for each in environments.values())
                if now >= sample_at:
                    processes, redis = load.sample(), _sample_server(client, environments)
                    samples.append(((now - started_at) / 60, processes, redis))
                    sample_at += self.SAMPLE_INTERVAL
                    progress(min(1.0, (now - started_at) / (60 * self.MINUTES)))
                load.send_requests()
            calls = {name: _calls(each) for name, each in environments.items()}
        return _result(samples, {"faults": injected, "workers that exited": restarts}, calls)


class _Load:
    """The processes beside the workers, and the requests to them."""

    def __init__(self, environments: Mapping[str, Environment], stack: ExitStack) -> None:
        self._environments = environments
        self._publishers: dict[str, subprocess.Popen[bytes]] = {}
        self._webs: dict[str, WebServer] = {}
        for name, each in environments.items():
            variables = {CONFIG_VARIABLE: each.config.to_json()}
            self._publishers[name] = stack.enter_context(_publisher(variables))
            self._webs[name] = stack.enter_context(serving(f"{LOAD}:api", **variables))
        self._dashboard = stack.enter_context(
            dashboard(
                "labs.comparison.app",
                **{CONFIG_VARIABLE: environments[OURS.name].config.to_json()},
            )
        )
        self._pages = stack.enter_context(httpx.Client(base_url=self._dashboard.url, timeout=60))
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

    def sample(self) -> dict[tuple[str, str], Sample]:
        """Returns the state of each process and its children, by contestant and name."""
        leaders = {(OURS.name, DASHBOARD): self._dashboard.process.pid}
        for name, each in self._environments.items():
            leaders[name, WORKER] = each.worker_pid
            leaders[name, PUBLISHER] = self._publishers[name].pid
            leaders[name, WEB] = self._webs[name].pid
        return {which: _sample(pid) for which, pid in leaders.items()}


@contextmanager
def _publisher(variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", LOAD],
        cwd=REPOSITORY,
        env={**os.environ, **variables},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


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


def _sample(leader: int) -> Sample:
    processes = list(processes_of_group(leader))
    return Sample(
        sum(each.memory for each in processes),
        sum(each.descriptors for each in processes),
        sum(each.threads for each in processes),
    )


def _sample_server(client: Redis, environments: Mapping[str, Environment]) -> ServerSample:
    info = client.info()
    keys = {
        name: sum(
            info.get(f"db{number}", {}).get("keys", 0)
            for number in range(1 + position * DATABASES_EACH, 1 + (position + 1) * DATABASES_EACH)
        )
        for position, name in enumerate(environments)
    }
    return ServerSample(info["connected_clients"], info["used_memory"], keys)


def _calls(environment: Environment) -> int:
    return environment.log().count(" received")


Samples = Sequence[tuple[float, Mapping[tuple[str, str], Sample], ServerSample]]


def _result(samples: Samples, counts: Mapping[str, int], calls: Mapping[str, int]) -> MeasureResult:
    figures = [Figure(label, number) for label, number in counts.items()]
    figures += [Figure(f"calls, {name}", number) for name, number in calls.items()]
    plots, every = [], len(samples) // POINTS or 1
    for role in (WORKER, PUBLISHER, WEB, DASHBOARD):
        curves = {
            name: [
                (minute, processes[name, role])
                for minute, processes, _ in samples
                if (name, role) in processes
            ]
            for name in calls
        }
        growth = {
            name: _growth([each.memory for _, each in points]) / MB
            for name, points in curves.items()
            if points
        }
        figures += [Figure(f"{role}, {name}", each, "MB") for name, each in growth.items()]
        difference = growth[OURS.name] - growth.get(PLAIN.name, 0.0)
        figures.append(Figure(f"{role}, difference", difference, "MB", Goal(1)))
        plots.append(
            Curves(
                f"Resident memory, {role}",
                "MB",
                "minutes",
                {
                    name: [
                        (minute, Spread.from_values([each.memory / MB]))
                        for minute, each in points[::every]
                    ]
                    for name, points in curves.items()
                    if points
                },
            )
        )
    for field in ("descriptors", "threads"):
        for name in calls:
            counts_of = [
                sum(getattr(each, field) for (owner, _), each in processes.items() if owner == name)
                for _, processes, _ in samples
            ]
            figures.append(Figure(f"{field}, {name}", _growth(counts_of)))
    servers = [server for *_, server in samples]
    connections, memory = (
        _growth([getattr(each, field) for each in servers]) for field in ("connections", "memory")
    )
    figures += [
        Figure("connections to Redis", connections, goal=Goal(0)),
        Figure("memory of Redis", memory / MB, "MB", Goal(1)),
    ]
    return MeasureResult(figures, plots, {"samples": [_raw(*each) for each in samples]})


def _growth(values: Sequence[float]) -> float:
    quarter = len(values) // 4
    return median(values[-quarter:]) - median(values[quarter : 2 * quarter])


def _raw(minute: float, processes: Mapping[tuple[str, str], Sample], server: ServerSample) -> Any:
    states = {f"{role}, {name}": each._asdict() for (name, role), each in processes.items()}
    return {"minute": minute, **states, "redis": server._asdict()}


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
