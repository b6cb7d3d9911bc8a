"""Canvases under chaos.

``make canvases`` publishes chains, groups, chords, links, errbacks, retries, replacements and
duplicates of all of them, drawn by a seed, while processes of two workers are killed and
connections are cut. A ledger on a server of its own decides: everything that follows has run, and
with this package once. Plain Celery gets the same schedule.
"""
