"""A scheduler without engine that does what the prompt says; speaks `fleet_runtime.messages`. Run by `fake_runtime` as a child process.

The words of a prompt (bytes as ids, specials part words) are commands:
    say:TEXT        answers with these bytes, one token each ("_" stands for a space); finish `stop`
    count:N         answers with N tokens; finish `length`
    slow:MS         that long between tokens
    fail:CODE       `Failed` with 429 before the first token
    break:N         `Failed` with 500 after N tokens
    hang            never answers, until it is aborted
    die             exits at once
    burst:N         N tokens in each message
    hex:BYTES       like say, with bytes as hex digits
    compile:fail    `Failed` with 400, as for a grammar that does not compile
Without a command: `max_new` tokens. A prefill leg ends with `HandedOver`, an embedding with the vector (bytes of the prompt, its length).
A token that is one of the request's stop ids ends the answer (after `min_tokens`). Logprobs are functions of the token: see `logprob`.
Control calls are answered with what was asked; op `log_level` with level `hang` is not answered, with level `bad` 400.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path

import msgspec
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
        words = bytes(i if i < 256 else 32 for i in ids).decode("utf-8", "replace").split()
        self.commands = dict(w.partition(":")[::2] for w in words)
        self.tokens = self._tokens()
        self.sent = 0
        self.next_at = 0.0

    def _tokens(self) -> list[int]:
        if "hex" in self.commands:
            return list(bytes.fromhex(self.commands["hex"]))
        if "say" in self.commands:
            return list(self.commands["say"].replace("_", " ").encode())
        count = int(self.commands.get("count", self.admit.max_new))
        return [ord("a") + i % 26 for i in range(min(count, self.admit.max_new))]

    @property
    def finish(self) -> str:
        return "stop" if {"say", "hex"} & self.commands.keys() else "length"


def logprob(token: int, top: int) -> m.TokenLogprob:
    """The token's own and the `top` most likely: the token itself first, then the ids after it."""
    ids = [(token + i) % 256 for i in range(top)]
    return m.TokenLogprob(token, -0.5 - token / 1000, ids, [-0.5 - token / 1000 - i for i in range(top)])


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
        self.early: list[m.Admit] = []
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
        info = msgspec.structs.replace(info, vocab_size=int(os.environ.get("FAKE_SCHEDULER_VOCAB", "0")))
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
            early, self.early = self.early, []
            for admit in early:
                if admit.sender == message.http:
                    self.admit(admit)
        elif isinstance(message, m.PeerDied):
            self.rows.clear()
        elif isinstance(message, m.Admit) and message.sender == self.peers.get(m.HTTP):
            self.admit(message)
        elif isinstance(message, m.Admit) and m.HTTP not in self.peers:
            self.early.append(message)  # channels are not ordered among each other: its `Peers` is still to come
        elif isinstance(message, m.Abort):
            for rid, index in [k for k in self.rows if k[0] == message.rid]:
                self.fail(rid, index, 499, "aborted", message.reason)
        elif isinstance(message, m.Control):
            self.control(message)
        elif isinstance(message, m.Stopped) and (row := self.rows.pop((message.rid, message.index), None)) is not None:
            self.send(m.DETOKENIZER, m.SampledBatch(items=[m.Sampled(message.rid, message.index, [], row.sent, "stop", 16)]))

    def control(self, message: m.Control) -> None:
        status, data = 200, {"op": message.op, "args": message.args}
        if message.args.get("level") == "hang":
            return
        if message.args.get("level") == "bad":
            status, data = 409, {"message": "not now", "code": "busy"}
        self.send(m.DETOKENIZER, m.ControlReply(id=message.id, status=status, data=json.dumps(data).encode()))

    def note(self, message: m.Message) -> None:
        """Appends what came to a file, for tests that ask what http sent."""
        if isinstance(message, (m.Admit, m.Abort, m.RoomRejected, m.Stopped, m.Control)):
            line = {"kind": type(message).__name__, **{f: msgspec.to_builtins(getattr(message, f)) for f in message.__struct_fields__ if f != "ids"}}
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
        elif "compile" in row.commands:
            self.send(m.DETOKENIZER, self.failed(message.rid, message.index, 400, "invalid_grammar", "the grammar does not compile"))
        elif message.embed:
            vector = struct.pack(f"<{len(row.prompt) + 1}f", *row.prompt, len(row.prompt))
            self.send(m.DETOKENIZER, m.Embedded(rid=message.rid, index=message.index, vector=vector, prompt_tokens=len(row.prompt)))
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
            items.append(self.sample(row))
            if items[-1].finish is not None:
                del self.rows[rid, index]
        if items:
            self.send(m.DETOKENIZER, m.SampledBatch(items=items))

    def sample(self, row: Row) -> m.Sampled:
        """The next tokens of a row."""
        admit, first = row.admit, row.sent == 0
        tokens = row.tokens[row.sent : row.sent + int(row.commands.get("burst", 1))]
        finish, stop_id = None, -1
        for n, token in enumerate(tokens):
            if token in admit.stop_ids and row.sent + n >= admit.min_tokens:
                tokens, finish, stop_id, row.sent = tokens[:n], "stop", token, row.sent + 1
                break
        row.sent += len(tokens)
        if finish is None and row.sent == len(row.tokens):
            finish = row.finish
        opened = None
        if first:
            opened = m.OpenText(
                row.prompt[-5:],
                list(admit.stop),
                len(row.prompt),
                admit.min_tokens,
                admit.include_stop,
                admit.keep_special,
                admit.spaces_between_special,
            )
        sampled = m.Sampled(admit.rid, admit.index, tokens, row.sent, finish, 16, opened, stop_id=stop_id)
        if admit.logprobs >= 0:
            sampled.logprobs = [logprob(t, admit.logprobs) for t in tokens]
        if first and admit.prompt_logprobs >= 0:
            sampled.prompt_logprobs = [logprob(t, admit.prompt_logprobs) for t in row.prompt[1:]]
        return sampled

    def fail(self, rid: str, index: int, status: int, code: str, message: str) -> None:
        self.rows.pop((rid, index), None)
        self.send(m.DETOKENIZER, self.failed(rid, index, status, code, message))

    def failed(self, rid: str, index: int, status: int, code: str, message: str) -> m.Failed:
        return m.Failed(rid=rid, index=index, status=status, type="server_error", code=code, message=message)


if __name__ == "__main__":
    FakeScheduler(*sys.argv[1:3]).run()
