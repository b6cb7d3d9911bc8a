"""Creates the table of outcomes."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    """``manage.py migrate celery_idempotent --database <alias>``."""

    initial = True
    operations: ClassVar = [
        migrations.CreateModel(
            name="Outcome",
            fields=[
                (
                    "id",
                    models.CharField(
                        help_text="digest of prefix and key",
                        max_length=64,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "turn",
                    models.CharField(
                        help_text="digest of a key that may run again",
                        max_length=32,
                        null=True,
                        unique=True,
                    ),
                ),
                ("record_key", models.TextField(verbose_name="key")),
                (
                    "owner",
                    models.CharField(help_text="random id of the transaction", max_length=32),
                ),
                ("state", models.CharField(max_length=16)),
                ("task_id", models.TextField()),
                ("worker", models.TextField()),
                ("token", models.BigIntegerField()),
                ("attempt", models.IntegerField()),
                ("fingerprint", models.CharField(max_length=32)),
                ("format", models.CharField(max_length=255)),
                ("body", models.BinaryField()),
                (
                    "outbox",
                    models.BinaryField(help_text="messages to publish after the commit", null=True),
                ),
                (
                    "finished_at",
                    models.BigIntegerField(help_text="milliseconds since the epoch", null=True),
                ),
                (
                    "expires_at",
                    models.BigIntegerField(
                        db_index=True, help_text="milliseconds since the epoch", null=True
                    ),
                ),
            ],
            options={
                "db_table": "celery_idempotency_outcomes",
                "default_permissions": ("view",),
                "permissions": (
                    ("forget_outcome", "Can forget outcome"),
                    ("view_outcome_result", "Can view result of outcome"),
                ),
            },
        ),
    ]
