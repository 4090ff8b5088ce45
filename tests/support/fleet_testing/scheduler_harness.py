"""Two harnesses around the scheduler: in this process over a virtual clock, and as a real process with its neighbours played by the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from fleet_contract.launch import RuntimeLaunch
from fleet_contract.lifeline import before_exec
from fleet_contract.wire import encode_ids
from fleet_contract.worker import Profile
from fleet_runtime import messages as m
from fleet_runtime.config import Identity, RuntimeConfig, mint_incarnation
from fleet_runtime.engine.base import Executor
from fleet_runtime.engine.simulated import PAGE_BYTES, SimulatedExecutor
from fleet_runtime.heartbeat import Board
from fleet_runtime.models.simulated_tokenizer import EOS_ID, simulated_tokenizer_files
from fleet_runtime.scheduler.grammar import LlguidanceCompiler
from fleet_runtime.scheduler.loop import Scheduler
from fleet_runtime.transfer.base import KvTransfer
from fleet_testing.fake_engine import VOCAB, FakeEngine

HTTP_INCARNATION = "aaaaaaaaaaaaaaaa"
DETOKENIZER_INCARNATION = "bbbbbbbbbbbbbbbb"


def rid_of(n: int) -> str:
    """A request id of 32 hex digits."""
    return f"{n:032x}"


def admit(rid: str, ids: list[int], max_new: int = 8, **fields: object) -> m.Admit:
    """A greedy request."""
    return m.Admit(**{"rid": rid, "ids": encode_ids(ids), "max_new": max_new, "temperature": 0.0, **fields})  # type: ignore[arg-type]


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Answer:
    """What one choice got so far."""

    ids: list[int] = field(default_factory=list)
    opened: m.OpenText | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[m.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[m.TokenLogprob] | None = None
    stop_id: int = -1
    ends: list[str | m.Failed | m.HandedOver | m.Embedded] = field(default_factory=list)  # terminal messages: must be one

    @property
    def end(self) -> str | m.Failed | m.HandedOver | m.Embedded | None:
        assert len(self.ends) <= 1, f"more than one terminal message: {self.ends}"
        return self.ends[0] if self.ends else None

    @property
    def failed(self) -> m.Failed:
        assert isinstance(self.end, m.Failed), self.end
        return self.end


@dataclass
class Inbox:
    """Plays the detokenizer: keeps the answers of all choices; implements the book's Outbox."""

    answers: dict[tuple[str, int], Answer] = field(default_factory=dict)
    replies: dict[str, m.ControlReply] = field(default_factory=dict)

    def of(self, rid: str, index: int = 0) -> Answer:
        return self.answers.setdefault((rid, index), Answer())

    def sampled(self, items: list[m.Sampled]) -> None:
        for item in items:
            answer = self.of(item.rid, item.index)
            assert not answer.ends, "a token after the end"
            assert (item.open is not None) == (answer.opened is None), "opened once, with the first token"
            answer.opened = item.open or answer.opened
            answer.ids += item.ids
            answer.logprobs += item.logprobs
            if item.prompt_logprobs is not None:
                assert answer.prompt_logprobs is None, "sent once"
                answer.prompt_logprobs = item.prompt_logprobs
            answer.stop_id = item.stop_id
            answer.completion_tokens, answer.cached_tokens = item.completion_tokens, item.cached_tokens
            if item.finish is not None:
                answer.ends.append(item.finish)

    def failed(self, message: m.Failed) -> None:
        self.of(message.rid, message.index).ends.append(message)

    def handed_over(self, message: m.HandedOver) -> None:
        self.of(message.rid, message.index).ends.append(message)

    def embedded(self, message: m.Embedded) -> None:
        self.of(message.rid, message.index).ends.append(message)

    def control_reply(self, message: m.ControlReply) -> None:
        assert message.id not in self.replies, "answered twice"
        self.replies[message.id] = message

    def take(self, message: m.Message) -> None:
        match message:
            case m.SampledBatch():
                self.sampled(message.items)
            case m.Failed():
                self.failed(message)
            case m.HandedOver():
                self.handed_over(message)
            case m.Embedded():
                self.embedded(message)
            case m.ControlReply():
                self.control_reply(message)


