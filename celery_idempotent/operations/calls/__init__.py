"""Finds, explains and changes single calls, and counts all of them."""
