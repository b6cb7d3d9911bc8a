"""The app with Flask: with the middleware, and with the decorator."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, make_response, request, session

from celery_idempotent.contrib.flask import idempotent_route
from celery_idempotent.contrib.wsgi import IdempotencyMiddleware, by_cookie, by_header
from tests.http.sites.common import OPTIONS, answer, count, is_allowed, with_cookies


def serve(path: str) -> Response:
    status, headers, content = answer(f"/{path}", request.get_data())
    return with_cookies(make_response(content, status, headers))  # type: ignore[no-any-return]


#: The same view, with the decorator instead of the middleware.
routes_app = Flask("routes")
protect = idempotent_route(
    identity=by_header("Authorization"),
    required=lambda request: request.path.startswith("/required"),
    authorize_replay=lambda request: is_allowed(request.headers["Idempotency-Key"]),
    **OPTIONS,
)
routes_app.route("/<path:path>", methods=["GET", "POST", "PATCH"])(protect(serve))

app = Flask(__name__)
app.route("/<path:path>", methods=["GET", "POST"])(serve)
app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
    app.wsgi_app,
    identity=by_header("Authorization"),
    required=lambda environ: environ["PATH_INFO"].startswith("/required"),
    authorize_replay=lambda environ: is_allowed(environ["HTTP_IDEMPOTENCY_KEY"]),
    **OPTIONS,
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
    return {"payment": count(request.get_json()["order"])}


def user(environ: Any) -> str | None:
    """Identifies a client by the user of Flask's session."""
    opened = shop.session_interface.open_session(shop, shop.request_class(environ))
    return opened.get("user_id") if opened else None


by_session_cookie = IdempotencyMiddleware(shop, identity=by_cookie("session"), **OPTIONS)
by_session_user = IdempotencyMiddleware(shop, identity=user, **OPTIONS)
