"""`radixfleet bench serve`: load on any OpenAI endpoint, and what came of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import uvloop

from fleet_bench import datasets, schedule
from fleet_bench.client import CannotConnect, Client, ConnectionLost, Endpoint, fetch, header_lines
from fleet_bench.datasets import BadDataset, Length, Session, Shape
from fleet_bench.exchange import Target, perform
from fleet_bench.load import Run, closed_loop, open_loop
from fleet_bench.record import Record
from fleet_bench.report import as_json, table, write_json
from fleet_bench.stats import Slo, summarise
from fleet_bench.words import calibrate

BUILT_IN: Final = ("random", "shared-prefix", "multi-turn")
DEFAULT_REQUESTS: Final = 100


class BenchError(Exception):
    """The run cannot be made; one message for the user."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, from the command line. Pure."""

    endpoint: Endpoint
    headers: dict[str, str]
    target: Target  # model empty: ask the server
    mode: str
    dataset: str
    shape: Shape
    slo: Slo
    concurrency: int | None
    rate: float
    requests: int | None
    duration_s: float | None
    warmup: int
    speed: float
    trace_block: int
    calibrate: bool
    json_file: Path | None
    quiet: bool
    nice: int
    settings: dict[str, Any]  # the options as given, for the JSON


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = argparse.ArgumentParser(prog="radixfleet bench serve", description="Sends load to an OpenAI endpoint and measures it from the client's side.")
    p.add_argument("--url", required=True, help="http://HOST:PORT, with or without /v1")
    p.add_argument("--model", help="model name (default: the first of /v1/models)")
    p.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="which API (default %(default)s)")
    p.add_argument("--api-key", help="sent as a bearer token (default: $OPENAI_API_KEY)")
    p.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="one more header; repeat for more")
    p.add_argument("--body", default="{}", metavar="JSON", help="fields merged into every request's body")
    load = p.add_argument_group("load")
    load.add_argument("--mode", choices=("closed", "rate", "poisson", "trace"), default="closed",
                      help="closed: always --concurrency open; rate, poisson: --rate a second; trace: as recorded (default %(default)s)")  # fmt: skip
    load.add_argument("--concurrency", type=int, help="requests open at once (closed: default 8; other modes: an upper limit, default none)")
    load.add_argument("--rate", type=float, help="requests (multi-turn: conversations) a second, of rate and poisson")
    load.add_argument("--requests", type=int, help=f"requests in all (default {DEFAULT_REQUESTS}; a trace: all; with --duration: no limit)")
    load.add_argument("--duration", type=float, metavar="S", help="begin nothing after S seconds; what is open is awaited")
    load.add_argument("--warmup", type=int, default=0, metavar="N", help="N requests first that are not counted (default %(default)s)")
    load.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest time of one request (default %(default)s)")
    load.add_argument("--speed", type=float, default=1.0, help="how many times faster than recorded a trace is played (default %(default)s)")
    load.add_argument(
        "--nice", type=int, default=10, help="niceness of this client, so that it does not take the server's cores (default %(default)s)"
    )
    data = p.add_argument_group("data")
    data.add_argument("--dataset", default="random", help=f"{', '.join(BUILT_IN)}, or a .jsonl file (default %(default)s); needed for a trace")
    data.add_argument(
        "--input-tokens", type=Length.parse, default=Length(128, 128), metavar="N|LOW-HIGH", help="new tokens of a prompt (default 128)"
    )
    data.add_argument("--output-tokens", type=Length.parse, default=Length(64, 64), metavar="N|LOW-HIGH", help="max_tokens (default 64)")
    data.add_argument("--ignore-eos", action="store_true", help="send ignore_eos, so that answers have their full length (vLLM, SGLang, ours)")
    data.add_argument("--temperature", type=float, default=0.0, help="(default %(default)s)")
    data.add_argument("--seed", type=int, default=0, help="of data and arrivals; the same seed sends the same requests (default %(default)s)")
    data.add_argument("--prompt-ids", action="store_true", help="prompts as token ids; needs --endpoint completions")
    data.add_argument(
        "--vocabulary", type=Length.parse, default=Length(100, 40_000), metavar="LOW-HIGH", help="ids of --prompt-ids (default 100-40000)"
    )
    data.add_argument("--prefixes", type=int, default=8, help="shared-prefix: how many beginnings (default %(default)s)")
    data.add_argument("--prefix-tokens", type=int, default=512, help="shared-prefix: their length (default %(default)s)")
    data.add_argument("--turns", type=int, default=4, help="multi-turn: questions of a conversation (default %(default)s)")
    data.add_argument("--trace-block", type=int, default=datasets.TRACE_BLOCK, help="trace: tokens of one hash id (default %(default)s)")
    data.add_argument("--no-calibrate", action="store_true", help="take a word for a token; else two small requests find the ratio")
    data.add_argument("--no-usage", action="store_true", help="do not ask for stream_options.include_usage; events are counted instead")
    out = p.add_argument_group("result")
    out.add_argument("--slo-ttft-ms", type=float, help="limit of a good request: time to first token")
    out.add_argument("--slo-itl-ms", type=float, help="limit of a good request: mean time between its tokens")
    out.add_argument("--slo-e2e-ms", type=float, help="limit of a good request: whole time")
    out.add_argument("--json", type=Path, metavar="FILE", help="write everything there, times of each request included")
    out.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return p


