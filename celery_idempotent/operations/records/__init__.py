"""Reads many records, and properties of their servers, for the command line and the dashboard."""
