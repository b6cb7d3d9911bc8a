"""The duration of key derivation."""

from __future__ import annotations

from inspect import signature

from celery_idempotent.core.key.rule import KeyRule
from labs.benchmarks.figure import Figure, Goal, MeasureResult, Spread
from labs.benchmarks.interleaving import Call, interleave
from labs.benchmarks.measure import Measure, ProgressCallback

ARGUMENTS = (17, "order-42", 9.99, "EUR", True)
ALL, TEMPLATE, ONE = "all arguments", "a template", "one named argument"


def charge(customer: int, order: str, amount: float, currency: str, live: bool) -> None:
    """Has the signature that keys are derived from."""


class KeyDerivation(Measure):
    """The time to derive the key and the fingerprint of five scalar arguments."""

    name = "keys"
    title = "key derivation, five scalars"

    ROUNDS, EACH = 40, 500

    def measure(self, progress: ProgressCallback) -> MeasureResult:
        rules = {ALL: None, TEMPLATE: "order:{order}", ONE: ("order",)}
        calls = {name: _deriving(rule) for name, rule in rules.items()}
        times = interleave(calls, self.ROUNDS, self.EACH, progress)
        goals = {ALL: Goal(10)}
        return MeasureResult(
            [
                Figure.from_spread(name, Spread.from_values(each), "µs", goals.get(name))
                for name, each in times.items()
            ],
            raw={"medians of rounds, µs": times},
        )


def _deriving(rule: object) -> Call:
    derive = KeyRule("shop.charge", rule, signature(charge), lambda a, k: (a, k)).derive
    return lambda: derive(ARGUMENTS, {})