def plan(argv: Sequence[str]) -> Plan:
    """Raises SystemExit (argparse) or BenchError, which names every fault."""
    a = parser().parse_args(argv)
    faults = _faults(a)
    try:
        endpoint, headers = Endpoint.from_url(a.url), header_lines(a.header, a.api_key or os.environ.get("OPENAI_API_KEY"))
        extra = json.loads(a.body)
        if not isinstance(extra, dict):
            faults.append(f"--body {a.body!r}: a JSON object is needed")
    except json.JSONDecodeError as e:
        faults.append(f"--body is not JSON: {e}")
    except ValueError as e:
        faults.append(str(e))
    if faults:
        raise BenchError("; ".join(faults))
    requests = a.requests if a.requests or a.duration or a.mode == "trace" else DEFAULT_REQUESTS
    target = Target(a.model or "", a.endpoint, a.ignore_eos, not a.no_usage, a.temperature, extra, a.timeout)
    shape = Shape(
        a.input_tokens,
        a.output_tokens,
        a.seed,
        a.prompt_ids,
        (a.vocabulary.low, a.vocabulary.high),
        prefixes=a.prefixes,
        prefix_tokens=a.prefix_tokens,
        turns=a.turns,
    )
    slo = Slo(*(None if v is None else v / 1000 for v in (a.slo_ttft_ms, a.slo_itl_ms, a.slo_e2e_ms)))
    secret = ("api_key", "header", "json", "quiet")
    settings = {k: f"{v.low}-{v.high}" if isinstance(v, Length) else v for k, v in vars(a).items() if k not in secret}
    return Plan(
        endpoint, headers, target, a.mode, a.dataset, shape, slo, a.concurrency, a.rate or 0.0, requests, a.duration, a.warmup, a.speed,
        a.trace_block, not a.no_calibrate and not a.prompt_ids and (a.mode == "trace" or a.dataset in BUILT_IN), a.json, a.quiet, a.nice, settings,
    )  # fmt: skip


def _faults(a: argparse.Namespace) -> list[str]:
    positive = ("concurrency", "rate", "requests", "duration", "timeout", "speed", "prefixes", "prefix_tokens", "turns", "trace_block")
    out = [f"--{k.replace('_', '-')} is {v:g}; more than 0 is needed" for k in positive if (v := getattr(a, k)) is not None and v <= 0]
    if a.warmup < 0:
        out.append(f"--warmup is {a.warmup}; 0 or more is needed")
    if a.mode in ("rate", "poisson") and a.rate is None:
        out.append(f"--mode {a.mode} needs --rate")
    if a.mode not in ("rate", "poisson") and a.rate is not None:
        out.append(f"--rate has no meaning with --mode {a.mode}; give --mode rate or poisson")
    if a.prompt_ids and a.endpoint != "completions":
        out.append("--prompt-ids needs --endpoint completions; a chat has no prompt of ids")
    if a.prompt_ids and a.dataset == "multi-turn":
        out.append("--prompt-ids cannot be used with multi-turn: an answer's ids are not known")
    if a.mode == "trace" and a.dataset in BUILT_IN:
        out.append("--mode trace needs --dataset FILE.jsonl with timestamp, input_length and output_length a line")
    if a.dataset not in BUILT_IN and not Path(a.dataset).is_file():
        out.append(f"--dataset {a.dataset!r} is neither one of {', '.join(BUILT_IN)} nor a file")
    return out


def sessions_of(p: Plan, shape: Shape) -> Iterator[Session]:
    """The plan's sessions, without end but for a trace. Raises BadDataset."""
    if p.mode == "trace":
        return iter(datasets.trace_sessions(Path(p.dataset), shape, p.speed, p.trace_block))
    built_in = {
        "random": datasets.random_sessions, "shared-prefix": datasets.shared_prefix_sessions, "multi-turn": datasets.multi_turn_sessions,
    }  # fmt: skip
    if p.dataset in built_in:
        return built_in[p.dataset](shape)
    return datasets.file_sessions(Path(p.dataset), shape.output, shape.seed)


