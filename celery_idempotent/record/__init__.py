"""The record of a key: its fields, bytes and parts. Pure, no I/O."""
