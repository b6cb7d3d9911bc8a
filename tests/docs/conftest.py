"""A test with the fixture `page` runs for each page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES


@pytest.fixture(params=PAGES, ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path
