"""Laboratories, which measure, compare and search; see README.md."""
