"""``explain``: from a call to its key, and what it would meet."""

from __future__ import annotations

from typing import Any

import click

from celery_idempotent.cli import console as screen
from celery_idempotent.cli.command import (
    FriendlyCommand,
    arguments_of,
    gated_tasks,
    json_option,
    print_json,
)
from celery_idempotent.cli.target import look
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.key.explanation import Argument, Explanation
from celery_idempotent.key.rule import TASK_ID
from celery_idempotent.monitoring import json_format
from celery_idempotent.monitoring.prediction import Prediction, predict
from celery_idempotent.store.record_query import RecordView


@click.command(cls=FriendlyCommand)
@click.argument("task")
@click.argument("arguments", nargs=-1, metavar="[ARGS] [KWARGS]")
@click.option("--key", "own_key", help="A key that the call carries itself.")
@click.option("--task-id", help="For the rule TASK_ID: the id of the message.")
@json_option
@click.pass_obj
def explain(
    obj: Any,
    task: str,
    arguments: tuple[str, ...],
    own_key: str | None,
    task_id: str | None,
    as_json: bool,
) -> None:
    """Tell how a call comes to its key, and what it would meet now.

    \b
    celery -A shop idempotency explain shop.charge '[42]' '{"amount": 999}'
    """
    by_name = {one.name: one for one in gated_tasks(obj.app)}
    if task not in by_name:
        raise click.ClickException(f"{task!r} is no idempotent task of this app")
    args, kwargs = arguments_of(arguments)
    configured = by_name[task].idempotency_configuration
    if configured.settings.key is TASK_ID and not (own_key or task_id):
        raise click.UsageError(f"{task} goes by TASK_ID: give --task-id")
    try:
        told = configured.rule.explain(args, kwargs, task_id=task_id, explicit=own_key)
    except IdempotencyError:
        raise
    except TypeError as error:
        raise click.UsageError(f"{task}: these arguments do not fit: {error}") from None
    record_view = look(configured.executor.store, told.key)
    meets = predict(told.key, configured.settings, record_view)
    name = configured.executor.store.name(told.key)
    if as_json:
        print_json(_document(by_name[task], told, name, record_view, meets))
    else:
        _print(by_name[task], told, name, meets)


def _document(
    task: IdempotentTaskLike,
    told: Explanation,
    name: str,
    record_view: RecordView | None,
    meets: Prediction,
) -> dict[str, Any]:
    return {
        "task": task.name,
        "rule": told.rule,
        "arguments": [
            {
                "name": one.name,
                "canonical": _text(one.form),
                "at_default": one.at_default,
                "in_key": one.in_key,
            }
            for one in told.arguments
        ],
        "form": _text(told.form),
        "key": str(told.key),
        "fingerprint": told.key.fingerprint.hex(),
        "redis_name": name,
        "record": None if record_view is None else json_format.of_view(record_view),
        "meets": meets._asdict(),
    }


def _print(task: IdempotentTaskLike, told: Explanation, name: str, meets: Prediction) -> None:
    from rich.text import Text

    console = screen.console()
    table = screen.table("ARGUMENT", "CANONICAL FORM", "PART IN THE KEY", "IN THE FINGERPRINT")
    for one in told.arguments:
        in_key, in_fingerprint = _parts(one, told)
        table.add_row(Text(one.name), Text(_text(one.form) or "has none"), in_key, in_fingerprint)
    grid = screen.pairs()
    lines = (
        ("task", task.name),
        ("rule", told.rule),
        ("form", _text(told.form) or ""),
        ("key", str(told.key)),
        ("fingerprint", told.key.fingerprint.hex() or "none: the key covers all there is"),
        ("in Redis", name),
        ("meets", meets.sentence),
    )
    for label, text in lines:
        grid.add_row(label, Text(text))
    if told.arguments:
        console.print(table)
    console.print(grid)


def _parts(one: Argument, told: Explanation) -> tuple[str, str]:
    in_key = {True: "yes", False: "no", None: "as the callable decides"}[one.in_key]
    if not told.key.fingerprint:
        return ("no: at its default" if one.at_default and one.in_key else in_key), "no"
    return in_key, "no: at its default" if one.at_default else "yes"


def _text(form: bytes | None) -> str | None:
    return None if form is None else form.decode(errors="backslashreplace")
