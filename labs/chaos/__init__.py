"""Injects faults by a seeded schedule into real workers, brokers and stores.

``python -m labs.chaos`` runs celery-idempotent, plain Celery and other libraries with the same
schedules. A schedule is a function of its seed
(:mod:`labs.chaos.schedule`); a run is evaluated by the records of the task bodies and of a
downstream system (:mod:`labs.chaos.verdict`).
"""
