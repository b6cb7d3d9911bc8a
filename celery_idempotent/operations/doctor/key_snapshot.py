"""Snapshots of the key rules of an app, to compare the keys of two versions of its code.

A snapshot holds sample calls of each task and their keys. The samples are made from the parameters'
types, never from real calls, so a snapshot contains no user data. It holds the digest of a default,
not the value. Equal code yields equal snapshots.
"""

from __future__ import annotations

import json
import typing
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from inspect import Parameter
from typing import Any

from celery import Celery
from kombu.utils import json as kombu_json

from celery_idempotent.core.configuration import app_tasks
from celery_idempotent.core.configuration.app_tasks import IdempotentTaskLike
from celery_idempotent.core.key.canonical import NotCanonicalError, canonical, digest
from celery_idempotent.core.key.parameters import entry_name
from celery_idempotent.core.key.rule import KeyRule
from celery_idempotent.errors import KeyRuleError
from celery_idempotent.extensions.shadow import SHADOW_SUFFIX
from celery_idempotent.operations.doctor.finding import Finding, Severity
from celery_idempotent.operations.doctor.tasks import type_hints

#: Version of the document; `read` refuses others.
VERSION = 1

#: Sample values by type. A parameter of unknown type gets the text or, if the rule then raises an
#: error, a mapping.
_SAMPLES: dict[type, Any] = {
    int: 7,
    float: 0.5,
    str: "sample",
    bytes: b"sample",
    Decimal: Decimal("0.5"),
    datetime: datetime(2000, 1, 2, 3, 4, 5, tzinfo=timezone.utc),
    date: date(2000, 1, 2),
    uuid.UUID: uuid.UUID(int=7),
    list: ["sample"],
    tuple: ["sample"],
}
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Sample:
    """A sample call and its key."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    digest: str
    #: The fingerprint in hexadecimal.
    fingerprint: str

    @classmethod
    def of(cls, rule: KeyRule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sample:
        """Returns the call with the key that `rule` derives for it.

        Raises:
            KeyRuleError: if the rule derives none.
            TypeError: if the call does not fit the task.
        """
        key = rule.derive(args, kwargs, task_id="sample")
        return cls(args, kwargs, key.digest, key.fingerprint.hex())


@dataclass(frozen=True)
class Snapshot:
    """The rule of one task, and the keys of its sample calls."""

    #: The rule in words: `KeyRule.description`.
    rule: str
    #: The prefix of the task's names in Redis.
    prefix: str
    #: The parameters by name, each with the digest of its default; empty text without a default.
    parameters: Mapping[str, str]
    #: The sample calls with their keys; empty if the rule raised an error for each of them.
    samples: Sequence[Sample]


def of_task(task: IdempotentTaskLike) -> Snapshot:
    """Returns the snapshot of one task."""
    configuration = task.idempotency_configuration
    parameters = configuration.rule.signature.parameters.values()
    return Snapshot(
        configuration.rule.description,
        # Without the suffix of shadow: a task that leaves shadow starts without records, as
        # intended, which is no change of its keys.
        configuration.settings.key_prefix.removesuffix(SHADOW_SUFFIX),
        {entry_name(parameter): _default_digest(parameter) for parameter in parameters},
        list(_samples(task)),
    )


def document_of(tasks: Sequence[IdempotentTaskLike]) -> dict[str, Any]:
    """Returns the snapshots of `tasks` as one JSON document."""
    snapshots = {task.name: asdict(of_task(task)) for task in tasks}
    # kombu's JSON, as used in messages, also represents dates, decimals and UUIDs.
    encoded = kombu_json.dumps({"celery_idempotent_keys": VERSION, "tasks": snapshots})
    return json.loads(encoded)  # type: ignore[no-any-return]


def read(text: str) -> dict[str, Snapshot]:
    """Returns the snapshots in a document, by task.

    Raises:
        ValueError: if `text` is not such a document.
    """
    try:
        document = kombu_json.loads(text)
        if document["celery_idempotent_keys"] != VERSION:
            raise ValueError(f"version {document['celery_idempotent_keys']!r} is not {VERSION}")
        snapshots = {}
        for task, fields in document["tasks"].items():
            samples = [Sample(**sample) for sample in fields.pop("samples")]
            parameters = {**fields.pop("parameters")}
            snapshots[task] = Snapshot(**fields, parameters=parameters, samples=samples)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return snapshots


def _samples(task: IdempotentTaskLike) -> Iterator[Sample]:
    """Yields a call with only the required arguments, and one with all."""
    configuration = task.idempotency_configuration
    rule = configuration.rule
    # A copy of the rule that does not serialize the arguments: `_Mapping` creates the items that
    # the rule reads, which serialization, by a copy, would lose.
    recording = KeyRule(rule.task, rule.source, rule.signature, lambda *call: call)
    named = [p for p in rule.signature.parameters.values() if p.kind not in _VARIADIC]
    required = [parameter for parameter in named if parameter.default is Parameter.empty]
    for chosen in (required, named) if required != named else (named,):
        for of_unknown_type in (str, _Mapping):
            call = _call(task, chosen, of_unknown_type)
            try:
                Sample.of(recording, *call)
                yield Sample.of(rule, *kombu_json.loads(kombu_json.dumps(call)))
            except (KeyRuleError, TypeError):
                continue  # the rule expects arguments of other types
            break


def _call(
    task: IdempotentTaskLike, parameters: Sequence[Parameter], of_unknown_type: type
) -> tuple[list[Any], dict[str, Any]]:
    rule, hints = task.idempotency_configuration.rule, type_hints(task)
    args, kwargs = [], {}
    for number, parameter in enumerate(parameters):
        value = _value(parameter, hints.get(parameter.name), of_unknown_type)
        # Two parameters of one type need different values to yield different keys.
        if type(value) in (int, str):
            value += type(value)(number)
        if parameter.kind is Parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    extra = (name for name in rule.names or () if name not in rule.signature.parameters)
    return args, kwargs | dict.fromkeys(extra, "sample")


def _value(parameter: Parameter, hint: Any, of_unknown_type: type) -> Any:
    """Returns a sample value of a type that the hint allows; else one of `of_unknown_type`."""
    if hint is None and parameter.default is not Parameter.empty:
        hint = type(parameter.default)
    if hint is bool:
        return parameter.default is not True  # never the default, which keys omit
    for kind in (hint, typing.get_origin(hint), *typing.get_args(hint)):
        if kind is dict:
            return _Mapping(sample=7)
        if isinstance(kind, type) and kind in _SAMPLES:
            return _SAMPLES[kind]
    return _SAMPLES.get(of_unknown_type, of_unknown_type())


class _Mapping(dict[str, Any]):
    """A sample mapping of a parameter of unknown type: it creates each item that a rule reads."""

    def __missing__(self, name: str) -> str:
        self[name] = "sample"
        return "sample"


def check(app: Celery, before: Mapping[str, Snapshot]) -> Iterator[Finding]:
    """Yields the change of each task from the snapshots `before` to this code."""
    tasks = {task.name: task for task in app_tasks.tasks(app)}
    for name, snapshot in sorted(before.items()):
        if name not in tasks:
            yield Finding(
                "task-removed", Severity.WARNING, name,
                "the snapshot has this task, and this code has no idempotent task of that name",
                "@app.task(name=…) with the old name, if the task was renamed or moved",
                "workers with this code discard its messages, or run them without a key; "
                "under another name its keys are new: duplicates of earlier calls run again",
            )  # fmt: skip
        elif tasks[name].idempotency_configuration.is_protected:
            yield from _check_task(tasks[name], snapshot)


def _check_task(task: IdempotentTaskLike, before: Snapshot) -> Iterator[Finding]:
    """Yields the change of the task's keys, if any."""
    now = of_task(task)
    differences = _differences(before, now)
    if not (before.samples and now.samples):
        yield Finding(
            "keys-unknown", Severity.NOTE, task.name,
            "its keys cannot be compared, because its rule raises an error for the sample calls "
            f"({differences})",
            "type annotations from which sample arguments can be made",
            "a change of its keys goes unnoticed",
        )  # fmt: skip
    elif changes := _changes(task, before, now):
        retention = f"{task.idempotency_configuration.settings.result_ttl:g} s"
        yield Finding(
            "keys-changed", Severity.WARNING, task.name,
            f"its {', '.join(changes)} differ from those of the snapshot ({differences})",
            "the previous rule, and the previous names, order and defaults of the parameters, with "
            "a default for each new one; or, at a time when no duplicate of an earlier call can "
            "arrive, stop all workers of one version before the first of the other starts",
            "while workers of both versions run, and until earlier outcomes would have expired "
            f"({retention}): of a call with another key, a duplicate also runs; with another "
            "fingerprint, it is refused with KeyReusedError; with another default, it gets the "
            "outcome of a call that meant something else; a call that is not accepted fails",
        )  # fmt: skip


