"""``make redelivery HOUR=1``: counts the deliveries of a living worker's messages.

For an hour, a worker of four processes runs tasks of ten minutes at a visibility timeout of 30 s.
It has received all of them at the start: four run, the others are prefetched or have a countdown.
Another worker is idle and takes whatever is delivered again.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from labs.redelivery.site import RedeliverySite

SIDES: dict[str, dict[str, Any]] = {
    "idempotency_redeliver_after": {},
    "None": {"idempotency_redeliver_after": None},
    "plain Celery": {"idempotency_enabled": False, "task_acks_late": True},
}
VISIBILITY_TIMEOUT = 30
#: The processes of the worker, and the messages of each without a countdown.
PROCESSES, ROUNDS = 4, 5
#: Parts of the whole time.
COUNTDOWNS = (1 / 60, 1 / 6, 1 / 2, 3 / 4)


def main() -> None:
    """Runs all sides at once and prints the deliveries of each."""
    parser = argparse.ArgumentParser(prog="make redelivery HOUR=1", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args()
    with ProcessPoolExecutor(len(SIDES)) as pool:
        runs = {side: pool.submit(count, side, options.seconds) for side in SIDES}
        for side, run in runs.items():
            print(f"{side}: {run.result()}", flush=True)


def count(side: str, seconds: float) -> str:
    """Runs one side, and returns its figures."""
    settings = {
        "broker_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT},
        "worker_prefetch_multiplier": ROUNDS,
        **SIDES[side],
    }
    with RedeliverySite(settings) as site:
        site.start("busy", "hour", "--concurrency", str(PROCESSES))
        duration = seconds / (ROUNDS + 1)
        countdowns = [*(part * seconds for part in COUNTDOWNS), *[None] * PROCESSES * ROUNDS]
        ids = [
            site.publish("hour", f"{number}", duration, countdown=countdown)
            for number, countdown in enumerate(countdowns)
        ]
        site.wait_until_received(len(ids))
        site.let_survivor_consume("hour")
        deadline = time.monotonic() + seconds + 30
        while time.monotonic() < deadline and not site.have("ended", ids):
            time.sleep(1)
        counts = [
            Counter(site.redis.llen(f"{what}:{task_id}") for task_id in ids)
            for what in ("deliveries", "starts")
        ]
        ended = sum(bool(site.redis.exists(f"ended:{task_id}")) for task_id in ids)
    deliveries, starts = (dict(sorted(counter.items())) for counter in counts)
    return (
        f"{ended} of {len(ids)} messages ended; messages by their deliveries {deliveries}, "
        f"by the executions that began {starts}"
    )


if __name__ == "__main__":
    main()
