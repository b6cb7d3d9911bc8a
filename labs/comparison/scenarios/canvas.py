"""Duplicates in chords and chains."""

from __future__ import annotations

from celery import chain, chord

from labs.comparison.environment import Environment
from labs.comparison.scenario import Cell, Scenario
from tests.waiting import eventually


class ChordWithDuplicate(Scenario):
    """Publishes a chord whose header has the same call twice. Does its body run?"""

    name = "chord"
    title = "chord with a duplicate in its header"
    expected = "body once"

    def measure(self, environment: Environment) -> Cell:
        order, after = environment.order(), environment.order()
        same = environment.task("work").s(order, 1.0)
        error = result = None
        try:
            result = chord([same, same.clone()], app=environment.app)(
                environment.task("follow").s(after)
            )
        except Exception as raised:
            error = type(raised).__name__
        environment.ledger.wait_for_run(order)
        eventually(
            lambda: (result is not None and result.ready()) or environment.settled(),
            "the chord ends, or no message is left",
        )
        environment.wait_until_settled()
        bodies = len(environment.ledger.completions(after))
        state = result.state if result is not None else None
        text = {0: "no body", 1: "body once"}.get(bodies, f"body {bodies} times")
        if bodies == 0:
            text = f"{error or state}, {text}"
        return Cell(text, {"bodies": bodies, "error": error, "state": state})


class SecondChain(Scenario):
    """Publishes a chain, and another one with the same head while that runs. Do both tails run?"""

    name = "chain"
    title = "second chain with the same head"
    expected = "both chains end"

    def measure(self, environment: Environment) -> Cell:
        head, tails = environment.order(), [environment.order(), environment.order()]
        work, follow = environment.task("work"), environment.task("follow")
        error = None
        chain(work.s(head, 2.0), follow.s(tails[0]), app=environment.app).apply_async()
        environment.ledger.wait_for_run(head)
        try:
            chain(work.s(head, 2.0), follow.s(tails[1]), app=environment.app).apply_async()
        except Exception as raised:
            error = type(raised).__name__
        environment.wait_until_settled()
        ended = sum(bool(environment.ledger.completions(tail)) for tail in tails)
        heads = len(environment.ledger.completions(head))
        text = "both chains end" if ended == 2 else error or "the second chain is lost"
        return Cell(text, {"chains ended": ended, "heads run": heads, "error": error})