def _changes(task: IdempotentTaskLike, before: Snapshot, now: Snapshot) -> list[str]:
    """Returns what differs: for the calls of the snapshot, or of the defaults."""
    rule, changes = task.idempotency_configuration.rule, set()
    if before.prefix != now.prefix:
        changes.add("keys")
    if _changed_defaults(before, now):
        changes.add("defaults")
    for sample in before.samples:
        try:
            same = Sample.of(rule, sample.args, sample.kwargs)
        except (KeyRuleError, TypeError):
            changes.add("accepted calls")
        else:
            if same.digest != sample.digest:
                changes.add("keys")
            elif same.fingerprint != sample.fingerprint:
                changes.add("fingerprints")
    return sorted(changes)


def _default_digest(parameter: Parameter) -> str:
    if parameter.default is Parameter.empty:
        return ""
    try:
        return digest(b"default" + canonical(parameter.default), 8).hex()
    except NotCanonicalError:
        return "?"


def _changed_defaults(before: Snapshot, now: Snapshot) -> list[str]:
    """Returns the names of the parameters whose default differs."""
    olds, news = before.parameters, now.parameters
    return [name for name in olds if olds[name] and news.get(name, "") not in ("", olds[name])]


def _differences(before: Snapshot, now: Snapshot) -> str:
    """Describes the code changes that a snapshot shows."""
    parts = []
    for label, old, new in (
        ("rule", before.rule, now.rule),
        ("prefix", before.prefix, now.prefix),
        ("parameters", ", ".join(before.parameters), ", ".join(now.parameters)),
    ):
        if old != new:
            parts.append(f"{label}: {old or 'none'} → {new or 'none'}")
    if defaults := _changed_defaults(before, now):
        parts.append(f"defaults: {', '.join(defaults)}")
    return "; ".join(parts) or "rule, names of parameters and prefix are the same"
