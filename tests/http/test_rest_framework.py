"""The mixin for views of Django REST framework: users, permissions, errors, transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.test import Client, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View as DjangoView
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import ValidationError
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.response import Response

from celery_idempotent import Idempotency
from celery_idempotent.contrib.django.rest_framework import IdempotencyMixin, by_header
from tests.docs.pages import ROOT, python_blocks

pytestmark = pytest.mark.usefixtures("django_project")

Send = Callable[..., Any]


@pytest.fixture
def calls() -> list[Any]:
    """What the views have done."""
    return []


@pytest.fixture(autouse=True)
def settings(idem: Idempotency) -> Iterator[None]:
    with override_settings(
        DEBUG_PROPAGATE_EXCEPTIONS=False, MIDDLEWARE=[], IDEMPOTENCY_MIDDLEWARE={"ENGINE": idem}
    ):
        yield


@pytest.fixture
def send(key: str) -> Iterator[Send]:
    """Sends a request of a user, whom a token names, to a view."""

    def send(view: Any, user: str | None = "alice", key: str | None = key, **data: Any) -> Any:
        class Urls:
            urlpatterns = (path("pay", view),)

        headers = {} if key is None else {"Idempotency-Key": key}
        if user is not None:
            headers["Authorization"] = f"Bearer {user}"
        with override_settings(ROOT_URLCONF=Urls):
            client = Client(raise_request_exception=False)
            return client.post("/pay", data, content_type="application/json", headers=headers)

    return send


def view_of(pay: Callable[[Any, Any], Any], **attributes: Any) -> Any:
    """Returns a view whose POST calls `pay`, and whose users send tokens."""
    from django.contrib.auth.models import User
    from rest_framework.renderers import JSONRenderer
    from rest_framework.views import APIView

    class Authentication(BaseAuthentication):  # type: ignore[misc]
        def authenticate(self, request: Any) -> Any:
            name = request.headers.get("Authorization", "").removeprefix("Bearer ")
            return (User.objects.get(username=name), name) if name else None

        def authenticate_header(self, request: Any) -> str:
            return "Bearer"

    default = {
        "authentication_classes": (Authentication,),
        "permission_classes": (IsAuthenticated,),
        "renderer_classes": (JSONRenderer,),
        "post": pay,
    }
    bases = (IdempotencyMixin, APIView)
    return type("Payments", bases, {**default, **attributes}).as_view()  # type: ignore[attr-defined]


class TestRefused:
    def test_the_mixin_after_the_view(self) -> None:
        from rest_framework.views import APIView

        with pytest.raises(
            ImproperlyConfigured,
            match=r"^Payments: IdempotencyMixin must precede APIView in the bases, or",
        ):
            type("Payments", (APIView, IdempotencyMixin), {})

    @pytest.mark.parametrize("name", ["post", "pay"])
    def test_coroutine_functions(self, name: str) -> None:
        from rest_framework.viewsets import ViewSet

        async def pay(self: Any, request: Any) -> None: ...

        view = type("Payments", (IdempotencyMixin, ViewSet), {name: pay})
        with pytest.raises(ImproperlyConfigured, match=rf"^Payments: {name} is a coroutine"):
            view.as_view({"post": name})  # type: ignore[attr-defined]

    def test_a_view_of_django(self) -> None:
        view: Any = type("Payments", (IdempotencyMixin, DjangoView), {})
        with pytest.raises(ImproperlyConfigured, match=r"^Payments: IdempotencyMixin needs an API"):
            view.as_view()

    def test_a_view_whose_initial_hides_ours(self, send: Send, calls: list[Any]) -> None:
        view = view_of(lambda self, request: Response(), initial=lambda self, request: None)
        with (
            override_settings(DEBUG_PROPAGATE_EXCEPTIONS=True),
            pytest.raises(ImproperlyConfigured, match=r"initial\(\) must call super\(\)"),
        ):
            send(view)


def test_a_key_belongs_to_the_user_whom_the_framework_authenticates(
    send: Send, calls: list[Any]
) -> None:
    def pay(self: Any, request: Any) -> Any:
        calls.append((request.user.username, dict(request.data)))
        return Response({"paid": len(calls)}, status=201, headers={"Location": "/pay/1"})

    view = view_of(pay)
    responses = [send(view, user, amount=1) for user in ("alice", "alice", "bob", None)]

    assert [r.status_code for r in responses] == [201, 201, 201, 401]
    assert [r.content for r in responses[:3]] == [b'{"paid":1}', b'{"paid":1}', b'{"paid":2}']
    first, again = (dict(response.headers) for response in responses[:2])
    assert again == {**first, "Idempotency-Replayed": "true"}
    assert calls == [("alice", {"amount": 1}), ("bob", {"amount": 1})]


def test_a_user_whose_permission_was_withdrawn_gets_no_replay(
    send: Send, calls: list[Any], idem: Idempotency
) -> None:
    allowed = [False, True, True, False]

    class Permission(BasePermission):  # type: ignore[misc]
        def has_permission(self, request: Any, view: Any) -> bool:
            return allowed.pop(0)

    def pay(self: Any, request: Any) -> Any:
        calls.append(request.user)
        return Response()

    view = view_of(pay, permission_classes=(Permission,))
    assert send(view).status_code == 403
    assert list(idem.records()) == []
    assert [send(view).status_code for _ in range(3)] == [200, 200, 403]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "status", "runs"),
    [("ValidationError", 400, 1), ("APIException", 500, 2), ("KeyError", 500, 2)],
)
def test_an_error_of_the_framework_is_a_response_and_others_release_the_key(
    send: Send, calls: list[Any], name: str, status: int, runs: int
) -> None:
    from rest_framework import exceptions

    def pay(self: Any, request: Any) -> None:
        calls.append("run")
        raise getattr(exceptions, name, KeyError)("no card")

    responses = [send(view_of(pay)) for _ in range(2)]
    assert [r.status_code for r in responses] == [status] * 2
    assert responses[0].content == responses[1].content
    assert len(calls) == runs


@pytest.mark.parametrize("opted_out", [False, True])
def test_a_transaction_of_the_request_ends_before_the_response_is_stored(
    send: Send, idem: Idempotency, monkeypatch: pytest.MonkeyPatch, opted_out: bool
) -> None:
    from django.contrib.auth.models import User

    def fail() -> None:
        raise RuntimeError("the commit has failed")

    def pay(self: Any, request: Any) -> Any:
        atomic.append(connection.in_atomic_block)
        User.objects.create_user(name)
        if step == "refuse":
            raise ValidationError
        if step == "commit":
            transaction.on_commit(fail)
        return Response(status=201)

    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    atomic: list[bool] = []
    attributes: dict[str, Any] = {}
    if opted_out:
        leave = method_decorator(transaction.non_atomic_requests)
        attributes["dispatch"] = leave(IdempotencyMixin.dispatch)
    view = view_of(pay, **attributes)
    name, step = uuid4().hex, "commit"
    assert send(view).status_code == 500
    assert list(idem.records()) == []
    name, step = uuid4().hex, "refuse"
    assert [send(view).status_code for _ in range(2)] == [400, 400]
    assert User.objects.filter(username=name).exists() is opted_out
    assert atomic == [not opted_out] * 2


def test_what_the_checks_write_before_a_replay_is_committed(
    send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.contrib.auth.models import User

    def check_permissions(self: Any, request: Any) -> None:
        User.objects.create_user(f"{prefix} {uuid4().hex}")

    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    prefix = uuid4().hex
    view = view_of(lambda *_: Response(status=201), check_permissions=check_permissions)
    responses = [send(view) for _ in range(2)]

    assert ["Idempotency-Replayed" in response for response in responses] == [False, True]
    assert User.objects.filter(username__startswith=prefix).count() == 2


def test_each_view_has_options_of_its_own(send: Send, calls: list[Any], key: str) -> None:
    def pay(self: Any, request: Any) -> Any:
        calls.append("run")
        return Response()

    view = view_of(pay, idempotency_options={"METHODS": ["PUT"]})
    assert [send(view).status_code for _ in range(2)] == [200, 200]
    assert len(calls) == 2
    view = view_of(pay, idempotency_options={"IDENTITY": lambda request: f"one {request.user.pk}"})
    assert [send(view).status_code for _ in range(2)] == [200, 200]
    assert len(calls) == 3


def test_a_wrong_option_is_refused_when_the_view_is_created() -> None:
    with pytest.raises(ImproperlyConfigured, match="no option 'METHOD'; did you mean METHODS"):
        view_of(lambda self, request: None, idempotency_options={"METHOD": ["PUT"]})


def test_inside_the_middleware_it_adds_nothing(
    send: Send, calls: list[Any], idem: Idempotency
) -> None:
    def pay(self: Any, request: Any) -> Any:
        calls.append("run")
        return Response()

    with override_settings(
        MIDDLEWARE=["celery_idempotent.contrib.django.middleware.IdempotencyMiddleware"],
        IDEMPOTENCY_MIDDLEWARE={"ENGINE": idem, "IDENTITY": by_header("authorization")},
    ):
        responses = [send(view_of(pay)) for _ in range(2)]
    assert [r.status_code for r in responses] == [200, 200]
    assert calls == ["run"]
    assert len(list(idem.records())) == 1


def test_the_view_of_the_page(send: Send) -> None:
    from rest_framework.viewsets import ModelViewSet

    (block,) = (b for b in python_blocks(ROOT / "docs/http.md") if "import IdempotencyMixin" in b)
    names: dict[str, Any] = {"ModelViewSet": ModelViewSet}
    exec(block, names)
    view = names["PaymentViewSet"].as_view({"post": "create"})

    response = send(view, key=None)
    assert (response.status_code, response.json()["type"]) == (
        400,
        "urn:celery-idempotent:key-missing",
    )
