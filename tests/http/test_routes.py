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
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Depends,
    FastAPI,
    Form,
    HTTPException,
    Request,
    Response,
)
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


@pytest.fixture
def calls() -> list[Any]:
    """What the endpoints have done."""
    return []


@pytest.fixture
def api() -> FastAPI:
    return FastAPI()


@pytest.fixture
def send(api: FastAPI, idem: Idempotency, key: str) -> Send:
    """Sends a request to FastAPI twice, or as often as there are changes to its options."""

    def send(path: str, *changes: dict[str, Any], **options: Any) -> list[httpx.Response]:
        async def send_all() -> list[httpx.Response]:
            transport = httpx.ASGITransport(api, raise_app_exceptions=False)
            headers = {"Authorization": "Bearer alice", "Idempotency-Key": key}
            client = httpx.AsyncClient(transport=transport, base_url="http://shop", headers=headers)
            try:
                async with client:
                    return [
                        await client.request(
                            url=path,
                            **{"method": "POST", "json": {"amount": 1}, **options, **change},
                        )
                        for change in changes or ({}, {})
                    ]
            finally:
                await idem.aclose()

        return asyncio.run(send_all())

    return send


def replayed(responses: list[Any]) -> list[bool]:
    return ["idempotency-replayed" in response.headers for response in responses]


