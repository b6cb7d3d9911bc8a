"""Who watches: the command line, the worker's answers, events, metrics and traces.

Nothing here decides anything. Tasks are known by what they show (`idempotency_configuration`), so
this floor lies below the one that makes them, and that one may call it: a worker at its start for
its checks, the engine for its records.
"""
