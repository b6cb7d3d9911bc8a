"""The store of records or locks, and its faults."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from redis.exceptions import RedisError

from labs.chaos.schedule import Shape
from tests.faults.proxy import Proxy
from tests.servers.groups import ClusterServers, SentinelServers
from tests.servers.program import Stoppable, find_faketime
from tests.servers.redis_server import RedisServer

#: No acknowledged write is lost in a crash.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}
#: Deletes everything at once, except for Celery's results.
_DELETE_RECORDS = """
for _, key in ipairs(redis.call('KEYS', '*')) do
    if key:sub(1, 17) ~= 'celery-task-meta-' then
        redis.call('DEL', key)
    end
end
"""
#: Number of replies that one fault delays or drops.
REPLIES = 8
DELAY_SECONDS = 0.15
#: Clock steps are shorter than the rest of a lease at its extension.
STEP_SECONDS = 1.5
#: Contestants without failover get a restart of the same duration.
FAILOVER_SECONDS = 2.5


class Store(Stoppable):
    """A store. Every fault returns when the store works again.

    Attributes:
        url: the contestant's URL of the store.
        settings: further settings for celery-idempotent.
    """

    url: str
    settings: Mapping[str, Any] = {}

    def servers(self) -> Iterable[RedisServer]:
        """Returns the running servers."""
        raise NotImplementedError

    def kill(self, target: float, seconds: float) -> None:
        """Kills a server and restarts it after `seconds`; a replica is promoted if there is one."""
        raise NotImplementedError

    def freeze(self, target: float, seconds: float) -> None:
        """Pauses all servers, too briefly for a failover."""
        frozen = list(self.servers())
        try:
            for server in frozen:
                server.pause()
            time.sleep(seconds)
        finally:
            for server in frozen:
                server.resume()

    def cut(self, target: float, seconds: float) -> None:
        """Closes all client connections repeatedly."""
        self._repeat(seconds, _close_connections)

    def flush_scripts(self, target: float, seconds: float) -> None:
        """Flushes all scripts repeatedly."""
        self._repeat(seconds, _flush_scripts)

    def flush(self, target: float, seconds: float) -> None:
        """Deletes all records."""
        self._repeat(0, _flush_all)

    def _repeat(self, seconds: float, action: Callable[[RedisServer], None]) -> None:
        until = time.monotonic() + seconds
        while True:
            for server in self.servers():
                with contextlib.suppress(RedisError):  # the server is being killed
                    action(server)
            if time.monotonic() >= until:
                return
            time.sleep(0.02)


def _close_connections(server: RedisServer) -> None:
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def _flush_all(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


def _flush_scripts(server: RedisServer) -> None:
    with server.client() as client:
        client.script_flush()


def _delete_records(server: RedisServer) -> None:
    with server.client() as client:
        client.eval(_DELETE_RECORDS, 0)


class Single(Store):
    """One durable server behind a proxy.

    Args:
        min_downtime: of a kill, in seconds.
        has_results: whether it also has Celery's results.

    Attributes:
        direct_url: the URL without the proxy.
    """

    def __init__(self, min_downtime: float = 0.0, *, has_results: bool = False) -> None:
        self._min_downtime = min_downtime
        self._has_results = has_results
        self._has_clock = find_faketime() is not None
        self._server = RedisServer.start(clock=self._has_clock, config=DURABLE)
        self._proxy = Proxy(self._server.url)
        self.url, self.direct_url = self._proxy.url, self._server.url

    def servers(self) -> Iterable[RedisServer]:
        return (self._server,)

    def flush(self, target: float, seconds: float) -> None:
        """Deletes all records; results that callers have not read yet remain."""
        self._repeat(0, _delete_records if self._has_results else _flush_all)

    def kill(self, target: float, seconds: float) -> None:
        self._server.kill()
        time.sleep(max(seconds, self._min_downtime))
        self._server.restart()

    def cut(self, target: float, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._proxy.reset()
            time.sleep(0.02)

    def black_hole(self, target: float, seconds: float) -> None:
        """Holds back the data of both sides."""
        self._proxy.black_hole()
        time.sleep(seconds)
        self._proxy.heal()

    def delay_replies(self, target: float, seconds: float) -> None:
        """Delays the next replies."""
        for _ in range(REPLIES):
            self._proxy.delay_reply("", DELAY_SECONDS)

    def lose_replies(self, target: float, seconds: float) -> None:
        """Closes connections instead of sending the next replies."""
        for _ in range(REPLIES):
            self._proxy.lose_reply("")

    def set_clock_back(self, target: float, seconds: float) -> None:
        """Sets the clock back by less than half a lease."""
        if self._has_clock:
            self._server.step_clock(-STEP_SECONDS * (0.1 + 0.9 * target))

    def set_clock_forward(self, target: float, seconds: float) -> None:
        """Sets the clock forward by less than the rest of a lease at its extension."""
        if self._has_clock:
            self._server.step_clock(STEP_SECONDS * (0.1 + 0.9 * target))

    def stop(self) -> None:
        self._proxy.stop()
        self._server.stop()


class Sentinels(Store):
    """A master, its replica and three Sentinels."""

    def __init__(self) -> None:
        self._sentinels = SentinelServers.start()
        self.url = self._sentinels.url
        self.settings = {"idempotency_redis_options": {"master_name": self._sentinels.master_name}}

    def servers(self) -> Iterable[RedisServer]:
        return [node for node in self._sentinels.nodes if node.running]

    def kill(self, target: float, seconds: float) -> None:
        self._sentinels.failover(abrupt=True)
        time.sleep(seconds)
        self._sentinels.rejoin()

    def stop(self) -> None:
        self._sentinels.stop()


class Cluster(Store):
    """Three masters with three replicas."""

    def __init__(self) -> None:
        self._cluster = ClusterServers.start()
        self.url = self._cluster.url

    def servers(self) -> Iterable[RedisServer]:
        return self._cluster.living

    def kill(self, target: float, seconds: float) -> None:
        self._cluster.kill_master_of(f"{target}", abrupt=True)
        time.sleep(seconds)
        self._cluster.rejoin()

    def stop(self) -> None:
        self._cluster.stop()


def store_for(shape: Shape, *, any_store: bool) -> Store:
    """Starts the store of `shape`.

    Args:
        any_store: whether the contestant supports Sentinel and Cluster.
    """
    if shape.store == "single":
        return Single(has_results=shape.results_in_store)
    if not any_store:
        return Single(min_downtime=FAILOVER_SECONDS)
    return Sentinels() if shape.store == "sentinel" else Cluster()
