"""Starts a message that was put back because of a conflict as soon as its key is free.

Without it, the message would run at its ETA, one lease after the conflict.
"""
