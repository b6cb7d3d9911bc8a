"""Outcomes in the user's own database, written in the transaction of the effects.

A row is claimed before the body runs, and gets the outcome before the commit. So effects and
outcome are committed together or not at all, and two executions of a key meet at the row: the
second waits in the database for the end of the first.
"""
