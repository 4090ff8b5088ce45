"""A scheduler without engine that does what the prompt says; speaks `fleet_runtime.messages`. Run by `fake_runtime` as a child process.

The words of a prompt (bytes as ids, specials ignored) are commands:
    say:TEXT        answers with these bytes, one token each ("_" stands for a space); finish `stop`
    count:N         answers with N tokens; finish `length`
    slow:MS         that long between tokens
    fail:CODE       `Failed` with 429 before the first token
    break:N         `Failed` with 500 after N tokens
    hang            never answers, until it is aborted
    die             exits at once
Without a command: `max_new` tokens. A prefill leg ends with `HandedOver`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import zmq

from fleet_contract.wire import decode_ids
from fleet_runtime import heartbeat as hb
from fleet_runtime import messages as m
from fleet_runtime.config import RuntimeConfig


class Row:
    """One choice under way."""

    def __init__(self, admit: m.Admit) -> None:
        self.admit = admit
        ids = decode_ids(admit.ids)
        self.prompt = ids
        words = bytes(i for i in ids if i < 256).decode("utf-8", "replace").split()
        self.commands = dict(w.partition(":")[::2] for w in words)
        self.tokens = self._tokens()
        self.sent = 0
        self.next_at = 0.0

    def _tokens(self) -> list[int]:
        if "say" in self.commands:
            return list(self.commands["say"].replace("_", " ").encode())
        count = int(self.commands.get("count", self.admit.max_new))
        return [ord("a") + i % 26 for i in range(min(count, self.admit.max_new))]

    @property
    def finish(self) -> str:
        return "stop" if "say" in self.commands else "length"


class FakeScheduler:
    def __init__(self, run_dir: str, incarnation: str) -> None:
        self.run_dir, self.incarnation = run_dir, incarnation
        self.config = RuntimeConfig.read(run_dir)
        self.board = hb.Board.open(run_dir)
        self.row = self.board.row(m.SCHEDULER)
        self.context = zmq.Context()
        self.pull = self.context.socket(zmq.PULL)
        self.pull.bind(m.endpoint(run_dir, m.SCHEDULER))
        self.push: dict[str, zmq.Socket[bytes]] = {}
        self.peers: dict[str, str] = {m.SUPERVISOR: ""}
        self.rows: dict[tuple[str, int], Row] = {}
        self.log = Path(os.environ.get("FAKE_SCHEDULER_LOG", "/dev/null"))

    def send(self, peer: str, message: m.Message) -> None:
        if peer not in self.peers:
            return
        message.sender, message.to = self.incarnation, self.peers[peer]
        if peer not in self.push:
            self.push[peer] = self.context.socket(zmq.PUSH)
            self.push[peer].setsockopt(zmq.RECONNECT_IVL, 20)
            self.push[peer].connect(m.endpoint(self.run_dir, peer))
        self.push[peer].send(m.encode(message), zmq.NOBLOCK)

    def run(self) -> None:
        self.load()
        self.row.set(phase=hb.PHASE_READY, percent=100)
        info = m.SchedulerInfo(kv_capacity_tokens=4096, max_rows=8, bootstrap_port=1, transfer_port=2, load_port=3, transfer_backends=["tcp"])
        self.send(m.SUPERVISOR, m.Ready(who=m.SCHEDULER, pid=os.getpid(), scheduler_info=info))
        while True:
            self.row.beat()
            self.row.set(pending=len(self.rows), inflight=len(self.rows))
            self.board.set_counters({"running_requests": len(self.rows)})
            self.pull.poll(2 if self.rows else 200)
            while True:
                try:
                    message = m.decode(self.pull.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                self.handle(message)
            self.step()

    def load(self) -> None:
        seconds, started = self.config.flags().simulated_load_s, time.monotonic()
        while (spent := time.monotonic() - started) < seconds:
            self.row.set(percent=int(100 * spent / seconds))
            self.row.set_text("reading weights")
            time.sleep(0.01)

    def handle(self, message: m.Message) -> None:
        self.note(message)
        if isinstance(message, m.Peers):
            self.peers.update({m.HTTP: message.http, m.DETOKENIZER: message.detokenizer})
        elif isinstance(message, m.PeerDied):
            self.rows.clear()
        elif isinstance(message, m.Admit) and message.sender == self.peers.get(m.HTTP):
            self.admit(message)
        elif isinstance(message, m.Abort):
            for rid, index in [k for k in self.rows if k[0] == message.rid]:
                self.fail(rid, index, 499, "aborted", message.reason)
        elif isinstance(message, m.Stopped):
            self.rows.pop((message.rid, message.index), None)

    def note(self, message: m.Message) -> None:
        """Appends what came to a file, for tests that ask what http sent."""
        if isinstance(message, (m.Admit, m.Abort, m.RoomRejected, m.Stopped)):
            line = {"kind": type(message).__name__, **{f: getattr(message, f) for f in message.__struct_fields__ if f != "ids"}}
            if isinstance(message, m.Admit):
                line["ids"] = decode_ids(message.ids)
            with self.log.open("a") as f:
                f.write(json.dumps(line) + "\n")

    def admit(self, message: m.Admit) -> None:
        row = Row(message)
        if "die" in row.commands:
            os._exit(7)
        if "fail" in row.commands:
            self.send(m.DETOKENIZER, self.failed(message.rid, message.index, 429, row.commands["fail"], "the queue is full"))
        elif message.leg == "prefill":
            done = m.HandedOver(rid=message.rid, index=message.index, cached_tokens=16, prompt_tokens=len(row.prompt))
            self.send(m.DETOKENIZER, done)
        else:
            self.rows[message.rid, message.index] = row

    def step(self) -> None:
        items, now = [], time.monotonic()
        for (rid, index), row in list(self.rows.items()):
            if "hang" in row.commands or now < row.next_at:
                continue
            if "break" in row.commands and row.sent >= int(row.commands["break"]):
                self.fail(rid, index, 500, "device_error", "the device failed")
                continue
            row.next_at = now + int(row.commands.get("slow", 0)) / 1000
            token = row.tokens[row.sent]
            row.sent += 1
            last = row.sent == len(row.tokens)
            opened = m.OpenText(row.prompt[-5:], list(row.admit.stop), len(row.prompt)) if row.sent == 1 else None
            items.append(m.Sampled(rid, index, [token], row.sent, row.finish if last else None, 16, opened))
            if last:
                del self.rows[rid, index]
        if items:
            self.send(m.DETOKENIZER, m.SampledBatch(items=items))

    def fail(self, rid: str, index: int, status: int, code: str, message: str) -> None:
        self.rows.pop((rid, index), None)
        self.send(m.DETOKENIZER, self.failed(rid, index, status, code, message))

    def failed(self, rid: str, index: int, status: int, code: str, message: str) -> m.Failed:
        return m.Failed(rid=rid, index=index, status=status, type="server_error", code=code, message=message)


if __name__ == "__main__":
    FakeScheduler(*sys.argv[1:3]).run()
