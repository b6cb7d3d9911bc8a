"""Redelivers the messages of a dead worker soon, and those of a living one never."""
