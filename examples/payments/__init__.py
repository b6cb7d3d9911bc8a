"""A demo that charges webhook events exactly once: ``python -m examples.payments``.

The wheel has it as ``celery_idempotent.demo``.
"""
