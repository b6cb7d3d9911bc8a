"""Mutants of the Lua that nobody can tell from the original, each with the reason.

By name, as `lua_mutants.Mutant.name` writes it, so that a reason outlives a move of its line.
"""

from __future__ import annotations

SURVIVORS: dict[str, str] = {}
