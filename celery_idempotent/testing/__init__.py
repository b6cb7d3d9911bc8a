"""Test helpers for applications: isolated records, and private Redis-compatible servers."""

from celery_idempotent.testing.records import (
    IdempotencyTestMixin,
    IsolatedRecords,
    isolated_records,
)

__all__ = ["IdempotencyTestMixin", "IsolatedRecords", "isolated_records"]
