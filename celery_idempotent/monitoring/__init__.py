"""Monitoring for operators: start-up checks, inspect commands, events and statistics."""
