"""Many at once: one begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from tests.store.record_harness import Answer, RecordHarness

CONTENDERS = 32


def run_sync(harness: RecordHarness) -> list[Answer]:
    gun = Barrier(CONTENDERS)

    def begin(number: int) -> Answer:
        gun.wait()
        return harness.begin(task_id=f"task-{number}")

    with ThreadPoolExecutor(CONTENDERS) as pool:
        return list(pool.map(begin, range(CONTENDERS)))


def test_one_begins_and_all_others_are_held(harness: RecordHarness) -> None:
    answers = run_sync(harness)

    winner = next(answer for answer in answers if answer.case == "begun")
    losers = [answer for answer in answers if answer is not winner]
    assert all(answer.case == "held" for answer in losers)
    assert all(answer.record == winner.record for answer in losers)


def test_one_takes_over(harness: RecordHarness) -> None:
    harness.expired()

    answers = run_sync(harness)

    cases = sorted(answer.case for answer in answers)
    assert cases == ["begun"] + ["held"] * (CONTENDERS - 1)
    assert {answer.there.attempt for answer in answers} == {2}


def test_the_first_outcome_wins(harness: RecordHarness) -> None:
    tokens = [harness.started().token]
    for _ in range(CONTENDERS - 1):
        harness.abandon()
        tokens.append(harness.started(max_attempts=255).token)

    with ThreadPoolExecutor(CONTENDERS) as pool:
        answers = list(pool.map(harness.complete, tokens))

    assert [answer.case for answer in answers] == ["lost"] * (CONTENDERS - 1) + ["ok"]
