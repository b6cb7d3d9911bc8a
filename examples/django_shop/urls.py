"""The URLs of the shop."""

from __future__ import annotations

from django.urls import path

from examples.django_shop.views import pay

urlpatterns = [path("orders/<int:order_id>/pay", pay)]
