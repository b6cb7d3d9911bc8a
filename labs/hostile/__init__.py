"""Hostile input, counted: confusable arguments, damaged and forged records, messages, headers."""
