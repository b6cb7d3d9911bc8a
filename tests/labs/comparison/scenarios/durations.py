"""Tasks that take longer than somebody thought."""

from __future__ import annotations

import time

from tests.labs.comparison.environment import Environment
from tests.labs.comparison.ledger import run_sync
from tests.labs.comparison.scenario import Cell, Scenario


class LongerThanTheLock(Scenario):
    """Given a task of 6 s under a lock of 2 s, publish the same call 6 times, one each 1.6 s.

    How many executions are there, and how many of them at the same time?
    """

    name = "lock"
    title = "6 s task, lock of 2 s, 6 publishes: runs / at once"
    asked = "1 / 1"
    given = {"concurrency": 6, "lock": 2.0}

    SECONDS = 6.0
    PUBLISHES = 6
    APART = 1.6

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        first_at = time.monotonic()
        for number in range(self.PUBLISHES):
            time.sleep(max(0.0, first_at + number * self.APART - time.monotonic()))
            environment.publish("work", order, self.SECONDS)
        return _runs_and_at_once(environment, order)


class LongerThanTheVisibilityTimeout(Scenario):
    """Given a broker that takes a message for lost after 3 s, publish one task of 12 s.

    How many executions are there, and how many of them at the same time?
    """

    name = "visibility"
    title = "12 s task, visibility timeout 3 s, one publish: runs / at once"
    asked = "1 / 1"
    given = {
        "settings": {
            "broker_transport_options": {
                "visibility_timeout": 3,
                # kombu looks for lost messages every second, instead of every hundred seconds.
                "unacked_restore_interval": 1,
                "unacked_restore_throttle": 1,
            }
        }
    }

    SECONDS = 12.0

    def measure(self, environment: Environment) -> Cell:
        order = environment.order()
        environment.publish("work", order, self.SECONDS)
        return _runs_and_at_once(environment, order)


def _runs_and_at_once(environment: Environment, order: str) -> Cell:
    environment.ledger.wait_for_run(order)
    environment.wait_until_settled(seconds=60)
    runs = environment.ledger.completions(order)
    facts = {"runs": len(runs), "at once": run_sync(runs)}
    return Cell("{runs} / {at once}".format(**facts), facts)
