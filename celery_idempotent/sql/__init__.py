"""Outcomes in the user's own database, written in the transaction of the effects.

An execution claims a row before the body runs, and writes the outcome to it before the commit.
Effects and outcome are therefore committed together or not at all. A second execution of the key
waits in the database for the first to end.
"""
