"""Rules by argument names, by callable and by task id, and keys that callers pass."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from celery_idempotent import TASK_ID
from celery_idempotent.core.key import Key
from celery_idempotent.core.key.rule import KeyRule
from celery_idempotent.errors import KeyRuleError, SettingsError
from tests.unit.conftest import TASK, Task, rule_of

pytestmark = pytest.mark.core


def charge(order_id: Any, amount: Any = 0, **options: Any) -> None: ...


class TestNames:
    def test_their_order_is_part_of_the_rule(self) -> None:
        one, other = Task(charge, ("order_id", "amount")), Task(charge, ("amount", "order_id"))

        assert one.name(1, 2) != one.name(2, 1)
        assert one.name(1, 2) == other.name(2, 1)

    def test_names_may_be_a_list(self) -> None:
        assert Task(charge, ["order_id"]).name(1) == Task(charge, ("order_id",)).name(1)

    def test_an_error_names_a_missing_argument(self) -> None:
        with pytest.raises(KeyRuleError, match="shop.charge: .*'region'"):
            Task(charge, ("region",))(1)

    def test_an_error_names_an_argument_without_canonical_form_and_does_not_quote_it(self) -> None:
        with pytest.raises(KeyRuleError) as caught:
            Task(charge, ("order_id",))(object())

        assert "'order_id'" in str(caught.value)
        assert "0x" not in str(caught.value)

    def test_an_unknown_argument_is_rejected_at_start(self) -> None:
        with pytest.raises(SettingsError, match=r"names 'orderid'.*\(it takes: order_id\)"):
            rule_of(lambda order_id: None, ("orderid",))


class TestCallable:
    def test_gets_the_arguments_and_returns_the_key(self) -> None:
        task = Task(charge, lambda order_id, amount=0: f"order:{order_id}")

        assert task.name(42, amount=5) == task.name(42) == task.name(order_id=42)
        assert task.name(42) != task.name(43)
        assert task(42, 1).fingerprint != task(42, 2).fingerprint

    def test_may_be_a_callable_object(self) -> None:
        rule = rule_of(charge, partial("{0}:{1}".format, "order"))

        assert str(rule.derive((42,), {})) == Task(charge, lambda value: "order:42").name(42)
        assert rule.description == "the callable partial"

    def test_a_number_or_a_uuid_is_the_same_key_as_its_text(self) -> None:
        given = Task(charge, lambda value: value)

        assert given.name(5) == given.name("5")
        assert given.name(UUID(int=5)) == given.name(str(UUID(int=5)))
        assert given.name(0) == given.name("0")

    @pytest.mark.parametrize("value", [None, "", b"", (), [], {}, True, False], ids=repr)
    def test_empty_values_are_not_keys(self, value: Any) -> None:
        with pytest.raises(KeyRuleError, match="charge: the value returned by idempotency_key is "):
            Task(charge, lambda order_id: value)(1)

    def test_a_value_without_canonical_form_is_not_a_key(self) -> None:
        for value in (object(), float("nan"), [len]):
            with pytest.raises(KeyRuleError, match="value returned by idempotency_key") as caught:
                Task(charge, lambda order_id, value=value: value)(1)
            assert "0x" not in str(caught.value)

    def test_an_error_of_the_callable_is_named_and_its_message_not_quoted(self) -> None:
        def rule(order_id: Any) -> str:
            raise LookupError(f"no customer with card {order_id}")

        with pytest.raises(KeyRuleError) as caught:
            Task(charge, rule)("4111-1111")

        assert str(caught.value) == (
            "shop.charge: idempotency_key raised LookupError; it gets the arguments, not a "
            "task's self, and must return a key for calls without one"
        )
        assert isinstance(caught.value.__cause__, LookupError)

    @pytest.mark.parametrize("rule", [lambda: "", int])
    def test_a_callable_that_cannot_be_called_is_an_error(self, rule: Any) -> None:
        with pytest.raises(KeyRuleError, match="idempotency_key raised (Type|Value)Error; it gets"):
            Task(charge, rule)("4111-1111")


def test_only_copies_of_one_message_are_duplicates() -> None:
    rule = rule_of(charge, TASK_ID)

    first = rule.derive((1,), {}, task_id="a")

    assert first == rule.derive((1,), {}, task_id="a")
    assert first == rule.derive((2,), {}, task_id="a")
    assert first != rule.derive((1,), {}, task_id="b")


class TestExplicitKey:
    @staticmethod
    def derive(rule: KeyRule, *args: Any, key: str) -> str:
        return str(rule.derive(args, {}, task_id="a", explicit_key=key))

    @pytest.mark.parametrize("key", [None, "{order_id}", ("order_id",), len, TASK_ID])
    def test_takes_precedence_over_every_rule(self, key: Any) -> None:
        rule = rule_of(charge, key)

        assert self.derive(rule, 1, key="req-7") == self.derive(rule, 2, key="req-7")
        assert self.derive(rule, 1, key="req-7") != self.derive(rule, 1, key="req-8")
        assert self.derive(rule, 1, key="req-7") == str(rule.of_text("req-7"))

    @pytest.mark.parametrize(
        ("key", "explicit"),
        [
            (None, "x"),
            ("{order_id}", "x"),
            ("order:{order_id}", "order:x"),
            (("order_id",), "x"),
            (("order_id",), ["x"]),
            (("order_id", "amount"), ["x", "0"]),
            (lambda order_id: order_id, "x"),
            (lambda order_id: ("acme", order_id), ["acme", "x"]),
            (lambda order_id: ["acme", order_id], ("acme", "x")),
            (TASK_ID, "x"),
        ],
    )
    def test_never_equals_a_key_of_any_rule(self, key: Any, explicit: Any) -> None:
        rule = rule_of(charge, key)
        derived = rule.derive(("x",), {}, task_id="x")
        brought = rule.derive(("x",), {}, task_id="x", explicit_key=explicit)

        assert brought.digest.removeprefix("~") != derived.digest
        assert (brought.explicit, derived.explicit) == (True, False)
        assert str(brought) == f"{TASK}:{brought.digest}"
        assert brought.digest.startswith("~")
        assert not derived.digest.startswith("~")

    def test_a_part_of_it_is_in_the_namespace_and_cannot_be_named(self) -> None:
        rule = rule_of(charge)
        key = rule.of_text("req-7")

        assert key.part("a").explicit
        assert key.part("a") != rule.of_text((key.digest, "a"))
        assert not rule.derive((1,), {}).part("a").explicit

    def test_a_number_or_a_uuid_in_a_tuple_is_the_same_as_its_text(self) -> None:
        of_text = rule_of(charge).of_text

        assert of_text(("acme", 7, UUID(int=1))) == of_text(["acme", "7", str(UUID(int=1))])
        assert of_text(("acme", True)) != of_text(("acme", "1"))

    @pytest.mark.parametrize("key", ["", None, False, True], ids=repr)
    def test_empty_values_are_not_keys(self, key: Any) -> None:
        kinds = "it must be text, an integer, a UUID or a tuple of these"
        with pytest.raises(
            KeyRuleError, match=f"^shop.charge: key is .*, which is not .*; {kinds}$"
        ):
            rule_of(charge).of_text(key)


@pytest.mark.parametrize("rule", [5, (), [], ("a", 1), {"a"}, b"{order_id}", 0.5, True], ids=repr)
def test_an_invalid_rule_is_rejected_at_start(rule: Any) -> None:
    with pytest.raises(SettingsError, match="shop.charge: idempotency_key must be"):
        rule_of(charge, rule)


def test_the_text_of_a_key_is_fit_for_redis_and_urls() -> None:
    rule = rule_of(charge, task="shop: a task/with {odd} name")

    key = rule.derive((1,), {})

    assert str(key) == f"shop%3A%20a%20task%2Fwith%20%7Bodd%7D%20name:{key.digest}"
    assert " " not in str(key)
    assert "{" not in str(key)


@pytest.mark.parametrize(
    "rule", [None, "order:{order_id}", ("order_id",), lambda *args: len(args), TASK_ID]
)
@pytest.mark.parametrize("explicit", [None, "req-7"])
def test_an_explanation_shows_what_the_key_is_derived_from(rule: Any, explicit: str | None) -> None:
    key_rule = rule_of(charge, rule)
    explained = key_rule.explain((1, 2), {}, task_id="a", explicit_key=explicit)

    assert explained.key == key_rule.derive((1, 2), {}, task_id="a", explicit_key=explicit)
    assert explained.key == Key.of(
        TASK, explained.canonical_bytes, explained.key.fingerprint, explicit=explicit is not None
    )


def test_an_explanation_shows_every_argument_and_which_are_in_the_key() -> None:
    call: Any = ((1, 0), {"region": "eu"})
    bytes_of = {"order_id": b"i1;", "amount": b"i0;", "**options": b"{s6:regions2:eu}"}

    for rule, in_key in [
        (None, (True, True, True)),
        (("order_id",), (True, False, False)),
        (lambda *_, **__: "one", (None, None, None)),
    ]:
        arguments = rule_of(charge, rule).explain(*call).arguments
        assert arguments == tuple(
            (name, canonical_bytes, name == "amount", used)
            for (name, canonical_bytes), used in zip(bytes_of.items(), in_key, strict=True)
        )
    assert rule_of(charge).explain((1,), {}).arguments[1] == ("amount", b"i0;", True, False)


def test_keys_are_equal_if_all_their_parts_are() -> None:
    key = Key("shop charge", "digest", b"print").of_message("one")
    others = {key.with_fingerprint(b""), key.turn, key.of_message("two"), str(key)}

    assert key == Key("shop charge", "digest", b"print").of_message("one")
    assert hash(key) == hash(key.of_message("one"))
    assert len(others) == 4
    assert not any(key == other or other == key for other in others)
    assert key not in others


def test_a_key_survives_pickle_and_copy() -> None:
    key = Key("shop charge", "digest", b"print")

    for other in (pickle.loads(pickle.dumps(key)), copy.deepcopy(key)):
        assert other == key
        assert (other.task, other.digest) == ("shop charge", "digest")
