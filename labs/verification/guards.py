"""The guards of the protocol, each with a scenario that breaks when it is left out."""

from __future__ import annotations

from labs.verification import model
from labs.verification.environment import Environment
from labs.verification.scenarios import SCENARIOS
from labs.verification.search import SearchResult, search

#: By guard, as `model.is_off` names it: what it does, and the scenario.
GUARDS: dict[str, tuple[str, str]] = {
    "mark": ("the first begin after a lease only marks it", "expired: late"),
    "own lease": ("a message waits for the lease of its own record", "turn: copies"),
    "generation": ("an earlier copy is not the retry or the replacement", "expired: replaced task"),
    "resent": ("a begin that is sent again is recognized", "expired: lost"),
    "turn of a resent begin": ("… only while its record has the turn", "turn: lost"),
    "resent renews": ("… and renews its lease", "expired: lost"),
    "quiet time": ("a message waits for its quiet time", "started: quiet"),
    "last token": ("a turn keeps the last token of its key", "turn: copies"),
    "fence": ("who loses the turn has a token that is spent", "turn: freeze"),
    "claim": ("one delivery at a time sends the continuation", "expired: continuation"),
    "worker of a claim": ("… and its worker is in the record", "expired: three senders"),
    "sent before": ("a copy does not send a continuation again", "task id: chord"),
    "confirm": ("a begin that was granted to nobody did not die", "expired: crash"),
    "takeover confirms": ("a takeover extends before its body", "expired: crash"),
    "body stays": ("steps and arguments survive a takeover", "started: reserved"),
    "slot ends": ("a begin ends the slot of its message", "started: reserved"),
    "token of extend": ("extend checks the token", "expired: freeze"),
    "token of settle": ("settle checks the token", "expired: freeze"),
    "settled records stay": ("a late settle changes nothing", "expired: late"),
    "worker of abandon": ("abandon checks the worker", "expired: crash"),
    "token of abandon": ("abandon spends the token", "expired: hard limit"),
    "deadline": ("a late command does nothing", "started: reserved"),
    "one copy at a time": ("a copy is sent after the deadline of the last one", "turn: forget"),
    "stale slot": ("the slot of a message that has begun is free", "started: rolling deploy"),
    "newest arguments": ("a waiting message gets the newest arguments", "started: reserved"),
    "holder is forgotten": ("forget deletes the record that has the turn", "turn: forget"),
    "replaced ends": ("a message that was replaced has ended", "turn: replace"),
}


def search_without(guard: str) -> SearchResult:
    """Searches the scenario of a guard without it."""
    model.OFF.add(guard)
    try:
        return search(Environment(SCENARIOS[GUARDS[guard][1]]))
    finally:
        model.OFF.discard(guard)
