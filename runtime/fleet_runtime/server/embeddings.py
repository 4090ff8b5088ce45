"""`POST /v1/embeddings`: one vector per input. Many inputs go to the scheduler in waves, so that one call does not fill its queue."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from fleet_contract.errors import ApiError
from fleet_contract.openai import EmbeddingRequest
from fleet_contract.wire import RoutedHeaders, encode_ids
from fleet_runtime import messages as m
from fleet_runtime.server import validate
from fleet_runtime.server.generate import Prompt, check_prompt
from fleet_runtime.server.requests import encode_inputs
from fleet_runtime.server.state import HttpState

WAVE: Final = 64  # inputs that are with the scheduler at once


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """A checked request."""

    options: EmbeddingRequest
    prompts: list[Prompt]


async def read_embedding(state: HttpState, body: dict[str, Any], ids: list[int] | None = None) -> EmbeddingJob:
    """Args: ids: of the only input, as the router tokenized it. Raises ApiError 400."""
    options = validate.embedding_request(body)
    validate.check_model(options.model, state.config.served_names)
    text, context = state.ready_text(), state.flags.context_length
    if ids is not None:
        prompts = [Prompt(ids, "input")]
        if not _is_single(options.input):
            raise ApiError(400, "token ids beside the JSON are those of a single input; this request has several", code="bad_wire")
    else:
        prompts = await encode_inputs(text, options.input, "input", add_special_tokens=options.add_special_tokens, context=context)
    for prompt in prompts:
        if not prompt.ids:
            raise ApiError(400, f"{prompt.name} has no tokens; at least one is needed", param=prompt.name)
        if len(prompt.ids) > context:
            message = f"{prompt.name} has {len(prompt.ids)} tokens, but the context is {context} tokens; shorten it"
            raise ApiError(400, message, code="context_length_exceeded", param=prompt.name)
        check_prompt(prompt, state.model_vocab_size())
    return EmbeddingJob(options, prompts)


def _is_single(given: Any) -> bool:
    """One text or one list of ids, alone or as the only one of a list."""
    return isinstance(given, str) or len(given) == 1 or (bool(given) and isinstance(given[0], int))


def embed_admits(job: EmbeddingJob, rid: str, routed: RoutedHeaders, started_at: float) -> list[m.Admit]:
    """One `Admit` per input. Args: as of `generate.plan`."""
    router_id, pick = routed.pick if routed.pick is not None else ("", -1)
    return [
        m.Admit(
            rid=rid,
            index=index,
            ids=encode_ids(prompt.ids),
            max_new=0,
            temperature=0.0,
            embed=job.options.pooling,
            deadline=0.0 if routed.deadline_ms is None else started_at + routed.deadline_ms / 1000,
            router_id=router_id,
            pick=pick,
            salt=job.options.cache_salt or "",
            priority=job.options.priority or 0,
        )
        for index, prompt in enumerate(job.prompts)
    ]


def embedding_answer(job: EmbeddingJob, vectors: list[m.Embedded]) -> bytes:
    """The answer's body. Args: vectors: in the order of the inputs."""
    data = [
        {"object": "embedding", "index": i, "embedding": written_vector(e.vector, job.options.encoding_format, normalize=job.options.normalize)}
        for i, e in enumerate(vectors)
    ]
    tokens = sum(e.prompt_tokens for e in vectors)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": sum(e.cached_tokens for e in vectors)}}
    return msgspec.json.encode({"object": "list", "data": data, "model": job.options.model, "usage": usage})


def written_vector(vector: bytes, encoding: str, *, normalize: bool) -> str | list[float]:
    """A vector as numbers, or as base64 of little-endian float32. A zero vector stays one."""
    values = np.frombuffer(vector, dtype="<f4")
    if normalize and (length := float(np.linalg.norm(values.astype(np.float64)))) > 0:
        values = (values / length).astype("<f4")
    if encoding == "base64":
        return base64.b64encode(values.tobytes()).decode()
    return [float(v) for v in values]
