"""Leases without a server."""
