"""Migrations of the table of outcomes."""
