"""Receives messages: the request in the main process, the call in the pool."""
