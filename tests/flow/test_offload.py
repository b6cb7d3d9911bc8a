"""Offloaded results, errors and steps exist as long as a record refers to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import IdempotentTask, KeyReusedError, State
from celery_idempotent.core.store.commands import Command
from celery_idempotent.core.store.scripts import Reply
from celery_idempotent.errors import ResultNotStoredError, StoreUnavailableError
from celery_idempotent.testing import IsolatedRecords
from tests.flow.deliveries import Make, Offer, begin_elsewhere

LARGE = "x" * 2000


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


@pytest.fixture
def offloading(task: Make, directory: Path) -> Make:
    """Tasks that offload payloads of more than 1000 bytes to `directory`."""

    def make(body: Callable[..., Any], **options: Any) -> IdempotentTask:
        return task(body, max_result_size=1000, offload_backend=f"file://{directory}", **options)

    return make


def object_names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def large(self: IdempotentTask, order: str) -> str:
    return f"{LARGE}{order}"


def test_a_duplicate_gets_the_offloaded_result(offloading: Make, directory: Path) -> None:
    task = offloading(large)

    assert task.delay("1").get() == task.delay("1").get() == f"{LARGE}1"
    assert len(object_names(directory)) == 1
    record = task.idempotency_record("1")
    assert len(record.body) < 200
    assert record.result == f"{LARGE}1"


def test_forgetting_the_record_deletes_the_object(offloading: Make, directory: Path) -> None:
    task = offloading(large)
    task.delay("1")
    task.delay("2")

    assert task.idempotency_forget("1") is True
    assert task.idempotency_forget("1") is False

    assert object_names(directory) == [task.idempotency_record("2").body.decode()]


def test_without_offloading_forgetting_is_one_round_trip(task: Make, monkeypatch: Any) -> None:
    charge = task(large)
    charge.delay("1")
    store = charge.idempotency_configuration.executor.store
    execute = store.execute
    scripts: list[str] = []

    async def record_script(command: Command) -> Reply:
        scripts.append(command.script.name)
        return await execute(command)

    monkeypatch.setattr(store, "execute", record_script)

    assert charge.idempotency_forget("1", force=True) is True
    assert scripts == ["forget"]


@pytest.mark.parametrize(
    ("is_gone", "error", "message"),
    [
        (True, ResultNotStoredError, "no longer in idempotency_offload_backend"),
        (False, StoreUnavailableError, "cannot be read for the result of"),
    ],
    ids=["gone", "unavailable"],
)
def test_if_the_object_cannot_be_read_the_call_fails_and_nothing_runs(
    offloading: Make, directory: Path, is_gone: bool, error: type[Exception], message: str
) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        runs.append(order)
        return LARGE

    runs: list[str] = []
    task = offloading(body, on_store_error="run")
    task.delay("1")
    (path,) = directory.iterdir()
    path.unlink()
    if not is_gone:
        path.mkdir()  # Backends raise different errors. For this one, a directory is one.

    with pytest.raises(error, match=message):
        task.delay("1")
    assert runs == ["1"]
    assert task.idempotency_forget("1")
    if is_gone:
        assert task.delay("1").get() == LARGE


def test_if_the_storage_fails_the_record_has_no_value(offloading: Make, directory: Path) -> None:
    task = offloading(large)
    directory.rmdir()

    assert task.delay("1").get() == f"{LARGE}1"
    with pytest.raises(ResultNotStoredError, match="could not store it"):
        task.delay("1")


def test_an_error_that_ends_the_key_is_offloaded(offloading: Make, directory: Path) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        raise ValueError(LARGE)

    task = offloading(body, replay_errors=(ValueError,))

    for _ in range(2):
        with pytest.raises(ValueError, match=LARGE):
            task.delay("1")
    assert len(object_names(directory)) == 1
    assert task.idempotency_forget("1")
    assert object_names(directory) == []


def test_a_result_that_is_refused_leaves_no_object(
    offloading: Make, directory: Path, idempotency: IsolatedRecords
) -> None:
    def body(self: IdempotentTask, order: str) -> str:
        if self.idempotency.recovered:
            return f"{LARGE} first"
        idempotency.expire_lease(task, order)
        assert task.delay(order).get() == f"{LARGE} first"
        return f"{LARGE} late"

    task = offloading(body)

    assert task.delay("1").get() == f"{LARGE} first"
    assert object_names(directory) == [task.idempotency_record("1").body.decode()]


class TestSteps:
    def test_that_are_offloaded_survive_an_error_and_are_deleted_with_the_outcome(
        self, offloading: Make, directory: Path
    ) -> None:
        done, seen = [], []

        def body(self: IdempotentTask, order: str) -> str:
            for name in ("a", "b/c"):
                self.idempotency.step(name, lambda name=name: done.append(name) or LARGE + name)
            if len(seen) == 0:
                seen.append(len(object_names(directory)))
                raise ValueError("once")
            return "small"

        task = offloading(body)

        with pytest.raises(ValueError, match="once"):
            task.delay("1")
        assert task.delay("1").get() == "small"

        assert done == ["a", "b/c"]
        assert seen == [2]
        assert object_names(directory) == []

    def test_whose_objects_are_gone_fail_the_call(self, offloading: Make, directory: Path) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            self.idempotency.step("a", lambda: LARGE)
            for path in directory.iterdir():
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

    @pytest.mark.parametrize("is_final", [True, False], ids=["error", "forgotten record"])
    def test_are_deleted_with_an_error_that_ends_the_key_or_a_forgotten_record(
        self, offloading: Make, directory: Path, is_final: bool
    ) -> None:
        def body(self: IdempotentTask, order: str) -> str:
            self.idempotency.step("a", lambda: LARGE)
            raise ValueError("not now")

        task = offloading(body, replay_errors=(ValueError,) if is_final else ())
        with pytest.raises(ValueError, match="not now"):
            task.delay("1")
        assert (task.idempotency_record("1").state is State.FAILED) is is_final
        assert len(object_names(directory)) == (0 if is_final else 1)

        assert task.idempotency_forget("1")

        assert object_names(directory) == []


def test_other_arguments_leave_the_first_outcome(offloading: Make, directory: Path) -> None:
    def body(self: IdempotentTask, order: str, amount: int) -> str:
        return LARGE

    task = offloading(body, key="{order}")
    task.delay("1", 1)

    with pytest.raises(KeyReusedError):
        task.delay("1", 2)
    assert task.delay("1", 1).get() == LARGE
    assert len(object_names(directory)) == 1


def test_kept_messages_of_one_key_have_objects_of_their_own(offer: Offer, directory: Path) -> None:
    options = {"max_result_size": 1000, "offload_backend": f"file://{directory}"}
    deliveries = offer(
        options={f"idempotency_{name}": value for name, value in options.items()},
        idempotency_on_conflict="reject",
    )
    begin_elsewhere(deliveries.task, LARGE)

    ends = [deliveries.deliver(deliveries.publish(LARGE)).state for _ in range(2)]

    assert ends == ["dropped"] * 2
    assert len(object_names(directory)) == 2
