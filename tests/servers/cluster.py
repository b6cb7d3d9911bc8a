"""A private Redis Cluster: three masters, three replicas, their slots moved at will.

    with ClusterServers.start() as cluster:
        client = cluster.client()
        client.set("key", "value")
        cluster.kill_master_of("key")
        assert client.get("key") == b"value"

It takes two to three seconds to start, and as long to replace a master: share one between tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from celery_idempotent.testing.ports import Ports
from celery_idempotent.testing.process import Stoppable, wait_until
from celery_idempotent.testing.server import RedisServer

__all__ = ["ClusterServers", "SlotMove"]

_SLOTS = 16_384
_MASTERS = 3
_MIGRATE_MS = 5_000


class _Range(NamedTuple):
    """Consecutive slots as one node sees them: the ports of who has them."""

    first: int
    last: int
    master: int
    replicas: tuple[int, ...]


class ClusterServers(Stoppable):
    """A running cluster; `start` makes one. Leaving the `with` block stops it.

    Attributes:
        url: of some of its nodes, `;` between them; `redis+cluster://` where a single server has
            `redis://`.
        nodes: all six, whatever they are at the moment.
    """

    url: str

    def __init__(self, nodes: Iterable[RedisServer], ports: Ports) -> None:
        self.nodes = tuple(nodes)
        self._ports = ports
        some = self.nodes[:: len(self.nodes) - 1]
        self.url = ";".join(f"redis+cluster://127.0.0.1:{node.port}" for node in some)

    @classmethod
    def start(
        cls,
        kind: str = "any",
        *,
        node_timeout_ms: int = 1500,
        config: Mapping[str, str] | None = None,
    ) -> ClusterServers:
        """Start a cluster and return when every node serves and has its replica.

        Args:
            kind: as `RedisServer.start` has it.
            node_timeout_ms: how long a master may be silent before it counts as dead.
            config: further directives for each node.

        Raises:
            ServerError: there is no such server here, or they did not become a cluster.
        """
        directives = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(node_timeout_ms),
            "repl-ping-replica-period": "1",  # before a master's first ping a replica is hidden
            "cluster-replica-validity-factor": "0",  # a replica may always take over
            "cluster-allow-replica-migration": "no",  # and stays with its master
            **(config or {}),
        }

        def start_node(port: int) -> RedisServer:
            return RedisServer.start(kind, port=port, config=directives)

        ports = Ports(2 * _MASTERS)
        with ThreadPoolExecutor() as pool:
            cluster = cls(pool.map(start_node, ports.numbers), ports)
        cluster._join()
        return cluster

    @property
    def living(self) -> list[RedisServer]:
        """The nodes that were not killed."""
        return [node for node in self.nodes if node.running]

    def client(self, **options: Any) -> redis.RedisCluster:
        """A new redis-py client of the whole cluster."""
        return redis.RedisCluster(host="127.0.0.1", port=self.living[0].port, **options)

    def master_of(self, key: str) -> RedisServer:
        """The node that serves `key`."""
        return self._at(self._range_of(key).master)

    def replica_of(self, key: str) -> RedisServer:
        """The node that takes over `key` when its master dies."""
        return self._at(self._range_of(key).replicas[0])

    def other_master(self, key: str) -> RedisServer:
        """A master that does not serve `key`: somewhere to move its slot to."""
        ours = self.master_of(key).port
        return next(self._at(seen.master) for seen in self._view() if seen.master != ours)

    def kill_master_of(self, key: str, *, abrupt: bool = False) -> RedisServer:
        """Kill the master of `key`, and return it when all others have its replica for master.

        Args:
            abrupt: at once, and what the replica has not got yet is forgotten; else nothing is
                lost.
        """
        dead, heir = self.master_of(key), self.replica_of(key)
        if not abrupt:
            wait_until(lambda: heir.is_copy_of(dead), "The replica did not get the master's data")
        dead.kill()
        slot = key_slot(key.encode())
        wait_until(
            lambda: all(_serves(node, slot, heir.port) for node in self.living),
            "The replica was not promoted",
        )
        return dead

    def rejoin(self) -> None:
        """Bring the dead nodes back, each as a replica of the one that took over from it."""
        for node in self.nodes:
            if not node.running:
                node.restart()
        wait_until(self._whole, "The cluster did not become whole again")

    def move_slot(self, key: str, to: RedisServer) -> SlotMove:
        """Begin to move the slot of `key`; leaving the `with` block ends that.

        Until `SlotMove.carry`, its master answers for the keys that it has, and sends callers for
        others to the new one (ASK).
        """
        return SlotMove(self, key_slot(key.encode()), self.master_of(key), to)

    def stop(self) -> None:
        """End all nodes and remove their directories. Twice is once."""
        for node in self.nodes:
            node.stop()
        self._ports.stop()

    def _join(self) -> None:
        """Make the nodes one cluster, and return when each of them knows."""
        masters, replicas = self.nodes[:_MASTERS], self.nodes[_MASTERS:]
        share = -(-_SLOTS // _MASTERS)
        for number, master in enumerate(masters):
            slots = range(number * share, min((number + 1) * share, _SLOTS))
            # Masters that share an epoch would have to quarrel about it first.
            _tell(master, "SET-CONFIG-EPOCH", number + 1)
            _tell(master, "ADDSLOTS", *slots)
        for node in self.nodes:
            for other in self.nodes:
                _tell(node, "MEET", "127.0.0.1", other.port)
        wait_until(self._acquainted, "The nodes did not meet")
        for master, replica in zip(masters, replicas, strict=True):
            _tell(replica, "REPLICATE", _id_of(master))
        wait_until(self._whole, "The cluster did not come up")

    def _acquainted(self) -> bool:
        return all(
            f"cluster_known_nodes:{len(self.nodes)}" in _tell(node, "INFO") for node in self.nodes
        ) and all("handshake" not in _tell(node, "NODES") for node in self.nodes)

    def _whole(self) -> bool:
        """Whether every node serves, and sees a replica of every master with all its data."""
        for node in self.nodes:
            view = list(_view_of(node))
            ports = {port for seen in view for port in (seen.master, *seen.replicas)}
            if not _is_up(node) or len(ports) != len(self.nodes):
                return False
        return all(
            self._at(port).is_copy_of(self._at(seen.master))
            for seen in self._view()
            for port in seen.replicas
        )

    def _view(self) -> Iterator[_Range]:
        return _view_of(self.living[0])

    def _range_of(self, key: str) -> _Range:
        slot = key_slot(key.encode())
        return next(seen for seen in self._view() if seen.first <= slot <= seen.last)

    def _at(self, port: int) -> RedisServer:
        return next(node for node in self.nodes if node.port == port)


class SlotMove:
    """A slot on its way from one master to another; leaving the `with` block gets it there."""

    def __init__(
        self, cluster: ClusterServers, slot: int, source: RedisServer, target: RedisServer
    ) -> None:
        self._cluster = cluster
        self._slot = slot
        self._source = source
        self._target = target
        self._done = False
        _tell(target, "SETSLOT", slot, "IMPORTING", _id_of(source))
        _tell(source, "SETSLOT", slot, "MIGRATING", _id_of(target))

    def carry(self) -> None:
        """Take the slot's keys to the new master; the old one sends callers there (ASK)."""
        with self._source.client() as client:
            keys = client.execute_command("CLUSTER GETKEYSINSLOT", self._slot, 1_000_000)
            if keys:
                address = ("127.0.0.1", self._target.port, "", 0, _MIGRATE_MS)
                client.execute_command("MIGRATE", *address, "KEYS", *keys)

    def finish(self) -> None:
        """Make the new master known as such; the old one sends callers there for good (MOVED)."""
        if self._done:
            return
        self.carry()
        self._done = True
        for node in (self._target, self._source):
            _tell(node, "SETSLOT", self._slot, "NODE", _id_of(self._target))
        wait_until(
            lambda: all(
                _serves(node, self._slot, self._target.port) for node in self._cluster.living
            ),
            "The slot's move did not get around",
        )

    def __enter__(self) -> SlotMove:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


def _tell(node: RedisServer, command: str, *words: object) -> Any:
    """What `node` answers to CLUSTER `command`, as it answers it."""
    with node.client(decode_responses=True) as client:
        client.response_callbacks.clear()  # redis-py would make something else of it
        return client.execute_command("CLUSTER", command, *words)


def _id_of(node: RedisServer) -> str:
    return str(_tell(node, "MYID"))


def _view_of(node: RedisServer) -> Iterator[_Range]:
    for first, last, (_, master, *_), *replicas in _tell(node, "SLOTS"):
        yield _Range(first, last, master, tuple(port for _, port, *_ in replicas))


def _is_up(node: RedisServer) -> bool:
    return "cluster_state:ok" in _tell(node, "INFO")


def _serves(node: RedisServer, slot: int, master: int) -> bool:
    """Whether in the eyes of `node` the one at port `master` has `slot`, and the cluster serves."""
    try:
        return _is_up(node) and any(
            seen.master == master and seen.first <= slot <= seen.last for seen in _view_of(node)
        )
    except RedisError:  # not while it takes over
        return False
