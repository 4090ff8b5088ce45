"""The brain process of a router with several edges: index, load, choice and queue for all of them. Started by the supervisor.

Its death costs no stream: edges hold on by themselves (`remote_desk`) until the next one has read the workers again.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

import uvloop

from fleet_contract.lifeline import die_with_parent
from fleet_contract.logs import set_up_logging
from fleet_router.brain.answers import Answers
from fleet_router.brain.desk_server import DeskServer
from fleet_router.brain.host import BrainHost
from fleet_router.counters import Counters
from fleet_router.garbage import Sweeper
from fleet_router.http.client import Pool
from fleet_router.link import LinkServer
from fleet_router.process import Handover, on_stop, raise_file_limit, read_handover

log = logging.getLogger(__name__)


async def serve(handover: Handover) -> int:
    """The process's life."""
    stop = on_stop(handover)
    raise_file_limit()
    settings, pool = handover.settings, Pool()
    host = BrainHost(settings, Counters(), pool)
    server = DeskServer(host.brain, settings.workers, host.take_observed)
    server.answer = Answers(host.brain, server, host.static_workers).answer
    link = LinkServer(server.make_channel)
    host.start(handover.peer_socket())
    await link.start(socket.socket(fileno=handover.link_fd))
    server.start()
    Sweeper().start()
    log.info("brain decides", extra={"router_id": settings.router_id})
    await stop.wait()
    server.close()
    await link.close()
    await host.close()
    await pool.close()
    return 0


def main(argv: list[str]) -> int:
    """Entry of the child process."""
    handover = read_handover(argv)
    die_with_parent(handover.parent_pid)
    set_up_logging("brain", handover.settings.log_level)
    return uvloop.run(serve(handover))


if __name__ == "__main__":
    code = main(sys.argv)
    logging.shutdown()
    os._exit(code)  # nothing is left to do, and no library's thread may hold the end
