"""Tasks longer than a lock or a visibility timeout."""

from __future__ import annotations

import time

from labs.comparison.environment import Environment
from labs.comparison.ledger import max_concurrent
from labs.comparison.scenario import Cell, Scenario


class LongerThanTheLock(Scenario):
    """Publishes a call of 6 s, with a lock of 2 s, six times at intervals of 1.6 s.

    How many executions are there, and how many of them at the same time?
    """

    name = "lock"
    title = "6 s task, lock of 2 s, 6 publishes: executions / concurrent"
    expected = "1 / 1"
    options = {"concurrency": 6, "lock": 2.0}

    SECONDS = 6.0
    PUBLISHES = 6
    INTERVAL = 1.6

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        first_at = time.monotonic()
        for number in range(self.PUBLISHES):
            time.sleep(max(0.0, first_at + number * self.INTERVAL - time.monotonic()))
            environment.publish("work", order, self.SECONDS)
        return _count_executions(environment, order)


class LongerThanTheVisibilityTimeout(Scenario):
    """Publishes one task of 12 s to a broker that redelivers unacknowledged messages after 3 s.

    How many executions are there, and how many of them at the same time?
    """

    name = "visibility"
    title = "12 s task, visibility timeout 3 s, one publish: executions / concurrent"
    expected = "1 / 1"
    options = {
        "settings": {
            "broker_transport_options": {
                "visibility_timeout": 3,
                # kombu checks for these every second, instead of every hundred seconds.
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
            }
        }
    }

    SECONDS = 12.0

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        environment.publish("work", order, self.SECONDS)
        return _count_executions(environment, order)


def _count_executions(environment: Environment, order: str) -> Cell:
    environment.ledger.wait_for_run(order)
    environment.wait_until_settled(seconds=60)
    runs = environment.ledger.completions(order)
    facts = {"executions": len(runs), "concurrent": max_concurrent(runs)}
    return Cell("{executions} / {concurrent}".format(**facts), facts)
