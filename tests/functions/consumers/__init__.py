"""Kombu consumers."""
