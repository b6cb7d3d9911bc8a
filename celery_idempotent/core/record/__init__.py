"""The record of a key: its fields, bytes and parts. No I/O."""