class TestFastApi:
    def test_an_endpoint_keeps_its_parameters_response_and_documentation(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any]
    ) -> None:
        async def pay(
            order: int,
            payment: Payment,
            sender: User,
            response: Response,
            background: BackgroundTasks,
            attempts: int = 1,
        ) -> Payment:
            """Pays."""
            calls.append((order, payment, sender, attempts))
            response.headers["X-Order"] = str(order)
            background.add_task(calls.append, "afterwards")
            return payment

        options = {"status_code": 202, "response_model_exclude_none": True}
        protect = fastapi.idempotent_route(idem, identity=lambda request, sender: sender)
        api.post("/orders/{order}", **options)(protect(pay))
        plain = FastAPI()
        plain.post("/orders/{order}", **options)(pay)
        responses = send("/orders/7")

        assert calls == [(7, Payment(amount=1), "alice", 1), "afterwards"]
        assert [(r.status_code, r.content) for r in responses] == [(202, b'{"amount":1}')] * 2
        assert [r.headers["x-order"] for r in responses] == ["7", "7"]
        assert replayed(responses) == [False, True]
        assert api.openapi() == plain.openapi()

    def test_a_function_that_blocks_runs_in_a_thread(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any]
    ) -> None:
        @api.post("/pay", status_code=201)
        @fastapi.idempotent_route(idem, identity=by_header("authorization"))
        def pay(payment: Payment) -> Payment:
            calls.append((threading.current_thread(), idem.current.attempt))
            return payment

        responses = send("/pay")

        ((thread, attempt),) = calls
        assert thread is not threading.main_thread()
        assert attempt == 1
        assert {r.content for r in responses} == {b'{"amount":1,"note":null}'}
        assert [r.status_code for r in responses] == [201, 201]
        assert replayed(responses) == [False, True]

    def test_a_request_that_dependencies_refuse_leaves_nothing(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any]
    ) -> None:
        def permit(request: Request) -> None:
            if "forbidden" in request.query_params:
                raise HTTPException(403)

        @api.post("/pay", dependencies=[Depends(permit)])
        @fastapi.idempotent_route(idem, identity=by_header("authorization"))
        async def pay(payment: Payment) -> None:
            calls.append(payment)

        changes: list[dict[str, Any]] = [
            {"json": {"amount": "much"}},
            {"params": "forbidden"},
            {},
            {},
            {"params": "forbidden"},  # whose permission was withdrawn gets no replay
        ]
        assert [r.status_code for r in send("/pay", *changes)] == [422, 403, 200, 200, 403]
        assert len(calls) == 1

    @pytest.mark.parametrize("kind", ["coroutine function", "function", "wrapper"])
    @pytest.mark.parametrize("handler_blocks", [False, True])
    def test_an_error_with_a_handler_is_a_response_and_others_release_the_key(
        self,
        api: FastAPI,
        idem: Idempotency,
        send: Send,
        calls: list[Any],
        kind: str,
        handler_blocks: bool,
    ) -> None:
        def decline(request: Request, error: DeclinedError) -> Response:
            return Response(f"declined {error}", 402)

        async def decline_async(request: Request, error: DeclinedError) -> Response:
            return decline(request, error)

        api.exception_handler(DeclinedError)(decline if handler_blocks else decline_async)

        async def session() -> AsyncIterator[None]:
            try:
                yield
            except Exception as error:
                calls.append(f"rolled back {type(error).__name__}")
                raise

        errors = [
            DeclinedError("it"),
            HTTPException(404, "no card"),
            HTTPException(503),
            KeyError(),
        ]

        async def pay(number: int) -> None:
            calls.append(number)
            raise errors[number]

        def pay_in_thread(number: int) -> None:
            calls.append(number)
            raise errors[number]

        endpoint: Callable[[int], Any] = pay_in_thread if kind == "function" else pay
        if kind == "wrapper":
            endpoint = wraps(pay)(lambda number: pay(number))
        protect = fastapi.idempotent_route(
            idem, identity=by_header("authorization"), key=lambda request, number: str(number)
        )
        api.post("/pay/{number}", dependencies=[Depends(session)])(protect(endpoint))
        responses = [send(f"/pay/{number}") for number in range(len(errors))]

        assert [[r.status_code for r in pair] for pair in responses] == [
            [402, 402],
            [404, 404],
            [503, 503],
            [500, 500],
        ]
        assert [r.text for r in responses[0]] == ["declined it"] * 2
        assert [replayed(pair) for pair in responses] == [[False, True]] * 2 + [[False, False]] * 2
        names = ["DeclinedError", "HTTPException", "HTTPException", "KeyError"]
        runs = [[number, f"rolled back {name}"] for number, name in enumerate(names)]
        assert calls == runs[0] + runs[1] + runs[2] * 2 + runs[3] * 2

    def test_a_key_of_a_function_belongs_to_its_endpoint(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any]
    ) -> None:
        options: dict[str, Any] = {
            "identity": lambda request, sender: sender,
            "key": lambda request, order: order,
            "fingerprint": lambda request, payment: payment.amount,
        }

        @api.post("/pay/{order}")
        @fastapi.idempotent_route(idem, **options)
        async def pay(order: str, payment: Payment, sender: User) -> None:
            calls.append(("pay", sender))

        @api.post("/ship/{order}")
        @fastapi.idempotent_route(idem, **options)
        async def ship(order: str, payment: Payment, sender: User) -> None:
            calls.append(("ship", sender))

        bob = {"headers": {"Authorization": "Bearer bob"}}
        equal = {"json": {"amount": 1, "note": "again"}}
        paid = send('/pay/order 7 "x"', {}, equal, {"json": {"amount": 2}}, bob)

        assert [r.status_code for r in paid] == [200, 200, 422, 200]
        assert [r.status_code for r in send('/ship/order 7 "x"')] == [200, 200]
        assert calls == [("pay", "alice"), ("pay", "bob"), ("ship", "alice")]
        for invalid in ("x" * 256, "ä"):
            (response,) = send(f"/pay/{invalid}", {})
            assert (response.status_code, "key-invalid" in response.text) == (400, True)

    @pytest.mark.parametrize("fingerprint", [None, lambda request: "any"], ids=["request", "own"])
    def test_endpoints_of_one_factory_do_not_share_keys(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any], fingerprint: Any
    ) -> None:
        def routes(*, keyed: bool, prefix: str = "") -> APIRouter:
            key = (lambda request, number: str(number)) if keyed else None
            protect = fastapi.idempotent_route(
                idem, identity=by_header("authorization"), key=key, fingerprint=fingerprint
            )
            router = APIRouter(prefix=prefix)

            @router.put("/{number}")
            @router.post("/{number}")
            @protect
            async def pay(request: Request, number: int) -> str:
                calls.append((request.method, request.url.path))
                return request.url.path

            return router

        for prefix in ("/a", "/b"):
            api.include_router(routes(keyed=True, prefix=prefix))
            api.include_router(routes(keyed=False, prefix=f"/header{prefix}"))
            mounted = FastAPI()
            mounted.include_router(routes(keyed=True))
            api.mount(f"/mounted{prefix}", mounted)
        included = routes(keyed=True)
        api.include_router(included, prefix="/c")
        api.include_router(included, prefix="/d")
        paths = [f"/{name}/5" for name in ("a", "b", "c", "d", "mounted/a", "mounted/b")]

        for path in paths:
            assert [r.text for r in send(path)] == [f'"{path}"'] * 2
        assert calls == [("POST", path) for path in paths]
        assert [r.status_code for r in send("/a/5", method="PUT")] == [200, 200]
        assert calls[-1] == ("PUT", "/a/5")
        assert len(calls) == len(paths) + 1
        sent = [send(path, {})[0] for path in ("/header/a/5", "/header/b/5", "/header/a/6")]
        assert [r.status_code for r in sent] == [200, 422, 422]

    def test_a_form_needs_a_fingerprint(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any]
    ) -> None:
        identity = by_header("authorization")

        @api.post("/form")
        @fastapi.idempotent_route(
            idem, identity=identity, fingerprint=lambda request, amount: amount
        )
        async def pay(amount: Annotated[int, Form()]) -> None:
            calls.append(amount)

        @api.post("/without")
        @fastapi.idempotent_route(idem, identity=identity)
        async def refuse(amount: Annotated[int, Form()]) -> None:
            calls.append(amount)

        one, two = ({"data": {"amount": amount}, "json": None} for amount in (1, 2))
        assert [r.status_code for r in send("/form", one, one, two)] == [200, 200, 422]
        assert [r.status_code for r in send("/without", one)] == [500]
        assert calls == [1]

    @pytest.mark.parametrize("value", ["NaN", "[" * 150 + "]" * 150, r'"\ud800"'])
    def test_hostile_values_in_a_fingerprint(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any], value: str
    ) -> None:
        @api.post("/pay")
        @fastapi.idempotent_route(
            idem, identity=by_header("authorization"), fingerprint=lambda request, amount: amount
        )
        async def pay(amount: Annotated[Any, Body()]) -> None:
            calls.append(amount)

        headers = {"Content-Type": "application/json"}
        responses = send("/pay", json=None, content=value, headers=headers)
        expected = 200 if "ud800" in value else 400
        assert [r.status_code for r in responses] == [expected] * 2
        assert len(calls) == (expected == 200)

    def test_inside_the_middleware_it_adds_nothing(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any]
    ) -> None:
        api.add_middleware(IdempotencyMiddleware, idem=idem, identity=by_header("authorization"))

        @api.post("/pay")
        @fastapi.idempotent_route(idem, identity=by_header("authorization"))
        async def pay(payment: Payment) -> None:
            calls.append(payment)

        responses = send("/pay")
        assert replayed(responses) == [False, True]
        assert [r.status_code for r in responses] == [200, 200]

    def test_a_stream_is_sent_once(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any]
    ) -> None:
        @api.post("/pay")
        @fastapi.idempotent_route(idem, identity=by_header("authorization"))
        async def pay() -> StreamingResponse:
            calls.append("run")
            return StreamingResponse(iter([b"a", b"b"]))

        first, again = send("/pay")
        assert (first.content, again.status_code) == (b"ab", 409)
        assert "response-not-stored" in again.text
        assert calls == ["run"]

    def test_endpoints_of_starlette(
        self, api: FastAPI, idem: Idempotency, send: Send, calls: list[Any]
    ) -> None:
        protect = fastapi.idempotent_route(idem, identity=by_header("authorization"))

        class Payments(HTTPEndpoint):
            @protect
            async def post(self, request: Request) -> Response:
                calls.append(await request.json())
                return Response("paid", 201)

        @protect
        def refuse(request: Request) -> Response:
            calls.append("refused")
            raise StarletteHTTPException(404, "no card")

        routes = [Route("/pay", Payments), Route("/refuse", refuse, methods=["POST"])]
        api.mount("/shop", Starlette(routes=routes))
        paid = send("/shop/pay")
        refused = send("/shop/refuse", headers={"Idempotency-Key": "another"})

        assert [(r.status_code, r.text) for r in paid] == [(201, "paid")] * 2
        assert [(r.status_code, r.text) for r in refused] == [(404, "no card")] * 2
        assert replayed(paid) == replayed(refused) == [False, True]
        assert calls == [{"amount": 1}, "refused"]

    def test_endpoints_of_two_hosts_do_not_share_keys(
        self, api: FastAPI, idem: Idempotency, send: Send
    ) -> None:
        class Base(HTTPEndpoint):
            @fastapi.idempotent_route(idem, identity=by_header("authorization"), key=lambda _: "5")
            async def post(self, request: Request) -> Response:
                return Response(type(self).__name__)

        class Payments(Base): ...

        class Refunds(Base): ...

        for endpoint in (Payments, Refunds):
            host = endpoint.__name__.lower()
            api.host(host, Starlette(routes=[Route("/pay", endpoint)]))

        responses = send("/pay", *({"headers": {"Host": host}} for host in ("payments", "refunds")))

        assert [response.text for response in responses] == ["Payments", "Refunds"]

    def test_a_call_without_a_request_is_a_plain_call(self, idem: Idempotency) -> None:
        @fastapi.idempotent_route(idem, identity=by_header("authorization"))
        async def pay(amount: int) -> int:
            return amount

        @fastapi.idempotent_route(idem, identity=by_header("authorization"))
        def pay_in_thread(amount: int) -> int:
            return amount

        assert asyncio.run(pay(1)) == pay_in_thread(1) == 1
        assert list(idem.records()) == []


