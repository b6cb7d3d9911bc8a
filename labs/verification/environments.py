"""The environments that are searched: a short list by `make test`, a long one by `make proof`.

Each is a setting with a few faults, in every order and at every moment. In `LIMITS` something
happens that no protocol on one Redis can handle: there the search must find the violation.
"""

from __future__ import annotations

from typing import Any

#: By name: the arguments of Environment.
SHORT: dict[str, dict[str, Any]] = {
    "a crash": {"allowed": {"crash": 1}},
    "a freeze": {"allowed": {"freeze": 1}},
    "lost replies": {"tasks": 1, "allowed": {"lost reply": 2, "freeze": 1}},
    "a time limit": {"tasks": 1, "allowed": {"time limit": 1, "redelivery": 1}},
    "a retry": {"tasks": 1, "allowed": {"retry": 1, "crash": 1}},
    "a clock set back": {"tasks": 1, "allowed": {"clock back": 1, "crash": 1}},
    "a clock set forward": {"tasks": 1, "allowed": {"clock forward": 1, "redelivery": 1}},
    "an operator": {"tasks": 1, "allowed": {"forget": 1, "redelivery": 1}},
    "a child that dies repeatedly": {
        "tasks": 1, "workers": 1, "max_attempts": 2, "allowed": {"crash": 3},
    },
    "a step": {"tasks": 1, "allowed": {"step": 2, "crash": 1, "error": 1}},
    "a late copy of a request": {"tasks": 1, "allowed": {"late copy": 1, "freeze": 1}},
    "an error, and a copy": {"tasks": 1, "allowed": {"error": 1, "redelivery": 1}},
    "a retry, and a copy": {"tasks": 1, "allowed": {"retry": 1, "redelivery": 1}},
    "a final time limit": {
        "tasks": 1, "allowed": {"final time limit": 1, "redelivery": 1},
    },
    "an operator with a displayed record": {
        "tasks": 1, "allowed": {"forget displayed": 1, "redelivery": 1},
    },
    "reservations": {"reserves": True, "workers": 1, "allowed": {"retry": 1}},
    "a continuation": {
        "tasks": 1, "continues": True, "allowed": {"redelivery": 1, "crash": 1},
    },
    "a continuation, and lost replies": {
        "tasks": 1, "continues": True, "allowed": {"redelivery": 1, "lost reply": 2},
    },
    "errbacks, and a crash": {
        "tasks": 1, "continues": True, "allowed": {"error": 1, "crash": 1, "redelivery": 1},
    },
    "published anew": {"same_id": True, "allowed": {"error": 1, "redelivery": 1}},
    "published anew, with continuations": {
        "same_id": True, "continues": True, "allowed": {"error": 1, "redelivery": 1},
    },
    "duplicates that are ignored": {
        "on_conflict": "ignore", "allowed": {"redelivery": 1},
    },
    "fused completion": {"fused": True, "allowed": {"crash": 1}},
    "a result that expires": {"fused": True, "allowed": {"lost reply": 1, "result expires": 1}},
    "a result that is overwritten": {
        "fused": True, "tasks": 1, "allowed": {"redelivery": 1, "result overwritten": 1},
    },
}  # fmt: skip

