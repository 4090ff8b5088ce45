"""The flags of `radixfleet-runtime`: typed once here, written by the operator and `serve`, read by the runtime.

Every flag is a field: its name is the field's with dashes, its help is the description, its limits are the field's. The names
that users may set by `spec.engine.args` are `USER_FLAGS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fleet_contract import flag_words, names

Port = Annotated[int, Field(ge=0, le=65535)]


class BadFlag(ValueError):
    """The command line is wrong; the message says which flag, what it got, what is allowed."""


class RuntimeLaunch(BaseModel):
    """One runtime's command line. Port 0 = any free port, advertised in `GET /worker` and in the announce file."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    # Set by the operator.
    model: str = Field(description="Model: bundled://NAME, file:///path of a folder or a .gguf file, its path, or simulated://")
    served_model_name: tuple[str, ...] = Field(default=(), description="Name the API answers to; repeat for more")
    role: Literal["prefill", "decode", "unified"] = Field(default="unified", description="What this worker does")
    revision: str = Field(default="", description="Revision of the service, 8 hex digits")
    context_length: int = Field(default=4096, ge=16, le=1_048_576, description="Longest prompt + answer, tokens")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and KV; auto: bfloat16 with the native executor, else float32"
    )
    kv_cache_memory: int = Field(default=1 << 30, ge=1 << 16, description="Bytes for KV pages")
    drain_timeout: int = Field(default=300, ge=0, le=86_400, description="Seconds for running requests after SIGTERM")
    host: str = Field(default="0.0.0.0", description="Address of the data port")
    internal_host: str = Field(
        default="0.0.0.0", description="Address of the internal port and of the worker-to-worker ports; not given: loopback where --host is"
    )
    data_port: Port = Field(default=names.RUNTIME_DATA_PORT, description="Public API")
    internal_port: Port = Field(default=names.RUNTIME_INTERNAL_PORT, description="Routed requests, probes and control calls")
    bootstrap_port: Port = Field(default=names.RUNTIME_BOOTSTRAP_PORT, description="Bootstrap server of a prefill worker")
    transfer_port: Port = Field(default=names.RUNTIME_TRANSFER_PORT, description="Transfer port of a prefill worker")
    load_port: Port = Field(default=names.RUNTIME_LOAD_PORT, description="Load reports")
    events_port: Port = Field(default=names.RUNTIME_EVENTS_PORT, description="KV events, PUB")
    replay_port: Port = Field(default=names.RUNTIME_REPLAY_PORT, description="Replay and snapshot of KV events")
    announce: str = Field(default="", description="File that gets the worker's record as JSON once its ports are bound; empty: none")

    # What a user may set by spec.engine.args.
    executor: Literal["auto", "native", "torch", "simulated"] = Field(
        default="auto", description="What computes a step; auto: native where this CPU and model allow it, else torch; simulated computes nothing"
    )
    weight_dtype: Literal["auto", "bfloat16", "int8"] = Field(default="auto", description="Weights of the native executor; auto: bfloat16")
    threads: int = Field(default=0, ge=0, le=1024, description="Compute threads; 0: from affinity and cgroup quota")
    max_rows: int = Field(default=64, ge=1, le=4096, description="Most requests that run at once")
    max_step_tokens: int = Field(default=512, ge=16, le=65_536, description="Token budget of one step (chunk of a prompt)")
    max_prefill_steps: int = Field(default=2, ge=1, le=1000, description="Most prefill steps between two decode steps")
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "priority"] = Field(
        default="fcfs", description="Order of waiting requests: arrival, longest cached prefix, heaviest branch of the prefix tree, or priority"
    )
    eviction_policy: Literal["lru", "lfu", "fifo", "priority"] = Field(default="lru", description="Which cached prefixes go first")
    overlap: bool = Field(default=True, description="Compute a step while the results of the one before are handled")
    mixed_chunk: bool = Field(default=True, description="Running requests get a token in steps that compute a prompt, too")
    new_token_ratio: float = Field(
        default=0.7, gt=0, le=1, description="Share of max_tokens that admission reserves at first; less: more rows, more retractions; 1: none"
    )
    max_queue_tokens: int = Field(default=1 << 20, ge=1, description="Most prompt tokens of waiting requests; more are answered 429")
    running_timeout: int = Field(default=0, ge=0, le=86_400, description="Seconds a request may run from its first step; 0: --request-timeout alone")
    grammar_timeout: int = Field(default=5, ge=1, le=600, description="Seconds to compile a grammar or schema")
    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "qwen_coder"] = Field(
        default="auto", description="Format of the model's tool calls; auto: from its chat template"
    )
    reasoning_parser: Literal["auto", "none", "think"] = Field(default="auto", description="Tags of reasoning; auto: from the chat template")
    api_key_file: str = Field(default="", description="File of API keys, one a line, for the data port; empty: open")
    tls_cert_file: str = Field(default="", description="Certificate chain of the data port, PEM; with --tls-key-file")
    tls_key_file: str = Field(default="", description="Private key of the data port, PEM")
    cors_origins: str = Field(default="", description="Origins a browser may call the data port from, comma between; * for all; empty: none")
    otlp_endpoint: str = Field(default="", description="OpenTelemetry collector, http(s)://host:port; empty: no traces")
    replay_batches: int = Field(default=10_000, ge=16, le=1_000_000, description="KV event batches kept for replay")
    max_queue: int = Field(default=512, ge=1, le=1_000_000, description="Most waiting requests; more are answered 429")
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30, description="Largest request body")
    body_timeout: int = Field(default=30, ge=1, le=3600, description="Seconds in which a request's body must arrive")
    write_timeout: int = Field(default=60, ge=1, le=3600, description="Seconds a client may leave a stream unread")
    request_timeout: int = Field(default=600, ge=1, le=86_400, description="Seconds a request may take in all")
    queue_timeout: int = Field(default=120, ge=1, le=86_400, description="Seconds a request may wait before it runs, when it brings no deadline")
    transfer_timeout: int = Field(default=10, ge=1, le=3600, description="Least seconds a hand-over may take from its first page")
    stall_timeout: int = Field(default=30, ge=1, le=3600, description="Seconds without progress after which a busy scheduler counts as stalled")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level that is logged")
    simulated_prefill_tokens_per_s: float = Field(default=20_000.0, gt=0, description="Simulated prefill speed")
    simulated_step_base_ms: float = Field(default=2.0, ge=0, description="Simulated step time, fixed part")
    simulated_step_per_row_ms: float = Field(default=0.1, ge=0, description="Simulated step time, part per row")
    simulated_step_per_ctx_token_us: float = Field(default=0.0, ge=0, description="Simulated step time, part per token of context")
    simulated_load_s: float = Field(default=0.0, ge=0, le=3600, description="Simulated time to load the model")
    debug_checks: bool = Field(default=False, description="Check all invariants after each step, poison freed pages")
    transfer_hold: bool = Field(default=False, description="Fault injection: accept rooms but send no page")

    def to_argv(self) -> list[str]:
        """The flags that differ from their defaults, in field order; `from_argv` reads them back."""
        out: list[str] = []
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if value == info.default and not (name == "internal_host" and is_loopback(self.host)):
                continue
            flag = flag_name(name)
            for item in value if isinstance(value, tuple) else (value,):
                out += [flag, "true" if item is True else "false" if item is False else str(item)]
        return out

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> RuntimeLaunch:
        """Parses a command line of `--flag value` or `--flag=value`. Raises BadFlag with all faults, a sentence each."""
        values: dict[str, Any] = {}
        faults: list[str] = []
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            flag, eq, value = word.partition("=")
            field = flag.removeprefix("--").replace("-", "_")
            if not flag.startswith("--") or field not in cls.model_fields:
                faults.append(f"{word!r} is not a flag of radixfleet-runtime; see --help")
                continue
            if not eq:
                if not rest:
                    faults.append(f"{flag} needs a value: {cls.model_fields[field].description}")
                    continue
                value = rest.pop(0)
            if field == "served_model_name":
                values[field] = (*values.get(field, ()), value)
            elif field in values:
                faults.append(f"{flag} is given twice; give it once")
            else:
                values[field] = value
        if is_loopback(values.get("host", "")):
            values.setdefault("internal_host", values["host"])  # who keeps the data port to this machine wants no other port on the network
        if not faults:
            try:
                return cls.model_validate(values)
            except ValidationError as e:
                faults += [sentence(err, values) for err in e.errors()]
        raise BadFlag("; ".join(faults))

    @classmethod
    def help(cls) -> str:
        """Text of --help: one line a flag, with what it may be and what holds without it."""
        lines = ["usage: radixfleet-runtime --model MODEL [flags]", ""]
        for name, info in cls.model_fields.items():
            may_be = "" if (words := flag_words.allowed(info)) == "text" else f"{words}; "
            default = f"{'' if info.is_required() else 'default: '}{flag_words.default(info)}"
            lines.append(f"  {flag_name(name):36} {info.description} ({may_be}{default})".replace("`", ""))
        return "\n".join(lines)


