"""What the http process has: configuration, board, mail, text model, open requests, counts. Made by `process`, read by `app` and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fleet_contract.errors import OVERLOADED, ApiError
from fleet_contract.launch import RuntimeLaunch
from fleet_contract.worker import WorkerRecord
from fleet_runtime import heartbeat as hb
from fleet_runtime import messages as m
from fleet_runtime.config import RuntimeConfig
from fleet_runtime.errors import StartError
from fleet_runtime.mailbox import Mailbox
from fleet_runtime.models.files import ModelFiles, load_text_files, read_config
from fleet_runtime.record import worker_record
from fleet_runtime.server.access import ApiKeys
from fleet_runtime.server.control import Controls
from fleet_runtime.server.guard import Guard
from fleet_runtime.server.health import look, not_ready
from fleet_runtime.server.manager import TokenizerManager
from fleet_runtime.server.metrics import Metrics
from fleet_runtime.server.parsing.reasoning import THINK
from fleet_runtime.server.parsing.registry import OutputFormat, resolve
from fleet_runtime.server.token_texts import TokenTexts
from fleet_runtime.server.traces import Traces
from fleet_text.prompt import PromptEncoder, TokenizerFilesError, zip_files


@dataclass(frozen=True, slots=True)
class TextModel:
    """The model as text: encoder, the zip that routers fetch, how many ids have a text or weights, and what its answers are made of."""

    encoder: PromptEncoder
    zip: bytes
    vocab_size: int
    texts: TokenTexts
    format: OutputFormat
    think_end_ids: list[int]  # ids of the tag that ends reasoning


def load_text_model(config: RuntimeConfig) -> TextModel:
    """Reads the tokenizer files; takes up to a second. Raises StartError ModelInvalid."""
    folder = Path(config.model_folder) if config.model_folder else None
    files = load_text_files(ModelFiles(folder=folder, base_name="", revision=config.model_revision))
    try:
        encoder = PromptEncoder(files)
    except TokenizerFilesError as e:
        raise StartError("ModelInvalid", f"{config.model_folder}: {e}") from e
    declared = read_config(folder).get("vocab_size") if folder is not None else None
    # Ids between the tokenizer's and the model's vocabulary size have weights, but no text.
    vocab_size = max(encoder.vocab_size, declared if isinstance(declared, int) else 0)
    flags = config.flags()
    written = resolve(encoder.template_source, flags.tool_parser, flags.reasoning_parser)
    texts = TokenTexts(encoder.tokenizer, files["tokenizer.json"], shown=written.markup)
    return TextModel(encoder, zip_files(files), vocab_size, texts, written, encoder.encode(THINK[1], add_special_tokens=False))


@dataclass(slots=True)
class HttpState:
    """One per http process. `text` and `info` come while it starts."""

    config: RuntimeConfig
    flags: RuntimeLaunch
    board: hb.Board
    mailbox: Mailbox
    guard: Guard
    metrics: Metrics = field(default_factory=Metrics)
    keys: ApiKeys | None = None  # of the data port
    traces: Traces | None = None
    text: TextModel | None = None
    info: m.SchedulerInfo | None = None
    last_death: str = ""
    late_replies: int = 0  # of control calls that nobody waits for any more
    manager: TokenizerManager = field(init=False)
    controls: Controls = field(init=False)

    def __post_init__(self) -> None:
        self.manager = TokenizerManager(self.mailbox, self.cannot_take)
        self.controls = Controls(self.mailbox)

    def cannot_take(self) -> ApiError | None:
        """Why no request can be taken now; None when one can. A request needs both neighbours, not the probe's opinion of them."""
        if self.manager.draining:
            return ApiError(503, "the worker is shutting down; it takes no new requests", type=OVERLOADED, code="draining", retry_after_s=1)
        if self.text is not None and m.SCHEDULER in self.mailbox.peers and m.DETOKENIZER in self.mailbox.peers:
            return None
        reason = not_ready(look(self.board), self.flags.stall_timeout)
        if self.last_death:
            message = f"{self.last_death}; it is being restarted" + (f" ({reason.message})" if reason is not None else "")
            return ApiError(503, message, type=OVERLOADED, code="worker_restarting", retry_after_s=1)
        return reason or ApiError(503, "the worker is starting", type=OVERLOADED, code="loading", retry_after_s=1)

    def model_vocab_size(self) -> int:
        """Ids that the model can read and draw; the scheduler's word, where it is here. Raises ApiError 503 as `ready_text`."""
        size = self.ready_text().vocab_size
        return min(size, self.info.vocab_size) if self.info is not None and self.info.vocab_size else size

    def ready_text(self) -> TextModel:
        """The text model. Raises ApiError 503 while it is loaded."""
        if self.text is None:
            raise ApiError(503, "loading: the tokenizer is not there yet", type=OVERLOADED, code="loading", retry_after_s=1)
        return self.text

    def record(self) -> WorkerRecord:
        """`GET /worker`. Raises ApiError 503 until the scheduler is known."""
        incarnation = self.mailbox.peers.get(m.SCHEDULER)
        if self.info is None or incarnation is None:
            raise self.cannot_take() or ApiError(503, "the worker is starting", type=OVERLOADED, code="loading", retry_after_s=1)
        return worker_record(self.config, self.info, incarnation)
