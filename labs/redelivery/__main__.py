"""``make redelivery``: kills whole workers under load, at a visibility timeout of an hour.

In each trial, calls are published at a steady rate to the queue of a worker, which is killed with
SIGKILL together with its pool, at a random moment. It then has running, prefetched and scheduled
messages. Another worker, which lives through all trials, consumes the queue from then on. Each
trial measures the time from the kill until each message begins there, and counts the starts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections import Counter
from pathlib import Path

from labs.redelivery.site import SURVIVOR, RedeliverySite
from tests.waiting import eventually

#: Calls per second, and the longest of them in seconds: they occupy the victim's four processes.
RATE, LONGEST = 12.0, 1.0
#: One call in this many has a countdown, in seconds.
ETA_EVERY, COUNTDOWN = 5, 6.0
#: Longest wait for the messages of a killed worker, in seconds.
LONGEST_WAIT = 60.0
#: Seconds under load before the kill.
LOAD = (2.0, 5.0)


class Trials:
    """What was counted in all trials."""

    def __init__(self, site: RedeliverySite) -> None:
        self.site, self.redis = site, site.redis
        self._number = 0
        #: Seconds from the kill until a message of the dead worker began, by what it was.
        self.delays: dict[str, list[float]] = {}
        #: Messages that have not begun elsewhere, by what they were.
        self.late: Counter[str] = Counter()
        #: Messages of which nothing was left in Redis when the worker was killed: kombu has
        #: received them with BRPOP, and had not yet stored that they are unacknowledged.
        self.vanished = 0
        #: Calls by the number of their executions that began.
        self.starts: Counter[int] = Counter()

    def run(self) -> None:
        """Runs one trial, and adds what was counted."""
        self._number += 1
        queue = f"victim-{self._number}"
        victim = self.site.start(queue, queue, "--concurrency", "4")
        published: list[str] = []
        stopped = threading.Event()
        publisher = threading.Thread(target=self._publish, args=(queue, published, stopped))
        publisher.start()
        time.sleep(random.uniform(*LOAD))
        killed_at = time.time()
        victim.kill()
        stopped.set()
        publisher.join()
        held = self._held(queue)
        queued = {json.loads(text)["headers"]["id"] for text in self.redis.lrange(queue, 0, -1)}
        ended = {task_id for task_id in published if self.redis.exists(f"ended:{task_id}")}
        vanished = set(published) - held.keys() - queued - ended
        self.site.let_survivor_consume(queue)
        deadline = killed_at + LONGEST_WAIT
        while time.time() < deadline and not all(self._begun(i, killed_at) for i in held):
            time.sleep(0.05)
        lost = set()
        for task_id, kind in held.items():
            begun = self._begun(task_id, killed_at)
            if begun:
                self.delays.setdefault(kind, []).append(begun - killed_at)
            else:
                lost.add(task_id)
                self.late[kind] += 1
        rest = [task_id for task_id in published if task_id not in vanished | lost]
        eventually(
            lambda: self.site.have("ended", rest),
            "every call that was in Redis has ended",
            90,
        )
        self.site.app.control.cancel_consumer(queue, destination=[SURVIVOR])
        self.starts.update(self.redis.llen(f"starts:{task_id}") for task_id in published)
        self.vanished += len(vanished)
        if lost:
            self.redis.delete("unacked", "unacked_index")

    def _publish(self, queue: str, published: list[str], stopped: threading.Event) -> None:
        number = 0
        while not stopped.wait(random.expovariate(RATE)):
            number += 1
            countdown = COUNTDOWN if number % ETA_EVERY == 0 else None
            seconds, name = random.uniform(0, LONGEST), f"{queue}-{number}"
            published.append(self.site.publish(queue, name, seconds, countdown=countdown))

    def _held(self, queue: str) -> dict[str, str]:
        """Returns the unacknowledged messages of `queue` by task id, and what each was."""
        held = {}
        for text in self.redis.hvals("unacked"):
            message, _, routing_key = json.loads(text)
            headers = message["headers"]
            # One that has ended and was not acknowledged is replayed, and begins no more.
            if routing_key == queue and not self.redis.exists(f"ended:{headers['id']}"):
                started = self.redis.exists(f"starts:{headers['id']}")
                kind = "running" if started else "ETA" if headers["eta"] else "prefetched"
                held[headers["id"]] = kind
        return held

    def _begun(self, task_id: str, since: float) -> float | None:
        """Returns when the task began after `since`."""
        starts = [float(at.split()[0]) for at in self.redis.lrange(f"starts:{task_id}", 0, -1)]
        return next((at for at in starts if at > since), None)

    def __str__(self) -> str:
        every = [delay for found in self.delays.values() for delay in found]
        figures = [
            f"{kind} {len(found)}: p50 {statistics.median(found):.2f} s, p99 {_p99(found):.2f} s, "
            f"max {max(found):.2f} s"
            for kind, found in [*sorted(self.delays.items()), ("all", every)]
            if found
        ]
        late = [f"not within {LONGEST_WAIT:g} s: {dict(self.late) or 0}"]
        return "; ".join([*figures, *late, f"vanished in kombu {self.vanished}"])


def main() -> None:
    """Runs the trials and prints the delays."""
    parser = argparse.ArgumentParser(prog="make redelivery", description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--after", type=float, default=5.0, help="idempotency_redeliver_after")
    parser.add_argument("--lease", type=float, default=5.0, help="idempotency_lease")
    parser.add_argument("--logs", type=Path, help="keep the workers' logs here")
    options = parser.parse_args()
    settings = {
        "idempotency_redeliver_after": options.after,
        "idempotency_lease": options.lease,
    }
    with RedeliverySite(settings, options.logs) as site:
        trials = Trials(site)
        for number in range(1, options.trials + 1):
            trials.run()
            print(f"{number}/{options.trials}: {trials}", flush=True)
    print(f"executions that began, by call: {dict(sorted(trials.starts.items()))}")


def _p99(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


if __name__ == "__main__":
    main()
