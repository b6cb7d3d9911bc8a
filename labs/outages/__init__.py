"""Injects outages of the store while workers run; counts lost and duplicate executions."""
