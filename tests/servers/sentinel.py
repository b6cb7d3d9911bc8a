"""Starts a private Sentinel group: a master, its replica, and three Sentinels.

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

from tests.servers.program import Ports, Stoppable, wait_until
from tests.servers.redis_server import RedisServer

__all__ = ["SentinelServers"]

#: How many of the three Sentinels must agree.
_QUORUM = 2
_INFO_PERIOD_MS = 500


class SentinelServers(Stoppable):
    """A running group, returned by `start`. The end of a `with` block stops it.

    Attributes:
        url: the URL of the Sentinels for Celery's broker or result backend.
        master_name: the name of the master in the Sentinels' configuration.
        nodes: the two servers with the data, whatever their current roles.
        sentinels: the three Sentinels.
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
        """Starts a group and returns when all of its members have discovered each other.

        Args:
            kind: as in `RedisServer.start`.
            password: of the servers with the data; the Sentinels have none.
            down_after_ms: how long the master may not reply before it counts as down. Sentinels
                send a new master its first PING after a second; with a shorter time they would
                declare it down before that.

        Raises:
            ServerError: no such server is available, or they did not discover each other.
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
                # Interval at which Sentinels query the roles of servers; the default is 10 s.
                client.execute_command("SENTINEL DEBUG", "INFO-PERIOD", _INFO_PERIOD_MS)
        trio = cls((master, replica), sentinels, ports, password)
        wait_until(trio._ready, "The Sentinels did not discover each other")
        return trio

    @property
    def master(self) -> RedisServer:
        """The server that most Sentinels report as master."""
        ports = [self._master_port(sentinel) for sentinel in self.sentinels]
        elected = max(ports, key=ports.count)
        return next(node for node in self.nodes if node.port == elected)

    @property
    def replica(self) -> RedisServer:
        """The other server; after `failover` it is down until `rejoin`."""
        master = self.master
        return next(node for node in self.nodes if node is not master)

    def client(self, **options: Any) -> redis.Redis:
        """Returns a new redis-py client that follows the master."""
        addresses = [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]
        group = Sentinel(addresses)
        client: redis.Redis = group.master_for(self.master_name, password=self._password, **options)
        return client

    def failover(self, *, abrupt: bool = False) -> RedisServer:
        """Kills the master, and returns it when the replica has been promoted.

        Args:
            abrupt: kill immediately; data that is not replicated yet is lost.
        """
        failed, replica = self.master, self.replica
        if not abrupt:
            wait_until(
                lambda: replica.is_copy_of(failed), "The replica did not get the master's data"
            )
        failed.kill()
        wait_until(
            lambda: (
                all(self._master_port(sentinel) == replica.port for sentinel in self.sentinels)
                and _role(replica) == "master"
            ),
            "The Sentinels did not promote the replica",
        )
        return failed

    def rejoin(self) -> None:
        """Restarts the killed server as a replica, so that another failover is possible."""
        if not self.replica.running:
            self.replica.restart(replica_of=self.master)
        wait_until(self._ready, "The Sentinels did not discover the replica")

    def stop(self) -> None:
        """Stops all servers and removes their directories. A second call has no effect."""
        for server in (*self.sentinels, *self.nodes):
            server.stop()
        self._ports.stop()

    def _master_port(self, sentinel: RedisServer) -> int:
        with sentinel.client() as client:
            _, port = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.master_name)
        return int(port)

    def _ready(self) -> bool:
        """Whether every Sentinel knows the two others and a replica that can be promoted."""
        for sentinel in self.sentinels:
            with sentinel.client(decode_responses=True) as client:
                (replica, *others) = client.sentinel_slaves(self.master_name) or [None]
                master = client.sentinel_master(self.master_name)
            if others or replica is None or master["num-other-sentinels"] != 2:
                return False
            if (master["flags"], replica["flags"]) != ("master", "slave"):  # and not "s_down"
                return False
            if replica["master-link-status"] != "ok":
                return False
        return True


def _role(server: RedisServer) -> str:
    with server.client(decode_responses=True) as client:
        return str(client.role()[0])
