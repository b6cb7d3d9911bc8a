"""Conflicts."""
