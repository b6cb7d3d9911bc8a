"""A private Sentinel group: a master, its replica, and the three Sentinels that watch them.

    with SentinelServers.start() as trio:
        app.conf.update(result_backend=trio.url,
                        result_backend_transport_options={"master_name": trio.master_name})
        trio.failover()

It takes two to three seconds to start, and as long to fail over: share one between tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import redis
from redis.exceptions import ResponseError
from redis.sentinel import Sentinel

from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.process import Stoppable, wait_until
from celery_idempotent.testing.server import RedisServer

__all__ = ["SentinelServers"]

#: The Sentinels that must agree, of three.
_QUORUM = 2
_INFO_PERIOD_MS = 500


class SentinelServers(Stoppable):
    """A running group; `start` makes one. Leaving the `with` block stops it.

    Attributes:
        url: of the Sentinels, as Celery takes it as broker or backend.
        master_name: under which they know the group.
        nodes: the servers with the data, whichever is master.
        sentinels: those that watch them.
    """

    master_name = "shop"

    def __init__(
        self,
        nodes: Iterable[RedisServer],
        sentinels: Iterable[RedisServer],
        ports: Ports,
        password: str | None,
    ) -> None:
        self.nodes = tuple(nodes)
        self.sentinels = tuple(sentinels)
        self._ports = ports
        self._password = password
        credentials = f":{quote(password, safe='')}@" if password else ""
        self.url = ";".join(
            f"sentinel://{credentials}127.0.0.1:{sentinel.port}/0" for sentinel in self.sentinels
        )

    @classmethod
    def start(
        cls, kind: str = "any", *, password: str | None = None, down_after_ms: int = 1500
    ) -> SentinelServers:
        """Start a group and return when all know all.

        Args:
            kind: as `RedisServer.start` has it.
            password: of the servers with the data; the Sentinels have none.
            down_after_ms: how long the master may be silent before it counts as dead. Sentinels
                first ask a new master after a second: with less than that, they depose it unasked.

        Raises:
            ServerError: there is no such server here, or they did not find each other.
        """
        ports = Ports(4)
        master_port, *sentinel_ports = ports.numbers
        master = RedisServer.start(kind, port=master_port, password=password)
        replica = RedisServer.start(kind, password=password, replica_of=master)
        name = cls.master_name
        config = {
            f"sentinel monitor {name}": f"127.0.0.1 {master.port} {_QUORUM}",
            f"sentinel down-after-milliseconds {name}": str(down_after_ms),
            f"sentinel failover-timeout {name}": "1000",
        }
        if password:
            config[f"sentinel auth-pass {name}"] = password

        def start_sentinel(port: int) -> RedisServer:
            return RedisServer.start(kind, port=port, sentinel=True, config=config)

        with ThreadPoolExecutor() as pool:
            sentinels = list(pool.map(start_sentinel, sentinel_ports))
        for sentinel in sentinels:
            with sentinel.client() as client, suppress(ResponseError):  # 6.2 has no such command
                # How often they look what a server is, instead of every ten seconds.
                client.execute_command("SENTINEL DEBUG", "INFO-PERIOD", _INFO_PERIOD_MS)
        trio = cls((master, replica), sentinels, ports, password)
        wait_until(trio._ready, "The Sentinels did not find each other")
        return trio

    @property
    def master(self) -> RedisServer:
        """The server that most Sentinels hold for the master."""
        ports = [self._master_port(sentinel) for sentinel in self.sentinels]
        elected = max(ports, key=ports.count)
        return next(node for node in self.nodes if node.port == elected)

    @property
    def replica(self) -> RedisServer:
        """The other one; dead after `failover`, until `rejoin`."""
        master = self.master
        return next(node for node in self.nodes if node is not master)

    def client(self, **options: Any) -> redis.Redis:
        """A new redis-py client of whichever server is master."""
        addresses = [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]
        group = Sentinel(addresses)
        client: redis.Redis = group.master_for(self.master_name, password=self._password, **options)
        return client

    def failover(self, *, abrupt: bool = False) -> RedisServer:
        """Kill the master, and return it when all Sentinels name the other, which takes writes.

        Args:
            abrupt: at once, and what the other has not got yet is forgotten; else nothing is lost.
        """
        dead, heir = self.master, self.replica
        if not abrupt:
            wait_until(lambda: heir.is_copy_of(dead), "The replica did not get the master's data")
        dead.kill()
        wait_until(
            lambda: (
                all(self._master_port(sentinel) == heir.port for sentinel in self.sentinels)
                and _role(heir) == "master"
            ),
            "The Sentinels named no other master",
        )
        return dead

    def rejoin(self) -> None:
        """Bring the dead server back as a replica, so that there can be another failover."""
        if not self.replica.running:
            self.replica.restart(replica_of=self.master)
        wait_until(self._ready, "The Sentinels did not see the replica")

    def stop(self) -> None:
        """End all servers and remove their directories. Twice is once."""
        for server in (*self.sentinels, *self.nodes):
            server.stop()
        self._ports.stop()

    def _master_port(self, sentinel: RedisServer) -> int:
        with sentinel.client() as client:
            _, port = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.master_name)
        return int(port)

    def _ready(self) -> bool:
        """Whether every Sentinel knows the others, and a replica that it could promote."""
        for sentinel in self.sentinels:
            with sentinel.client(decode_responses=True) as client:
                (replica, *others) = client.sentinel_slaves(self.master_name) or [None]
                watched = client.sentinel_master(self.master_name)
            if others or replica is None or watched["num-other-sentinels"] != 2:
                return False
            if (watched["flags"], replica["flags"]) != ("master", "slave"):  # and not "s_down"
                return False
            if replica["master-link-status"] != "ok":
                return False
        return True


def _role(server: RedisServer) -> str:
    with server.client(decode_responses=True) as client:
        return str(client.role()[0])
