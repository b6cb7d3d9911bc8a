"""A Django shop: a view that pays an order, and a task that charges it once.

It uses PostgreSQL if PGHOST is set, and SQLite otherwise. The package imports the Celery app, so
that `shared_task` also uses it in web processes.
"""

from examples.django_shop.celery import app as celery_app

__all__ = ["celery_app"]
