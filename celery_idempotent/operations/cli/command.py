"""Shared by the commands: tasks, one-line errors, options, JSON, and records by their names."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import click

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.key import KEY_OPTION, Key
from celery_idempotent.core.printable import did_you_mean, one_line, plural
from celery_idempotent.core.record import State
from celery_idempotent.core.store.scan import key_of
from celery_idempotent.errors import IdempotencyError, KeyRuleError
from celery_idempotent.operations.calls import formatting
from celery_idempotent.operations.calls.lookup import Target, find_outcome, find_record
from celery_idempotent.operations.doctor.tasks import check_bases
from celery_idempotent.operations.records.query import (
    RecordFilter,
    find_label,
    find_task,
    read_view,
    record_views,
)
from celery_idempotent.operations.records.reader import RecordView
from celery_idempotent.sql.database import Database

Tasks = list[IdempotentTaskLike]
F = TypeVar("F", bound=Callable[..., Any])


class AppCommand(click.Command):
    """A command that receives the app's tasks as `tasks`, and its option --json as `as_json`.

    Errors of this package are printed in one line, without a traceback or control characters: they
    may quote untrusted text, such as a task id.
    """

    def __init__(self, *args: Any, has_json: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if has_json:
            option = ["--json", "as_json"]
            self.params.append(click.Option(option, is_flag=True, help="Print JSON, for programs."))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command.

        Raises:
            UsageError, ClickException: the latter also replaces an IdempotencyError.
        """
        app = ctx.obj.app
        try:
            # Loads the app's task modules, as a worker does.
            ctx.params["tasks"] = app_tasks.load(app)
            if not ctx.params["tasks"]:
                plain = [finding.line for finding in check_bases(app)]
                reasons = plain or ["name your app with -A: celery -A shop idempotency …"]
                raise click.ClickException(
                    f"the app {app.main!r} has no idempotent task; {'; '.join(reasons)}"
                )
            return super().invoke(ctx)
        except click.UsageError as error:
            raise click.UsageError(one_line(error.format_message()), error.ctx) from error
        except KeyRuleError as error:
            raise click.ClickException(one_line(formatting.key_error(error))) from error
        except (click.ClickException, IdempotencyError) as error:
            raise click.ClickException(one_line(str(error))) from error


def _duration(ctx: click.Context, param: click.Parameter, text: str | None) -> timedelta | None:
    """Parses `text`; without a unit, it is in seconds."""
    try:
        return None if text is None else formatting.parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Returns a decorator that adds `options` to a command, in this order."""
    return lambda command: functools.reduce(lambda f, option: option(f), reversed(options), command)


#: The options that select records; their values are the arguments of a `RecordFilter`.
filter_options = with_options(
    click.option(
        "--state",
        type=click.Choice([*(state.value for state in State), "CORRUPT"], case_sensitive=False),
        help="Only records in this state.",
    ),
    click.option("--task", help="Only records of this task."),
    click.option("--label", help="Only records whose label contains this text, in any case."),
    click.option(
        "--older-than",
        metavar="DURATION",
        callback=_duration,
        help="Only records that have been in their state for longer: 90s, 10m, 2h, 1d.",
    ),
)


#: The explicit key of a call, if any.
CallKey = str | tuple[str, ...] | None

key_option = click.option(
    "--key",
    "explicit_key",
    multiple=True,
    callback=lambda ctx, param, parts: parts if len(parts) > 1 else next(iter(parts), None),
    help="The explicit key of the call; repeat it for a tuple.",
)

database_option = click.option(
    "--database",
    metavar="NAME",
    callback=lambda ctx, param, name: name and Database(name),
    help="The database of functions: a Django alias, or the path of an engine.",
)

timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Seconds to wait for the workers' counters; 0 to skip them.",
)


#: The parameters of a command that changes records, which are selected by name or by a filter.
record_options = with_options(
    click.argument("names", nargs=-1, metavar="RECORD…"),
    key_option,
    filter_options,
    click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
)


def confirm(question: str, subjects: Sequence[str], noun: str) -> None:
    """Asks about the only one of `subjects`, or about their number; aborts unless confirmed."""
    subject = subjects[0] if len(subjects) == 1 else plural(len(subjects), noun)
    click.confirm(one_line(question.format(subject)), abort=True, err=True)


#: With more records than this, only the number of each case is printed.
_MAX_LINES = 20


def end(
    cases: Mapping[str, str], messages: Mapping[str, str], good: Container[str], *, as_json: bool
) -> None:
    """Prints what became of each key, and exits with 1 unless all cases are `good`."""
    if as_json:
        print_json([{"key": key, "case": case} for key, case in cases.items()])
    elif not cases:
        click.echo("No matching records.")
    elif len(cases) <= _MAX_LINES:
        for key, case in cases.items():
            click.echo(one_line(f"{key}: {messages.get(case, case)}"))
    else:
        numbers = Counter(cases.values())
        for case in (case for case in {**messages, **numbers} if numbers[case]):
            click.echo(one_line(f"{numbers[case]:,} {messages.get(case, case)}"))
    raise SystemExit(0 if all(case in good for case in cases.values()) else 1)


def print_json(document: Any, *, indent: int | None = 2) -> None:
    """Prints one JSON document in ASCII, on one line where `indent` is None."""
    click.echo(json.dumps(document, indent=indent, default=str))


def parse_arguments(texts: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Parses a call's arguments: ``'[42]'``, ``'{"amount": 999}'`` or both, in this order.

    Raises:
        UsageError: if `texts` is something else.
    """
    values = [*map(_parse, texts)]
    args = values.pop(0) if values and isinstance(values[0], list) else []
    kwargs = values.pop(0) if values else {}
    if values or not isinstance(kwargs, dict):
        raise click.UsageError("give the arguments as a JSON list, a JSON object, or both")
    return args, kwargs