class TestFlask:
    @pytest.fixture
    def web(self) -> flask.Flask:
        return flask.Flask("shop")

    @pytest.fixture
    def post(self, web: flask.Flask, key: str) -> Iterator[Any]:
        headers = {"Authorization": "Bearer alice", "Idempotency-Key": key}
        client = web.test_client()
        return lambda path, **options: client.post(path, headers=headers, **options)

    def test_a_method_of_a_class_sees_its_arguments(
        self, web: flask.Flask, idem: Idempotency, post: Any, calls: list[Any]
    ) -> None:
        class Payments(MethodView):
            @contrib_flask.idempotent_route(
                idem, identity=lambda request, tenant: f"{tenant} {request.authorization}"
            )
            def post(self, tenant: str) -> Any:
                calls.append((tenant, flask.request.get_json()))
                return {"paid": len(calls)}, 201

        web.add_url_rule("/<tenant>/payments", view_func=Payments.as_view("payments"))
        paths = ("/a/payments", "/a/payments", "/b/payments")
        responses = [post(path, json={"amount": 1}) for path in paths]

        assert [(r.status_code, r.json["paid"]) for r in responses] == [
            (201, 1),
            (201, 1),
            (201, 2),
        ]
        assert calls == [("a", {"amount": 1}), ("b", {"amount": 1})]

    @pytest.mark.parametrize("fingerprint", [None, lambda request: "any"], ids=["request", "own"])
    def test_views_that_inherit_a_method_do_not_share_keys(
        self, web: flask.Flask, idem: Idempotency, post: Any, calls: list[Any], fingerprint: Any
    ) -> None:
        protect = contrib_flask.idempotent_route(
            idem,
            identity=by_header("authorization"),
            key=lambda request: request.view_args["number"],
            fingerprint=fingerprint,
        )

        class View(MethodView):
            @protect
            def post(self, number: str) -> str:
                calls.append(type(self).__name__)
                return calls[-1]

        class Payments(View): ...

        class Refunds(View): ...

        class Decorated(MethodView):
            decorators = (protect,)

            def post(self, number: str) -> str:
                calls.append(type(self).__name__)
                return calls[-1]

        class AlsoDecorated(Decorated): ...

        views = (Payments, Refunds, Decorated, AlsoDecorated)
        for view in views:
            name = view.__name__
            web.add_url_rule(f"/{name}/<number>", view_func=view.as_view(name))

        for view in views:
            assert [post(f"/{view.__name__}/5").text for _ in range(2)] == [view.__name__] * 2
        assert calls == [view.__name__ for view in views]

    def test_an_error_with_a_handler_is_a_response_and_others_release_the_key(
        self, web: flask.Flask, idem: Idempotency, post: Any, calls: list[Any]
    ) -> None:
        web.register_error_handler(DeclinedError, lambda error: (f"declined {error}", 402))

        @web.post("/<int:number>")
        @contrib_flask.idempotent_route(
            idem, identity=by_header("authorization"), key=lambda request, number: str(number)
        )
        def pay(number: int) -> None:
            calls.append(number)
            if number == 402:
                raise DeclinedError("it")
            flask.abort(number)

        for number, text in ((404, "Not Found"), (402, "declined it")):
            responses = [post(f"/{number}", json=number) for _ in range(2)]
            assert [r.status_code for r in responses] == [number] * 2
            assert responses[0].data == responses[1].data
            assert text in responses[0].text
        assert [post("/503").status_code for _ in range(2)] == [503, 503]
        assert calls == [404, 402, 503, 503]

    def test_a_body_that_a_hook_has_read_counts(
        self, web: flask.Flask, idem: Idempotency, post: Any, calls: list[Any]
    ) -> None:
        web.before_request(lambda: calls.append(flask.request.values.get("amount")))
        web.config["PROPAGATE_EXCEPTIONS"] = True
        identity = by_header("authorization")
        protect = contrib_flask.idempotent_route(idem, identity=identity)
        web.post("/json")(protect(lambda: [flask.request.get_json()]))
        web.config["TESTING"] = True

        assert [post("/json", json=n).status_code for n in (1, 1, 2)] == [200, 200, 422]
        with pytest.raises(TypeError, match="pass fingerprint="):
            post("/json", data={"amount": 1})

    def test_inside_the_middleware_it_adds_nothing(
        self, web: flask.Flask, idem: Idempotency, post: Any, calls: list[Any]
    ) -> None:
        identity = by_header("authorization")
        web.wsgi_app = wsgi.IdempotencyMiddleware(  # type: ignore[method-assign]
            web.wsgi_app, idem, identity=identity
        )

        @web.post("/pay")
        @contrib_flask.idempotent_route(idem, identity=identity)
        def pay() -> dict[str, int]:
            calls.append("run")
            return {"paid": 1}

        assert replayed([post("/pay"), post("/pay")]) == [False, True]
        assert calls == ["run"]

    def test_a_call_without_a_request_is_a_plain_call(self, idem: Idempotency) -> None:
        @contrib_flask.idempotent_route(idem, identity=by_header("authorization"))
        def pay(amount: int) -> int:
            return amount

        assert pay(1) == 1