def flags_of(pages: int = 64, **fields: object) -> RuntimeLaunch:
    """Flags of a simulated worker with so many KV pages, all checks on, on loopback and free ports."""
    ports = {
        "bootstrap_port": 0,
        "transfer_port": 0,
        "load_port": 0,
        "events_port": 0,
        "replay_port": 0,
        "internal_host": "127.0.0.1",
        "data_port": 0,
        "internal_port": 0,
    }
    given = {
        "model": "simulated://",
        "context_length": pages * 16,
        "executor": "simulated",
        "kv_cache_memory": max(pages, 64) * PAGE_BYTES,
        "debug_checks": True,
        **ports,
        **fields,
    }
    return RuntimeLaunch.model_validate(given)


class VirtualScheduler:
    """The loop over a simulated executor that takes no time but that of the virtual clock."""

    def __init__(
        self,
        flags: RuntimeLaunch | None = None,
        *,
        executor: Executor | None = None,
        transfer: KvTransfer | None = None,
        clock: Clock | None = None,
        pages: int = 0,
        **more: object,
    ) -> None:
        self.flags = flags or flags_of()
        self.clock = clock or Clock()
        self.inbox = Inbox()
        profile = Profile(prefill_tokens_per_s=20_000, step_base_s=0.002, step_per_row_s=0.0001)
        pages = pages or self.flags.kv_cache_memory // PAGE_BYTES
        self.executor = executor or SimulatedExecutor(num_pages=pages, profile=profile, sleep=self.clock.advance)
        self.scheduler = Scheduler(self.flags, self.executor, self.inbox, clock=self.clock, transfer=transfer, **more)  # type: ignore[arg-type]

    @property
    def book(self):  # type: ignore[no-untyped-def]
        return self.scheduler.book

    def admit(self, rid: str, ids: list[int], max_new: int = 8, **fields: object) -> Answer:
        self.scheduler.handle(admit(rid, ids, max_new, **fields))
        return self.inbox.of(rid)

    def run(self, steps: int = 100_000) -> int:
        """Iterates until nothing runs; returns the steps."""
        for n in range(steps):
            if not self.scheduler.iterate():
                return n
        raise AssertionError(f"still busy after {steps} steps")

    def answer(self, ids: list[int], max_new: int = 8, **fields: object) -> list[int]:
        """The tokens of one request that runs alone."""
        answer = self.admit(os.urandom(16).hex(), ids, max_new, **fields)
        self.run()
        assert answer.end in ("stop", "length"), answer
        return answer.ids


def byte_compiler() -> LlguidanceCompiler:
    """Compiles grammars over the byte tokenizer."""
    return LlguidanceCompiler(lambda: (simulated_tokenizer_files()["tokenizer.json"].decode(), [EOS_ID]), VOCAB)


class FakeWorker(VirtualScheduler):
    """The loop over the fake engine, whose right answers are known. Grammars compile at once."""

    def __init__(self, pages: int = 64, **fields: object) -> None:
        clock = Clock()
        flags = flags_of(pages, **fields)
        self.engine = FakeEngine(pages, slots=flags.max_rows, tick=clock.advance)
        super().__init__(flags, executor=self.engine, clock=clock, compile=byte_compiler(), spawn=lambda job: job())  # type: ignore[arg-type]

    def control(self, op: str, **args: object) -> m.ControlReply | None:
        """A control call; its answer, if it has one by now."""
        self._calls = getattr(self, "_calls", 0) + 1
        self.scheduler.handle(m.Control(id=str(self._calls), op=op, args=args))  # type: ignore[arg-type]
        return self.inbox.replies.get(str(self._calls))

    def assert_idle(self) -> None:
        """Nothing is held, and everything adds up."""
        book = self.book
        book.check_integrity()
        assert not book.requests and not book.by_rid and not book.limbo and not book.grammars.waiting
        assert not self.scheduler.outstanding and book.rows.used == 0 and book.memory.promised == 0
        counters = self.scheduler.counters()
        assert counters["pages_request"] == counters["running_requests"] == counters["waiting_requests"] == 0
        assert book.memory.tree.protected == 0


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Polls until a condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"after {timeout_s} s still not: {what}"
        time.sleep(0.005)


