"""Many leases in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from celery_idempotent.lease.heartbeat import Heartbeat
from celery_idempotent.lease.lease import Lease
from celery_idempotent.store.commands import Extension
from celery_idempotent.store.record_store import RecordStore
from celery_idempotent.store.transport.sync import SyncTransport
from celery_idempotent.testing.process import wait_until
from celery_idempotent.testing.server import RedisServer
from tests.labs.benchmarks.bench import RETENTION_MS, Bench, own_server
from tests.labs.benchmarks.figure import Figure, Finding, Goal, Spread
from tests.labs.benchmarks.measure import Measure, Show

#: The default lease, and how often it is extended.
LEASE, BEATS_A_LEASE = 60.0, 3


class HeartbeatOfMany(Measure):
    """What the heartbeat of a process that holds a thousand leases sends, and what it computes.

    The leases are short, so that there are beats enough to count; the share of a core is what
    such beats come to with leases of a minute, the default.
    """

    name = "heartbeat"
    title = "heartbeat, 1,000 leases in one process"

    LEASES, LEASE_MS, BEATS = 1_000, 3_000, 8

    def measure(self, show: Show) -> Finding:
        with own_server() as server:
            in_a_trip = self._extended_in_a_trip(server)
            show(0.3)
            beats = self._seconds_of_beats(server, show)
        share = [100 * beat * BEATS_A_LEASE / LEASE for beat in beats]
        return Finding(
            [
                Figure("round trips for all that are due", self.LEASES / in_a_trip, goal=Goal(1)),
                Figure.spread_of("of a core, leases of 60 s", Spread.of(share), "%", Goal(1)),
                Figure.spread_of("a beat", Spread.of([1000 * each for each in beats]), "ms of CPU"),
            ],
            raw={"CPU seconds of beats": beats, "leases in a round trip": in_a_trip},
        )

    def _extended_in_a_trip(self, server: RedisServer) -> float:
        """How many leases the heartbeat's line sends at a time, before it reads answers."""
        trips: list[int] = []
        send = SyncTransport.send

        def counting(line: SyncTransport, requests: Sequence[bytes]) -> list[Any]:
            trips.append(sum(b"EVALSHA" in request for request in requests))
            return send(line, requests)

        with self._leases(server):
            # The first beat teaches the script, and takes two.
            wait_until(lambda: _extensions(server) >= 2 * self.LEASES, "no beats came")
            with patch.object(SyncTransport, "send", counting):
                wait_until(lambda: len(trips) >= 4, "four beats did not come")
        return median(trips[:4])

    def _seconds_of_beats(self, server: RedisServer, show: Show) -> list[float]:
        """CPU seconds of each beat, by the clock of the heartbeat's own thread."""
        beats: list[float] = []
        with server.client() as client, self._leases(server) as clock:
            client.config_resetstat()
            for number in range(self.BEATS):
                before = time.clock_gettime(clock)
                wait_until(
                    lambda last=number: _extensions(server) >= (last + 1) * self.LEASES,
                    "no beat came",
                )
                # The server has answered; the thread has yet to read it all.
                time.sleep(self.LEASE_MS / 1000 / BEATS_A_LEASE / 2)
                beats.append(time.clock_gettime(clock) - before)
                show(0.3 + 0.7 * (number + 1) / self.BEATS)
        return beats

    @contextmanager
    def _leases(self, server: RedisServer) -> Iterator[int]:
        """So many leases with a heartbeat, all due together; gives the clock of its thread."""
        bench, heart = Bench(server), Heartbeat()
        leases = [self._lease(bench) for _ in range(self.LEASES)]
        together = time.monotonic()
        for lease in leases:
            lease.renewed(together)
            heart.start_renewal(lease)
        try:
            assert heart._thread is not None
            assert heart._thread.ident is not None
            yield time.pthread_getcpuclockid(heart._thread.ident)
        finally:
            for lease in leases:
                heart.stop_renewal(lease)
            bench.close()

    def _lease(self, bench: Bench) -> Lease[RecordStore]:
        key = next(bench.fresh)
        extension = Extension(key, bench.begun(key), self.LEASE_MS, RETENTION_MS)
        return Lease(bench.store, extension, time.monotonic(), lambda: None)


def _extensions(server: RedisServer) -> int:
    with server.client() as client:
        stats: dict[str, Any] = client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])
