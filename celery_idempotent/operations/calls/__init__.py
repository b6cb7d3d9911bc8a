"""Finds, explains, forgets and reruns single calls, and counts all of them.

The command line and the dashboard share these functions.
"""
