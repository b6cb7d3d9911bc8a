"""Reads many records and server properties, for operators and monitoring."""
