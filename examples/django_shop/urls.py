"""The URLs of the shop, and the admin, which shows the outcomes of its tasks."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from examples.django_shop.views import pay

urlpatterns = [path("orders/<int:order_id>/pay", pay), path("admin/", admin.site.urls)]
