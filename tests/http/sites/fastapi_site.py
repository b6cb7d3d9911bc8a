"""The app with FastAPI: with the middleware, and with the decorator."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from celery_idempotent.contrib.asgi import IdempotencyMiddleware, by_header
from celery_idempotent.contrib.fastapi import idempotent_route
from tests.http.sites.common import OPTIONS, answer, is_allowed, with_cookies


async def serve(request: Request) -> Response:
    body = await request.body()
    status, headers, content = await asyncio.to_thread(answer, request.url.path, body)
    kinds: dict[type, Any] = {dict: JSONResponse, bytes: Response}
    response = kinds.get(type(content), StreamingResponse)(content, status, headers)
    return with_cookies(response)  # type: ignore[no-any-return]


#: The same endpoint, with the decorator instead of the middleware.
routes_app = FastAPI()
protect = idempotent_route(
    identity=by_header("authorization"),
    required=lambda request: request.url.path.startswith("/required"),
    authorize_replay=lambda request: is_allowed(request.headers["idempotency-key"]),
    **OPTIONS,
)
routes_app.api_route("/{path:path}", methods=["GET", "POST", "PATCH"])(protect(serve))


async def authorize_replay(scope: Any) -> bool:
    return await asyncio.to_thread(is_allowed, dict(scope["headers"])[b"idempotency-key"].decode())


app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    identity=by_header("authorization"),
    required=lambda scope: scope["path"].startswith("/required"),
    authorize_replay=authorize_replay,
    **OPTIONS,
)
app.api_route("/{path:path}", methods=["GET", "POST"])(serve)
