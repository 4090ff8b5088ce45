"""The detokenizer process: tokens of the scheduler become text for http. `python -m fleet_runtime.detokenizer.process RUN_DIR INCARNATION`."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Final

from fleet_contract.logs import facts, set_up_logging
from fleet_runtime import heartbeat as hb
from fleet_runtime import messages as m
from fleet_runtime.config import RuntimeConfig
from fleet_runtime.detokenizer.choices import Choices
from fleet_runtime.detokenizer.incremental import Decode
from fleet_runtime.errors import EXIT_START_FAILED, StartError, leave_failure
from fleet_runtime.mailbox import Mailbox
from fleet_runtime.models.files import ModelFiles, load_text_files
from fleet_runtime.priority import yield_to_engine
from fleet_runtime.server.parsing.registry import resolve
from fleet_text.prompt import PromptEncoder, TokenizerFilesError

log = logging.getLogger(__name__)

_POLL_MS: Final = 500


def load_decoder(config: RuntimeConfig) -> tuple[Decode, list[int], list[int]]:
    """The model's decoder, which keeps special tokens, the ids of those that answers leave out (not the markup that http's parsers read), and the
    ids of all added tokens.

    Raises StartError.
    """
    folder = Path(config.model_folder) if config.model_folder else None
    files = load_text_files(ModelFiles(folder=folder, base_name="", revision=config.model_revision))
    try:
        encoder = PromptEncoder(files)
    except TokenizerFilesError as e:
        raise StartError("ModelInvalid", f"{config.model_folder}: {e}") from e
    flags, tokenizer = config.flags(), encoder.tokenizer
    shown = resolve(encoder.template_source, flags.tool_parser, flags.reasoning_parser).markup
    added = tokenizer.get_added_tokens_decoder()
    special = [i for i, token in added.items() if token.special and token.content not in shown]
    return (lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))), special, list(added)


def serve(config: RuntimeConfig, incarnation: str) -> None:
    """Runs until it is killed."""
    row = hb.Board.open(config.run_dir).row(m.DETOKENIZER)
    row.set(phase=hb.PHASE_STARTING)
    started = time.monotonic()
    choices = Choices(*load_decoder(config))
    mailbox = Mailbox(config.run_dir, m.DETOKENIZER, incarnation)
    yield_to_engine()
    mailbox.send(m.SUPERVISOR, m.Ready(who=m.DETOKENIZER, pid=os.getpid()))
    log.info("tokenizer loaded", extra=facts(seconds=round(time.monotonic() - started, 3)))
    while True:
        row.beat()
        mailbox.poll(_POLL_MS)
        for message in mailbox.receive():
            handle(message, choices, mailbox)
            if isinstance(message, m.Peers):
                row.set(phase=hb.PHASE_READY)
        row.set(inflight=len(choices))


def handle(message: m.Message, choices: Choices, mailbox: Mailbox) -> None:
    """One message: text goes to http, stops go to the scheduler, other endings pass through."""
    if isinstance(message, m.SampledBatch):
        output = choices.push(message.items)
        if output.texts:
            mailbox.send(m.HTTP, m.TextBatch(items=output.texts))
        for stopped in output.stopped:
            mailbox.send(m.SCHEDULER, stopped)
    elif isinstance(message, (m.Failed, m.HandedOver, m.Embedded)):
        if choices.end(message.rid, message.index):
            mailbox.send(m.HTTP, message)
    elif isinstance(message, m.ControlReply):
        mailbox.send(m.HTTP, message)
    elif isinstance(message, m.PeerDied):
        choices.clear()


def main() -> None:
    """Child entry."""
    run_dir, incarnation = sys.argv[1:3]
    config = RuntimeConfig.read(run_dir)
    set_up_logging(m.DETOKENIZER, config.flags().log_level)
    try:
        serve(config, incarnation)
    except StartError as e:
        leave_failure(run_dir, m.DETOKENIZER, e)
        sys.exit(EXIT_START_FAILED)


if __name__ == "__main__":
    main()
