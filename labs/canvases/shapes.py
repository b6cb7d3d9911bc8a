"""The kinds of canvases, each with its effects."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

from celery import Celery, chain, chord, group
from celery.result import AsyncResult


class Shape(NamedTuple):
    """A canvas of one kind; effects have names."""

    #: Effects that have to happen once.
    units: tuple[str, ...]
    publish: Callable[[], Any]
    #: Callers get a DeclinedError.
    fails: bool = False
    #: Rows that have to be in the database once.
    rows: tuple[str, ...] = ()
    #: Effects that may happen once or not at all: the message expires or is revoked.
    optional: tuple[str, ...] = ()
    #: Effects of a plain task, which may be repeated.
    repeatable: tuple[str, ...] = ()
    #: Each publish has the same result.
    same_result: bool = True


def shapes(app: Celery, name: str, chance: random.Random) -> dict[str, Shape]:
    """Returns a canvas of each kind."""
    task = {each.removeprefix("canvases."): app.tasks[each] for each in app.tasks}
    work, tail, decline, apologise = map(task.get, ("work", "tail", "decline", "apologise"))
    seconds = [chance.uniform(0, 0.4) for _ in range(4)]
    names = [f"{name}.{letter}" for letter in "abcde"]
    calls = [*zip(names, seconds, strict=False)]
    works = [work.si(*call) for call in calls]
    first, last = names[0], names[4]
    inside = f"{first}, inside", f"{first}, inside, tail"
    failing = chord([works[0], decline.si(names[1])], tail.s(names[2]).on_error(apologise.si(last)))
    nested = chord([chord(works[:2], tail.s(names[2])), works[3]], tail.s(last))
    task_id = uuid4().hex

    def publish_revoked() -> AsyncResult[Any]:
        result = works[0].apply_async(countdown=1)
        result.revoke()
        return result

    return {
        "plain": Shape((first,), works[0].delay),
        "countdown": Shape((first,), lambda: works[0].apply_async(countdown=1)),
        "priority": Shape((first,), lambda: works[0].apply_async(priority=chance.choice([3, 6]))),
        "same task id": Shape((first,), lambda: works[0].apply_async(task_id=task_id)),
        "expires": Shape(
            (), lambda: works[0].apply_async(expires=1), optional=(first,), same_result=False
        ),
        "revoked": Shape((), publish_revoked, optional=(first,), same_result=False),
        "link": Shape((first, last), lambda: works[0].apply_async(link=tail.s(last))),
        "errback": Shape(
            (first, last),
            lambda: decline.apply_async((first,), link_error=apologise.si(last)),
            fails=True,
        ),
        "chain": Shape(
            (first, names[1], last), lambda: chain(works[0], tail.s(names[1]), tail.s(last)).delay()
        ),
        "chain of a plain task": Shape(
            (first, last),
            lambda: chain(works[0], task["unprotected"].s(names[1]), tail.s(last)).delay(),
            repeatable=(names[1],),
        ),
        "chord": Shape((*names[:3], last), lambda: chord(works[:3])(tail.s(last))),
        "chord that fails": Shape((*names[:2], last), failing.delay, fails=True),
        "chord in a chord": Shape((*names[:4], last), nested.delay),
        "group in a chain": Shape(
            (*names[:4], last),
            lambda: chain(works[0], group(works[1:4]), tail.s(last)).delay(),
        ),
        "starmap": Shape((*names[:3],), lambda: work.starmap(calls[:3]).delay()),
        "chunks": Shape((*names[:4],), lambda: work.chunks(calls, 2).group().delay()),
        "publishes": Shape(
            (first, f"{first}, ordered"), lambda: task["order"].delay(first, seconds[0])
        ),
        "retries": Shape(
            (first, last), lambda: task["again"].apply_async((first,), link=tail.s(last))
        ),
        "retries without an error": Shape(
            (first,), lambda: task["again"].delay(first, throw=False), same_result=False
        ),
        "retries by itself": Shape((first,), lambda: task["busy"].delay(first)),
        "replaced": Shape(
            (*inside, last),
            lambda: chain(task["hand_over"].si(first, seconds[0]), tail.s(last)).delay(),
        ),
        "transaction": Shape(
            (last,),
            lambda: task["book"].apply_async((first, seconds[0]), link=tail.s(last)),
            rows=(first,),
        ),
        "transaction, replaced": Shape(
            (*inside, last),
            lambda: chain(task["book"].si(first, seconds[0], True), tail.s(last)).delay(),
            rows=(first,),
        ),
    }
