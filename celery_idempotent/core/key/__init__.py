"""Derives keys, which name records, from a task's arguments. No I/O."""
