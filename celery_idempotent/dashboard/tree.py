"""Values as trees of bounded size, for templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kombu.utils.encoding import safe_repr

#: Maximum levels, items per collection, values in total, and characters per text.
MAX_DEPTH, MAX_ITEMS, MAX_NODES, MAX_TEXT = 8, 100, 1000, 2000


@dataclass
class Node:
    """A value: `text` of a scalar, or `children` of a collection."""

    name: str
    #: ``object``, ``array``, ``string``, ``number``, ``constant``, or the name of another type.
    kind: str
    text: str = ""
    children: list[Node] = field(default_factory=list)
    #: Number of omitted children.
    omitted: int = 0


def tree(value: Any) -> Node:
    """Returns the tree of `value`. Never raises."""
    return _Builder().node("", value, 0)


class _Builder:
    def __init__(self) -> None:
        self._left = MAX_NODES

    def node(self, name: str, value: Any, depth: int) -> Node:
        self._left -= 1
        if depth < MAX_DEPTH and isinstance(value, Mapping):
            items = ((_text(key), child) for key, child in value.items())
            return self._collection(name, "object", items, len(value), depth)
        if depth < MAX_DEPTH and isinstance(value, (list, tuple, set, frozenset)):
            numbered = ((str(number), child) for number, child in enumerate(value))
            return self._collection(name, "array", numbered, len(value), depth)
        if isinstance(value, str):
            return Node(name, "string", _cut(value))
        if value is None or isinstance(value, bool):
            return Node(name, "constant", str(value))
        if isinstance(value, (int, float)):
            return Node(name, "number", _cut(_text(value)))
        return Node(name, type(value).__name__, _text(value))

    def _collection(
        self, name: str, kind: str, items: Iterable[tuple[str, Any]], size: int, depth: int
    ) -> Node:
        result = Node(name, kind)
        for child_name, child in islice(items, MAX_ITEMS):
            if self._left <= 0:
                break
            result.children.append(self.node(child_name, child, depth + 1))
        result.omitted = size - len(result.children)
        return result


def _text(value: Any) -> str:
    return _cut(value if isinstance(value, str) else safe_repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text):,} characters)"