_OPERATOR_FLAGS: Final = frozenset(
    "model served_model_name role revision context_length dtype kv_cache_memory drain_timeout host internal_host data_port internal_port"
    " bootstrap_port transfer_port load_port events_port replay_port announce".split()
)
# Flags that spec.engine.args may name, as written there (without the dashes in front).
USER_FLAGS: Final = tuple(n.replace("_", "-") for n in RuntimeLaunch.model_fields if n not in _OPERATOR_FLAGS)


def flag_name(field: str) -> str:
    """`max_rows` -> `--max-rows`."""
    return "--" + field.replace("_", "-")


def is_loopback(host: str) -> bool:
    """An address that only this machine reaches."""
    return host in ("localhost", "::1") or host.startswith("127.")


def sentence(err: Any, values: dict[str, Any]) -> str:
    """One pydantic error as: flag, what we got, what is allowed."""
    field = str(err["loc"][0]) if err["loc"] else ""
    if err["type"] == "missing":
        return f"{flag_name(field)} is missing: {RuntimeLaunch.model_fields[field].description}"
    return f"{flag_name(field)} is {values.get(field)!r}: {err['msg'][0].lower()}{err['msg'][1:]}"


def user_args_to_fields(args: dict[str, str]) -> dict[str, str]:
    """`spec.engine.args` as fields of RuntimeLaunch. Raises BadFlag, naming each unknown flag and those allowed."""
    unknown = sorted(set(args) - set(USER_FLAGS))
    if unknown:
        raise BadFlag(f"engine.args names {', '.join(unknown)}; allowed: {', '.join(USER_FLAGS)}")
    return {k.replace("-", "_"): v for k, v in args.items()}