LONG: dict[str, dict[str, Any]] = {
    **SHORT,
    "crash and freeze": {"allowed": {"crash": 1, "freeze": 1}},
    "crash and lost reply": {"allowed": {"crash": 1, "lost reply": 1}},
    "crash and redelivery": {"allowed": {"crash": 1, "redelivery": 1}},
    "freeze and redelivery": {"allowed": {"freeze": 1, "redelivery": 1}},
    "freeze and lost reply": {"allowed": {"freeze": 1, "lost reply": 1}},
    "two freezes": {"allowed": {"freeze": 2}},
    "two crashes": {"allowed": {"crash": 2}},
    "three workers": {"workers": 3, "tasks": 2, "allowed": {"freeze": 1, "redelivery": 1}},
    "three tasks": {"tasks": 3, "allowed": {"crash": 1}},
    "time limit and freeze": {"allowed": {"time limit": 1, "freeze": 1}},
    "retry, error and crash": {"allowed": {"retry": 1, "error": 1, "crash": 1}},
    "retry, stored error and freeze": {"allowed": {"retry": 1, "stored error": 1, "freeze": 1}},
    "steps and crash": {"allowed": {"step": 2, "stored error": 1, "crash": 1}},
    "steps, freeze and retry": {"allowed": {"step": 1, "freeze": 1, "retry": 1}},
    "clock back and freeze": {"allowed": {"clock back": 1, "freeze": 1}},
    "clock back, crash and retry": {"allowed": {"clock back": 1, "crash": 1, "retry": 1}},
    "clock forward and freeze": {"allowed": {"clock forward": 1, "freeze": 1}},
    "clock both ways": {"allowed": {"clock back": 1, "clock forward": 1, "crash": 1}},
    "forget and freeze": {"allowed": {"forget": 1, "freeze": 1}},
    "forget and crash": {"allowed": {"forget": 1, "crash": 1, "lost reply": 1}},
    "late copy and freeze": {"allowed": {"late copy": 1, "freeze": 1}},
    "late copy and crash": {"allowed": {"late copy": 1, "crash": 1}},
    "late copy, retry and error": {"tasks": 1, "allowed": {"late copy": 1, "retry": 1, "error": 1}},
    "reservations, retry and crash": {"reserves": True, "allowed": {"retry": 1, "crash": 1}},
    "reservations and freeze": {"reserves": True, "allowed": {"freeze": 1, "error": 1}},
    "ignore, redelivery and crash": {
        "on_conflict": "ignore", "allowed": {"redelivery": 1, "crash": 1},
    },
    "errors of both tasks, and a copy": {"allowed": {"error": 2, "redelivery": 1}},
    "error, exit and a copy": {"allowed": {"error": 1, "exit": 1, "redelivery": 1}},
    "error, a copy and crash": {"allowed": {"error": 1, "redelivery": 1, "crash": 1}},
    "error, a copy and freeze": {"allowed": {"error": 1, "redelivery": 1, "freeze": 1}},
    "error, a copy and a lost reply": {
        "tasks": 1, "allowed": {"error": 1, "redelivery": 1, "lost reply": 1},
    },
    "error, steps and a copy": {
        "allowed": {"error": 1, "step": 1, "redelivery": 1},
    },
    "error, retry and copies": {
        "tasks": 1, "allowed": {"error": 1, "retry": 1, "redelivery": 2},
    },
    "retry, a copy and crash": {"allowed": {"retry": 1, "redelivery": 1, "crash": 1}},
    "reservations, error and a copy": {
        "reserves": True, "allowed": {"error": 1, "redelivery": 1},
    },
    "final time limit, error and a copy": {
        "allowed": {"final time limit": 1, "error": 1, "redelivery": 1},
    },
    "deaths in a row at time limits": {
        "max_attempts": 2, "tasks": 3, "workers": 1, "allowed": {"final time limit": 3},
    },
    "a displayed record and freeze": {"allowed": {"forget displayed": 1, "freeze": 1}},
    "a displayed record, error and retry": {
        "allowed": {"forget displayed": 1, "error": 1, "retry": 1},
    },
    "published anew, and a retry": {
        "same_id": True, "allowed": {"error": 1, "retry": 1, "redelivery": 1},
    },
    "published anew, two errors": {
        "same_id": True, "allowed": {"error": 2, "redelivery": 1},
    },
    "published anew, continuations and crash": {
        "same_id": True, "continues": True, "allowed": {"error": 1, "redelivery": 1, "crash": 1},
    },
    "continuation, error, redelivery and crash": {
        "continues": True, "allowed": {"error": 1, "redelivery": 1, "crash": 1},
    },
    "continuation, freeze and redelivery": {
        "continues": True, "allowed": {"freeze": 1, "redelivery": 1},
    },
    "continuation, final time limit and redelivery": {
        "continues": True, "allowed": {"final time limit": 1, "redelivery": 1},
    },
    "continuation and deaths in a row": {
        "tasks": 1, "continues": True, "max_attempts": 2, "workers": 1, "allowed": {"crash": 3},
    },
    "continuation, redelivery and crash": {
        "continues": True, "allowed": {"redelivery": 1, "crash": 1},
    },
    "deaths in a row": {
        "max_attempts": 2, "tasks": 1, "allowed": {"crash": 3, "redelivery": 1},
    },
    "fused, crash and redelivery": {"fused": True, "allowed": {"crash": 1, "redelivery": 1}},
    "fused, freeze and lost reply": {"fused": True, "allowed": {"freeze": 1, "lost reply": 1}},
    "fused, freeze and redelivery": {
        "fused": True, "keeps_success": False, "allowed": {"freeze": 1, "redelivery": 1},
    },
    "fused, error and redelivery": {
        "fused": True, "allowed": {"error": 1, "redelivery": 1},
    },
    "fused, error and crash": {"fused": True, "allowed": {"error": 1, "crash": 1}},
    "fused, late copy and freeze": {"fused": True, "allowed": {"late copy": 1, "freeze": 1}},
    "fused, late copy and an expired result": {
        "fused": True, "allowed": {"late copy": 1, "result expires": 1},
    },
    "fused, freeze and an expired result": {
        "fused": True, "allowed": {"freeze": 1, "result expires": 1},
    },
    "fused, crash and an overwritten result": {
        "fused": True, "allowed": {"crash": 1, "result overwritten": 1},
    },
    "fused, crash, lost reply and an expired result": {
        "fused": True, "tasks": 1,
        "allowed": {"crash": 1, "lost reply": 1, "result expires": 1},
    },
}  # fmt: skip

#: What cannot be promised: the arguments of Environment, and the invariant that breaks there.
LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "the server's clock leaps past a lease": (
        {"exclusive": True, "allowed": {"clock forward": 1}},
        "two executions trust their lease",
    ),
    "an operator forgets a running execution": (
        {"exclusive": True, "allowed": {"forget": 1}},
        "two executions trust their lease",
    ),
    "the clock falls back past a forgotten record": (
        {"tokens_grow": True, "tasks": 1,
         "allowed": {"clock back": 1, "exit": 1, "redelivery": 1}},
        "the token does not grow",
    ),
    "a publisher dies between its reservation and its message": (
        {"reserves": True, "allowed": {"publisher dies": 1}},
        "T2 waits for a message that was never sent",
    ),
    # Celery reads the result, then writes it. In between, a copy of the message has written one.
    "Celery writes a result that is not stored over one that is": (
        {"fused": True, "tasks": 1, "allowed": {"freeze": 1, "redelivery": 1}},
        "Celery replaces a SUCCESS",
    ),
}  # fmt: skip
