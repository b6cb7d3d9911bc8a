"""Measures the overhead of celery-idempotent and compares it with goals and other libraries.

``make bench`` runs every measure of :mod:`labs.benchmarks.measures`, each in its own process
and on its own servers, and reports which goals are met. A measure interleaves its contestants in
rounds, so that background load affects all of them alike, and reports medians with their
interquartile range.
"""
