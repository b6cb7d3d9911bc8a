"""Canvases under chaos.

``make canvases`` publishes chains, groups, chords, links, errbacks, retries, replacements,
transactions and duplicates of all of them, drawn by a seed. Meanwhile processes of two workers and
publishers are killed, connections are cut, packets are delayed, workers are restarted with and
without one of the tasks, and an operator forgets calls and runs them again. A ledger in a
file shows whether every effect has happened, with this package exactly once. Plain Celery gets
the same schedule, and with ``PEERS=1`` so do idemkit and fencekit.
"""
