"""A slot that moves between the nodes of the private Redis Cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.servers.groups import ClusterServers
from tests.servers.program import is_running
from tests.servers.redis_server import RedisServer

pytestmark = pytest.mark.exhaustive  # the store's tests run on it, too


KEY, NEIGHBOUR = "{shop}key", "{shop}neighbour"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServers]:
    with ClusterServers.start(config={"appendonly": "yes"}) as cluster:
        yield cluster
        pids = [node.client().info("server")["process_id"] for node in cluster.nodes]
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)
    cluster.stop()


@pytest.fixture
def client(cluster: ClusterServers) -> Iterator[redis.RedisCluster]:
    with cluster.client() as client:
        client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
        yield client


def reply(node: RedisServer, *command: str) -> bytes | str:
    """Returns the node's reply to a plain client, or the redirection as text."""
    with node.client(retry=None) as plain:
        try:
            value = plain.execute_command(*command)
        except (redis.exceptions.AskError, redis.exceptions.MovedError) as error:
            # In redis-py, MovedError is a subclass of AskError.
            kind = "MOVED" if isinstance(error, redis.exceptions.MovedError) else "ASK"
            return f"{kind} {error.port}"
    return value or b""


def test_a_moving_slot_redirects_with_ask_then_with_moved(
    cluster: ClusterServers, client: redis.RedisCluster
) -> None:
    client.set(KEY, "value")
    old, new = cluster.master_of(KEY), cluster.other_master(KEY)

    with cluster.move_slot(KEY, new) as move:
        assert reply(old, "GET", KEY) == b"value"
        assert reply(old, "GET", NEIGHBOUR) == f"ASK {new.port}"
        assert reply(new, "GET", KEY) == f"MOVED {old.port}"

        move.migrate_keys()
        assert reply(old, "GET", KEY) == f"ASK {new.port}"
        assert reply(new, "GET", KEY) == f"MOVED {old.port}"
        assert client.get(KEY) == b"value"

    assert cluster.master_of(KEY) is new
    assert reply(old, "GET", KEY) == f"MOVED {new.port}"
    assert reply(new, "GET", KEY) == b"value"
    assert client.get(KEY) == b"value"
    move.finish()
