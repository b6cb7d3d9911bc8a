"""Which record an operator means: by key, by task id, or by task and arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from celery_idempotent.cli.command import arguments_of
from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.key.key import Key
from celery_idempotent.store.record_query import RecordFilter, RecordView, record_views
from celery_idempotent.store.record_store import RecordStore

WORDS_HELP = """\b
A record is named by
  its key        shop.charge:PN0MlSPt3FmEwTzQ5dHvBQ (with or without the prefix)
  its task id    5e1d…  (looks through all records)
  its task and the call's arguments, as JSON:  shop.charge '[42]' '{"amount": 999}'
  its task and the call's own key:             shop.charge --key req-7f3a"""


def resolve_records(
    tasks: Sequence[IdempotentTaskLike], names: tuple[str, ...], own_key: str | None
) -> list[RecordView]:
    """The records that `words` name.

    Raises:
        ClickException: if there is no record of that name.
        UsageError: if the words name nothing.
    """
    by_name = {task.name: task for task in tasks}
    first = by_name.get(names[0])
    if first is not None:
        key = _key_of_call(first, names[1:], own_key)
        record_view = look(first.idempotency_configuration.executor.store, key)
        if record_view is None:
            raise click.ClickException(f"{key} is absent: a call with these arguments would run")
        return [record_view]
    if own_key is not None:
        raise click.UsageError("--key goes with a task: shop.charge --key req-7f3a")
    return [_one(tasks, word) for word in names]


def _key_of_call(task: IdempotentTaskLike, names: tuple[str, ...], own_key: str | None) -> Key:
    args, kwargs = arguments_of(names)
    if own_key is not None:
        kwargs["idempotency_key"] = own_key
    try:
        return task.idempotency_key_of(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"{task.name}: these arguments do not fit: {error}") from None


def _one(tasks: Sequence[IdempotentTaskLike], word: str) -> RecordView:
    for store in _likely_first(tasks, word):
        with store.open_reader() as open_reader:
            key = open_reader.key_of(word)
        record_view = look(store, key) if key else None
        if record_view is not None:
            return record_view
    if key is not None:
        raise click.ClickException(f"{word} is absent")
    if not word.isascii() or "[" in word or "{" in word:
        raise click.UsageError(f"{word!r} is no task of this app, no key and no task id")
    found = next(_with_task_id(tasks, word), None)
    if found is None:
        raise click.ClickException(f"no record has the task id {word}, and no task that name")
    return found


def _likely_first(tasks: Sequence[IdempotentTaskLike], word: str) -> list[RecordStore]:
    """The stores of the tasks, those of the task that `word` begins with first."""
    return app_tasks.stores(sorted(tasks, key=lambda task: f"{task.name}:" not in word))


def _with_task_id(tasks: Sequence[IdempotentTaskLike], task_id: str) -> Iterator[RecordView]:
    for page in record_views(app_tasks.stores(tasks), RecordFilter()):
        for record_view in page:
            if record_view.record is not None and record_view.record.task_id == task_id:
                yield record_view


def look(store: RecordStore, key: Key) -> RecordView | None:
    """What is under `key` now."""
    with store.open_reader() as open_reader:
        found = open_reader.get([key]).get(key)
        if found is None:
            return None
        try:
            record = open_reader.read(found)
        except CorruptRecordError:
            record = None
        return RecordView(key, record, found.now, store)
