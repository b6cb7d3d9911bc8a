"""The README for the package index, where links into the repository need its address."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|#|mailto:)([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):  # type: ignore[misc]
    """Completes the links of README.md: those of a release lead to its tag."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the field `readme`."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        site = metadata["urls"]["Source"]
        tag = f"v{metadata['version']}"

        def complete(match: re.Match[str]) -> str:
            kind = "raw" if match[1].startswith("!") else "blob"
            return f"{match[1]}{site}/{kind}/{tag}/{match[2]})"

        readme = {"content-type": "text/markdown", "text": _LINK.sub(complete, text)}
        metadata["readme"] = readme
