"""Reads many records and server properties."""