def arrivals_of(p: Plan, sessions: Iterator[Session]) -> Iterator[tuple[float, Session]]:
    """Each session with its time, of the open modes."""
    if p.mode == "trace":
        return ((s.at_s or 0.0, s) for s in sessions)
    times = schedule.fixed_rate(p.rate) if p.mode == "rate" else schedule.poisson(p.rate, p.shape.seed)
    return zip(times, sessions, strict=False)


async def first_model(client: Client) -> str:
    """The first name that the server lists. Raises BenchError."""
    answer = await fetch(client, "GET", "/v1/models")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise BenchError(f"/v1/models gave HTTP {answer.status} and no model name; give --model") from e


async def prepare(p: Plan, client: Client) -> tuple[Target, Shape]:
    """Finds the model's name and the tokens of a word. Raises BenchError."""
    target = p.target
    try:
        if not target.model:
            target = replace(target, model=await first_model(client))
    except (CannotConnect, ConnectionLost) as e:
        raise BenchError(str(e)) from e
    except TimeoutError as e:
        raise BenchError("/v1/models gave no answer within 30 s") from e
    if not p.calibrate or not target.usage:
        return target, p.shape

    async def prompt_tokens(words: str) -> int | None:
        record = Record(0, 0, 0, time.monotonic())
        prompt = datasets.History(chat=target.endpoint == "chat").prompt(datasets.Turn(words, 1))
        await perform(client, target, prompt, 1, record, time.monotonic)
        if not record.ok:
            raise BenchError(f"a first request failed: {record.error}: {record.message}")
        return record.prompt_tokens

    found = await calibrate(prompt_tokens, p.shape.seed)
    return target, p.shape if found is None else replace(p.shape, calibration=found)


async def measure(p: Plan) -> Run:
    """The whole run: preparation, warm-up, load. Raises BenchError, BadDataset."""
    client = Client(p.endpoint, headers=p.headers, clock=time.monotonic)
    try:
        target, shape = await prepare(p, client)
        if p.warmup:
            warm = Run(client, target, time.monotonic)
            cold = random_like(p, shape)
            await closed_loop(warm, datasets.limit_requests(cold, p.warmup), concurrency=p.concurrency or 8)
        sessions = sessions_of(p, shape)
        if p.requests is not None:  # made before the clock runs: making prompts costs time
            sessions = iter(list(datasets.limit_requests(sessions, p.requests)))
        run = Run(client, target, time.monotonic, _progress(p))
        if p.mode == "closed":
            await closed_loop(run, sessions, concurrency=p.concurrency or 8, duration_s=p.duration_s)
        else:
            await open_loop(run, arrivals_of(p, sessions), max_open=p.concurrency, duration_s=p.duration_s)
        return run
    except ExceptionGroup as group:  # of the load's tasks
        known, other = group.split(BadDataset)
        if known is None or other is not None:
            raise
        raise BenchError(str(known.exceptions[0])) from group
    finally:
        client.close()


def random_like(p: Plan, shape: Shape) -> Iterator[Session]:
    """Warm-up requests: of the same lengths, with other words, so that no cache is warmed for the run."""
    other = replace(shape, seed=shape.seed + 1_000_003)
    if p.mode != "trace":
        return datasets.random_sessions(other)
    return (replace(s, at_s=None) for s in islice(datasets.trace_sessions(Path(p.dataset), other, 1.0, p.trace_block), p.warmup))


def _progress(p: Plan) -> Any:
    done, last = 0, time.monotonic()

    def ended(_: Record) -> None:
        nonlocal done, last
        done += 1
        if not p.quiet and sys.stderr.isatty() and time.monotonic() - last > 0.5:
            last = time.monotonic()
            print(f"\r{done}{'' if p.requests is None else f' of {p.requests}'} requests", end="", file=sys.stderr, flush=True)

    return ended


def main(argv: Sequence[str]) -> int:
    """Exit code 0: measured and nothing failed; 1: some requests failed, or none could be made; 2: wrong usage."""
    try:
        p = plan(argv)
    except BenchError as e:
        print(f"radixfleet bench serve: {e}", file=sys.stderr)
        return 2
    os.nice(p.nice)
    try:
        run = uvloop.run(measure(p))
    except (BenchError, BadDataset) as e:
        print(f"radixfleet bench serve: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    summary = summarise(run.records, p.slo)
    if not p.quiet and sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(f"{run.target.model} at {p.endpoint.authority}, {p.mode}, {p.dataset}\n\n{table(summary)}")
    for message in sorted({r.message for r in run.records if r.error})[:5]:
        print(f"  {message[:300]}", file=sys.stderr)
    if p.json_file is not None:
        write_json(p.json_file, as_json(summary, run.records, p.settings | {"model": run.target.model}))
    return 1 if summary.failed else 0
