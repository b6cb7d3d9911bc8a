"""Redelivers a dead worker's messages soon, but not those that a living worker renews."""
