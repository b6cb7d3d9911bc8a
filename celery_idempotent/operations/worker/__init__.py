"""Monitoring in a worker: start-up checks, inspect commands and events."""
