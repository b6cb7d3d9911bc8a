"""A table that refuses the writes of an execution that has lost its lease."""
