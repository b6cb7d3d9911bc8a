"""The app with Flask: with the middleware, and with the decorator."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, jsonify, request, session

from celery_idempotent.contrib.flask import idempotent_route
from celery_idempotent.contrib.wsgi import IdempotencyMiddleware, by_cookie, by_header
from tests.http.sites.common import (
    OPTIONS,
    chunks,
    copy_of,
    count,
    idem,
    is_allowed,
    wait_for_release,
)

app = Flask(__name__)
app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
    app.wsgi_app,
    identity=by_header("Authorization"),
    required=lambda environ: environ["PATH_INFO"].startswith("/required"),
    authorize_replay=lambda environ: is_allowed(environ["HTTP_IDEMPOTENCY_KEY"]),
    **OPTIONS,
)


def order_in_body() -> str:
    order: str = request.get_json()["order"]
    return order


@app.post("/payments")
@app.post("/required/payments")
@app.get("/payments/<order>")
def pay(order: str = "") -> Response:
    order = order or order_in_body()
    number = count(order)
    response = jsonify(payment=number, attempt=idem.current.attempt)
    response.status_code = 201
    response.headers["Location"] = f"/payments/{number}"
    response.set_cookie("a", "1")
    response.set_cookie("b", "2")
    response.call_on_close(lambda: count(f"{order}:after"))
    return response


@app.post("/slow")
def slow() -> Response:
    order = order_in_body()
    number = count(order)
    wait_for_release(order)
    return jsonify(payment=number)


@app.post("/status/<int:status>")
def respond(status: int) -> tuple[str, int]:
    return str(count(order_in_body())), status


@app.post("/broken")
def broken() -> None:
    count(order_in_body())
    raise RuntimeError("broken")


@app.post("/echo")
def echo() -> Response:
    return Response(request.get_data(), content_type="application/octet-stream")


@app.post("/chunks/<int:size>")
def stream(size: int) -> Response:
    count(order_in_body())
    return Response(chunks(size))


#: The same views, each with the decorator instead of the middleware.
routes_app = Flask("routes")
protect = idempotent_route(
    identity=by_header("Authorization"),
    required=lambda request: request.path.startswith("/required"),
    authorize_replay=lambda request: is_allowed(request.headers["Idempotency-Key"]),
    **OPTIONS,
)
for rule in app.url_map.iter_rules():
    if rule.endpoint != "static":
        view, is_get = app.view_functions[rule.endpoint], "GET" in (rule.methods or ())
        routes_app.add_url_rule(
            rule.rule,
            view_func=view if is_get else protect(copy_of(view)),
            methods=["GET"] if is_get else ["POST", "PATCH"],
            endpoint=rule.rule,
        )


#: An app whose users log in, with Flask's session: a signed cookie.
shop = Flask("shop")
shop.secret_key = "for tests"


@shop.post("/login/<name>")
def log_in(name: str) -> str:
    session["user_id"] = name
    return name


@shop.post("/payments")
def charge() -> dict[str, int]:
    session["payments"] = session.get("payments", 0) + 1
    return {"payment": count(order_in_body())}


def user(environ: Any) -> str | None:
    """Identifies a client by the user of Flask's session."""
    opened = shop.session_interface.open_session(shop, shop.request_class(environ))
    return opened.get("user_id") if opened else None


by_session_cookie = IdempotencyMiddleware(shop, identity=by_cookie("session"), **OPTIONS)
by_session_user = IdempotencyMiddleware(shop, identity=user, **OPTIONS)
