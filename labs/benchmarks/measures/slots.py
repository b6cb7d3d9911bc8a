"""The distribution of keys over the slots of a Cluster."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from celery_idempotent.core.key.key import Key
from labs.benchmarks.bench import TASK
from labs.benchmarks.figure import Figure, MeasureResult
from labs.benchmarks.measure import Measure, ProgressCallback

MASTERS = (3, 6, 12)


class Slots(Measure):
    """The number of records in each slot of a Redis Cluster.

    For randomly distributed keys, the standard deviation is the square root of the mean.
    """

    name = "slots"
    title = "slots of 1,000,000 keys"
    page = "scaling"
    is_exact = True

    KEYS = 1_000_000

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        counts = [0] * REDIS_CLUSTER_HASH_SLOTS
        for number in range(self.KEYS):
            key = Key.of(TASK, number.to_bytes(8, "big"))
            counts[key_slot(f"idem:{key}".encode())] += 1
            if number % 10_000 == 0:
                progress(number / self.KEYS)
        mean = self.KEYS / len(counts)
        deviation = sqrt(sum((each - mean) ** 2 for each in counts) / len(counts))
        return MeasureResult(
            [
                Figure("empty slots", counts.count(0)),
                Figure("keys per slot, mean", mean),
                Figure("keys per slot, minimum", min(counts)),
                Figure("keys per slot, maximum", max(counts)),
                Figure("standard deviation / expected at random", deviation / sqrt(mean), "×"),
                *(
                    Figure(f"fullest of {masters} masters / mean", _fullest(counts, masters), "×")
                    for masters in MASTERS
                ),
            ]
        )


def _fullest(counts: list[int], masters: int) -> float:
    """Returns the largest share of a master, where all have equally many slots; the mean is 1."""
    bounds = [len(counts) * n // masters for n in range(masters + 1)]
    shares = [sum(counts[first:last]) for first, last in pairwise(bounds)]
    return round(max(shares) * masters / sum(counts), 4)
