"""The tests that docs/security.md names exist."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, prose

PAGE = ROOT / "docs/security.md"


def test_named_tests_exist() -> None:
    links = re.findall(r"\[(test_\w+)\]\(([^)]+)\)", prose(PAGE))

    missing = [
        name
        for name, path in links
        if not re.search(rf"^ *def {name}\(", (PAGE.parent / path).read_text("utf-8"), flags=re.M)
    ]
    assert len(links) > 15
    assert missing == []
