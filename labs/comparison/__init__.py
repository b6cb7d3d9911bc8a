"""Compares celery-idempotent with plain Celery and other libraries.

``make peers`` runs all of them through the same scenarios on one private
server. Some have an environment of their own in .peers, which the first run installs.
Each row of its table is a class in :mod:`labs.comparison.scenarios`.
"""
