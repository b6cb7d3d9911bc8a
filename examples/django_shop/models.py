"""Orders and their payments."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order of a customer."""

    amount = models.PositiveIntegerField()
    state = models.CharField(max_length=10, default="new")


class Payment(models.Model):
    """A payment. The database rejects a second payment with the same idempotency key."""

    order = models.ForeignKey(Order, on_delete=models.PROTECT)
    amount = models.PositiveIntegerField()
    key = models.CharField(max_length=200, unique=True)
