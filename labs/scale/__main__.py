"""``make scale``: the connections of a thousand processes, many waiters, and a failover."""

from __future__ import annotations

import argparse
from functools import partial

from labs.scale import measures
from tests.servers.groups import ClusterServers, SentinelServers
from tests.servers.redis_server import RedisServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m labs.scale", description=__doc__)
    parser.add_argument("--part", type=float, default=1.0, help="of the sizes, for a short run")
    part = parser.parse_args().part

    def scaled(number: int) -> int:
        return max(2 * measures.LEASES_PER_CLIENT, int(number * part))

    # A busy machine must not look like a dead master, as it does to those of the failover.
    patient_cluster = partial(ClusterServers.start, node_timeout_ms=15_000)
    for clients in (100, 300, 1_000):
        measures.connections(max(measures.LOOPS, int(clients * part)), 500, 15 * part + 1)
    for rate, start in (
        (1_000, RedisServer.start),
        (2_000, RedisServer.start),
        (500, patient_cluster),
    ):
        measures.connections(max(measures.LOOPS, int(1_000 * part)), rate, 15 * part + 1, start)
    for waiters in (1_000, 10_000):
        measures.hot_key(max(measures.LOOPS, int(waiters * part)), 10 * part + 2)
    for servers in (ClusterServers, SentinelServers):
        measures.failover(scaled(20_000), 500 * part, 10_000, 30, servers.start())


if __name__ == "__main__":
    main()
