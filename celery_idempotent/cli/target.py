"""Which record an operator means: by key, by task id, or by task and arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from celery_idempotent.cli.command import arguments_of
from celery_idempotent.configuration import app_tasks as gated
from celery_idempotent.configuration.app_tasks import Gated
from celery_idempotent.errors import CorruptRecordError
from celery_idempotent.key.key import Key
from celery_idempotent.store.record_query import Choice, Sight, sights
from celery_idempotent.store.record_store import RecordStore

WORDS_HELP = """\b
A record is named by
  its key        shop.charge:PN0MlSPt3FmEwTzQ5dHvBQ (with or without the prefix)
  its task id    5e1d…  (looks through all records)
  its task and the call's arguments, as JSON:  shop.charge '[42]' '{"amount": 999}'
  its task and the call's own key:             shop.charge --key req-7f3a"""


def meant(tasks: Sequence[Gated], words: tuple[str, ...], own_key: str | None) -> list[Sight]:
    """The records that `words` name.

    Raises:
        ClickException: if there is no record of that name.
        UsageError: if the words name nothing.
    """
    by_name = {task.name: task for task in tasks}
    first = by_name.get(words[0])
    if first is not None:
        key = _key_of_call(first, words[1:], own_key)
        sight = look(first.idempotency_configuration.gate.store, key)
        if sight is None:
            raise click.ClickException(f"{key} is absent: a call with these arguments would run")
        return [sight]
    if own_key is not None:
        raise click.UsageError("--key goes with a task: shop.charge --key req-7f3a")
    return [_one(tasks, word) for word in words]


def _key_of_call(task: Gated, words: tuple[str, ...], own_key: str | None) -> Key:
    args, kwargs = arguments_of(words)
    if own_key is not None:
        kwargs["idempotency_key"] = own_key
    try:
        return task.idempotency_key_of(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"{task.name}: these arguments do not fit: {error}") from None


def _one(tasks: Sequence[Gated], word: str) -> Sight:
    for store in _likely_first(tasks, word):
        with store.watch() as watch:
            key = watch.key_of(word)
        sight = look(store, key) if key else None
        if sight is not None:
            return sight
    if key is not None:
        raise click.ClickException(f"{word} is absent")
    if not word.isascii() or "[" in word or "{" in word:
        raise click.UsageError(f"{word!r} is no task of this app, no key and no task id")
    found = next(_with_task_id(tasks, word), None)
    if found is None:
        raise click.ClickException(f"no record has the task id {word}, and no task that name")
    return found


def _likely_first(tasks: Sequence[Gated], word: str) -> list[RecordStore]:
    """The stores of the tasks, those of the task that `word` begins with first."""
    return gated.stores(sorted(tasks, key=lambda task: f"{task.name}:" not in word))


def _with_task_id(tasks: Sequence[Gated], task_id: str) -> Iterator[Sight]:
    for page in sights(gated.stores(tasks), Choice()):
        for sight in page:
            if sight.record is not None and sight.record.task_id == task_id:
                yield sight


def look(store: RecordStore, key: Key) -> Sight | None:
    """What is under `key` now."""
    with store.watch() as watch:
        found = watch.look_up([key]).get(key)
        if found is None:
            return None
        try:
            record = watch.read(found)
        except CorruptRecordError:
            record = None
        return Sight(key, record, found.now, store)
