"""Generates mutants of the Lua files: each has one change, derived from the syntax tree.

Every comparison, condition, connective, sum, constant, argument, assignment and call is changed.
Nothing is chosen by hand, so nothing is left out because it looked safe.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from luaparser import ast, astnodes

from celery_idempotent.core.store import scripts

SCRIPTS = ("begin", "extend", "settle", "abandon", "queue", "forget")

_REPLACED_OPERATORS = {
    astnodes.EqToOp: ["~="],
    astnodes.NotEqToOp: ["=="],
    astnodes.LessThanOp: ["<=", ">="],
    astnodes.LessOrEqThanOp: ["<", ">"],
    astnodes.GreaterThanOp: [">=", "<="],
    astnodes.GreaterOrEqThanOp: [">", "<"],
    astnodes.AndLoOp: ["or"],
    astnodes.OrLoOp: ["and"],
    astnodes.AddOp: ["-"],
    astnodes.SubOp: ["+"],
    astnodes.MultOp: ["/"],
    astnodes.FloatDivOp: ["*"],
}
#: Strings that are no lists of letters.
_WORDS = {"GET", "SET", "DEL", "TIME", "PX", "EX", "PTTL", "held", "wait", "send", "late", "lost"}
_REPLACED_FUNCTIONS = {"max": "min", "min": "max", "floor": "ceil"}


@dataclass(frozen=True)
class Mutant:
    #: The file without .lua.
    script: str
    line: int
    #: The original line, the changed text and the text that replaces it.
    code: str
    old: str
    new: str
    source: str
    #: Distinguishes mutants with the same texts.
    number: int = 1

    @property
    def name(self) -> str:
        """Identifies the mutant even if its line moves."""
        number = f" ({self.number})" if self.number > 1 else ""
        return f"{self.script}: {self.code}  ⟶  {self.old} becomes {self.new or 'nothing'}{number}"


def all_mutants() -> list[Mutant]:
    """Returns the mutants of every file."""
    return [mutant for name in SCRIPTS for mutant in mutants_of(name, scripts.load(name).source)]


def mutants_of(name: str, source: str) -> Iterator[Mutant]:
    """Yields a mutant for each different text that one change of `source` produces."""
    seen = {source}
    names: Counter[str] = Counter()
    for start, stop, new in sorted(_changes(source)):
        changed = source[:start] + new + source[stop:]
        if changed in seen:
            continue
        seen.add(changed)
        line = source.count("\n", 0, start)
        code = source.splitlines()[line].strip()
        old = " ".join(source[start:stop].split())
        mutant = Mutant(name, line + 1, code, old, " ".join(new.split()), changed)
        names[mutant.name] += 1
        yield replace(mutant, number=names[mutant.name])


def _changes(source: str) -> Iterator[tuple[int, int, str]]:
    """Yields the start, the end and the new text of each change."""
    for node in ast.walk(ast.parse(source)):
        for kind, change in _CHANGES.items():
            if isinstance(node, kind):
                yield from change(source, node)


def _span(node: astnodes.Node) -> tuple[int, int]:
    return node.start_char, node.stop_char + 1


def _text(source: str, node: astnodes.Node) -> str:
    start, stop = _span(node)
    return source[start:stop]


_Changes = Iterator[tuple[int, int, str]]


def _operator(source: str, node: astnodes.BinaryOp) -> _Changes:
    left, right = _span(node.left), _span(node.right)
    between = source[left[1] : right[0]]
    operator = between.replace("(", " ").replace(")", " ").split()
    for new in _REPLACED_OPERATORS.get(type(node), []):
        yield left[1], right[0], between.replace(operator[0], new, 1)
    if isinstance(node, (astnodes.AndLoOp, astnodes.OrLoOp, astnodes.AriOp)):
        yield *_span(node), _text(source, node.left)
        yield *_span(node), _text(source, node.right)


def _concat(source: str, node: astnodes.Concat) -> _Changes:
    yield *_span(node), _text(source, node.left)
    yield *_span(node), _text(source, node.right)


def _not(source: str, node: astnodes.ULNotOp) -> _Changes:
    yield *_span(node), _text(source, node.operand)


def _minus(source: str, node: astnodes.UMinusOp) -> _Changes:
    yield *_span(node), _text(source, node.operand)


def _condition(source: str, node: astnodes.If | astnodes.ElseIf) -> _Changes:
    yield *_span(node.test), "true"
    yield *_span(node.test), "false"


def _number(source: str, node: astnodes.Number) -> _Changes:
    value = int(node.n)
    for new in (value + 1, value - 1):
        yield *_span(node), str(new)


def _string(source: str, node: astnodes.String) -> _Changes:
    start, stop = _span(node)
    inner = source[start + 1 : stop - 1]
    yield start, stop, "''" if inner else "'?'"
    if inner == "PX":
        yield start, stop, "'EX'"
    # A list of letters, without each of them.
    letters = re.fullmatch(r"([A-Za-z]{2,4})|\^?\[([A-Za-z]+)\]", inner)
    if letters and inner not in _WORDS:
        for position in range(*letters.span(letters.lastindex)):
            yield start, stop, f"'{inner[:position]}{inner[position + 1 :]}'"


def _call(source: str, node: astnodes.Call) -> _Changes:
    arguments = [_span(argument) for argument in node.args]
    called = _text(source, node).partition("(")[0]
    name = called.rpartition(".")[2]
    for (start, stop), after in pairwise(arguments):
        first, between, second = source[start:stop], source[stop : after[0]], source[slice(*after)]
        if name not in ("max", "min"):  # their order does not matter
            yield start, after[1], second + between + first
    for number, (start, stop) in enumerate(arguments):
        yield start, stop, "nil"
        if number:
            yield arguments[number - 1][1], stop, ""
    if name in _REPLACED_FUNCTIONS:
        stop = node.start_char + len(called)
        yield stop - len(name), stop, _REPLACED_FUNCTIONS[name]
    if name in ("tonumber", "max", "min", "floor"):
        for argument in node.args:
            yield *_span(node), _text(source, argument)


def _assignment(source: str, node: astnodes.Assign) -> _Changes:
    if not isinstance(node, astnodes.LocalAssign):
        yield *_span(node), ""
    for value in node.values:
        yield *_span(value), "nil"


def _statements(source: str, node: astnodes.Block) -> _Changes:
    for statement in node.body:
        if isinstance(statement, (astnodes.Call, astnodes.Invoke, astnodes.If)):
            yield *_span(statement), ""


def _return(source: str, node: astnodes.Return) -> _Changes:
    if not node.values:
        return
    for value in node.values:
        if isinstance(value, astnodes.TrueExpr):
            yield *_span(value), "false"
        elif isinstance(value, astnodes.FalseExpr):
            yield *_span(value), "true"
        else:
            yield *_span(value), "nil"


_CHANGES: dict[type, Callable[..., _Changes]] = {
    astnodes.BinaryOp: _operator,
    astnodes.Concat: _concat,
    astnodes.ULNotOp: _not,
    astnodes.UMinusOp: _minus,
    astnodes.If: _condition,
    astnodes.ElseIf: _condition,
    astnodes.Number: _number,
    astnodes.String: _string,
    astnodes.Call: _call,
    astnodes.Assign: _assignment,
    astnodes.Block: _statements,
    astnodes.Return: _return,
}
