"""What all commands share: the app, its tasks, one sentence for each fault, options."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import click
from celery import Celery

from celery_idempotent.configuration import app_tasks
from celery_idempotent.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.errors import IdempotencyError

F = TypeVar("F", bound=Callable[..., Any])


class FriendlyCommand(click.Command):
    """A command that tells what is wrong in one sentence, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except IdempotencyError as error:
            if isinstance(error, click.ClickException):
                raise
            raise click.ClickException(str(error)) from error


def loaded(app: Celery) -> Celery:
    """`app` with all its tasks, as a worker would have them."""
    app.loader.import_default_modules()
    app.finalize()
    return app


def gated_tasks(app: Celery) -> list[IdempotentTaskLike]:
    """The app's idempotent tasks.

    Raises:
        ClickException: if there is none: most often `-A` was forgotten.
    """
    found = app_tasks.tasks(loaded(app))
    if not found:
        raise click.ClickException(
            f"the app {app.main!r} has no idempotent task; name yours: celery -A shop idempotency …"
        )
    return found


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """``90``, ``90s``, ``10m``, ``2h``, ``1d``: as a timedelta."""

    name = "duration"
    _UNITS: ClassVar = {"": "seconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Read it."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no duration: write 90s, 10m, 2h or 1d", param, ctx)
        try:
            return timedelta(**{self._UNITS[match[2]]: float(match[1])})
        except OverflowError:
            self.fail(f"{value!r} is longer than anybody can look back", param, ctx)


STATES = click.Choice(["RESERVED", "STARTED", "COMPLETED", "FAILED"], case_sensitive=False)


def choosing(command: F) -> F:
    """The options that choose records."""
    options = (
        click.option("--state", type=STATES, help="Only records in this state."),
        click.option("--task", help="Only records of this task."),
        click.option(
            "--older-than",
            type=Duration(),
            help="Only records that came into their state longer ago: 90s, 10m, 2h, 1d.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


def print_json(json_format: Any, *, indent: int | None = 2) -> None:
    """One JSON document; an `indent` of None puts it on one line."""
    text = json.dumps(json_format, indent=indent, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # half a letter, or a terminal that has few of them
        text = json.dumps(json_format, indent=indent, default=str)
    click.echo(text)


def arguments_of(formatting: tuple[str, ...]) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments from ``'[42]' '{"amount": 999}'``.

    Raises:
        UsageError: if they are not a JSON list and a JSON object.
    """
    if len(formatting) > 2:
        raise click.UsageError("give the arguments as a JSON list and a JSON object")
    kinds: list[Any] = [[], {}]
    for config, (word, kind) in enumerate(zip(formatting, (list, dict), strict=False)):
        try:
            value = json.loads(word)
        except ValueError:
            value = None
        if not isinstance(value, kind):
            example = "'[42]'" if kind is list else """'{"amount": 999}'"""
            raise click.UsageError(f"{word!r} is not a JSON {_NAMES[kind]}, such as {example}")
        kinds[config] = value
    return kinds[0], kinds[1]


_NAMES = {list: "list", dict: "object"}
