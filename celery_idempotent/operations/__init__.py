"""What operators use: the command line, ``celery inspect``, doctor, and the reads behind them.

Nothing here runs for a task's call; only `worker` runs in a worker.
"""
