"""Results and steps outside Redis: there as long as a record points to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_idempotent import (
    IdempotentTask,
    KeyReusedError,
    ResultNotStoredError,
    State,
    StoreUnavailableError,
)
from celery_idempotent.pytest_plugin import Idempotency

Make = Callable[..., IdempotentTask]

LARGE = "x" * 2000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


@pytest.fixture
def offloading(task: Make, place: Path) -> Make:
    """Tasks that keep more than 1000 bytes in `place`."""

    def make(body: Callable[..., Any], **options: Any) -> IdempotentTask:
        return task(body, max_result_size=1000, offload_backend=f"file://{place}", **options)

    return make


def names_in(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()]


def large(self: IdempotentTask, order: str) -> str:
    return f"{LARGE}{order}"


def test_a_duplicate_gets_the_large_result_too(offloading: Make, place: Path) -> None:
    task = offloading(large)

    assert task.delay("1").get() == task.delay("1").get() == f"{LARGE}1"
    assert len(names_in(place)) == 1
    record = task.idempotency_record("1")
    assert record is not None
    assert len(record.body) < 200
    assert record.result == f"{LARGE}1"


def test_forgetting_the_record_forgets_the_object(offloading: Make, place: Path) -> None:
    task = offloading(large)
    task.delay("1")
    task.delay("2")

    assert task.idempotency_forget("1") is True
    assert task.idempotency_forget("1") is False

    record = task.idempotency_record("2")
    assert record is not None
    assert names_in(place) == [record.body.decode()]


def test_an_object_that_is_gone_is_told_and_nothing_runs(offloading: Make, place: Path) -> None:
    runs = []

    def body(self: IdempotentTask, order: str) -> str:
        runs.append(order)
        return LARGE

    task = offloading(body)
    task.delay("1")
    for path in place.iterdir():
        path.unlink()

    with pytest.raises(ResultNotStoredError, match="no longer in idempotency_offload_backend"):
        task.delay("1")
    assert runs == ["1"]
    assert task.idempotency_forget("1")
    assert task.delay("1").get() == LARGE


def test_a_depot_that_is_away_is_told_and_nothing_runs(offloading: Make, place: Path) -> None:
    runs = []

    def body(self: IdempotentTask, order: str) -> str:
        runs.append(order)
        return LARGE

    task = offloading(body, on_store_error="run")
    task.delay("1")
    # Every backend says it differently; this one's client is a directory where a file should be.
    (found,) = place.iterdir()
    found.unlink()
    found.mkdir()

    with pytest.raises(StoreUnavailableError, match="cannot be read for the result of"):
        task.delay("1")
    assert runs == ["1"]
    found.rmdir()


def test_a_depot_that_does_not_take_it_leaves_the_fact(offloading: Make, place: Path) -> None:
    task = offloading(large)
    place.rmdir()

    assert task.delay("1").get() == f"{LARGE}1"
    with pytest.raises(ResultNotStoredError, match="could not store it"):
        task.delay("1")


def test_an_error_that_ends_the_key_may_be_large(offloading: Make, place: Path) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        raise ValueError(LARGE)

    task = offloading(body, replay_errors=(ValueError,))

    for _ in range(2):
        with pytest.raises(ValueError, match=LARGE):
            task.delay("1")
    assert len(names_in(place)) == 1
    assert task.idempotency_forget("1")
    assert names_in(place) == []


def test_a_result_that_came_too_late_leaves_no_object(
    offloading: Make, place: Path, idempotency: Idempotency
) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        if self.idempotency.recovered:
            return f"{LARGE} first"
        idempotency.expire_lease(task, order)
        assert task.delay(order).get() == f"{LARGE} first"
        return f"{LARGE} late"

    task = offloading(body)

    assert task.delay("1").get() == f"{LARGE} first"
    record = task.idempotency_record("1")
    assert record is not None
    assert names_in(place) == [record.body.decode()]


class TestSteps:
    def test_that_are_large_survive_an_error_and_go_with_the_outcome(
        self, offloading: Make, place: Path
    ) -> None:
        done, seen = [], []

        def body(self: IdempotentTask, order: str) -> str:
            for name in ("a", "b/c"):
                self.idempotency.step(name, lambda name=name: done.append(name) or LARGE + name)
            if len(seen) == 0:
                seen.append(len(names_in(place)))
                raise ValueError("once")
            return "small"

        task = offloading(body)

        with pytest.raises(ValueError, match="once"):
            task.delay("1")
        assert task.delay("1").get() == "small"

        assert done == ["a", "b/c"]
        assert seen == [2]
        assert names_in(place) == []

    def test_that_are_gone_are_told(self, offloading: Make, place: Path) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            self.idempotency.step("a", lambda: LARGE)
            for path in place.iterdir():
                path.unlink()
            raise ValueError("each time")

        task = offloading(body)
        with pytest.raises(ValueError, match="each time"):
            task.delay("1")

        with pytest.raises(ResultNotStoredError, match="step 'a' of .* no longer in idempotency"):
            task.delay("1")
        assert task.idempotency_forget("1")
        with pytest.raises(ValueError, match="each time"):
            task.delay("1")

    def test_go_with_an_error_that_ends_the_key(self, offloading: Make, place: Path) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            self.idempotency.step("a", lambda: LARGE)
            raise ValueError("for good")

        task = offloading(body, replay_errors=(ValueError,))
        with pytest.raises(ValueError, match="for good"):
            task.delay("1")

        record = task.idempotency_record("1")
        assert record is not None
        assert record.state is State.FAILED
        assert names_in(place) == []

    def test_go_with_a_forgotten_record(self, offloading: Make, place: Path) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            self.idempotency.step("a", lambda: LARGE)
            raise ValueError("not now")

        task = offloading(body)
        with pytest.raises(ValueError, match="not now"):
            task.delay("1")
        assert len(names_in(place)) == 1

        assert task.idempotency_forget("1")

        assert names_in(place) == []


def test_a_backend_that_is_none_is_refused_at_start(task: Make) -> None:
    with pytest.raises(ImproperlyConfigured, match="idempotency_offload_backend"):
        task(large, offload_backend="rpc://")


def test_the_first_outcome_stays_where_it_is_under_other_arguments(
    offloading: Make, place: Path
) -> None:
    def body(self: IdempotentTask, order: str, amount: int) -> str:
        return LARGE

    task = offloading(body, key="{order}")
    task.delay("1", 1)

    with pytest.raises(KeyReusedError):
        task.delay("1", 2)
    assert task.delay("1", 1).get() == LARGE
    assert len(names_in(place)) == 1
