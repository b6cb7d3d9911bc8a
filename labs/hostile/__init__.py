"""Hostile input, counted: confusable arguments, damaged records, damaged headers."""
