"""Entry of the scheduler process: `python -m fleet_runtime.scheduler.process RUN_DIR INCARNATION`, started by the supervisor.

Loads the executor while its row of the heartbeat board tells how far it is, binds its ports, says `Ready`, and works from its first
`Peers` on. A cause for which it cannot start goes as JSON to RUN_DIR/scheduler.failure, exit status 3. SIGTERM ends it; so does its
parent's death.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

import zmq

from fleet_contract.handoff import Hello
from fleet_contract.logs import set_up_logging
from fleet_contract.names import ROLE_DECODE
from fleet_runtime import messages as m
from fleet_runtime.config import RuntimeConfig
from fleet_runtime.engine.base import Executor
from fleet_runtime.engine.factory import make_executor
from fleet_runtime.errors import EXIT_START_FAILED, StartError, leave_failure
from fleet_runtime.events.publisher import EventPublisher, Stream
from fleet_runtime.heartbeat import PHASE_DRAINING, PHASE_READY, PHASE_STARTING, Board
from fleet_runtime.models.files import ModelFiles, load_text_files
from fleet_runtime.scheduler.grammar import LlguidanceCompiler
from fleet_runtime.scheduler.load import LoadPublisher, LoadReporter
from fleet_runtime.scheduler.loop import Scheduler
from fleet_runtime.scheduler.mail import Mail
from fleet_runtime.scheduler.runner import ThreadRunner
from fleet_runtime.transfer.link import Settings
from fleet_runtime.transfer.tcp import TcpTransfer
from fleet_text.prompt import PromptEncoder

log = logging.getLogger(__name__)
_COUNTERS_EVERY_S: Final = 0.01
_IDLE_WAIT_S: Final = 0.25
_HOLDING_WAIT_S: Final = 0.05  # while requests wait: their deadlines are looked at


def _terminate(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


class SchedulerProcess:
    """The scheduler with its sockets, board row and transfer."""

    def __init__(self, config: RuntimeConfig, incarnation: str, board: Board) -> None:
        self._config = config
        self._flags = config.flags()
        self._incarnation = incarnation
        self._board = board
        self._row = board.row(m.SCHEDULER)
        self._next_counters = 0.0
        executor = self._load()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = LoadPublisher(self._context, host=self._flags.internal_host, port=self._flags.load_port, pod_uid=config.identity.pod_uid)
        self._transfer = self._make_transfer(executor)
        self._runner = ThreadRunner(executor)
        self._mail = Mail(self._context, config.run_dir, incarnation, (self._transfer.wake_fd, self._runner.wake_fd))
        self._scheduler = Scheduler(
            self._flags,
            executor,
            self._mail,
            clock=time.monotonic,
            transfer=self._transfer,
            runner=self._runner,
            compile=LlguidanceCompiler(self._load_tokenizer, executor.vocab_size),
            wake=self._runner.wake,
        )
        self._events = self._make_events()
        self._reporter = LoadReporter(self._scheduler, incarnation=incarnation, clock=time.monotonic)
        self._info = self._describe(executor)

    def _load(self) -> Executor:
        def progress(percent: int, text: str) -> None:
            self._row.set(percent=percent)
            self._row.set_text(text)
            self._row.beat()

        begin = time.monotonic()
        executor = make_executor(self._flags, self._config.model_folder, self._config.threads, progress)
        layout = executor.layout
        log.info(
            "loaded %s in %.2f s: KV pool of %d tokens (%d pages of %d bytes, --kv-cache-memory %d), %d rows, %d threads",
            self._flags.model,
            time.monotonic() - begin,
            layout.num_pages * layout.page_size,
            layout.num_pages,
            layout.page_bytes,
            self._flags.kv_cache_memory,
            self._flags.max_rows,
            self._config.threads,
        )
        return executor

    def _load_tokenizer(self) -> tuple[str, list[int]]:
        """For grammars: tokenizer.json, and the ids that end an answer. Called on first use, on a thread of the grammars'."""
        folder = Path(self._config.model_folder) if self._config.model_folder else None
        files = load_text_files(ModelFiles(folder=folder, base_name="", revision=self._config.model_revision))
        return files["tokenizer.json"].decode(), list(PromptEncoder(files).eos_ids)

    def _make_transfer(self, executor: Executor) -> TcpTransfer:
        layout = executor.layout
        hello = Hello(
            incarnation=self._incarnation,
            pod_uid=self._config.identity.pod_uid,
            model_revision=self._config.model_revision,
            page_size=layout.page_size,
            page_bytes=layout.page_bytes,
            dtype=layout.dtype,
            layers=layout.layers,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            layout=layout.layout,
        )
        settings = Settings(
            transfer_timeout_s=self._flags.transfer_timeout,
            stall_timeout_s=self._flags.stall_timeout,
            prefill_tokens_per_s=executor.profile.prefill_tokens_per_s,
            hold=self._flags.transfer_hold,
        )
        transfer = TcpTransfer(
            hello,
            executor,
            settings,
            listen=self._flags.role != ROLE_DECODE,
            host=self._flags.internal_host,
            transfer_port=self._flags.transfer_port,
            bootstrap_port=self._flags.bootstrap_port,
        )
        transfer.start()
        return transfer

    def _make_events(self) -> EventPublisher:
        stream = Stream(
            host=self._flags.internal_host,
            events_port=self._flags.events_port,
            replay_port=self._flags.replay_port,
            pod_uid=self._config.identity.pod_uid,
            model_revision=self._config.model_revision,
            incarnation=self._incarnation,
            replay_batches=self._flags.replay_batches,
        )
        return EventPublisher(self._context, stream, self._scheduler.book.memory.tree)

    def _describe(self, executor: Executor) -> m.SchedulerInfo:
        return m.SchedulerInfo(
            kv_capacity_tokens=executor.layout.num_pages * executor.layout.page_size,
            max_rows=self._flags.max_rows,
            bootstrap_port=self._transfer.bootstrap_port,
            transfer_port=self._transfer.transfer_port,
            load_port=self._publisher.port,
            events_port=self._events.events_port,
            replay_port=self._events.replay_port,
            transfer_backends=["tcp"],
            profile=executor.profile,
            vocab_size=executor.vocab_size,
        )

    def run(self) -> None:
        """Says `Ready`, then works until a signal."""
        self._row.beat()  # first: ready with the last beat of the loading would be a stall
        self._row.set(phase=PHASE_READY, percent=100)
        self._row.set_text("ready")
        self._mail.ready(os.getpid(), self._info)
        wait_s = 0.0
        while True:
            for message in self._mail.receive(wait_s):
                self._handle(message)
            self._runner.drain_wake()
            progress = self._scheduler.iterate()
            self._publish(rested=not progress)
            wait_s = 0.0 if progress else (_HOLDING_WAIT_S if self._scheduler.book.requests or self._scheduler.outstanding else _IDLE_WAIT_S)

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.PeerDied():
                if message.who in (m.HTTP, m.DETOKENIZER):
                    log.warning("%s is gone (%s); ending %d requests", message.who, message.cause, len(self._scheduler.book.requests))
                    self._scheduler.drop_all(f"the {message.who} process is gone: {message.cause}")
            case m.Admit():
                if message.router_id:
                    self._reporter.seen.note(message.router_id, message.pick, time.monotonic())
                self._scheduler.handle(message)
            case m.Drain():
                self._row.set(phase=PHASE_DRAINING)
                self._scheduler.handle(message)
            case m.Abort() | m.RoomRejected() | m.Stopped() | m.Control():
                self._scheduler.handle(message)
            case _:
                pass  # Peers: the mail has taken it in

    def _publish(self, *, rested: bool) -> None:
        """KV events, heartbeat and load report, once per loop. A long step is no stall, but one that never ends is: then the beats stop."""
        self._events.publish()
        scheduler = self._scheduler
        totals = scheduler.book.totals
        open_requests = len(scheduler.book.requests)
        self._row.set(steps=totals.steps, pending=open_requests, inflight=open_requests)
        begun = scheduler.step_begun
        if not begun or time.monotonic() - begun < self._flags.stall_timeout / 2:
            self._row.beat()
        now = time.monotonic()
        if rested or now >= self._next_counters:  # before each wait, and not after each of many short steps
            self._next_counters = now + _COUNTERS_EVERY_S
            self._board.set_counters(scheduler.counters())
        if (report := self._reporter.due()) is not None:
            self._publisher.publish(report)

    def close(self) -> None:
        """Peers see closed connections at once."""
        self._runner.close()
        self._transfer.close()
        self._mail.close()
        self._publisher.close()
        self._events.close()
        self._context.term()


def main(argv: list[str]) -> int:
    """Runs the process; returns its exit status."""
    run_dir, incarnation = argv
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the supervisor ends us in order
    config = RuntimeConfig.read(run_dir)
    set_up_logging(m.SCHEDULER, config.flags().log_level)
    board = Board.open(run_dir)
    row = board.row(m.SCHEDULER)
    row.set(phase=PHASE_STARTING, percent=0)
    row.set_text("starting")
    try:
        process = SchedulerProcess(config, incarnation, board)
    except StartError as e:
        log.error("cannot start: %s: %s", e.reason, e.message)
        leave_failure(run_dir, m.SCHEDULER, e)
        return EXIT_START_FAILED
    try:
        process.run()
    except SystemExit:
        log.info("ending on SIGTERM")
    except Exception as e:
        row.set_text(f"{type(e).__name__}: {e}")
        log.exception("the scheduler loop failed")
        return 1
    finally:
        process.close()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)  # the engine thread may still compute: nothing may be torn down below it
