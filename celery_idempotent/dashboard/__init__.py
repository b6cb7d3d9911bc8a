"""The dashboard: pages, a JSON API and live updates for monitoring idempotent tasks.

``celery -A shop idempotency dashboard`` serves it; :func:`asgi` returns it as an ASGI application
to mount in FastAPI, Starlette or beside Django.
"""

from celery_idempotent.dashboard.access import Access
from celery_idempotent.dashboard.application import asgi

__all__ = ["Access", "asgi"]
