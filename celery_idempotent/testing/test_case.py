"""The fixtures of the pytest plugin for unittest and Django."""

from __future__ import annotations

import unittest
from contextlib import ExitStack
from typing import TYPE_CHECKING

from celery_idempotent.testing.records import IsolatedRecords, isolated_records

if TYPE_CHECKING:
    _TestCase = unittest.TestCase
else:
    _TestCase = object


class IdempotencyTestMixin(_TestCase):
    """Isolates the records of each test: ``class ChargeTest(IdempotencyTestMixin, TestCase)``.

    Attributes:
        idempotency: the records of the test, as the fixture of the same name.
        idempotency_redis_url: a Redis server for tests; None: a private server.
    """

    idempotency: IsolatedRecords
    idempotency_redis_url: str | None = None

    def setUp(self) -> None:
        """Isolates the records; a subclass with its own setUp must call this one first."""
        stack = ExitStack()
        self.idempotency = stack.enter_context(isolated_records(self.idempotency_redis_url))
        self.addCleanup(stack.close)
        super().setUp()
