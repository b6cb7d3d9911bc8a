"""Idempotency without tasks: functions, code blocks and batches of keys, with `engine.Idempotency`.

The caller has no message that could be put back: it gets an outcome, an error, or a decision.
"""
