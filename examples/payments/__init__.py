"""A demo that charges webhook events exactly once: ``python -m examples.payments``."""
