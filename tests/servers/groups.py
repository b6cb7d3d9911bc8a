"""Starts private groups of servers: a Redis Cluster, or a master with a replica and Sentinels.

    with ClusterServers.start() as cluster:
        client = cluster.client()
        client.set("key", "value")
        cluster.kill_master_of("key")
        assert client.get("key") == b"value"

    with SentinelServers.start() as trio:
        app.conf.update(result_backend=trio.url,
                        result_backend_transport_options={"master_name": trio.master_name})
        trio.failover()

A group takes two to three seconds to start, and as long to fail over: share one between tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote

import redis
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError
from redis.sentinel import Sentinel

from tests.servers.program import Ports, Stoppable, wait_until
from tests.servers.redis_server import RedisServer

_SLOTS = 16_384
_MASTERS = 3
_MIGRATE_MS = 5_000
#: How many of the three Sentinels must agree.
_QUORUM = 2
_INFO_PERIOD_MS = 500
#: How long a master may not reply before it counts as failed. Sentinels send a new master its first
#: PING after a second; with a shorter time they would declare it down before that.
_DOWN_AFTER_MS = "1500"


class _Range(NamedTuple):
    """A range of slots in the view of one node, with the ports of its master and replicas."""

    first: int
    last: int
    master: int
    replicas: tuple[int, ...]


class ClusterServers(Stoppable):
    """A running cluster, returned by `start`. The end of a `with` block stops it.

    Attributes:
        url: the URLs of two nodes, separated by `;`, with the scheme `redis+cluster://`.
        nodes: all six, whatever their current roles.
    """

    url: str

    def __init__(self, nodes: Iterable[RedisServer], ports: Ports) -> None:
        self.nodes = tuple(nodes)
        self._ports = ports
        first_and_last = self.nodes[:: len(self.nodes) - 1]
        self.url = ";".join(f"redis+cluster://127.0.0.1:{node.port}" for node in first_and_last)

    @classmethod
    def start(
        cls, config: Mapping[str, str] | None = None, users: Mapping[str, str] | None = None
    ) -> ClusterServers:
        """Starts a cluster and returns when it serves all slots and every master has a replica.

        Args:
            config: further redis.conf directives for each node.
            users: as in `RedisServer.start`; see `url_as`.

        Raises:
            ServerError: no such server is available, or the nodes did not form a cluster.
        """
        directives = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": _DOWN_AFTER_MS,
            "repl-ping-replica-period": "1",  # a replica is listed after its master's first ping
            "cluster-replica-validity-factor": "0",  # a replica may always be promoted
            "cluster-allow-replica-migration": "no",  # a replica keeps its master
            **(config or {}),
        }

        def start_node(port: int) -> RedisServer:
            return RedisServer.start(port=port, config=directives, users=users)

        ports = Ports(2 * _MASTERS)
        with ThreadPoolExecutor() as pool:
            cluster = cls(pool.map(start_node, ports.numbers), ports)
        cluster._join()
        return cluster

    def url_as(self, user: str, password: str) -> str:
        """Returns `url` with the credentials of one of its `users`."""
        return self.url.replace("://", f"://{quote(user, safe='')}:{quote(password, safe='')}@")

    @property
    def living(self) -> list[RedisServer]:
        """The nodes that are running."""
        return [node for node in self.nodes if node.running]

    def client(self, **options: Any) -> redis.RedisCluster:
        """Returns a new redis-py client of the whole cluster."""
        return redis.RedisCluster(host="127.0.0.1", port=self.living[0].port, **options)

    def master_of(self, key: str) -> RedisServer:
        """Returns the master that serves `key`."""
        return self._at(self._range_of(key).master)

    def replica_of(self, key: str) -> RedisServer:
        """Returns the replica that is promoted when the master of `key` fails."""
        return self._at(self._range_of(key).replicas[0])

    def other_master(self, key: str) -> RedisServer:
        """Returns a master that does not serve `key`, to which its slot can be moved."""
        port = self.master_of(key).port
        return next(self._at(slots.master) for slots in self._view() if slots.master != port)

    def kill_master_of(self, key: str, *, abrupt: bool = False) -> RedisServer:
        """Kills the master of `key`, and returns it when its replica has been promoted.

        Args:
            abrupt: kill immediately; data that is not replicated yet is lost.
        """
        failed, replica = self.master_of(key), self.replica_of(key)
        _kill(failed, replica, abrupt=abrupt)
        self.wait_for_master(replica, key_slot(key.encode()), "The replica was not promoted")
        return failed

    def wait_for_master(self, master: RedisServer, slot: int, error: str) -> None:
        """Returns when every node knows that `master` has the slot."""
        wait_until(lambda: all(_serves(node, slot, master.port) for node in self.living), error)

    def rejoin(self) -> None:
        """Restarts the killed nodes, each as a replica of the node that replaced it."""
        for node in self.nodes:
            if not node.running:
                node.restart()
        wait_until(self._complete, "The cluster was not complete again")

    def move_slot(self, key: str, to: RedisServer) -> SlotMove:
        """Starts to move the slot of `key`; the end of the `with` block finishes the move.

        Until `SlotMove.migrate_keys`, the old master serves the keys that it has, and redirects
        clients to the new master for other keys (ASK).
        """
        return SlotMove(self, key_slot(key.encode()), self.master_of(key), to)

    def stop(self) -> None:
        """Stops all nodes and removes their directories. A second call has no effect."""
        for node in self.nodes:
            node.stop()
        self._ports.stop()

    def _join(self) -> None:
        """Forms the cluster, and returns when every node reports it as complete."""
        masters, replicas = self.nodes[:_MASTERS], self.nodes[_MASTERS:]
        share = -(-_SLOTS // _MASTERS)
        for number, master in enumerate(masters):
            slots = range(number * share, min((number + 1) * share, _SLOTS))
            # Masters with the same epoch would first have to resolve the collision.
            _cluster(master, "SET-CONFIG-EPOCH", number + 1)
            _cluster(master, "ADDSLOTS", *slots)
        for node in self.nodes:
            for other in self.nodes:
                _cluster(node, "MEET", "127.0.0.1", other.port)
        wait_until(self._all_nodes_known, "The nodes did not discover each other")
        for master, replica in zip(masters, replicas, strict=True):
            _cluster(replica, "REPLICATE", _id_of(master))
        wait_until(self._complete, "The cluster did not come up")

    def _all_nodes_known(self) -> bool:
        return all(
            f"cluster_known_nodes:{len(self.nodes)}" in _cluster(node, "INFO")
            for node in self.nodes
        ) and all("handshake" not in _cluster(node, "NODES") for node in self.nodes)

    def _complete(self) -> bool:
        """Whether every node is up and knows all others, and all replicas are synchronized."""
        for node in self.nodes:
            ports = {port for slots in _view_of(node) for port in (slots.master, *slots.replicas)}
            if not _is_up(node) or len(ports) != len(self.nodes):
                return False
        return all(
            self._at(port).is_copy_of(self._at(slots.master))
            for slots in self._view()
            for port in slots.replicas
        )

    def _view(self) -> Iterator[_Range]:
        return _view_of(self.living[0])

    def _range_of(self, key: str) -> _Range:
        slot = key_slot(key.encode())
        return next(slots for slots in self._view() if slots.first <= slot <= slots.last)

    def _at(self, port: int) -> RedisServer:
        return next(node for node in self.nodes if node.port == port)


class SlotMove(Stoppable):
    """Moves a slot from one master to another; the end of a `with` block finishes the move."""

    def __init__(
        self, cluster: ClusterServers, slot: int, source: RedisServer, target: RedisServer
    ) -> None:
        self._cluster, self._slot = cluster, slot
        self._source, self._target = source, target
        self._finished = False
        _cluster(target, "SETSLOT", slot, "IMPORTING", _id_of(source))
        _cluster(source, "SETSLOT", slot, "MIGRATING", _id_of(target))

    def migrate_keys(self) -> None:
        """Moves the slot's keys to the new master; the old one redirects clients (ASK)."""
        with self._source.client() as client:
            keys = client.execute_command("CLUSTER GETKEYSINSLOT", self._slot, 1_000_000)
            if keys:
                address = ("127.0.0.1", self._target.port, "", 0, _MIGRATE_MS)
                client.execute_command("MIGRATE", *address, "KEYS", *keys)

    def stop(self) -> None:
        """Assigns the slot to the new master; the old one redirects clients for good (MOVED)."""
        if self._finished:
            return
        self.migrate_keys()
        self._finished = True
        for node in (self._target, self._source):
            _cluster(node, "SETSLOT", self._slot, "NODE", _id_of(self._target))
        error = "The move of the slot did not reach all nodes"
        self._cluster.wait_for_master(self._target, self._slot, error)


