"""For the tests of applications: isolated records, and private Redis-compatible servers."""

from celery_idempotent.testing.records import IsolatedRecords, isolated_records
from celery_idempotent.testing.test_case import IdempotencyTestMixin

__all__ = ["IdempotencyTestMixin", "IsolatedRecords", "isolated_records"]
