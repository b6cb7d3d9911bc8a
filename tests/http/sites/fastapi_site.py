"""The app with FastAPI: with the middleware, and with the decorator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import BackgroundTasks, FastAPI, Header, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute

from celery_idempotent.contrib.asgi import IdempotencyMiddleware, by_header
from celery_idempotent.contrib.fastapi import idempotent_route
from tests.http.sites.common import (
    OPTIONS,
    chunks,
    copy_of,
    count,
    idem,
    is_allowed,
    wait_for_release,
)


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


async def order_of(request: Request) -> str:
    order: str = (await request.json())["order"]
    return order


@app.post("/payments", status_code=201)
@app.post("/required/payments", status_code=201)
@app.get("/payments/{order}")
async def pay(
    request: Request,
    response: Response,
    background: BackgroundTasks,
    order: str = "",
    idempotency_key: Annotated[str | None, Header(description="Makes retries safe.")] = None,
) -> dict[str, Any]:
    order = order or await order_of(request)
    number = await asyncio.to_thread(count, order)
    background.add_task(count, f"{order}:after")
    response.headers["location"] = f"/payments/{number}"
    response.set_cookie("a", "1")
    response.set_cookie("b", "2")
    return {"payment": number, "attempt": getattr(idem.current, "attempt", 0)}


@app.post("/slow")
async def slow(request: Request) -> dict[str, int]:
    order = await order_of(request)
    number = await asyncio.to_thread(count, order)
    await asyncio.to_thread(wait_for_release, order)
    return {"payment": number}


@app.post("/status/{status}")
async def respond(status: int, request: Request) -> Response:
    return Response(str(count(await order_of(request))), status)


@app.post("/broken")
async def broken(request: Request) -> None:
    count(await order_of(request))
    raise RuntimeError("broken")


@app.post("/echo")
async def echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/octet-stream")


@app.post("/chunks/{size}")
async def stream(size: int, request: Request) -> StreamingResponse:
    count(await order_of(request))
    return StreamingResponse(chunks(size))


@idem.idempotent(key="{order}", name="web.endless")
async def endless(order: str) -> None:
    count(order)
    await asyncio.sleep(3600)


@app.get("/endless/{order}")
async def stream_endlessly(order: str) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        yield "started\n"
        await endless(order)

    return StreamingResponse(lines())


def may_be_replayed(request: Request) -> bool:
    return is_allowed(request.headers["idempotency-key"])


#: The same endpoints, each with the decorator instead of the middleware.
routes_app = FastAPI()
protect = idempotent_route(
    identity=by_header("authorization"),
    required=lambda request: request.url.path.startswith("/required"),
    authorize_replay=may_be_replayed,
    **OPTIONS,
)
for route in app.routes:
    if isinstance(route, APIRoute):
        is_get = "GET" in route.methods
        routes_app.add_api_route(
            route.path,
            route.endpoint if is_get else protect(copy_of(route.endpoint)),
            methods=["GET"] if is_get else ["POST", "PATCH"],
            status_code=route.status_code,
        )
