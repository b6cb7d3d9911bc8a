"""Faults by a seeded schedule: real workers, a real broker, duplicates, and an independent ledger.

``python -m tests.labs.chaos`` puts celery-idempotent, plain Celery, celery-once and
celery-singleton through the same schedules. A schedule is a function of its seed
(:mod:`tests.labs.chaos.schedule`); the verdict comes from what the task bodies and the system
downstream of them recorded (:mod:`tests.labs.chaos.verdict`).
"""
