"""The dashboard: pages, a JSON API and live updates for monitoring idempotent tasks.

``celery -A shop idempotency dashboard`` serves it; :func:`asgi` returns it as an ASGI application
to mount in FastAPI, Starlette or beside Django.
"""

from celery_idempotent.dashboard.application import asgi
from celery_idempotent.dashboard.protection import Access

__all__ = ["Access", "asgi"]
