"""The cost of a heartbeat that renews many leases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from celery_idempotent.core.lease.heartbeat import Heartbeat
from celery_idempotent.core.lease.lease import Lease
from celery_idempotent.core.store.commands import LeaseExtension
from celery_idempotent.core.store.transport.server import ServerTransport
from labs.benchmarks.bench import RETENTION_MS, Bench, private_server
from labs.benchmarks.figure import Figure, Goal, MeasureResult, Spread
from labs.benchmarks.measure import Measure, ProgressCallback
from tests.servers.program import wait_until
from tests.servers.redis_server import RedisServer

#: The default lease in seconds, and its renewals per lease.
LEASE, RENEWALS_PER_LEASE = 60.0, 3


class ManyLeases(Measure):
    """Round trips and CPU time of the heartbeat of a process that holds a thousand leases.

    The measure uses short leases to observe enough heartbeats; the CPU share is computed from
    their cost for leases of a minute, the default.
    """

    name = "heartbeat"
    title = "heartbeat, 1,000 leases in one process"

    LEASES, LEASE_MS, HEARTBEATS = 1_000, 3_000, 8

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        with private_server() as server:
            per_trip = self._renewals_per_round_trip(server)
            progress(0.3)
            seconds = self._cpu_seconds(server, progress)
        share = [100 * each * RENEWALS_PER_LEASE / LEASE for each in seconds]
        milliseconds = [1000 * each for each in seconds]
        return MeasureResult(
            [
                Figure("round trips per heartbeat", self.LEASES / per_trip, goal=Goal(1)),
                Figure.from_spread(
                    "CPU of one core, leases of 60 s", Spread.from_values(share), "%", Goal(1)
                ),
                Figure.from_spread("CPU per heartbeat", Spread.from_values(milliseconds), "ms"),
            ],
            raw={"CPU seconds of heartbeats": seconds, "leases per round trip": per_trip},
        )

    def _renewals_per_round_trip(self, server: RedisServer) -> float:
        """Returns the renewals that the transport sends before it reads replies."""
        trips: list[int] = []
        send = ServerTransport.send

        def counting(transport: ServerTransport, *requests: Sequence[Any], **options: Any) -> Any:
            trips.append(sum(request[0] == "EVALSHA" for request in requests))
            return send(transport, *requests, **options)

        with self._leases(server):
            # The first heartbeat loads the script and needs two round trips.
            wait_until(lambda: _renewals(server) >= 2 * self.LEASES, "no leases were renewed")
            with patch.object(ServerTransport, "send", counting):
                wait_until(lambda: len(trips) >= 4, "leases were renewed less than four times")
        return median(trips[:4])

    def _cpu_seconds(self, server: RedisServer, progress: ProgressCallback) -> list[float]:
        """Returns the CPU seconds of each heartbeat, by the CPU clock of its thread."""
        seconds: list[float] = []
        with server.client() as client, self._leases(server) as clock:
            client.config_resetstat()
            for number in range(self.HEARTBEATS):
                before = time.clock_gettime(clock)
                wait_until(
                    lambda previous=number: _renewals(server) >= (previous + 1) * self.LEASES,
                    "leases were not renewed",
                )
                # The server has replied; leave the thread time to read all replies.
                time.sleep(self.LEASE_MS / 1000 / RENEWALS_PER_LEASE / 2)
                seconds.append(time.clock_gettime(clock) - before)
                progress(0.3 + 0.7 * (number + 1) / self.HEARTBEATS)
        return seconds

    @contextmanager
    def _leases(self, server: RedisServer) -> Iterator[int]:
        """Holds leases that are renewed together; yields the CPU clock of the heartbeat."""
        bench, heartbeat = Bench(server), Heartbeat()
        leases = [self._lease(bench) for _ in range(self.LEASES)]
        renewed_at = time.monotonic()
        for lease in leases:
            lease.renewed(renewed_at)
            heartbeat.start_renewal(lease)
        try:
            thread = heartbeat.renewer(bench.store).thread
            assert thread is not None
            assert thread.ident is not None
            yield time.pthread_getcpuclockid(thread.ident)
        finally:
            for lease in leases:
                heartbeat.stop_renewal(lease)
            bench.close()

    def _lease(self, bench: Bench) -> Lease:
        key = next(bench.new_keys)
        extension = LeaseExtension(key, bench.begin_token(key), self.LEASE_MS, RETENTION_MS)
        return Lease(bench.store, extension, time.monotonic(), lambda raw: None)


def _renewals(server: RedisServer) -> int:
    with server.client() as client:
        stats: dict[str, Any] = client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])
