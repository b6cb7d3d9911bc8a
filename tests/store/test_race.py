"""Many at once: one begins."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from tests.store.record_harness import Answer, Scene

CONTENDERS = 32


def at_once(scene: Scene) -> list[Answer]:
    gun = Barrier(CONTENDERS)

    def begin(number: int) -> Answer:
        gun.wait()
        return scene.begin(task_id=f"task-{number}")

    with ThreadPoolExecutor(CONTENDERS) as pool:
        return list(pool.map(begin, range(CONTENDERS)))


def test_one_begins_and_all_others_see_it(scene: Scene) -> None:
    answers = at_once(scene)

    winner = next(answer for answer in answers if answer.case == "begun")
    losers = [answer for answer in answers if answer is not winner]
    assert all(answer.case == "held" for answer in losers)
    assert all(answer.record == winner.record for answer in losers)


def test_one_takes_over(scene: Scene) -> None:
    scene.expired()

    answers = at_once(scene)

    cases = sorted(answer.case for answer in answers)
    assert cases == ["begun"] + ["held"] * (CONTENDERS - 1)
    assert {answer.there.attempt for answer in answers} == {2}


def test_the_first_outcome_wins(scene: Scene) -> None:
    tokens = [scene.started().token]
    for _ in range(CONTENDERS - 1):
        scene.abandon()
        tokens.append(scene.started(max_attempts=255).token)

    with ThreadPoolExecutor(CONTENDERS) as pool:
        answers = list(pool.map(scene.complete, tokens))

    assert [answer.case for answer in answers] == ["lost"] * (CONTENDERS - 1) + ["ok"]
