"""The settings; DATABASE is the path of the database, DJANGO_ENGINE another engine."""

from __future__ import annotations

import os

SECRET_KEY = "for tests"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.http.sites.django_views"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "celery_idempotent.contrib.django.middleware.IdempotencyMiddleware",
]
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DATABASE"]}
DATABASES = {"default": {**database, "OPTIONS": {"timeout": 30}}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
USE_TZ = True

IDEMPOTENCY_MIDDLEWARE = {
    "ENGINE": "tests.http.sites.common.idem",
    "MAX_BODY_BYTES": 100_000,
    "REQUIRED": "tests.http.sites.django_views.requires_key",
    "AUTHORIZE_REPLAY": "tests.http.sites.django_views.authorize_replay",
}
