"""``make redelivery COST=1``: the cost of holding 1,000 messages.

Idle workers hold messages that wait for their ETA. Their processor time and the commands of their
brokers are compared with those of a worker that renews nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from multiprocessing import Pool
from typing import Any

from labs.redelivery.site import RedeliverySite
from labs.rig.processes import processor_seconds

MESSAGES, SECONDS = 1000, 120.0
SIDES: tuple[float | None, ...] = (60.0, 5.0, None)


def main() -> None:
    """Runs all sides at once and prints the figures of each."""
    with Pool(len(SIDES)) as pool:
        figures = dict(zip(SIDES, pool.map(measure, SIDES), strict=True))
    without, commands_without = figures[None]
    for side, (processor, commands) in figures.items():
        text = f"idempotency_redeliver_after {side}: {processor / SECONDS:.3%} of a core"
        if side:
            more = {
                name: round(number / SECONDS * side / 3, 2)
                for name, number in (commands - commands_without).items()
            }
            text += f", {(processor - without) / SECONDS:.3%} more; commands a third of it: {more}"
        print(text)


def measure(seconds: float | None) -> tuple[float, Counter[str]]:
    """Returns the processor seconds of the worker, and the commands of its broker."""
    with RedeliverySite({"idempotency_redeliver_after": seconds}) as site:
        pid = site.start("holder", "held", "--concurrency", "1").process.pid
        for number in range(MESSAGES):
            site.publish("held", f"{number}", 0, countdown=3600)
        site.wait_until_received(MESSAGES)
        time.sleep(5)
        before = processor_seconds(pid), _commands(site)
        time.sleep(SECONDS)
        return processor_seconds(pid) - before[0], _commands(site) - before[1]


def _commands(site: RedeliverySite) -> Counter[str]:
    stats: Any = site.redis.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()})


if __name__ == "__main__":
    main()
