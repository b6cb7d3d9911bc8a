"""All outages, each with the servers that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_idempotent.testing.server import RedisServer
from tests.faults.proxy import Proxy
from tests.labs.outages.outage import Again, Outage, Stage
from tests.servers.cluster import ClusterServers
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.sentinel import SentinelServers

#: Nothing that Redis has answered to is ever lost, not by a crash either.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}

#: Shorter than an outage, so that it is the outage that costs.
IMPATIENT = {"idempotency_redis_timeout": 1.0}


class OneServer(Stage):
    """A store of its own, on one server that keeps what it has said."""

    def open(self) -> Mapping[str, Any]:
        self.store = self.servers.enter_context(RedisServer.start(config=DURABLE))
        return {"idempotency_redis_url": self.store.url}


class Killed(OneServer):
    def trigger(self) -> None:
        self.store.kill()

    def mend(self) -> None:
        self.store.restart()


class Frozen(OneServer):
    def trigger(self) -> None:
        self.store.pause()

    def mend(self) -> None:
        self.store.resume()


class Full(OneServer):
    def trigger(self) -> None:
        self._set_memory("1")

    def mend(self) -> None:
        self._set_memory("0")

    def _set_memory(self, most: str) -> None:
        with self.store.client() as client:
            client.config_set("maxmemory", most)


class Flushed(OneServer):
    """The scripts, not the records."""

    def trigger(self) -> None:
        client = self.servers.enter_context(self.store.client())
        self._again = Again(client.script_flush, 0.01)

    def mend(self) -> None:
        self._again.stop()


class BehindProxy(OneServer):
    def open(self) -> Mapping[str, Any]:
        super().open()
        self.proxy = self.servers.enter_context(Proxy(self.store.url))
        return {"idempotency_redis_url": self.proxy.url}


class BlackHoled(BehindProxy):
    def trigger(self) -> None:
        self.proxy.black_hole()

    def mend(self) -> None:
        self.proxy.heal()


class Cut(BehindProxy):
    def trigger(self) -> None:
        self._again = Again(self.proxy.reset, 0.05)

    def mend(self) -> None:
        self._again.stop()


class Everything(Killed):
    """Broker, results and records on one server."""

    def open(self) -> Mapping[str, Any]:
        url = super().open()["idempotency_redis_url"]
        return {
            "broker_url": url,
            "result_backend": url,
            # What a worker had when the broker went is handed out again.
            "broker_transport_options": {
                "visibility_timeout": 6,
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
            },
        }


class BesideRabbitMQ(Killed):
    def open(self) -> Mapping[str, Any]:
        broker = self.servers.enter_context(RabbitMQ.start())
        return {**super().open(), "broker_url": broker.url}


class Sentinels(Stage):
    """The master is killed, and its heir has not all that it had said."""

    def open(self) -> Mapping[str, Any]:
        self.trio = self.servers.enter_context(SentinelServers.start())
        return {
            "idempotency_redis_url": self.trio.url,
            "idempotency_redis_options": {"master_name": self.trio.master_name},
        }

    def trigger(self) -> None:
        self.trio.failover()

    def mend(self) -> None:
        self.trio.rejoin()


class Cluster(Stage):
    def open(self) -> Mapping[str, Any]:
        self.cluster = self.servers.enter_context(ClusterServers.start())
        return {"idempotency_redis_url": self.cluster.url}

    def trigger(self) -> None:
        self.cluster.kill_master_of("any")

    def mend(self) -> None:
        """The replica has taken over by now."""


_FORGETS = "what the replica did not have yet, Redis forgot"

OUTAGES = (
    Outage(name="killed", title="store killed, restarted", stage=Killed),
    Outage(name="run", title="… on_store_error = run", stage=Killed,
           settings={"idempotency_on_store_error": "run"},
           may_double="run goes on without protection"),
    Outage(name="raise", title="… on_store_error = raise", stage=Killed,
           settings={"idempotency_on_store_error": "raise"},
           may_tell="raise tells the caller"),
    Outage(name="rabbitmq", title="… broker RabbitMQ", stage=BesideRabbitMQ),
    Outage(name="everything", title="… broker and results on it, too", stage=Everything,
           strikes_broker=True),
    Outage(name="start", title="store away at worker start", stage=Killed, at_start=True),
    Outage(name="frozen", title="store frozen", stage=Frozen, settings=IMPATIENT),
    Outage(name="black-hole", title="store in a black hole", stage=BlackHoled, settings=IMPATIENT),
    Outage(name="cut", title="connections cut 20 times a second", stage=Cut),
    Outage(name="flushed", title="scripts flushed 100 times a second", stage=Flushed),
    Outage(name="full", title="store full (maxmemory)", stage=Full),
    Outage(name="sentinel", title="Sentinel failover", stage=Sentinels, seconds=0.0,
           may_double=_FORGETS),
    Outage(name="sentinel-wait", title="… wait_replicas = 1", stage=Sentinels, seconds=0.0,
           settings={"idempotency_wait_replicas": 1}),
    Outage(name="cluster", title="Cluster: a master killed", stage=Cluster, seconds=0.0,
           may_double=_FORGETS),
)  # fmt: skip


def named(name: str) -> Outage:
    """The outage of that name."""
    return next(outage for outage in OUTAGES if outage.name == name)
