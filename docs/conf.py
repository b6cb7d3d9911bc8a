"""The documentation site: `make docs` builds it into dist/docs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import celery_idempotent

_SOURCE = "https://github.com/celery-idempotent/celery-idempotent"

project = "celery-idempotent"
author = "The celery-idempotent developers"
release = celery_idempotent.__version__
language = "en"
default_role = "code"  # single backticks in docstrings

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = f"{project} {release}"
html_theme_options = {
    "source_repository": _SOURCE,
    "source_branch": "main",
    "source_directory": "docs",
}

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]  # drawn by the reader's browser
myst_heading_anchors = 4  # the anchors that GitHub derives from titles
# Console transcripts, Lua and other blocks that Pygments has no exact lexer for stay as they are.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"show-inheritance": True}
napoleon_google_docstring = True
copybutton_prompt_text = "$ "

# A build without a network does without the indexes of other projects.
intersphinx_mapping = (
    {
        "celery": ("https://docs.celeryq.dev/en/stable", None),
        "kombu": ("https://docs.celeryq.dev/projects/kombu/en/stable", None),
        "python": ("https://docs.python.org/3", None),
        "redis": ("https://redis.readthedocs.io/en/stable", None),
    }
    if "READTHEDOCS" in os.environ or "DOCS_INTERSPHINX" in os.environ
    else {}
)
# DOIs and RFC trackers refuse clients that are not browsers.
linkcheck_ignore = [r"https://doi\.org/.*", rf"{re.escape(_SOURCE)}.*"]


def _link_to_source(app: object, docname: str, content: list[str]) -> None:
    """Makes links that leave docs/ lead to the repository, where README.md is read, too."""
    folder = (Path(__file__).parent / docname).parent
    root = Path(__file__).parents[1]

    def replaced(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        target = Path(os.path.normpath(folder / path))
        if root / "docs" in target.parents or not target.exists():
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        url = f"{_SOURCE}/{kind}/main/{target.relative_to(root).as_posix()}"
        return f"]({url}{'#' + anchor if anchor else ''})"

    content[0] = re.sub(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)", replaced, content[0])


def _quote_options(app: object, context: object, lines: list[str]) -> None:
    """Shows the options in a command's description as code: two hyphens would become a dash."""
    lines[:] = [re.sub(r"(--[a-z-]+)", r"``\1``", line) for line in lines]


def _write_one_file(app: Any, error: Exception | None) -> None:
    """Writes all pages in the order of the site into one Markdown file, for AI assistants."""
    if error is None and app.builder.name == "html":
        sources = [Path(app.env.doc2path(name)) for name in app.env.collect_relations()]
        pages = [f"<!-- {file.name} -->\n{_with_quoted_files(file)}" for file in sources]
        (Path(app.outdir) / "llms.txt").write_text("\n".join(pages), "utf-8")


def _with_quoted_files(page: Path) -> str:
    """Returns the text of a page, with the files that it quotes as code blocks."""
    return re.sub(
        r"^```{literalinclude} (\S+)\n.*?```$",
        lambda match: f"```python\n{(page.parent / match[1]).read_text('utf-8')}```",
        page.read_text("utf-8"),
        flags=re.S | re.M,
    )


def setup(app: Any) -> None:
    """Registers the handlers of sources, of commands, and of the end of a build."""
    app.connect("source-read", _link_to_source)
    app.connect("sphinx-click-process-description", _quote_options)
    app.connect("build-finished", _write_one_file)
