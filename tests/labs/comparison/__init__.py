"""celery-idempotent beside plain Celery, celery-once and celery-singleton.

``python -m tests.labs.comparison`` puts the four through the same scenarios on one private server, and says
what each of them made of it. Every row of its table is a class in :mod:`tests.labs.comparison.scenarios`.
"""
