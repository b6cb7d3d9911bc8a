"""The pages about HTTP name the options, the problems, the headers and the tests that exist."""

from __future__ import annotations

import ast
import inspect
import re

from celery_idempotent.contrib.django.middleware import OPTIONS
from celery_idempotent.contrib.http.middleware import BaseMiddleware
from celery_idempotent.contrib.http.problem import Problem
from celery_idempotent.contrib.http.response import NEVER_STORED, RETRIED_STATUSES
from tests.docs.pages import ROOT, prose

PAGE = prose(ROOT / "docs/http.md")
CONTRACT = prose(ROOT / "docs/contributing/http-contract.md")


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", CONTRACT))
    files = [*(ROOT / "tests/http").rglob("test_*.py"), ROOT / "tests/docs/test_http_page.py"]
    existing = {
        name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text("utf-8"))
    }
    assert named
    assert named - existing == set()


def test_every_rule_of_the_two_contracts_names_a_test() -> None:
    rows = re.findall(r"^\| .* \|$", CONTRACT, flags=re.M)
    heads = [row for row in rows if row.endswith("| test |")]
    assert len(heads) == 1
    assert [row for row in rows if row not in heads and not re.search(r"`test_\w+` \|$", row)] == []


def test_every_problem_is_documented() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (\d{3})(, `Retry-After`)? \|", PAGE, flags=re.M)
    documented = {(name, int(status), bool(retry)) for name, status, retry in rows}

    assert documented == {(p.type_name, p.value.status, p.value.retry) for p in Problem}
    assert len(rows) == len(Problem)


def test_every_option_is_documented_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \| (.*?) \| ", PAGE, flags=re.M)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(BaseMiddleware).parameters.items()
        if name != "app"
    }
    assert {upper: name for name, upper, _ in rows} == OPTIONS
    assert [name for name, _, _ in rows] == list(parameters)
    for name, _, documented in rows:
        default = parameters[name].default
        if default is inspect.Parameter.empty:
            assert documented.startswith("required")
        elif callable(default):
            assert documented == f"`{default.__name__}`"
        else:
            assert ast.literal_eval(documented.strip("`")) == default


def test_every_header_that_is_never_stored_is_documented() -> None:
    paragraph = re.search(r"^\*\*Which headers\.\*\*.*?\n\n", PAGE, flags=re.M | re.S)
    documented = {name.lower() for name in re.findall(r"`([\w-]+\*?)`", paragraph[0])}
    assert documented - {"proxy-*", "content-length"} == NEVER_STORED


def test_every_status_that_is_not_stored_is_documented() -> None:
    sentence = re.search(r"except ([\d, and\n]+), which ask", PAGE)
    assert set(map(int, re.findall(r"\d+", sentence[1]))) == RETRIED_STATUSES
