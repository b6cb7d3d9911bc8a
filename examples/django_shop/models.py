"""Orders and their payments."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order of a customer."""

    amount = models.PositiveIntegerField()
    state = models.CharField(max_length=10, default="new")


class Payment(models.Model):
    """A payment. No constraint prevents a second one: a double charge would be a second row."""

    order = models.ForeignKey(Order, on_delete=models.PROTECT)
    amount = models.PositiveIntegerField()
