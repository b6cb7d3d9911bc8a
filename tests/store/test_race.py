"""Concurrent calls: one of them begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from tests.store.record_harness import RecordHarness, RecordReply

CONTENDERS = 32


def begin_concurrently(harness: RecordHarness) -> list[RecordReply]:
    gun = Barrier(CONTENDERS)

    def begin(number: int) -> RecordReply:
        gun.wait()
        return harness.begin(task_id=f"task-{number}")

    with ThreadPoolExecutor(CONTENDERS) as pool:
        return list(pool.map(begin, range(CONTENDERS)))


def test_one_begins_and_all_others_are_held(harness: RecordHarness) -> None:
    replies = begin_concurrently(harness)

    winner = next(reply for reply in replies if reply.case == "begun")
    losers = [reply for reply in replies if reply is not winner]
    assert all(reply.case == "held" for reply in losers)
    assert all(reply.record == winner.record for reply in losers)


def test_one_takes_over(harness: RecordHarness) -> None:
    harness.dead()

    replies = begin_concurrently(harness)

    cases = sorted(reply.case for reply in replies)
    assert cases == ["begun"] + ["held"] * (CONTENDERS - 1)
    assert {reply.stored.attempt for reply in replies} == {2}


def test_the_first_outcome_wins(harness: RecordHarness) -> None:
    tokens = [harness.started().token]
    for _ in range(CONTENDERS - 1):
        harness.abandon()
        tokens.append(harness.started().token)

    with ThreadPoolExecutor(CONTENDERS) as pool:
        replies = list(pool.map(harness.complete, tokens))

    assert [reply.case for reply in replies] == ["lost"] * (CONTENDERS - 1) + ["ok"]
