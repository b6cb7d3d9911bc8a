"""Creates the table of outcomes."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

_FIELDS = {
    "id": models.CharField(primary_key=True, max_length=32, serialize=False),
    "turn": models.CharField(max_length=32, null=True, unique=True),
    "record_key": models.TextField(),
    "owner": models.CharField(max_length=32),
    "state": models.CharField(max_length=16),
    "task_id": models.TextField(),
    "worker": models.TextField(),
    "token": models.BigIntegerField(),
    "attempt": models.IntegerField(),
    "fingerprint": models.CharField(max_length=32),
    "format": models.CharField(max_length=255),
    "body": models.BinaryField(),
    "outbox": models.BinaryField(null=True),
    "finished_at": models.BigIntegerField(null=True),
    "expires_at": models.BigIntegerField(null=True, db_index=True),
}


class Migration(migrations.Migration):
    """``manage.py migrate celery_idempotent --database <alias>``."""

    initial = True
    operations: ClassVar = [
        migrations.CreateModel(
            name="Outcome",
            fields=list(_FIELDS.items()),
            options={"db_table": "celery_idempotency_outcomes", "default_permissions": ()},
        ),
    ]
