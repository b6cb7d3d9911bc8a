"""The decorators of single endpoints: what they see, and what a framework still sees of them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps
from typing import Annotated, Any

import flask
import httpx
import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, Form, HTTPException, Request, Response
from fastapi.background import BackgroundTasks
from fastapi.responses import StreamingResponse
from flask.views import MethodView
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Route

from celery_idempotent import Idempotency
from celery_idempotent.contrib import fastapi, wsgi
from celery_idempotent.contrib import flask as contrib_flask
from celery_idempotent.contrib.asgi import IdempotencyMiddleware, by_header
from celery_idempotent.errors import SettingsError

Send = Callable[..., list[httpx.Response]]


class Payment(BaseModel):
    amount: int
    note: str | None = None


class DeclinedError(Exception):
    pass


def user(request: Request) -> str:
    return request.headers["authorization"].removeprefix("Bearer ")


User = Annotated[str, Depends(user)]


class Shop:
    """Endpoints of FastAPI and of Flask with one engine, and clients that use one key."""

    def __init__(self, idem: Idempotency, key: str) -> None:
        self.idem = idem
        self.api, self.web = FastAPI(), flask.Flask("shop")
        #: What the endpoints have done.
        self.calls: list[Any] = []
        self.headers = {"Authorization": "Bearer alice", "Idempotency-Key": key}
        self.protect, self.protect_flask = (
            partial(module.idempotent_route, idem, identity=by_header("authorization"))
            for module in (fastapi, contrib_flask)
        )

    def send(self, path: str, *changes: dict[str, Any], **options: Any) -> list[httpx.Response]:
        """Sends a request to FastAPI twice, or as often as there are changes to its options."""

        async def send_all() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
            base = {"base_url": "http://shop", "headers": self.headers}
            default = {"url": path, "method": "POST", "json": {"amount": 1}, **options}
            try:
                async with httpx.AsyncClient(transport=transport, **base) as client:
                    sent = [{**default, **change} for change in changes or ({}, {})]
                    return [await client.request(**each) for each in sent]
            finally:
                await self.idem.aclose()

        return asyncio.run(send_all())

    def post(self, path: str, **options: Any) -> Any:
        """Sends a request to Flask."""
        return self.web.test_client().post(path, headers=self.headers, **options)

    def call(self) -> str:
        """An endpoint without parameters."""
        self.calls.append("run")
        return "paid"


@pytest.fixture
def shop(idem: Idempotency, key: str) -> Shop:
    return Shop(idem, key)


def replayed(responses: list[Any]) -> list[bool]:
    return ["idempotency-replayed" in response.headers for response in responses]


def assert_replayed(responses: list[Any], status: int, text: str) -> None:
    """Asserts that both responses have this status and text, and that the second is a replay."""
    assert [(r.status_code, r.text) for r in responses] == [(status, text)] * 2
    assert replayed(responses) == [False, True]


class TestFastApi:
    def test_an_endpoint_keeps_its_parameters_response_and_documentation(self, shop: Shop) -> None:
        async def pay(
            order: int,
            payment: Payment,
            sender: User,
            response: Response,
            background: BackgroundTasks,
            attempts: int = 1,
        ) -> Payment:
            """Pays."""
            shop.calls.append((order, payment, sender, attempts))
            response.headers["X-Order"] = str(order)
            background.add_task(shop.calls.append, "afterwards")
            return payment

        options = {"status_code": 202, "response_model_exclude_none": True}
        protect = shop.protect(identity=lambda request, sender: sender)
        shop.api.post("/orders/{order}", **options)(protect(pay))
        plain = FastAPI()
        plain.post("/orders/{order}", **options)(pay)
        responses = shop.send("/orders/7")

        assert shop.calls == [(7, Payment(amount=1), "alice", 1), "afterwards"]
        assert_replayed(responses, 202, '{"amount":1}')
        assert [r.headers["x-order"] for r in responses] == ["7", "7"]
        assert shop.api.openapi() == plain.openapi()

    def test_a_function_that_blocks_runs_in_a_thread(self, shop: Shop) -> None:
        @shop.api.post("/pay", status_code=201)
        @shop.protect()
        def pay(payment: Payment) -> Payment:
            is_main = threading.current_thread() is threading.main_thread()
            shop.calls.append((is_main, shop.idem.current.attempt))
            return payment

        assert_replayed(shop.send("/pay"), 201, '{"amount":1,"note":null}')
        assert shop.calls == [(False, 1)]

    def test_a_request_that_dependencies_refuse_leaves_nothing(self, shop: Shop) -> None:
        def permit(request: Request) -> None:
            if "forbidden" in request.query_params:
                raise HTTPException(403)

        @shop.api.post("/pay", dependencies=[Depends(permit)])
        @shop.protect()
        async def pay(payment: Payment) -> None:
            shop.calls.append(payment)

        invalid, forbidden = {"json": {"amount": "much"}}, {"params": "forbidden"}
        # Whose permission was withdrawn gets no replay.
        responses = shop.send("/pay", invalid, forbidden, {}, {}, forbidden)
        assert [r.status_code for r in responses] == [422, 403, 200, 200, 403]
        assert len(shop.calls) == 1

    @pytest.mark.parametrize("kind", ["coroutine function", "function", "wrapper"])
    @pytest.mark.parametrize("handler_blocks", [False, True])
    def test_a_handled_error_is_a_response_and_others_release_the_key(
        self, shop: Shop, kind: str, handler_blocks: bool
    ) -> None:
        def decline(request: Request, error: DeclinedError) -> Response:
            return Response(f"declined {error}", 402)

        async def decline_async(request: Request, error: DeclinedError) -> Response:
            return decline(request, error)

        shop.api.exception_handler(DeclinedError)(decline if handler_blocks else decline_async)

        async def session() -> AsyncIterator[None]:
            try:
                yield
            except Exception as error:
                shop.calls.append(f"rolled back {type(error).__name__}")
                raise

        final = {402: DeclinedError("it"), 404: HTTPException(404, "no card")}
        errors = {**final, 503: HTTPException(503), 500: KeyError()}

        def pay_in_thread(number: int) -> None:
            shop.calls.append(number)
            raise errors[number]

        async def pay(number: int) -> None:
            pay_in_thread(number)

        endpoint: Callable[[int], Any] = pay_in_thread if kind == "function" else pay
        if kind == "wrapper":
            endpoint = wraps(pay)(lambda number: pay(number))
        protect = shop.protect(key=lambda request, number: str(number))
        shop.api.post("/pay/{number}", dependencies=[Depends(session)])(protect(endpoint))
        responses = [shop.send(f"/pay/{number}") for number in errors]

        assert [[r.status_code for r in pair] for pair in responses] == [[n, n] for n in errors]
        assert [r.text for r in responses[0]] == ["declined it"] * 2
        assert [replayed(pair) for pair in responses] == [[False, True]] * 2 + [[False, False]] * 2
        runs = [[number, f"rolled back {type(error).__name__}"] for number, error in errors.items()]
        assert shop.calls == runs[0] + runs[1] + runs[2] * 2 + runs[3] * 2

    def test_a_key_of_a_function_belongs_to_its_endpoint(self, shop: Shop) -> None:
        options: dict[str, Any] = {
            "identity": lambda request, sender: sender,
            "key": lambda request, order: order,
            "fingerprint": lambda request, payment: payment.amount,
        }

        async def pay(order: str, payment: Payment, sender: User) -> None:
            shop.calls.append(("pay", sender))

        async def ship(order: str, payment: Payment, sender: User) -> None:
            shop.calls.append(("ship", sender))

        for endpoint in (pay, ship):
            shop.api.post(f"/{endpoint.__name__}/{{order}}")(shop.protect(**options)(endpoint))

        bob = {"headers": {"Authorization": "Bearer bob"}}
        equal = {"json": {"amount": 1, "note": "again"}}
        paid = shop.send('/pay/order 7 "x"', {}, equal, {"json": {"amount": 2}}, bob)

        assert [r.status_code for r in paid] == [200, 200, 422, 200]
        assert [r.status_code for r in shop.send('/ship/order 7 "x"')] == [200, 200]
        assert shop.calls == [("pay", "alice"), ("pay", "bob"), ("ship", "alice")]
        for invalid in ("x" * 256, "ä"):
            (response,) = shop.send(f"/pay/{invalid}", {})
            assert (response.status_code, "key-invalid" in response.text) == (400, True)

    @pytest.mark.parametrize("fingerprint", [None, lambda request: "any"], ids=["request", "own"])
    def test_endpoints_of_one_factory_do_not_share_keys(self, shop: Shop, fingerprint: Any) -> None:
        def routes(*, keyed: bool, prefix: str = "") -> APIRouter:
            key = (lambda request, number: str(number)) if keyed else None
            protect = shop.protect(key=key, fingerprint=fingerprint)
            router = APIRouter(prefix=prefix)

            @router.put("/{number}")
            @router.post("/{number}")
            @protect
            async def pay(request: Request, number: int) -> str:
                shop.calls.append((request.method, request.url.path))
                return request.url.path

            return router

        for prefix in ("/a", "/b"):
            shop.api.include_router(routes(keyed=True, prefix=prefix))
            shop.api.include_router(routes(keyed=False, prefix=f"/header{prefix}"))
            mounted = FastAPI()
            mounted.include_router(routes(keyed=True))
            shop.api.mount(f"/mounted{prefix}", mounted)
        included = routes(keyed=True)
        shop.api.include_router(included, prefix="/c")
        shop.api.include_router(included, prefix="/d")
        paths = [f"/{name}/5" for name in ("a", "b", "c", "d", "mounted/a", "mounted/b")]

        for path in paths:
            assert [r.text for r in shop.send(path)] == [f'"{path}"'] * 2
        assert shop.calls == [("POST", path) for path in paths]
        assert [r.status_code for r in shop.send("/a/5", method="PUT")] == [200, 200]
        assert shop.calls[-1] == ("PUT", "/a/5")
        assert len(shop.calls) == len(paths) + 1
        sent = [shop.send(path, {})[0] for path in ("/header/a/5", "/header/b/5", "/header/a/6")]
        assert [r.status_code for r in sent] == [200, 422, 422]

    def test_a_form_needs_a_fingerprint(self, shop: Shop) -> None:
        async def pay(amount: Annotated[int, Form()]) -> None:
            shop.calls.append(amount)

        protect = shop.protect(fingerprint=lambda request, amount: amount)
        shop.api.post("/form")(protect(pay))
        shop.api.post("/without")(shop.protect()(pay))
        one, two = ({"data": {"amount": amount}, "json": None} for amount in (1, 2))
        assert [r.status_code for r in shop.send("/form", one, one, two)] == [200, 200, 422]
        assert [r.status_code for r in shop.send("/without", one)] == [500]
        assert shop.calls == [1]

    @pytest.mark.parametrize("value", ["NaN", "[" * 150 + "]" * 150, r'"\ud800"'])
    def test_hostile_values_in_a_fingerprint(self, shop: Shop, value: str) -> None:
        @shop.api.post("/pay")
        @shop.protect(fingerprint=lambda request, amount: amount)
        async def pay(amount: Annotated[Any, Body()]) -> None:
            shop.calls.append(amount)

        headers = {"Content-Type": "application/json"}
        responses = shop.send("/pay", json=None, content=value, headers=headers)
        expected = 200 if "ud800" in value else 400
        assert [r.status_code for r in responses] == [expected] * 2
        assert len(shop.calls) == (expected == 200)

    def test_a_stream_is_sent_once(self, shop: Shop) -> None:
        @shop.api.post("/pay")
        @shop.protect()
        async def pay() -> StreamingResponse:
            shop.calls.append("run")
            return StreamingResponse(iter([b"a", b"b"]))

        first, again = shop.send("/pay")
        assert (first.content, again.status_code) == (b"ab", 409)
        assert "response-not-stored" in again.text
        assert shop.calls == ["run"]

    def test_endpoints_of_starlette(self, shop: Shop) -> None:
        protect = shop.protect()

        class Payments(HTTPEndpoint):
            @protect
            async def post(self, request: Request) -> Response:
                shop.calls.append(await request.json())
                return Response("paid", 201)

        @protect
        def refuse(request: Request) -> Response:
            shop.calls.append("refused")
            raise StarletteHTTPException(404, "no card")

        routes = [Route("/pay", Payments), Route("/refuse", refuse, methods=["POST"])]
        shop.api.mount("/shop", Starlette(routes=routes))
        assert_replayed(shop.send("/shop/pay"), 201, "paid")
        another = {"Idempotency-Key": "another"}
        assert_replayed(shop.send("/shop/refuse", headers=another), 404, "no card")
        assert shop.calls == [{"amount": 1}, "refused"]

    def test_endpoints_of_two_hosts_do_not_share_keys(self, shop: Shop) -> None:
        class Base(HTTPEndpoint):
            @shop.protect(key=lambda _: "5")
            async def post(self, request: Request) -> Response:
                return Response(type(self).__name__)

        class Payments(Base): ...

        class Refunds(Base): ...

        for endpoint in (Payments, Refunds):
            host = endpoint.__name__
            shop.api.host(host, Starlette(routes=[Route("/pay", endpoint)]))
            (response,) = shop.send("/pay", {"headers": {"Host": host}})
            assert response.text == host


class TestFlask:
    def test_a_method_of_a_class_sees_its_arguments(self, shop: Shop) -> None:
        class Payments(MethodView):
            @shop.protect_flask(
                identity=lambda request, tenant: f"{tenant} {request.authorization}"
            )
            def post(self, tenant: str) -> Any:
                shop.calls.append((tenant, flask.request.get_json()))
                return {"paid": len(shop.calls)}, 201

        shop.web.add_url_rule("/<tenant>/payments", view_func=Payments.as_view("payments"))
        paths = ("/a/payments", "/a/payments", "/b/payments")
        responses = [shop.post(path, json={"amount": 1}) for path in paths]

        assert [r.status_code for r in responses] == [201] * 3
        assert [r.json["paid"] for r in responses] == [1, 1, 2]
        assert shop.calls == [("a", {"amount": 1}), ("b", {"amount": 1})]

    @pytest.mark.parametrize("fingerprint", [None, lambda request: "any"], ids=["request", "own"])
    def test_views_that_inherit_a_method_share_no_keys(self, shop: Shop, fingerprint: Any) -> None:
        protect = shop.protect_flask(
            key=lambda request: request.view_args["number"], fingerprint=fingerprint
        )

        class Decorated(MethodView):
            decorators = (protect,)

            def post(self, number: str) -> str:
                shop.calls.append(type(self).__name__)
                return shop.calls[-1]

        class AlsoDecorated(Decorated): ...

        class Payments(MethodView):
            post = protect(Decorated.post)

        class Refunds(Payments): ...

        views = {view.__name__: view for view in (Payments, Refunds, Decorated, AlsoDecorated)}
        for name, view in views.items():
            shop.web.add_url_rule(f"/{name}/<number>", view_func=view.as_view(name))

        for name in views:
            assert [shop.post(f"/{name}/5").text for _ in range(2)] == [name] * 2
        assert shop.calls == list(views)

    def test_a_handled_error_is_a_response_and_others_release_the_key(self, shop: Shop) -> None:
        shop.web.register_error_handler(DeclinedError, lambda error: (f"declined {error}", 402))

        @shop.web.post("/<int:number>")
        @shop.protect_flask(key=lambda request, number: str(number))
        def pay(number: int) -> None:
            shop.calls.append(number)
            if number == 402:
                raise DeclinedError("it")
            flask.abort(number)

        for number, text in ((404, "Not Found"), (402, "declined it")):
            responses = [shop.post(f"/{number}", json=number) for _ in range(2)]
            assert [r.status_code for r in responses] == [number] * 2
            assert responses[0].data == responses[1].data
            assert text in responses[0].text
        assert [shop.post("/503").status_code for _ in range(2)] == [503, 503]
        assert shop.calls == [404, 402, 503, 503]

    def test_a_body_that_a_hook_has_read_counts(self, shop: Shop) -> None:
        shop.web.before_request(lambda: shop.calls.append(flask.request.values.get("amount")))
        shop.web.config["PROPAGATE_EXCEPTIONS"] = True
        shop.web.post("/json")(shop.protect_flask()(lambda: [flask.request.get_json()]))
        shop.web.config["TESTING"] = True

        assert [shop.post("/json", json=n).status_code for n in (1, 1, 2)] == [200, 200, 422]
        with pytest.raises(TypeError, match="pass fingerprint="):
            shop.post("/json", data={"amount": 1})


def test_inside_the_middleware_it_adds_nothing(shop: Shop) -> None:
    options: dict[str, Any] = {"idem": shop.idem, "identity": by_header("authorization")}
    shop.api.add_middleware(IdempotencyMiddleware, **options)
    shop.web.wsgi_app = wsgi.IdempotencyMiddleware(shop.web.wsgi_app, **options)  # type: ignore[method-assign]
    shop.api.post("/pay")(shop.protect()(shop.call))
    shop.web.post("/pay")(shop.protect_flask()(shop.call))

    assert replayed(shop.send("/pay")) == [False, True]
    shop.headers["Idempotency-Key"] += "-flask"
    assert replayed([shop.post("/pay"), shop.post("/pay")]) == [False, True]
    assert shop.calls == ["run"] * 2


def test_a_call_without_a_request_is_a_plain_call(shop: Shop) -> None:
    async def pay(amount: int) -> int:
        return amount

    def pay_in_thread(amount: int) -> int:
        return amount

    assert asyncio.run(shop.protect()(pay)(1)) == shop.protect()(pay_in_thread)(1) == 1
    assert shop.protect_flask()(pay_in_thread)(1) == 1
    assert list(shop.idem.records()) == []


ROUTES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "fastapi": (fastapi, lambda: FastAPI().post("/pay")),
    "router": (fastapi, lambda: APIRouter().post("/pay")),
    "starlette": (fastapi, lambda: partial(Route, "/pay")),
    "flask": (contrib_flask, lambda: flask.Flask("shop").post("/pay")),
    "blueprint": (contrib_flask, lambda: flask.Blueprint("shop", __name__).post("/pay")),
}


def test_a_route_without_a_protected_method_is_refused(shop: Shop) -> None:
    shop.api.get("/pay")(shop.protect()(lambda: "paid"))
    shop.api.get("/own")(shop.protect(methods=["GET"])(lambda: "paid"))
    shop.web.get("/pay")(shop.protect_flask()(lambda: "paid"))
    shop.web.config["TESTING"] = True

    assert [r.status_code for r in shop.send("/own", method="GET")] == [200, 200]
    assert [r.status_code for r in shop.send("/pay", method="GET")] == [500, 500]
    with pytest.raises(SettingsError, match=r"route has none of the methods DELETE, .*methods="):
        shop.web.test_client().get("/pay")


def test_a_hidden_request_is_logged(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    @shop.protect()
    async def pay() -> None: ...

    @shop.api.post("/pay")
    async def hidden() -> None:
        await pay()

    shop.send("/pay")

    assert caplog.text.count("pay was called without a request, and is unprotected") == 1


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize(("module", "new_route"), ROUTES.values(), ids=ROUTES)
def test_an_endpoint_that_already_has_a_route_is_refused(
    idem: Idempotency, module: Any, new_route: Callable[[], Any], wrapped: bool
) -> None:
    protect = module.idempotent_route(idem, identity=by_header("authorization"))
    kept = []

    def add_route(endpoint: Any) -> Any:
        kept.append((route := new_route(), route(endpoint)))
        return endpoint

    def pay() -> None: ...

    add_route(protect(pay))
    with pytest.raises(SettingsError) as refused:

        @protect
        @(lambda endpoint: wraps(endpoint)(lambda: endpoint()) if wrapped else endpoint)
        @add_route
        def refund() -> None: ...

    assert str(refused.value).startswith("idempotent_route: a route calls ")
    assert "refund unprotected; put @idempotent_route below the decorator" in str(refused.value)


async def pay(order: int) -> None: ...


async def pay_any(order: Unknown, **more: Any) -> Unknown: ...  # type: ignore[name-defined] # noqa: F821


def stream() -> Iterator[bytes]:
    yield b""


@pytest.mark.parametrize("module", [fastapi, contrib_flask], ids=["fastapi", "flask"])
@pytest.mark.parametrize(
    ("endpoint", "options", "message"),
    [
        (pay, {"identity": 1}, "identity must be a function of the request, not 1"),
        (pay, {"key": "order"}, "key must be a function of the request, not 'order'"),
        (
            pay,
            {"key": lambda request, ordr: ordr},
            "key has a parameter ordr, which the endpoint does not have; it has order",
        ),
        (pay, {"methods": ["HEAD"]}, "methods cannot include HEAD; remove it"),
        (stream, {}, "stream yields its response, which cannot be held back"),
        (partial(pay), {}, "a partial has no name; decorate a function"),
        (Payment, {}, "Payment is a class; decorate its methods"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(
    idem: Idempotency, module: Any, endpoint: Any, options: Any, message: str
) -> None:
    decorate = module.idempotent_route(idem, **{"identity": by_header("authorization"), **options})
    with pytest.raises(SettingsError) as refused:
        decorate(endpoint)
    assert str(refused.value).startswith(f"idempotent_route: {message}")


def test_the_signature_is_that_of_the_endpoint_and_one_dependency(shop: Shop) -> None:
    protect = shop.protect()
    names = [list(inspect.signature(protect(endpoint)).parameters) for endpoint in (pay, pay_any)]
    assert names == [["order", "idempotency_exchange"], ["order", "idempotency_exchange", "more"]]
