"""Compares celery-idempotent with plain Celery, celery-once and celery-singleton.

``python -m tests.labs.comparison`` runs all four through the same scenarios on one private server.
Each row of its table is a class in :mod:`tests.labs.comparison.scenarios`.
"""