def starlette_route() -> Any:
    routes = []

    def add(endpoint: Any) -> Any:
        routes.append(Route("/pay", endpoint))
        return endpoint

    return add


ROUTES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "fastapi": (fastapi, lambda: FastAPI().post("/pay")),
    "router": (fastapi, lambda: APIRouter().post("/pay")),
    "starlette": (fastapi, starlette_route),
    "flask": (contrib_flask, lambda: flask.Flask("shop").post("/pay")),
    "blueprint": (contrib_flask, lambda: flask.Blueprint("shop", __name__).post("/pay")),
}


def test_a_route_without_a_protected_method_is_refused(
    api: FastAPI, idem: Idempotency, send: Send, key: str
) -> None:
    options: dict[str, Any] = {"identity": by_header("authorization")}
    protect = fastapi.idempotent_route(idem, **options)
    api.get("/pay")(protect(lambda: "paid"))
    api.get("/own")(fastapi.idempotent_route(idem, methods=["GET"], **options)(lambda: "paid"))
    web = flask.Flask("shop")
    web.get("/pay")(contrib_flask.idempotent_route(idem, **options)(lambda: "paid"))
    web.config["TESTING"] = True

    assert [r.status_code for r in send("/own", method="GET")] == [200, 200]
    assert [r.status_code for r in send("/pay", method="GET")] == [500, 500]
    with pytest.raises(SettingsError, match=r"route has none of the methods DELETE, .*methods="):
        web.test_client().get("/pay")


