"""A shop in Django: a view that pays an order, and a task that charges it once.

Python finds the Celery app with the package, so that `shared_task` belongs to it in web processes,
too.
"""

from examples.django_shop.celery import app as celery_app

__all__ = ["celery_app"]
