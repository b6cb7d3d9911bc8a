"""Batches of keys."""
