"""How keys spread over the slots of a Cluster."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from celery_idempotent.key.key import Key
from tests.labs.benchmarks.bench import TASK
from tests.labs.benchmarks.figure import Figure, Finding
from tests.labs.benchmarks.measure import Measure, Show

MASTERS = (3, 6, 12)


class Slots(Measure):
    """Names of records, by the slot that Redis Cluster derives from them.

    Keys that fell by pure chance would have a standard deviation of the root of their mean.
    """

    name = "slots"
    title = "slots of 1,000,000 keys"
    page = "scaling"
    counts = True

    KEYS = 1_000_000

    def measure(self, show: Show) -> Finding:
        found = [0] * REDIS_CLUSTER_HASH_SLOTS
        for number in range(self.KEYS):
            key = Key.of(TASK, number.to_bytes(8, "big"))
            found[key_slot(f"idem:{key}".encode())] += 1
            if number % 10_000 == 0:
                show(number / self.KEYS)
        mean = self.KEYS / len(found)
        deviation = sqrt(sum((each - mean) ** 2 for each in found) / len(found))
        return Finding(
            [
                Figure("slots without a key", found.count(0)),
                Figure("a slot, mean", mean, "keys"),
                Figure("a slot, fewest", min(found), "keys"),
                Figure("a slot, most", max(found), "keys"),
                Figure("standard deviation / that of chance", deviation / sqrt(mean), "×"),
                *(
                    Figure(f"fullest of {masters} masters / mean", _fullest(found, masters), "×")
                    for masters in MASTERS
                ),
            ]
        )


def _fullest(found: list[int], masters: int) -> float:
    """The master that has most, where each has a range of slots as long as the others'."""
    bounds = [len(found) * n // masters for n in range(masters + 1)]
    shares = [sum(found[a:b]) for a, b in pairwise(bounds)]
    return round(max(shares) * masters / sum(found), 4)
