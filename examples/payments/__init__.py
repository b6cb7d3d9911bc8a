"""Webhook events of a payment provider, charged exactly once: ``python -m examples.payments``."""
