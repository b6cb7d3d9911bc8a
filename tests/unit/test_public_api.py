"""The public interface changes only on purpose: names, signatures, options, signals, commands.

``python -m tests.unit.test_public_api`` rewrites the snapshot after an intended change.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

import click
import pytest
from celery.utils.dispatch import Signal

import celery_idempotent
from celery_idempotent import dashboard, errors, pytest_plugin, settings, signals
from celery_idempotent.contrib import asgi, fastapi, flask, kombu, wsgi
from celery_idempotent.contrib.django import middleware as django
from celery_idempotent.contrib.django import rest_framework
from celery_idempotent.core.flow.execution import AsyncExecution, Execution
from celery_idempotent.functions.batch import AsyncBatch, Batch
from celery_idempotent.functions.block import AsyncBlockExecution, BlockExecution
from celery_idempotent.operations.cli import idempotency
from celery_idempotent.operations.worker import inspect_commands
from celery_idempotent.testing import IdempotencyTestMixin, IsolatedRecords, isolated_records

#: Public classes that users import from modules of their own.
IMPORTED = [module.IdempotencyMiddleware for module in (asgi, django, wsgi)]
IMPORTED += [rest_framework.IdempotencyMixin, kombu.IdempotentConsumer]
#: Modules with public functions for the options of these classes.
HELPERS = (asgi, django, wsgi, fastapi, flask, rest_framework, dashboard)
#: Public classes that users do not instantiate.
RETURNED = [Execution, AsyncExecution, BlockExecution, AsyncBlockExecution]
RETURNED += [Batch, AsyncBatch, IsolatedRecords]


SNAPSHOT = Path(__file__).with_name("public_api.txt")


def describe() -> str:
    """Returns one line for each name."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Names"
    for name in sorted(celery_idempotent.__all__):
        yield from _describe(name, getattr(celery_idempotent, name))
    for cls in IMPORTED:
        yield from _describe(f"{cls.__module__}.{cls.__name__}", cls)
    for module in HELPERS:
        for name in sorted(set(module.__all__) - {"IdempotencyMiddleware", "IdempotencyMixin"}):
            yield f"{module.__name__}.{name}{_signature(getattr(module, name))}"
    for cls in RETURNED:
        yield cls.__name__
        yield from _attributes(cls)
    yield "# Errors"
    for name, value in sorted(vars(errors).items()):
        if inspect.isclass(value) and issubclass(value, Exception):
            yield f"{name} < {', '.join(base.__name__ for base in value.__mro__[1:-2])}"
    yield "# Options"
    for option in fields(settings.Settings):
        default = option.default if option.default is not MISSING else "required"
        yield f"{settings.PREFIX}{option.name} = {default!r}"
    yield from settings.APP_OPTIONS
    yield "# Signals"
    for name, signal in sorted(vars(signals).items()):
        if isinstance(signal, Signal):
            yield f"{name}({', '.join(sorted(signal.providing_args))})"
    yield "# Command line"
    yield from _commands(idempotency, "celery idempotency")
    yield from sorted(inspect_commands.COMMANDS)
    yield "# Testing"
    for value in (IdempotencyTestMixin, isolated_records):
        yield from _describe(f"celery_idempotent.testing.{value.__name__}", value)
    for name, value in sorted(vars(pytest_plugin).items()):
        if type(value).__name__ == "FixtureFunctionDefinition":
            yield name


def _describe(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield name + (_signature(value) if inspect.isfunction(value) else "")
        return
    yield name + ("" if issubclass(value, (Exception, Enum)) else _signature(value))
    if issubclass(value, Enum):
        for member in value:
            yield f"  {member.name} = {member.value!r}"
    if not issubclass(value, (Exception, Enum)):
        yield from _attributes(value)


def _attributes(cls: type) -> Iterator[str]:
    for attribute in sorted(_public_attributes(cls)):
        static = inspect.getattr_static(cls, attribute)
        shown = "" if isinstance(static, property) or not callable(static) else _signature(static)
        yield f"  .{attribute}{shown}"


def _public_attributes(cls: type) -> set[str]:
    """Returns the names that classes of this project define, without Celery's own."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("celery_idempotent"):
            names |= {*vars(base), *getattr(base, "__slots__", ())}
    return {name for name in names if not name.startswith("_")}


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r"<function (\w+) at \w+>", r"\1", text)


def _commands(command: click.Command, path: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from _commands(command.commands[name], f"{path} {name}")
        return
    parameters = sorted(
        "/".join((*parameter.opts, *parameter.secondary_opts))
        if isinstance(parameter, click.Option)
        else f"<{parameter.name}>"
        for parameter in command.params
    )
    yield f"{path}: {' '.join(parameters)}"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="signatures as by Python 3.11")
def test_the_public_interface_is_as_in_the_snapshot() -> None:
    assert describe() == SNAPSHOT.read_text(encoding="utf-8"), (
        "if this change is intended, run python -m tests.unit.test_public_api, "
        "and describe it in CHANGELOG.md"
    )


if __name__ == "__main__":
    SNAPSHOT.write_text(describe(), encoding="utf-8")
