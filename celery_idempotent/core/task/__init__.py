"""The task class, its messages and its results."""
