"""All outages and their deployments."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from labs.outages.outage import Deployment, Outage, Repeater
from labs.rig.processes import children_of
from tests.faults.proxy import Proxy
from tests.servers.groups import ClusterServers, SentinelServers
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.redis_server import RedisServer

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


class DiskFull(OneServer):
    """No file can grow: like a full disk, but for this server only."""

    def start(self) -> Mapping[str, Any]:
        # With appendfsync always, Redis exits.
        config = {"appendonly": "yes", "appendfsync": "everysec"}
        self.store = self.servers.enter_context(RedisServer.start(config=config))
        return {"idempotency_redis_url": self.store.url}

    def inject(self) -> None:
        self._limit_files(1)

    def heal(self) -> None:
        with self.store.client() as client:
            assert client.info("persistence")["aof_last_write_status"] == "err"
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        with self.store.client() as client:
            pid = client.info("server")["process_id"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class ReadOnly(OneServer):
    """The server becomes a replica, as after a failover that its clients do not notice."""

    def inject(self) -> None:
        with self.store.client() as client:
            client.replicaof("127.0.0.1", "1")  # which does not exist, so the records stay

    def heal(self) -> None:
        with self.store.client() as client:
            client.replicaof("NO", "ONE")


class Busy(OneServer):
    """Another client runs a script that does not end."""

    def inject(self) -> None:
        client = self.servers.enter_context(self.store.client(socket_timeout=None))
        client.config_set("lua-time-limit", "100")
        self._script = threading.Thread(target=self._run, args=(client,), daemon=True)
        self._script.start()

    @staticmethod
    def _run(client: Redis) -> None:
        with suppress(RedisError):  # it is killed
            client.eval("while true do end", 0)

    def heal(self) -> None:
        with self.store.client() as client:
            client.script_kill()
        self._script.join()


class RightsRevoked(OneServer):
    USER, PASSWORD = "shop", "secret"

    def start(self) -> Mapping[str, Any]:
        self.store = self.servers.enter_context(
            RedisServer.start(config=DURABLE, users={self.USER: f"on >{self.PASSWORD} ~* &* +@all"})
        )
        return {"idempotency_redis_url": self.store.url_as(self.USER, self.PASSWORD)}

    def inject(self) -> None:
        self._set_rights("-@all")

    def heal(self) -> None:
        self._set_rights("+@all")

    def _set_rights(self, rule: str) -> None:
        with self.store.client() as client:
            client.execute_command("ACL", "SETUSER", self.USER, rule)


class NoMoreClients(OneServer):
    """All connections are closed, and no new ones are accepted."""

    def inject(self) -> None:
        self._client = self.servers.enter_context(self.store.client())
        self._limit = self._client.config_get("maxclients")["maxclients"]
        self._client.config_set("maxclients", 1)
        self._client.client_kill_filter(_type="normal", skipme=True)

    def heal(self) -> None:
        self._client.config_set("maxclients", self._limit)


class NoDescriptors(OneServer):
    """The worker loses its connections, and has no descriptor for new ones."""

    def inject(self) -> None:
        pid = self.worker.process.pid
        self._limits = {
            each: resource.prlimit(each, resource.RLIMIT_NOFILE)
            for each in (pid, *children_of(pid))
        }
        for each, (_, most) in self._limits.items():
            resource.prlimit(each, resource.RLIMIT_NOFILE, (3, most))
        with self.store.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)

    def heal(self) -> None:
        for each, limits in self._limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(each, resource.RLIMIT_NOFILE, limits)


class Loading(Killed):
    """The restarted server takes long to load its records."""

    def start(self) -> Mapping[str, Any]:
        # One record after the other, with a reply to its clients after each.
        config = {
            **DURABLE,
            "key-load-delay": "25000",
            "loading-process-events-interval-bytes": "1024",
        }
        self.store = self.servers.enter_context(RedisServer.start(config=config))
        return {"idempotency_redis_url": self.store.url}

    def inject(self) -> None:
        with self.store.client() as client:
            client.bgrewriteaof()  # the delay applies to snapshots
            while client.info("persistence")["aof_rewrite_in_progress"]:
                time.sleep(0.01)
        super().inject()

    def heal(self) -> None:
        super().heal()
        with self.store.client() as client:
            scripts = client.info("commandstats").get("cmdstat_evalsha", {"rejected_calls": 0})
        assert scripts["rejected_calls"], "no script got the reply LOADING"


class OldSnapshot(Killed):
    """The server is restored from a snapshot that lacks the last seconds."""

    def start(self) -> Mapping[str, Any]:
        self.store = self.servers.enter_context(RedisServer.start(config={"save": ""}))
        return {"idempotency_redis_url": self.store.url}

    def inject(self) -> None:
        with self.store.client() as client:
            client.save()

    def heal(self) -> None:
        self.store.kill()
        super().heal()


class OtherServer(OneServer):
    """A server of its own for `setting`, which is killed instead of the store."""

    setting = ""

    def start(self) -> Mapping[str, Any]:
        self.other = self.servers.enter_context(RedisServer.start(config=DURABLE))
        return {**super().start(), self.setting: self.other.url}

    def inject(self) -> None:
        self.other.kill()

    def heal(self) -> None:
        self.other.restart()


class BrokerKilled(OtherServer):
    setting = "broker_url"


class ResultsKilled(OtherServer):
    setting = "result_backend"


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


class ClusterDown(Cluster):
    """A master is killed, and its replica does not take over."""

    def start(self) -> Mapping[str, Any]:
        self.cluster = self.servers.enter_context(ClusterServers.start(config=DURABLE))
        return {"idempotency_redis_url": self.cluster.url}

    def inject(self) -> None:
        self._master, replica = self.cluster.master_of("any"), self.cluster.replica_of("any")
        with replica.client() as client:
            client.config_set("cluster-replica-no-failover", "yes")
        self._master.kill()

    def heal(self) -> None:
        self._master.restart()


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
    Outage(name="disk", title="disk of the store full (MISCONF)", deployment=DiskFull),
    Outage(name="read-only", title="store read-only (READONLY)", deployment=ReadOnly),
    Outage(name="busy", title="endless script of another client (BUSY)", deployment=Busy),
    Outage(name="rights", title="rights revoked (NOPERM)", deployment=RightsRevoked),
    Outage(name="clients", title="no more clients (maxclients)", deployment=NoMoreClients),
    Outage(name="descriptors", title="descriptors of the worker used up", deployment=NoDescriptors),
    Outage(name="loading", title="store killed, and slow to load (LOADING)", deployment=Loading),
    Outage(
        name="snapshot",
        title="store restored from a snapshot of four seconds ago",
        deployment=OldSnapshot,
        may_execute_twice="the snapshot lacks records",
    ),
    Outage(
        name="broker", title="broker (Redis) killed", deployment=BrokerKilled, affects_broker=True
    ),
    Outage(
        name="results",
        title="result backend killed, result_backend_always_retry",
        deployment=ResultsKilled,
        # Else Celery acknowledges a message whose result it cannot store.
        settings={"result_backend_always_retry": True},
    ),
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
    Outage(name="cluster-down", title="… without a failover (CLUSTERDOWN)", deployment=ClusterDown),
)


def find_outage(name: str) -> Outage:
    """Returns the outage of that name."""
    return next(outage for outage in OUTAGES if outage.name == name)
