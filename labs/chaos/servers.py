"""The servers behind proxies, and their faults: each returns when the server works again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import amqp
import sqlalchemy as sa
from redis.exceptions import RedisError
from sqlalchemy.engine import make_url

from celery_idempotent.contrib.sqlalchemy import metadata
from labs.chaos.app import QUEUES, effects
from labs.chaos.schedule import LEASE, Shape
from labs.rig.site import DURABLE
from tests.faults.proxy import Proxy
from tests.servers.groups import ClusterServers, SentinelServers
from tests.servers.program import ServerError, Stoppable, find_faketime
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis_server import RedisServer
from tests.servers.sql_server import PostgreSQL

#: Deletes everything at once, except for Celery's results.
_DELETE_RECORDS = """
for _, key in ipairs(redis.call('KEYS', '*')) do
    if key:sub(1, 17) ~= 'celery-task-meta-' then
        redis.call('DEL', key)
    end
end
"""
#: Number of replies of the store, and of replies to publishes or commits, that one fault loses.
REPLIES, CONFIRMATIONS = 8, 3
DELAY_SECONDS = 0.15
#: Clock steps are shorter than the rest of a lease at its extension.
STEP_SECONDS = 1.5
#: Contestants without failover get a restart of the same duration.
FAILOVER_SECONDS = 2.5
#: Longest wait for the last process of a killed server to end, in seconds.
RESTART_SECONDS = 20.0
#: Shorter than a freeze past the lease, in seconds.
IDLE_SECONDS = LEASE + 1
#: Longest time to connect to the database, in seconds.
CONNECT_TIMEOUT = 5


class Proxied(Stoppable):
    """One server behind a proxy.

    Attributes:
        url: of the proxy.
        direct_url: of the server.
    """

    #: What a publish or a commit contains.
    confirmed = "LPUSH"

    def __init__(self, server: Any, url: str = "") -> None:
        self.server = server
        self.direct_url = url or server.url
        self.proxy = Proxy(self.direct_url)
        self.url = self.proxy.url

    def kill(self, target: float, seconds: float) -> None:
        """Kills the server and restarts it after `seconds`; it keeps what it has accepted."""
        self.server.kill()
        time.sleep(seconds)
        self.server.restart()

    def freeze(self, target: float, seconds: float) -> None:
        """Pauses the server."""
        self.server.pause()
        time.sleep(seconds)
        self.server.resume()

    def cut(self, target: float, seconds: float) -> None:
        """Resets all connections repeatedly."""
        _repeat(seconds, self.proxy.reset)

    def black_hole(self, target: float, seconds: float) -> None:
        """Holds back the data of both sides."""
        self.proxy.black_hole()
        time.sleep(seconds)
        self.proxy.heal()

    def lose_confirmations(self, target: float, seconds: float) -> None:
        """Closes connections instead of confirming the next publishes (of Redis) or commits."""
        for _ in range(CONFIRMATIONS):
            self.proxy.lose_reply(self.confirmed)

    def stop(self) -> None:
        self.proxy.stop()
        self.server.stop()


def _repeat(seconds: float, action: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while True:
        action()
        if time.monotonic() >= until:
            return
        time.sleep(0.02)


class RecordStore(Stoppable):
    """The servers of records or locks.

    Attributes:
        url: the contestant's URL of the store.
        settings: further settings for celery-idempotent.
    """

    url: str
    settings: Mapping[str, Any] = {}

    def servers(self) -> Iterable[RedisServer]:
        """Returns the running servers."""
        raise NotImplementedError

    def flush_scripts(self, target: float, seconds: float) -> None:
        """Flushes all scripts repeatedly."""
        _repeat(seconds, lambda: self._each("SCRIPT", "FLUSH"))

    def flush(self, target: float, seconds: float) -> None:
        """Deletes all records."""
        self._each("FLUSHALL")

    def _each(self, *command: Any) -> None:
        for server in self.servers():
            # The server is being killed.
            with suppress(RedisError), server.client() as client:
                client.execute_command(*command)


class Single(Proxied, RecordStore):
    """One durable server.

    Args:
        min_downtime: of a kill, in seconds.
        has_results: whether it also has Celery's results.
    """

    def __init__(self, min_downtime: float = 0.0, *, has_results: bool = False) -> None:
        self._min_downtime = min_downtime
        self._has_results = has_results
        self._has_clock = find_faketime() is not None
        super().__init__(RedisServer.start(clock=self._has_clock, config=DURABLE))

    def servers(self) -> Iterable[RedisServer]:
        return (self.server,)

    def kill(self, target: float, seconds: float) -> None:
        super().kill(target, max(seconds, self._min_downtime))

    def flush(self, target: float, seconds: float) -> None:
        """Deletes all records; results that callers have not read yet remain."""
        self._each(*(("EVAL", _DELETE_RECORDS, 0) if self._has_results else ("FLUSHALL",)))

    def delay_replies(self, target: float, seconds: float) -> None:
        """Delays the next replies."""
        for _ in range(REPLIES):
            self.proxy.delay_reply("", DELAY_SECONDS)

    def lose_replies(self, target: float, seconds: float) -> None:
        """Closes connections instead of sending the next replies."""
        for _ in range(REPLIES):
            self.proxy.lose_reply("")

    def set_clock_back(self, target: float, seconds: float) -> None:
        """Sets the clock back by less than half a lease."""
        self._step_clock(-STEP_SECONDS * (0.1 + 0.9 * target))

    def set_clock_forward(self, target: float, seconds: float) -> None:
        """Sets the clock forward by less than the rest of a lease at its extension."""
        self._step_clock(STEP_SECONDS * (0.1 + 0.9 * target))

    def _step_clock(self, seconds: float) -> None:
        if self._has_clock:
            self.server.step_clock(seconds)


class Replicated(RecordStore):
    """A master with its replica and three Sentinels, or a Cluster of three masters and replicas."""

    def __init__(self, group: SentinelServers | ClusterServers) -> None:
        self._group = group
        self.url = group.url
        if isinstance(group, SentinelServers):
            self.settings = {"idempotency_redis_options": {"master_name": group.master_name}}

    def servers(self) -> Iterable[RedisServer]:
        if isinstance(self._group, ClusterServers):
            return self._group.living
        return [node for node in self._group.nodes if node.running]

    def kill(self, target: float, seconds: float) -> None:
        """Kills a master, whose replica is promoted, and restarts it after `seconds`."""
        if isinstance(self._group, ClusterServers):
            self._group.kill_master_of(f"{target}", abrupt=True)
        else:
            self._group.failover(abrupt=True)
        time.sleep(seconds)
        self._group.rejoin()

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
        kill = ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        _repeat(seconds, lambda: self._each(*kill))

    def stop(self) -> None:
        self._group.stop()


Store = Single | Replicated


def store_for(shape: Shape, *, any_store: bool) -> Store:
    """Starts the store of `shape`.

    Args:
        any_store: whether the contestant supports Sentinel and Cluster.
    """
    if shape.store == "single":
        return Single(has_results=shape.results_in_store)
    if not any_store:
        return Single(min_downtime=FAILOVER_SECONDS)
    group = SentinelServers if shape.store == "sentinel" else ClusterServers
    return Replicated(group.start())


class RedisBroker(Proxied):
    """Redis; messages of a dead worker are redelivered after a few seconds.

    With celery-idempotent that does not depend on kombu's options, which keep their defaults: the
    visibility timeout is an hour.
    """

    #: Whether `messages` includes unacknowledged messages.
    counts_unacknowledged = True
    #: ``broker_transport_options`` of the others, and with celery-idempotent.
    options: Mapping[str, Any] = {
        "visibility_timeout": 4,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that dies during redelivery blocks it for all others, for five minutes by
        # default.
        "unacked_mutex_expire": 2,
    }
    own_options: Mapping[str, Any] = {}

    def __init__(self, config: Mapping[str, str]) -> None:
        super().__init__(RedisServer.start(config={"databases": "1", **config}))
        self._client = self.server.client()

    def messages(self) -> int:
        """Returns the number of messages."""
        try:
            waiting = sum(self._client.llen(queue) for queue in QUEUES)
            return int(waiting) + int(self._client.hlen("unacked"))
        except RedisError:  # killed
            return 1


class RabbitBroker(Proxied):
    """RabbitMQ with publisher confirms."""

    counts_unacknowledged = False
    options: Mapping[str, Any] = {"confirm_publish": True}
    own_options = options

    def __init__(self) -> None:
        super().__init__(RabbitMQ.start())
        self._address = self.direct_url.rpartition("@")[2].rstrip("/")

    def messages(self) -> int:
        """Returns the number of messages."""
        try:
            with amqp.Connection(self._address, login_method="PLAIN") as connection:
                channel = connection.channel()
                return sum(
                    int(channel.queue_declare(each, passive=True).message_count) for each in QUEUES
                )
        except (OSError, amqp.AMQPError):
            return 1

    def stop(self) -> None:
        with suppress(Exception):
            super().stop()


Broker = RedisBroker | RabbitBroker


def broker_for(shape: Shape) -> Broker:
    """Starts the broker of `shape`."""
    if shape.broker == "rabbitmq":
        return RabbitBroker()
    # Where it is killed, what it has accepted must survive.
    return RedisBroker(DURABLE if shape.transaction else {})


class Database(Proxied):
    """PostgreSQL, with effects and outcomes.

    Args:
        idle_timeout: end transactions whose process is frozen past its lease.
    """

    confirmed = "COMMIT"

    def __init__(self, *, idle_timeout: bool) -> None:
        server = PostgreSQL.start()
        super().__init__(server, server.create_database())
        address = make_url(self.direct_url)
        if idle_timeout:
            milliseconds = round(IDLE_SECONDS * 1000)
            server.execute(
                f"ALTER DATABASE {address.database} "
                f"SET idle_in_transaction_session_timeout = {milliseconds}"
            )
        self._engine = sa.create_engine(address, poolclass=sa.NullPool)
        metadata.create_all(self._engine)
        effects.metadata.create_all(self._engine)
        query = {"connect_timeout": str(CONNECT_TIMEOUT)}
        proxied = address.set(port=self.proxy.port).update_query_dict(query)
        self.url = proxied.render_as_string(hide_password=False)

    def kill(self, target: float, seconds: float) -> None:
        self.server.kill()
        time.sleep(seconds)
        deadline = time.monotonic() + RESTART_SECONDS
        while True:
            try:
                return self.server.launch()
            except ServerError:  # processes of its connections are still ending
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def effects(self) -> list[dict[str, Any]]:
        """Returns the committed effects."""
        query = sa.select(effects).order_by(effects.c.id)
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]
