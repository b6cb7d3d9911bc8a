"""Idempotency for functions, code blocks and batches of keys."""
