"""The endpoints of the app with FastAPI, each with the decorator instead of the middleware."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute

from celery_idempotent.contrib.fastapi import by_header, idempotent_route
from tests.http.sites import fastapi_site
from tests.http.sites.common import OPTIONS, is_allowed


def authorize_replay(request: Request) -> bool:
    return is_allowed(request.headers["idempotency-key"])


protect = idempotent_route(
    identity=by_header("authorization"),
    required=lambda request: request.url.path.startswith("/required"),
    authorize_replay=authorize_replay,
    **OPTIONS,
)
app = FastAPI()
for route in fastapi_site.app.routes:
    if isinstance(route, APIRoute):
        app.add_api_route(
            route.path,
            protect(route.endpoint),
            methods=["GET"] if "GET" in route.methods else ["POST", "PATCH"],
            status_code=route.status_code,
        )
