"""Tests of celery_idempotent.record."""
