"""What can happen to a call, and the one function that reports it.

:mod:`.table` has a row for each event: its log line, signal and counter. :func:`.report.report`
writes the line, increments the counter and sends the signal.
"""
