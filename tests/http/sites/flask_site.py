"""The app with Flask: with the middleware, and with the decorator."""

from __future__ import annotations

from flask import Flask, Response, make_response, request

from celery_idempotent.contrib.flask import idempotent_route
from celery_idempotent.contrib.wsgi import IdempotencyMiddleware, by_header
from tests.http.sites.common import OPTIONS, answer, is_allowed, with_cookies


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
