"""Integrations with other libraries, each imported by its user."""