def _cluster(node: RedisServer, command: str, *arguments: object) -> Any:
    """Sends CLUSTER `command` to `node` and returns the reply, unparsed."""
    with node.client(decode_responses=True) as client:
        client.response_callbacks.clear()  # redis-py would parse the reply
        return client.execute_command("CLUSTER", command, *arguments)


def _id_of(node: RedisServer) -> str:
    return str(_cluster(node, "MYID"))


def _view_of(node: RedisServer) -> Iterator[_Range]:
    for first, last, (_, master, *_), *replicas in _cluster(node, "SLOTS"):
        yield _Range(first, last, master, tuple(port for _, port, *_ in replicas))


def _is_up(node: RedisServer) -> bool:
    return "cluster_state:ok" in _cluster(node, "INFO")


def _serves(node: RedisServer, slot: int, master: int) -> bool:
    """Whether, in the view of `node`, the cluster is up and `master` (a port) has `slot`."""
    try:
        return _is_up(node) and any(
            slots.master == master and slots.first <= slot <= slots.last for slots in _view_of(node)
        )
    except RedisError:  # during a failover
        return False


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
        nodes: list[RedisServer],
        sentinels: list[RedisServer],
        ports: Ports,
        password: str | None,
    ) -> None:
        self.nodes, self.sentinels = nodes, sentinels
        self._ports, self._password = ports, password
        host = f":{quote(password, safe='')}@127.0.0.1" if password else "127.0.0.1"
        self.url = ";".join(f"sentinel://{host}:{each.port}/0" for each in sentinels)

    @classmethod
    def start(cls, password: str | None = None) -> SentinelServers:
        """Starts a group and returns when all of its members have discovered each other.

        Args:
            password: of the servers with the data; the Sentinels have none.

        Raises:
            ServerError: no such server is available, or they did not discover each other.
        """
        ports = Ports(4)
        master_port, *sentinel_ports = ports.numbers
        master = RedisServer.start(port=master_port, password=password)
        replica = RedisServer.start(password=password, replica_of=master)
        name = cls.master_name
        config = {
            f"sentinel monitor {name}": f"127.0.0.1 {master.port} {_QUORUM}",
            f"sentinel down-after-milliseconds {name}": _DOWN_AFTER_MS,
            f"sentinel failover-timeout {name}": "1000",
        }
        if password:
            config[f"sentinel auth-pass {name}"] = password

        def start_sentinel(port: int) -> RedisServer:
            return RedisServer.start(port=port, sentinel=True, config=config)

        with ThreadPoolExecutor() as pool:
            sentinels = list(pool.map(start_sentinel, sentinel_ports))
        for sentinel in sentinels:
            with sentinel.client() as client, suppress(ResponseError):  # 6.2 has no such command
                # Interval at which Sentinels query the roles of servers; the default is 10 s.
                client.execute_command("SENTINEL DEBUG", "INFO-PERIOD", _INFO_PERIOD_MS)
        trio = cls([master, replica], sentinels, ports, password)
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
        _kill(failed, replica, abrupt=abrupt)

        def is_promoted() -> bool:
            ports = {self._master_port(sentinel) for sentinel in self.sentinels}
            return ports == {replica.port} and _role(replica) == "master"

        wait_until(is_promoted, "The Sentinels did not promote the replica")
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


def _kill(master: RedisServer, replica: RedisServer, *, abrupt: bool) -> None:
    """Kills a master; unless it is abrupt, not before the replica has all of its data."""
    if not abrupt:
        replica.wait_until_copy_of(master)
    master.kill()


def _role(server: RedisServer) -> str:
    with server.client(decode_responses=True) as client:
        return str(client.role()[0])
