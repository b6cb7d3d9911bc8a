"""The record: what Redis holds for a key, as a value. Pure, no I/O."""
