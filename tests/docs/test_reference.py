"""The reference is generated from the code, and complete."""

from __future__ import annotations

import re

import pytest

import celery_idempotent
from celery_idempotent import dashboard, errors
from celery_idempotent.contrib import asgi, fastapi, flask, kombu, wsgi
from celery_idempotent.contrib.django import middleware, rest_framework
from celery_idempotent.settings import _VALIDATORS
from docs.generate_reference import FOLDER, PAGES, error_classes, page, record_row

#: Modules whose public names the page of the API takes from them.
API = (errors, asgi, wsgi, middleware, fastapi, flask, rest_framework, kombu)


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    written = (FOLDER / name).read_text("utf-8")
    assert written == page(name), "run: python -m docs.generate_reference"


def test_the_fields_of_a_record_are_up_to_date() -> None:
    assert record_row() in (FOLDER / "command-line.md").read_text("utf-8")


def test_every_public_error_has_a_cause_and_a_remedy() -> None:
    public = {name for name in celery_idempotent.__all__ if name.endswith("Error")}
    text = page("errors.md")

    assert public <= set(error_classes())
    for name in error_classes():
        section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert "**Cause.**" in section, name
        assert "**Remedy.**" in section, name


def test_every_option_has_its_unit_or_its_values() -> None:
    # A key rule is validated together with the signature of its task.
    assert [name for name, (_, expected) in _VALIDATORS.items() if not expected] == ["key"]


def test_every_public_name_is_in_the_api() -> None:
    text = (FOLDER / "api.md").read_text("utf-8")
    names = set(re.findall(r"^\.\. auto(?:class|data|function):: ([\w.]+)$", text, flags=re.M))
    modules = set(re.findall(r"^\.\. automodule:: ([\w.]+)$", text, flags=re.M))

    # Errors are members of their module.
    public = {name for name in celery_idempotent.__all__ if not name.endswith("Error")}
    assert {f"celery_idempotent.{name}" for name in public} <= names
    assert {f"celery_idempotent.dashboard.{name}" for name in dashboard.__all__} <= names
    assert {module.__name__ for module in API} <= modules
