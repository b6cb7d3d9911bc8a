"""Orders, and what was taken for them."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """What somebody wants to have."""

    amount = models.PositiveIntegerField()
    state = models.CharField(max_length=10, default="new")


class Payment(models.Model):
    """Money that was taken. The key is unique: a second row for it is refused by the database."""

    order = models.ForeignKey(Order, on_delete=models.PROTECT)
    amount = models.PositiveIntegerField()
    key = models.CharField(max_length=200, unique=True)
