"""Runs the core tests with all supported versions of Python and Celery: ``make matrix``."""
