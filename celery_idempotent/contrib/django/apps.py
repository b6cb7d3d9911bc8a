"""The Django app: the table of outcomes, its migration, and system checks."""

from __future__ import annotations

from django.apps import AppConfig


class IdempotencyConfig(AppConfig):
    """``"celery_idempotent.contrib.django"`` in INSTALLED_APPS."""

    name = "celery_idempotent.contrib.django"
    label = "celery_idempotent"
    verbose_name = "Idempotent tasks"

    def ready(self) -> None:
        """Registers the system checks, and remembers the project's Celery app."""
        from celery_idempotent.contrib.django import checks

        checks.remember_app()
        checks.register()