class SchedulerProcess:
    """A real scheduler process; the test is its supervisor, http and detokenizer."""

    def __init__(self, run_dir: Path, flags: RuntimeLaunch, *, model_revision: str = "0123456789abcdef", pod_uid: str = "pod") -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.incarnation = mint_incarnation()
        self.inbox = Inbox()
        self.info = m.SchedulerInfo()
        config = RuntimeConfig(
            launch=flags.model_dump(mode="json"),
            identity=Identity(pod_uid=pod_uid),
            run_dir=str(run_dir),
            model_folder="",
            model_revision=model_revision,
            served_names=["simulated"],
            threads=1,
            data_fd=-1,
            internal_fd=-1,
            data_port=0,
            internal_port=0,
        )
        config.write()
        self.board = Board.create(run_dir)
        self._context = zmq.Context()
        self._supervisor = self._bind(m.SUPERVISOR)
        self._detokenizer = self._bind(m.DETOKENIZER)
        self._stderr = (run_dir / "stderr").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fleet_runtime.scheduler.process", str(run_dir), self.incarnation],
            stderr=self._stderr,
            preexec_fn=before_exec(os.getpid()),
        )
        self._push = self._context.socket(zmq.PUSH)
        self._push.setsockopt(zmq.LINGER, 0)

    def _bind(self, process: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.bind(m.endpoint(self.run_dir, process))
        return socket

    def start(self, timeout_s: float = 30.0) -> SchedulerProcess:
        """Waits for `Ready` and introduces the peers."""
        end = time.monotonic() + timeout_s
        while not self._supervisor.poll(50):
            assert self.process.poll() is None and time.monotonic() < end, self.stderr()
        ready = m.decode(self._supervisor.recv())
        assert isinstance(ready, m.Ready) and ready.sender == self.incarnation and ready.scheduler_info is not None
        self.info = ready.scheduler_info
        self._push.connect(m.endpoint(self.run_dir, m.SCHEDULER))
        self.introduce()
        return self

    def introduce(self, http: str = HTTP_INCARNATION, detokenizer: str = DETOKENIZER_INCARNATION) -> None:
        peers = m.Peers(http=http, scheduler=self.incarnation, detokenizer=detokenizer, scheduler_info=self.info)
        peers.to = self.incarnation
        self.send(peers)

    def send(self, message: m.Message, sender: str = HTTP_INCARNATION) -> None:
        message.sender = message.sender or sender
        message.to = message.to or self.incarnation
        self._push.send(m.encode(message))

    def admit(self, rid: str, ids: list[int], max_new: int = 8, **fields: object) -> Answer:
        self.send(admit(rid, ids, max_new, **fields))
        return self.inbox.of(rid)

    def pump(self, timeout_s: float = 0.0) -> None:
        """Takes what the scheduler has sent."""
        wait = int(timeout_s * 1000)
        while self._detokenizer.poll(wait):
            self.inbox.take(m.decode(self._detokenizer.recv()))
            wait = 0

    def wait_end(self, answer: Answer, timeout_s: float = 10.0) -> str | m.Failed | m.HandedOver | m.Embedded:
        """Waits for a choice's terminal message."""
        end = time.monotonic() + timeout_s
        while answer.end is None:
            assert time.monotonic() < end, f"no end after {timeout_s} s: {answer}\n{self.stderr()}"
            self.pump(0.02)
        return answer.end

    def counters(self) -> dict[str, int]:
        return self.board.counters()

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Waits until no request and no page is held."""

        def idle() -> bool:
            self.pump()
            c = self.counters()
            return c["pages_request"] == c["running_requests"] == c["waiting_requests"] == 0 and c["pages_total"] > 0

        wait_for(idle, f"pages and rows are given back: {self.counters()}", timeout_s)

    def stderr(self) -> str:
        return (self.run_dir / "stderr").read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Kills the process, if it still runs, and closes the sockets."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._stderr.close()
        self._context.destroy(linger=0)
