"""Calls whose effects are in Django's database; for processes that have set it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from django.db import connection

from celery_idempotent import Idempotency


def insert(name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effects (name, pid) VALUES (%s, 0)", [name])


def effects(name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM effects WHERE name = %s", [name])
        return int(cursor.fetchone()[0])


class Call:
    """A function with a transaction, and what it does after its effect."""

    def __init__(
        self,
        engine: Idempotency,
        during: Callable[[str], Any] = lambda name: None,
        **options: Any,
    ) -> None:
        self.name = uuid4().hex
        self.runs = 0

        @engine.idempotent(key="{name}", name="call", **options)
        def call(name: str) -> int:
            self.runs += 1
            insert(name)
            during(name)
            return self.runs

        self.function = call

    def __call__(self) -> Any:
        """Returns what the function does, or the name and text of its error."""
        try:
            return self.function(self.name)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def result(self) -> list[Any]:
        """Calls it twice; returns both outcomes, its runs and its effects."""
        return [self(), self(), self.runs, effects(self.name)]