def test_a_decorator_that_hides_the_request_is_logged(
    api: FastAPI, idem: Idempotency, send: Send, caplog: pytest.LogCaptureFixture
) -> None:
    @fastapi.idempotent_route(idem, identity=by_header("authorization"))
    async def pay() -> None: ...

    @api.post("/pay")
    async def hidden() -> None:
        await pay()

    send("/pay")

    assert caplog.text.count("pay was called without a request, and is unprotected") == 1


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize(("module", "new_route"), ROUTES.values(), ids=ROUTES)
def test_an_endpoint_that_already_has_a_route_is_refused(
    idem: Idempotency, module: Any, new_route: Callable[[], Any], wrapped: bool
) -> None:
    protect = module.idempotent_route(idem, identity=by_header("authorization"))
    kept = []

    def add_route(endpoint: Any) -> Any:
        kept.append(route := new_route())
        return route(endpoint)

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


def test_the_signature_is_that_of_the_endpoint_and_one_dependency(idem: Idempotency) -> None:
    protect = fastapi.idempotent_route(idem, identity=by_header("authorization"))
    names = [list(inspect.signature(protect(endpoint)).parameters) for endpoint in (pay, pay_any)]
    assert names == [["order", "idempotency_exchange"], ["order", "idempotency_exchange", "more"]]
