"""The store that records, or a contestant's locks, are on, and how each of its kinds is struck."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

from redis.exceptions import RedisError

from celery_idempotent.testing.process import Stoppable
from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.labs.chaos.schedule import Shape
from tests.servers.clock import find_faketime
from tests.servers.cluster import ClusterServers
from tests.servers.redis_server import ConfigurableRedisServer
from tests.servers.sentinel import SentinelServers

#: Nothing that it has answered to is lost, not by a crash either.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}
#: Replies that one fault delays, or loses.
REPLIES = 8
DELAY_SECONDS = 0.15
#: A server's clock is stepped by less than what a lease has left when it is extended.
STEP_SECONDS = 1.5
#: A failover takes longer than a restart. Those who know no failover get a restart that is as long.
FAILOVER_SECONDS = 2.5


class Store(Stoppable):
    """What can befall any kind of store. Every fault returns when the store is whole again.

    Attributes:
        url: of the store, as the contestant connects to it.
        settings: that celery-idempotent needs besides.
    """

    url: str
    settings: Mapping[str, Any] = {}

    def servers(self) -> Iterable[RedisServer]:
        """Those that run."""
        raise NotImplementedError

    def kill(self, aim: float, seconds: float) -> None:
        """Kill a server, and bring it back `seconds` later; a replica replaces it where it can."""
        raise NotImplementedError

    def freeze(self, aim: float, seconds: float) -> None:
        """Let no server answer for so long, too short for a failover."""
        frozen = list(self.servers())
        try:
            for server in frozen:
                server.pause()
            time.sleep(seconds)
        finally:
            for server in frozen:
                server.resume()

    def cut(self, aim: float, seconds: float) -> None:
        """Close every client's connection, again and again."""
        self._again(seconds, lambda server: _cut(server))

    def flush_scripts(self, aim: float, seconds: float) -> None:
        """Let it forget every script, again and again."""
        self._again(seconds, lambda server: _flush(server))

    def _again(self, seconds: float, blow: Any) -> None:
        until = time.monotonic() + seconds
        while True:
            for server in self.servers():
                with contextlib.suppress(RedisError):  # one that is just being killed
                    blow(server)
            if time.monotonic() >= until:
                return
            time.sleep(0.02)


def _cut(server: RedisServer) -> None:
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def _flush(server: RedisServer) -> None:
    with server.client() as client:
        client.script_flush()


class Single(Store):
    """One server that keeps what it has said, behind a proxy.

    Args:
        away: seconds, at least, that it is away once it is killed.
    """

    def __init__(self, away: float = 0.0) -> None:
        self._away = away
        self._has_clock = find_faketime() is not None
        self._server = ConfigurableRedisServer.start(clock=self._has_clock, config=DURABLE)
        self._proxy = Proxy(self._server.url)
        self.url = self._proxy.url

    def servers(self) -> Iterable[RedisServer]:
        return (self._server,)

    def kill(self, aim: float, seconds: float) -> None:
        self._server.kill()
        time.sleep(max(seconds, self._away))
        self._server.restart()

    def cut(self, aim: float, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._proxy.reset()
            time.sleep(0.02)

    def black_hole(self, aim: float, seconds: float) -> None:
        """Hold back whatever either side says."""
        self._proxy.black_hole()
        time.sleep(seconds)
        self._proxy.heal()

    def delay_replies(self, aim: float, seconds: float) -> None:
        """Let the next replies come late."""
        for _ in range(REPLIES):
            self._proxy.delay_reply("", DELAY_SECONDS)

    def lose_replies(self, aim: float, seconds: float) -> None:
        """Act on the next requests, and close the connection instead of answering."""
        for _ in range(REPLIES):
            self._proxy.lose_reply("")

    def set_clock_back(self, aim: float, seconds: float) -> None:
        """By less than half a lease."""
        if self._has_clock:
            self._server.step_clock(-STEP_SECONDS * (0.1 + 0.9 * aim))

    def set_clock_forward(self, aim: float, seconds: float) -> None:
        """By less than what a lease has left when it is extended."""
        if self._has_clock:
            self._server.step_clock(STEP_SECONDS * (0.1 + 0.9 * aim))

    def stop(self) -> None:
        self._proxy.stop()
        self._server.stop()


class Sentinels(Store):
    """A master, its replica, and three sentinels."""

    def __init__(self) -> None:
        self._trio = SentinelServers.start()
        self.url = self._trio.url
        self.settings = {"idempotency_redis_options": {"master_name": self._trio.master_name}}

    def servers(self) -> Iterable[RedisServer]:
        return [node for node in self._trio.nodes if node.running]

    def kill(self, aim: float, seconds: float) -> None:
        self._trio.failover(abrupt=True)
        time.sleep(seconds)
        self._trio.rejoin()

    def stop(self) -> None:
        self._trio.stop()


class Cluster(Store):
    """Three masters, three replicas."""

    def __init__(self) -> None:
        self._cluster = ClusterServers.start()
        self.url = self._cluster.url

    def servers(self) -> Iterable[RedisServer]:
        return self._cluster.living

    def kill(self, aim: float, seconds: float) -> None:
        self._cluster.kill_master_of(f"{aim}", abrupt=True)
        time.sleep(seconds)
        self._cluster.rejoin()

    def stop(self) -> None:
        self._cluster.stop()


def store_for(shape: Shape, *, knows_all: bool) -> Store:
    """The store of `shape`.

    Args:
        knows_all: False for a contestant that can keep its locks on a single server only.
    """
    if shape.store == "single":
        return Single()
    if not knows_all:
        return Single(away=FAILOVER_SECONDS)
    return Sentinels() if shape.store == "sentinel" else Cluster()
