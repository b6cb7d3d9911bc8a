"""The adapter for Celery: the task class, and its messages from publish to end.

`message` is what a message carries, `publish` sends messages, `receive` handles them in a worker.
"""
