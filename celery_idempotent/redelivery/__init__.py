"""Redelivers a dead worker's messages soon, and never those of a living worker."""