def _parse(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, (list, dict)):
        example = """'{"amount": 999}'"""
        raise click.UsageError(f"{text!r} is not a JSON list, such as '[42]', or object: {example}")
    return value


RECORD_HELP = """\b
RECORD is one of:
  a key                      shop.charge:PN0MlSPt3FmEwTzQ5dHvBQ (with or without the prefix)
                             shop.charge:~XUu_BHoPn0pnw_7WY52VtA (an explicit key)
  a task id                  5e1d…  (of a duplicate, or of the executed task: this scans
                             all records)
  a label                    "order 42" (scans all records)
  a task and the arguments that its key rule reads, as JSON
                             shop.charge '[42]', or shop.charge '{"order_id": 42}'
  a task and the call's explicit key
                             shop.charge --key req-7f3a
                             shop.charge --key acme --key req-7f3a (a tuple)"""


def resolve_records(
    tasks: Sequence[IdempotentTaskLike],
    names: tuple[str, ...],
    explicit_key: CallKey,
    *,
    may_be_absent: bool = False,
    **selected: Any,
) -> list[Target]:
    """Returns the records, or rows without a record, that `names` refer to.

    Args:
        selected: fields of a `RecordFilter`, which selects the records if there are no names.
        may_be_absent: also return the key in a duplicate's reference, if record and row are gone.

    Raises:
        ClickException: if a name leads to neither.
        UsageError: if arguments do not fit the task, or `explicit_key` is given without a task.
    """
    if not names:
        pages = record_views(app_tasks.stores(tasks), RecordFilter(**selected))
        return [Target(view.key, view) for page in pages for view in page]
    task = next((task for task in tasks if task.name == names[0]), None)
    if task is not None:
        key = _key_of_call(task, names[1:], explicit_key)
        view = read_view(task.idempotency_configuration.executor.store, key)
        if view is None and find_outcome(tasks, key) is None:
            raise click.ClickException(f"{key} is absent: a call with these arguments would run")
        return [Target(key, view)]
    if explicit_key is not None:
        raise click.UsageError("--key needs a task: shop.charge --key req-7f3a")
    return [target for name in names for target in _find(tasks, name, may_be_absent)]


def _key_of_call(task: IdempotentTaskLike, texts: tuple[str, ...], explicit_key: CallKey) -> Key:
    args, kwargs = parse_arguments(texts)
    if explicit_key is not None:
        kwargs[KEY_OPTION] = explicit_key
    try:
        return task.idempotency_key_of(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _find(tasks: Sequence[IdempotentTaskLike], name: str, may_be_absent: bool) -> list[Target]:
    """Returns what a name stands for: a key, a task id or a label, which several records may have.

    Args:
        may_be_absent: whether the task id of a duplicate also stands for a key without a record.

    Raises:
        click.ClickException: if it stands for nothing.
    """
    view = find_record(tasks, name)
    if view is not None:
        return [Target(view.key, view)]
    outcome = find_outcome(tasks, name)
    if outcome is not None:
        return [Target(outcome.key, None)]
    stores = app_tasks.stores(tasks)
    known = [task.name for task in tasks]
    task_name = (name.rpartition(":")[0] or name).rpartition(":")[2]
    hint = "" if task_name in known else did_you_mean(task_name, known)
    if any(key_of(name, store.config.prefix) for store in stores):
        raise click.ClickException(f"{name} is absent{hint}")
    shown = one_line(name)
    found = find_task(stores, name)
    if isinstance(found, RecordView):
        return [Target(found.key, found, duplicate=name if found.reference else "")]
    if found is None and (views := find_label(stores, name)):
        return [Target(view.key, view) for view in views]
    if found is None:
        what = "key" if ":" in name else "task of this app"
        raise click.ClickException(
            f"{shown} is not a {what}, and no record has the task id or label {shown}{hint}"
        )
    keys = (key_of(found.key, store.config.prefix) for store in stores if may_be_absent)
    if (key := next(keys, None)) is not None:
        return [Target(key, None, duplicate=name)]
    raise click.ClickException(
        f"{shown} {formatting.became_text(found)}, under {found.key}, which is absent now"
    )
