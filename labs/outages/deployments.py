"""All outages and their deployments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labs.outages.outage import Deployment, Outage, Repeater
from tests.faults.proxy import Proxy
from tests.servers.cluster import ClusterServers
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis_server import RedisServer
from tests.servers.sentinel import SentinelServers

#: No acknowledged write is lost in a crash.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}

#: Shorter than an outage.
SHORT_TIMEOUT = {"idempotency_redis_timeout": 1.0}


class OneServer(Deployment):
    """A store on one durable server."""

    def start(self) -> Mapping[str, Any]:
        self.store = self.servers.enter_context(RedisServer.start(config=DURABLE))
        return {"idempotency_redis_url": self.store.url}


class Killed(OneServer):
    def inject(self) -> None:
        self.store.kill()

    def heal(self) -> None:
        self.store.restart()


class Frozen(OneServer):
    def inject(self) -> None:
        self.store.pause()

    def heal(self) -> None:
        self.store.resume()


class OutOfMemory(OneServer):
    def inject(self) -> None:
        self._set_memory("1")

    def heal(self) -> None:
        self._set_memory("0")

    def _set_memory(self, limit: str) -> None:
        with self.store.client() as client:
            client.config_set("maxmemory", limit)


class ScriptsFlushed(OneServer):
    """Flushes the scripts repeatedly, not the records."""

    def inject(self) -> None:
        client = self.servers.enter_context(self.store.client())
        self._repeater = Repeater(client.script_flush, 0.01)

    def heal(self) -> None:
        self._repeater.stop()


class BehindProxy(OneServer):
    def start(self) -> Mapping[str, Any]:
        super().start()
        self.proxy = self.servers.enter_context(Proxy(self.store.url))
        return {"idempotency_redis_url": self.proxy.url}


class BlackHole(BehindProxy):
    def inject(self) -> None:
        self.proxy.black_hole()

    def heal(self) -> None:
        self.proxy.heal()


class ConnectionsCut(BehindProxy):
    def inject(self) -> None:
        self._repeater = Repeater(self.proxy.reset, 0.05)

    def heal(self) -> None:
        self._repeater.stop()


class SharedServer(Killed):
    """Broker, results and records on one server."""

    def start(self) -> Mapping[str, Any]:
        url = super().start()["idempotency_redis_url"]
        return {
            "broker_url": url,
            "result_backend": url,
            # Unacknowledged messages of the outage are redelivered soon.
            "broker_transport_options": {
                "visibility_timeout": 6,
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
            },
        }


class WithRabbitMQ(Killed):
    def start(self) -> Mapping[str, Any]:
        broker = self.servers.enter_context(RabbitMQ.start())
        return {**super().start(), "broker_url": broker.url}


class Sentinels(Deployment):
    """The master is killed; the promoted replica may lack acknowledged writes."""

    def start(self) -> Mapping[str, Any]:
        self.sentinels = self.servers.enter_context(SentinelServers.start())
        return {
            "idempotency_redis_url": self.sentinels.url,
            "idempotency_redis_options": {"master_name": self.sentinels.master_name},
        }

    def inject(self) -> None:
        self.sentinels.failover()

    def heal(self) -> None:
        self.sentinels.rejoin()


class Cluster(Deployment):
    def start(self) -> Mapping[str, Any]:
        self.cluster = self.servers.enter_context(ClusterServers.start())
        return {"idempotency_redis_url": self.cluster.url}

    def inject(self) -> None:
        self.cluster.kill_master_of("any")

    def heal(self) -> None:
        """Does nothing: the replica has already been promoted."""


_FORGOTTEN = "the promoted replica lacks acknowledged writes"

OUTAGES = (
    Outage(name="killed", title="store killed, restarted", deployment=Killed),
    Outage(
        name="run",
        title="… on_store_error = run",
        deployment=Killed,
        settings={"idempotency_on_store_error": "run"},
        may_execute_twice="run executes without protection",
    ),
    Outage(
        name="raise",
        title="… on_store_error = raise",
        deployment=Killed,
        settings={"idempotency_on_store_error": "raise"},
        may_raise="raise fails the task",
    ),
    Outage(name="rabbitmq", title="… broker RabbitMQ", deployment=WithRabbitMQ),
    Outage(
        name="everything",
        title="… also broker and result backend",
        deployment=SharedServer,
        affects_broker=True,
    ),
    Outage(
        name="start", title="store unreachable at worker start", deployment=Killed, at_start=True
    ),
    Outage(name="frozen", title="store frozen", deployment=Frozen, settings=SHORT_TIMEOUT),
    Outage(
        name="black-hole",
        title="store connections without replies",
        deployment=BlackHole,
        settings=SHORT_TIMEOUT,
    ),
    Outage(name="cut", title="connections cut 20 times a second", deployment=ConnectionsCut),
    Outage(name="flushed", title="scripts flushed 100 times a second", deployment=ScriptsFlushed),
    Outage(name="full", title="store out of memory (maxmemory)", deployment=OutOfMemory),
    Outage(
        name="sentinel",
        title="Sentinel failover",
        deployment=Sentinels,
        seconds=0.0,
        may_execute_twice=_FORGOTTEN,
    ),
    Outage(
        name="sentinel-wait",
        title="… wait_replicas = 1",
        deployment=Sentinels,
        seconds=0.0,
        settings={"idempotency_wait_replicas": 1},
    ),
    Outage(
        name="cluster",
        title="Cluster: master killed",
        deployment=Cluster,
        seconds=0.0,
        may_execute_twice=_FORGOTTEN,
    ),
)


def find_outage(name: str) -> Outage:
    """Returns the outage of that name."""
    return next(outage for outage in OUTAGES if outage.name == name)
