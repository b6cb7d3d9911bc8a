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


class Site:
    """Sends requests with one key to views."""

    def __init__(self, idem: Idempotency, key: str) -> None:
        self.idem, self.key = idem, key
        #: The users for whom `pay` has run.
        self.calls: list[str] = []

    def send(self, view: Any, user: str | None = "alice", keyed: bool = True, **data: Any) -> Any:
        """Sends a request of a user, whom a token names."""

        class Urls:
            urlpatterns = (path("pay", view),)

        headers = {"Idempotency-Key": self.key} if keyed else {}
        if user is not None:
            headers["Authorization"] = f"Bearer {user}"
        with override_settings(ROOT_URLCONF=Urls):
            client = Client(raise_request_exception=False)
            return client.post("/pay", data, content_type="application/json", headers=headers)

    def pay(self, view: Any, request: Any) -> Any:
        """A handler of a view."""
        self.calls.append(request.user.username)
        body = {"paid": len(self.calls), "data": request.data}
        return Response(body, status=201, headers={"Location": "/pay/1"})


@pytest.fixture
def site(idem: Idempotency, key: str) -> Iterator[Site]:
    with override_settings(
        DEBUG_PROPAGATE_EXCEPTIONS=False, MIDDLEWARE=[], IDEMPOTENCY_MIDDLEWARE={"ENGINE": idem}
    ):
        yield Site(idem, key)


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
        "post": lambda self, request: pay(self, request),
    }
    bases = (IdempotencyMixin, APIView)
    return type("Payments", bases, {**default, **attributes}).as_view()  # type: ignore[attr-defined]


class TestRefused:
    def test_the_mixin_after_the_view(self) -> None:
        from rest_framework.views import APIView

        expected = "^Payments: IdempotencyMixin must precede APIView in the bases, or"
        with pytest.raises(ImproperlyConfigured, match=expected):
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

    def test_a_view_whose_initial_hides_ours(self, site: Site) -> None:
        view = view_of(site.pay, initial=lambda self, request: None)
        with (
            override_settings(DEBUG_PROPAGATE_EXCEPTIONS=True),
            pytest.raises(ImproperlyConfigured, match=r"initial\(\) must call super\(\)"),
        ):
            site.send(view)


def test_a_key_belongs_to_the_user_whom_the_framework_authenticates(site: Site) -> None:
    view = view_of(site.pay)
    *paid, refused = (site.send(view, user, amount=1) for user in ("alice", "alice", "bob", None))

    assert refused.status_code == 401
    bodies = [{"paid": number, "data": {"amount": 1}} for number in (1, 1, 2)]
    assert [(r.status_code, r.json()) for r in paid] == [(201, body) for body in bodies]
    first, again = (dict(response.headers) for response in paid[:2])
    assert again == {**first, "Idempotency-Replayed": "true"}
    assert site.calls == ["alice", "bob"]


def test_a_user_whose_permission_was_withdrawn_gets_no_replay(site: Site) -> None:
    allowed = [False, True, True, False]

    class Permission(BasePermission):  # type: ignore[misc]
        def has_permission(self, request: Any, view: Any) -> bool:
            return allowed.pop(0)

    view = view_of(site.pay, permission_classes=(Permission,))
    assert site.send(view).status_code == 403
    assert list(site.idem.records()) == []
    assert [site.send(view).status_code for _ in range(3)] == [201, 201, 403]
    assert len(site.calls) == 1


@pytest.mark.parametrize(
    ("name", "status", "runs"),
    [("ValidationError", 400, 1), ("APIException", 500, 2), ("KeyError", 500, 2)],
)
def test_an_error_of_the_framework_is_a_response_and_others_release_the_key(
    site: Site, name: str, status: int, runs: int
) -> None:
    from rest_framework import exceptions

    def pay(self: Any, request: Any) -> None:
        site.pay(self, request)
        raise getattr(exceptions, name, KeyError)("no card")

    responses = [site.send(view_of(pay)) for _ in range(2)]
    assert [r.status_code for r in responses] == [status] * 2
    assert responses[0].content == responses[1].content
    assert len(site.calls) == runs


@pytest.mark.parametrize("opted_out", [False, True])
def test_a_transaction_of_the_request_ends_before_the_response_is_stored(
    site: Site, monkeypatch: pytest.MonkeyPatch, opted_out: bool
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
    assert site.send(view).status_code == 500
    assert list(site.idem.records()) == []
    name, step = uuid4().hex, "refuse"
    assert [site.send(view).status_code for _ in range(2)] == [400, 400]
    assert User.objects.filter(username=name).exists() is opted_out
    assert atomic == [not opted_out] * 2


def test_what_the_checks_write_before_a_replay_is_committed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.contrib.auth.models import User

    def check_permissions(self: Any, request: Any) -> None:
        User.objects.create_user(f"{prefix} {uuid4().hex}")

    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    prefix = uuid4().hex
    view = view_of(site.pay, check_permissions=check_permissions)
    responses = [site.send(view) for _ in range(2)]

    assert ["Idempotency-Replayed" in response for response in responses] == [False, True]
    assert User.objects.filter(username__startswith=prefix).count() == 2


def test_each_view_has_options_of_its_own(site: Site) -> None:
    for options, runs in (({"METHODS": ["PUT"]}, 2), ({"IDENTITY": by_header("authorization")}, 3)):
        view = view_of(site.pay, idempotency_options=options)
        assert [site.send(view).status_code for _ in range(2)] == [201, 201]
        assert len(site.calls) == runs


def test_a_wrong_option_is_refused_when_the_view_is_created() -> None:
    with pytest.raises(ImproperlyConfigured, match="no option 'METHOD'; did you mean METHODS"):
        view_of(lambda self, request: None, idempotency_options={"METHOD": ["PUT"]})


def test_inside_the_middleware_it_adds_nothing(site: Site) -> None:
    with override_settings(
        MIDDLEWARE=["celery_idempotent.contrib.django.middleware.IdempotencyMiddleware"],
        IDEMPOTENCY_MIDDLEWARE={"ENGINE": site.idem, "IDENTITY": by_header("authorization")},
    ):
        responses = [site.send(view_of(site.pay)) for _ in range(2)]
    assert [r.status_code for r in responses] == [201, 201]
    assert len(site.calls) == len(list(site.idem.records())) == 1


def test_the_view_of_the_page(site: Site) -> None:
    from rest_framework.viewsets import ModelViewSet

    (block,) = (b for b in python_blocks(ROOT / "docs/http.md") if "import IdempotencyMixin" in b)
    names: dict[str, Any] = {"ModelViewSet": ModelViewSet}
    exec(block, names)
    view = names["PaymentViewSet"].as_view({"post": "create"})

    response = site.send(view, keyed=False)
    assert response.status_code == 400
    assert response.json()["type"] == "urn:celery-idempotent:key-missing"
