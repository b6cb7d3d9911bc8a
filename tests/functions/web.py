"""An API that counts its requests per order; STORE_URL is the URL of a private Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from fastapi import BackgroundTasks, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from redis.asyncio import Redis

from celery_idempotent import Idempotency
from celery_idempotent.contrib.asgi import IdempotencyMiddleware

url = os.environ["STORE_URL"]
idem = Idempotency(
    os.environ.get("UNAVAILABLE_URL", url), key_prefix="web", lease=1, redis_timeout=0.5, name="web"
)
api = FastAPI()
api.add_middleware(
    IdempotencyMiddleware,
    idem=idem,
    required=lambda scope: scope["path"] != "/optional",
    max_body_bytes=1000,
)
ledger = Redis.from_url(url)


async def count(name: str) -> int:
    return int(await ledger.incr(f"requests:{name}"))


@api.post("/payments", status_code=201)
async def pay(request: Request, response: Response, background: BackgroundTasks) -> dict[str, Any]:
    body = await request.json()
    number = await count(body["order"])
    background.add_task(count, f"{body['order']}:after")
    response.headers["location"] = f"/payments/{number}"
    response.set_cookie("a", "1")
    response.set_cookie("b", "2")
    return {"payment": number, "attempt": idem.current.attempt}


@api.post("/slow")
async def slow(request: Request) -> dict[str, int]:
    body = await request.json()
    number = await count(body["order"])
    await asyncio.sleep(body["seconds"] if number == 1 else 0)
    return {"payment": number}


@idem.idempotent(key="{order}", name="web.endless")
async def endless(order: str) -> None:
    await count(order)
    await asyncio.sleep(3600)


@api.get("/stream/{order}")
async def stream(order: str) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        yield "started\n"
        await endless(order)

    return StreamingResponse(lines())


@api.post("/status/{status}")
async def respond(status: int, request: Request) -> Response:
    number = await count((await request.json())["order"])
    return Response(f"{number}", status)


@api.post("/broken")
async def broken(request: Request) -> None:
    await count((await request.json())["order"])
    raise RuntimeError("broken")


@api.post("/optional")
async def optional(request: Request) -> int:
    return await count((await request.json())["order"])
