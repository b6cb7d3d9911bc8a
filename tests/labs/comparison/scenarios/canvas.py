"""Duplicates with something behind them."""

from __future__ import annotations

from celery import chain, chord

from tests.labs.comparison.environment import Environment
from tests.labs.comparison.scenario import Cell, Scenario
from tests.waiting import eventually


class ChordWithDuplicate(Scenario):
    """Given a chord with the same call twice in its header, publish it. Does its body run?"""

    name = "chord"
    title = "chord with a duplicate header"
    asked = "body once"

    def measure(self, environment: Environment) -> Cell:
        order, after = environment.order(), environment.order()
        same = environment.task("work").s(order, 1.0)
        error = result = None
        try:
            result = chord([same, same.clone()], app=environment.app)(
                environment.task("follow").s(after)
            )
        except Exception as refusal:
            error = type(refusal).__name__
        environment.ledger.wait_for_run(order)
        eventually(
            lambda: (result is not None and result.ready()) or environment.settled(),
            "it ends, or nothing is left to do",
        )
        environment.wait_until_settled()
        bodies = len(environment.ledger.completions(after))
        state = result.state if result is not None else None
        text = {0: "no body", 1: "body once"}.get(bodies, f"body {bodies} times")
        if bodies == 0:
            text = f"{error or state}, {text}"
        return Cell(text, {"bodies": bodies, "error": error, "state": state})


class SecondChain(Scenario):
    """Given a chain whose head runs, publish another one with the same head. Do both tails run?"""

    name = "chain"
    title = "second chain with the same head"
    asked = "both chains end"

    def measure(self, environment: Environment) -> Cell:
        head, tails = environment.order(), [environment.order(), environment.order()]
        work, follow = environment.task("work"), environment.task("follow")
        error = None
        chain(work.s(head, 2.0), follow.s(tails[0]), app=environment.app).apply_async()
        environment.ledger.wait_for_run(head)
        try:
            chain(work.s(head, 2.0), follow.s(tails[1]), app=environment.app).apply_async()
        except Exception as refusal:
            error = type(refusal).__name__
        environment.wait_until_settled()
        ended = sum(bool(environment.ledger.completions(tail)) for tail in tails)
        heads = len(environment.ledger.completions(head))
        text = "both chains end" if ended == 2 else error or "the second is lost"
        return Cell(text, {"chains ended": ended, "heads run": heads, "error": error})
