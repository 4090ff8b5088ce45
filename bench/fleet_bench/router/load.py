"""Load of wrk: its scripts, one run, and what it tells. The same bodies for every router. Called by `scenarios`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet_bench.peers.servers import MODEL, ServerFailed
from fleet_bench.router.tools import Tools

# 2.8 KB: sixteen systems of four hundred words, a question of its own in each request.
CHATS: Final = """
local words = {}
for i = 1, 400 do words[i] = "word" .. (i * 7 % 97) end
local base = table.concat(words, " ")
local n = START
request = function()
  n = n + 1
  return wrk.format(nil, nil, nil, '{"model":"MODEL","messages":[{"role":"system","content":"group ' .. n % 16 .. ' ' .. base ..
    '"},{"role":"user","content":"question ' .. n .. '"}],"max_tokens":16STREAM}')
end
"""
# Chats of ten turns, a request each turn; the tenth has 48 KB. No two chats begin alike.
TURNS: Final = """
local words = {}
for i = 1, 650 do words[i] = "word" .. (i * 7 % 97) end
local base = table.concat(words, " ")
local chat, turn, messages = START, 0, ""
request = function()
  turn = turn + 1
  if turn > 10 then chat, turn = chat + 1, 1 end
  if turn == 1 then messages = '{"role":"system","content":"This is chat ' .. chat .. '."}'
  else messages = messages .. ',{"role":"assistant","content":"Answer ' .. turn .. '."}' end
  messages = messages .. ',{"role":"user","content":"Turn ' .. turn .. ' of ' .. chat .. ': ' .. base .. '"}'
  return wrk.format(nil, nil, nil, '{"model":"MODEL","messages":[' .. messages .. '],"max_tokens":16}')
end
"""
HEAD: Final = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
"""
DONE: Final = """
done = function(summary, latency, requests)
  io.write(string.format('{"requests":%d,"us":%d,"p50_us":%f,"p99_us":%f,"mean_us":%f,"status":%d,"broken":%d}\\n', summary.requests,
    summary.duration, latency:percentile(50), latency:percentile(99), latency.mean, summary.errors.status,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout))
end
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of wrk found."""

    requests: int
    seconds: float
    p50_us: float
    p99_us: float
    mean_us: float

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


def script(body: str, *, start: int, stream: bool = False) -> str:
    """A script for wrk. `start`: number of the first request or chat, so that each run has chats of its own."""
    text = body.replace("MODEL", MODEL).replace("START", str(start)).replace("STREAM", ',"stream":true' if stream else "")
    return HEAD + text + DONE


def run_wrk(tools: Tools, url: str, text: str, *, connections: int, seconds: float) -> Load:
    """Blocks for the run. Raises ServerFailed when an answer is no 2xx or a connection breaks."""
    with tempfile.TemporaryDirectory(prefix="radixfleet-bench-wrk-") as folder:
        file = Path(folder, "load.lua")
        file.write_text(text)
        argv = [str(tools.wrk), "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "10s", "-s", str(file)]
        done = subprocess.run([*argv, f"{url}/v1/chat/completions"], capture_output=True, text=True, env=tools.environment, timeout=seconds + 60)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"requests"')]
    if not lines:
        raise ServerFailed(f"wrk gave no result: {(done.stderr or done.stdout)[-300:]}")
    return read_result(lines[-1], url)


def read_result(line: str, url: str) -> Load:
    """The line that the script prints at the end. Raises ServerFailed when not all went well."""
    got = json.loads(line)
    if got["status"] or got["broken"] or not got["requests"]:
        raise ServerFailed(f"{url}: of {got['requests']} requests {got['status']} were refused and {got['broken']} broke")
    return Load(got["requests"], got["us"] / 1e6, got["p50_us"], got["p99_us"], got["mean_us"])
