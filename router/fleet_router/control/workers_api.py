"""Workers of static mode over REST, on the control port: `POST /workers`, `DELETE /workers/{id}`, `POST` and `DELETE /workers/{id}/drain`."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request, Response

from fleet_contract.errors import ApiError
from fleet_router.link import LinkClient
from fleet_router.messages import Reply

MAX_BYTES: Final = 64 << 10


def add_workers_api(app: FastAPI, link: LinkClient) -> None:
    """The paths; what they do is done beside the registry (`static_workers`)."""

    @app.post("/workers")
    async def add(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                raise ApiError(413, f"the body is longer than {MAX_BYTES} bytes", code="body_too_large")
        return _answer(await link.ask("worker_add", body=bytes(body)), created=True)

    @app.delete("/workers/{worker_id}")
    async def remove(worker_id: str) -> Response:
        return _answer(await link.ask("worker_remove", worker_id))

    @app.post("/workers/{worker_id}/drain")
    async def drain(worker_id: str) -> Response:
        return _answer(await link.ask("worker_drain", worker_id))

    @app.delete("/workers/{worker_id}/drain")
    async def resume(worker_id: str) -> Response:
        return _answer(await link.ask("worker_resume", worker_id))


def _answer(reply: Reply, *, created: bool = False) -> Response:
    return Response(reply.body, 201 if created and reply.status == 200 else reply.status, media_type="application/json")
