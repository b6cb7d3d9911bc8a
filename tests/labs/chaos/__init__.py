"""Faults by a seeded schedule: real workers, a real broker, duplicates, and an independent ledger.

``python -m tests.labs.chaos`` puts celery-idempotent, plain Celery, celery-once and celery-singleton
through the same schedules, and says what each of them made of it. A schedule is a function of its
seed (:mod:`tests.labs.chaos.schedule`); what it struck is judged by what the task bodies and the system
downstream of them wrote down (:mod:`tests.labs.chaos.verdict`).
"""
