"""A table that rejects writes by an execution that has lost its lease."""
