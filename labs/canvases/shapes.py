"""The kinds of canvases, each with its effects."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

from celery import Celery, Signature, chain, chord, group
from celery.result import AsyncResult


class Shape(NamedTuple):
    """A canvas of one kind; effects have names.

    Plain Celery promises each effect at least once, and repeats it for each publish.
    """

    #: Effects that have to happen once.
    units: tuple[str, ...]
    publish: Callable[[], Any]
    #: Callers get a DeclinedError.
    fails: bool = False
    #: Rows that have to be in the database once.
    rows: tuple[str, ...] = ()
    #: Effects that may happen once or not at all: the message expires, is revoked, or is discarded
    #: by a worker that does not know its task.
    optional: tuple[str, ...] = ()
    #: Effects of a plain task, or of one in shadow: at least one for each publish.
    repeatable: tuple[str, ...] = ()
    #: A command of the operator and its call, whose effect it may repeat once.
    operated: tuple[str, Signature] | None = None
    #: A call whose first publisher is killed between its reservation and its message.
    reserved: Signature | None = None
    #: Each publish has the same result.
    same_result: bool = True


def shapes(app: Celery, seed: int, name: str) -> dict[str, Shape]:
    """Returns a canvas of each kind."""
    chance = random.Random(f"{seed}, {name}")
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
    task_id = UUID(int=chance.getrandbits(128)).hex
    priority = chance.choice([3, 6])
    stamped = chain(works[0], tail.s(last))
    stamped.stamp(order=name)

    def publish_revoked() -> AsyncResult[Any]:
        result = works[0].apply_async(countdown=1)
        result.revoke()
        return result

    def publish_stamped() -> AsyncResult[Any]:
        result = stamped.apply_async(countdown=1)
        app.control.revoke_by_stamped_headers({"order": name})
        return result

    return {
        "plain": Shape((first,), works[0].delay),
        "countdown": Shape((first,), lambda: works[0].apply_async(countdown=1)),
        "priority": Shape((first,), lambda: works[0].apply_async(priority=priority)),
        "same task id": Shape((first,), lambda: works[0].apply_async(task_id=task_id)),
        "expires": Shape(
            (), lambda: works[0].apply_async(expires=1), optional=(first,), same_result=False
        ),
        "revoked": Shape((), publish_revoked, optional=(first,), same_result=False),
        "revoked by a stamp": Shape((), publish_stamped, optional=(first, last), same_result=False),
        "reserved": Shape((first,), lambda: task["reserved"].delay(*calls[0])),
        "reserved, publisher killed": Shape(
            (first,),
            lambda: task["reserved briefly"].delay(*calls[0]),
            reserved=task["reserved briefly"].si(*calls[0]),
        ),
        "new": Shape((), lambda: task["new"].delay(*calls[0]), optional=(first,)),
        "forgotten": Shape((first,), works[0].delay, operated=("forget", works[0])),
        "run again": Shape(
            (first, last),
            lambda: decline.apply_async((first,), link_error=apologise.si(last)),
            fails=True,
            operated=("rerun", decline.si(first)),
        ),
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
        "chain with a task in shadow": Shape(
            (first, last),
            lambda: chain(works[0], task["watched"].s(names[1]), tail.s(last)).delay(),
            repeatable=(names[1],),
        ),
        "chord of two stores": Shape(
            (*names[:2], last),
            lambda: chord([works[0], task["elsewhere"].si(*calls[1])])(tail.s(last)),
        ),
        "chord": Shape((*names[:3], last), lambda: chord(works[:3])(tail.s(last))),
        "chord that fails": Shape((*names[:2], last), failing.delay, fails=True),
        "chord in a chord": Shape((*names[:4], last), nested.delay),
        "group in a chain": Shape(
            (*names[:4], last),
            lambda: chain(works[0], group(works[1:4]), tail.s(last)).delay(),
        ),
        "publishes": Shape(
            (first, f"{first}, ordered"), lambda: task["place"].delay(first, seconds[0])
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
        "transaction, forgotten": Shape(
            (),
            lambda: task["book"].delay(first, seconds[0]),
            rows=(first,),
            operated=("forget", task["book"].si(first, seconds[0])),
        ),
        "publishes on commit": Shape(
            (f"{first}, sold",), lambda: task["sell"].delay(first, seconds[0]), rows=(first,)
        ),
    }
