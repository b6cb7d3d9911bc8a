"""Publishes messages: first, again, with a commit, after an end; and what callers get."""
