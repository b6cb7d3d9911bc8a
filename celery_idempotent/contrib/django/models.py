"""The table of outcomes as a Django model, which is not used to write it."""

from __future__ import annotations

from django.db import models

from celery_idempotent.sql.outcomes import TABLE


class Outcome(models.Model):
    """The outcome of a key, committed together with the effects of the task."""

    #: A digest of prefix and key: `sql.outcomes.row_id`. See `sql.outcomes.Claim` for the others.
    id = models.CharField(primary_key=True, max_length=32)
    #: For a key that may run again: a digest of it, until the execution has finished.
    turn = models.CharField(max_length=32, null=True, unique=True)
    record_key = models.TextField()
    #: A random id of the execution, so that its statements change no row of another one.
    owner = models.CharField(max_length=32)
    state = models.CharField(max_length=16)
    task_id = models.TextField()
    worker = models.TextField()
    token = models.BigIntegerField()
    attempt = models.IntegerField()
    fingerprint = models.CharField(max_length=32)
    format = models.CharField(max_length=255)
    body = models.BinaryField()
    #: Messages to publish after the commit; None once they are published.
    outbox = models.BinaryField(null=True)
    #: Milliseconds since the epoch.
    finished_at = models.BigIntegerField(null=True)
    expires_at = models.BigIntegerField(null=True, db_index=True)

    class Meta:
        """Rows are not added or changed by hand."""

        db_table = TABLE
        default_permissions = ()
