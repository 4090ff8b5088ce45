"""A small HTTP server for the kubelet and Prometheus: /livez, /readyz, /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web


class HealthServer:
    """`alive` and `ready` return None when all is well, else what is not; `metrics` the text of /metrics."""

    def __init__(self, *, alive: Callable[[], str | None], ready: Callable[[], str | None], metrics: Callable[[], str]) -> None:
        self._alive, self._ready, self._metrics = alive, ready, metrics
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port."""
        app = web.Application()
        app.router.add_get("/livez", self._check(self._alive))
        app.router.add_get("/readyz", self._check(self._ready))
        app.router.add_get("/metrics", self._print_metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stops listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _check(self, ask: Callable[[], str | None]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(_: web.Request) -> web.StreamResponse:
            fault = ask()
            return web.Response(text="ok\n") if fault is None else web.Response(status=503, text=fault + "\n")

        return answer

    async def _print_metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
