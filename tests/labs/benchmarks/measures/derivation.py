"""Keys."""

from __future__ import annotations

from inspect import signature

from celery_idempotent.key.rule import KeyRule
from tests.labs.benchmarks.figure import Figure, Finding, Goal, Spread
from tests.labs.benchmarks.measure import Measure, Show
from tests.labs.benchmarks.turns import Call, take_turns

ARGUMENTS = (17, "order-42", 9.99, "EUR", True)
ALL, TEMPLATE, ONE = "all arguments", "a template", "one argument by name"


def charge(customer: int, order: str, amount: float, currency: str, live: bool) -> None:
    """What a rule looks at."""


class Derivation(Measure):
    """How long it takes to make a key of five scalars, the fingerprint of all included."""

    name = "keys"
    title = "key of five scalars"

    ROUNDS, EACH = 40, 500

    def measure(self, show: Show) -> Finding:
        rules = {ALL: None, TEMPLATE: "order:{order}", ONE: ("order",)}
        calls = {name: _deriving(rule) for name, rule in rules.items()}
        times = take_turns(calls, self.ROUNDS, self.EACH, show)
        goals = {ALL: Goal(10)}
        return Finding(
            [
                Figure.spread_of(name, Spread.of(each), "µs", goals.get(name))
                for name, each in times.items()
            ],
            raw={"medians of rounds, µs": times},
        )


def _deriving(rule: object) -> Call:
    derive = KeyRule("shop.charge", rule, signature(charge), lambda a, k: (a, k)).derive
    return lambda: derive(ARGUMENTS, {})
