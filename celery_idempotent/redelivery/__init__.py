"""Renews the visibility timeout of a living worker's messages, so that it can be short.

Without renewal, the timeout must be longer than the longest task and ETA, and the messages of a
dead worker come back only after it. With renewal, they come back after a minute, say: brokers with
a visibility timeout are Redis and SQS.
"""
