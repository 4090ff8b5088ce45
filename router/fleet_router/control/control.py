"""The control process: FastAPI on the control port, and discovery. Started by the supervisor; everything it says comes over the link.

Its death or slowness never touches the data path: the edge keeps the last table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys

import uvicorn

from fleet_contract.lifeline import die_with_parent
from fleet_contract.logs import set_up_logging
from fleet_router.control.api import create_app
from fleet_router.control.discovery import Discovery
from fleet_router.link import LinkClient
from fleet_router.process import Handover, on_stop, read_handover

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Sleeps while nobody asks; uvicorn's own looks ten times a second whether it is to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.end.wait()


async def serve(handover: Handover) -> int:
    """The process's life."""
    settings = handover.settings
    stop = on_stop(handover)
    loop = asyncio.get_running_loop()
    link = LinkClient(handover.link_name, settings.workers if settings.workers > 1 else 0)
    tasks = [loop.create_task(link.run(), name="link")]
    if settings.kubernetes:
        from fleet_router.control.kube import kubernetes_source  # optional: a second of start-up that static routers need not pay

        discovery = Discovery(lambda: kubernetes_source(settings.kubeconfig), link.send_news, settings.relist_interval)
        tasks.append(loop.create_task(discovery.run(), name="discovery"))
    app = create_app(link, settings.max_body_bytes)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=30, timeout_graceful_shutdown=2, date_header=False
    )
    server = Server(config)
    http = loop.create_task(server._serve([socket.socket(fileno=handover.listen_fd)]), name="http")  # serve() would take the signals
    stopped = loop.create_task(stop.wait())
    done, _ = await asyncio.wait([http, stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
    failed = [t for t in done if t is not stopped]
    for task in failed:  # none of them ends by itself
        log.error("task %s of the control process ended", task.get_name(), exc_info=task.exception())
    server.end.set()
    for task in tasks:
        task.cancel()
    stopped.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(4):
            await asyncio.gather(http, *tasks, stopped, return_exceptions=True)
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    """Entry of the child process."""
    handover = read_handover(argv)
    die_with_parent(handover.parent_pid)
    set_up_logging("control", handover.settings.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return asyncio.run(serve(handover))


if __name__ == "__main__":
    code = main(sys.argv)
    logging.shutdown()
    os._exit(code)
