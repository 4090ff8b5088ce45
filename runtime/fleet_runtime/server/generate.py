"""The one internal request that all API dialects become, and what the scheduler gets of it. Pure.

    OpenAI chat ──┐
    completions ──┼─► GenerateRequest ─► plan() ─► Admit per choice ─► scheduler
    other dialects┘                                Answer per request ◄─ Text

Choices are numbered prompt by prompt: choice `c` of prompt `p` has the index `p * per_prompt + c`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from fleet_contract.errors import ApiError
from fleet_contract.openai import MAX_CHOICES
from fleet_contract.wire import RoutedHeaders, encode_ids
from fleet_runtime import messages as m
from fleet_runtime.server.answer import OutputParser, PlainParser

_SEEDS: Final = 1 << 64
CHAT_PROMPT: Final = "messages"  # name of a prompt that a chat template makes
_MINTED_SEED_BITS: Final = 53  # a client whose numbers are doubles can send it back


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `name`: what an error calls it. `text`: as the client wrote it, if it did."""

    ids: list[int]
    name: str
    text: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn; ranges were checked by the dialect, ids are checked by `plan`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class StopOptions:
    """What ends an answer, and what of it is shown."""

    strings: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_string: bool = False
    keep_special: bool = False
    spaces_between_special: bool = True


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """See the module.

    max_new: tokens that were asked for; 0: only the prompt's own answer (logprobs); None: `default_max_new`, or what the context leaves.
    logprobs, prompt_logprobs: -1: none; k: of the token itself and the k most likely.
    make_parser: for each choice, what turns its text into content, reasoning and tool calls.
    """

    model: str
    prompts: list[Prompt]
    max_new: int | None = None
    default_max_new: int | None = None
    n: int = 1
    best_of: int = 1  # at least n; more: the best n by mean logprob are answered
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: StopOptions = field(default_factory=StopOptions)
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: m.Grammar | None = None
    make_parser: Callable[[], OutputParser] = PlainParser
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    salt: str = ""
    priority: int = 0

    @property
    def per_prompt(self) -> int:
        """Choices that are computed for each prompt."""
        return max(self.n, self.best_of)

    @property
    def choices(self) -> int:
        """Choices that are computed."""
        return len(self.prompts) * self.per_prompt


@dataclass(frozen=True, slots=True)
class Worker:
    """What `plan` needs to know of the worker."""

    context: int  # tokens, prompt and answer together
    vocab_size: int
    eos_ids: tuple[int, ...]


def plan(request: GenerateRequest, worker: Worker, rid: str, routed: RoutedHeaders, started_at: float) -> list[m.Admit]:
    """One `Admit` per choice. Raises ApiError 400: lengths, vocabulary, number of choices, rooms.

    Args: started_at: CLOCK_MONOTONIC seconds, the start of the deadline in `routed`.
    """
    if request.choices > MAX_CHOICES:
        raise ApiError(
            400,
            f"{len(request.prompts)} prompts with {request.per_prompt} choices each are {request.choices} choices; "
            f"at most {MAX_CHOICES} are allowed in one request",
            param="n",
        )
    if routed.leg is not None and len(routed.rooms) != request.choices:
        raise ApiError(400, f"the request has {request.choices} choices but {len(routed.rooms)} rooms; one room a choice", code="bad_rooms")
    check_ids(request.stop.ids, worker.vocab_size, "stop_token_ids")
    check_ids(request.sampling.logit_bias, worker.vocab_size, "logit_bias", keys=True)
    # Of the rid, which both legs of a pair have: the seed that decode's http tells is the one that prefill drew with.
    minted = xxh3_64_intdigest(rid.encode()) >> (64 - _MINTED_SEED_BITS)
    out: list[m.Admit] = []
    for prompt in request.prompts:
        if not prompt.ids:
            raise ApiError(400, f"{prompt.name} has no tokens; at least one is needed", param=prompt.name)
        max_new = max_new_tokens(len(prompt.ids), request.max_new, worker.context, default=request.default_max_new, param=prompt.name)
        check_prompt(prompt, worker.vocab_size)
        if request.stop.min_tokens > max_new:
            raise ApiError(400, f"min_tokens is {request.stop.min_tokens}, but at most {max_new} tokens are made", param="min_tokens")
        first = _admit(request, worker, prompt, max_new, rid, routed, started_at)
        for choice in range(request.per_prompt):
            index = len(out)
            # A given seed means the same for a prompt whatever stands beside it; a minted one must not make equal prompts answer alike.
            seed = minted + index if request.sampling.seed is None else request.sampling.seed + choice
            out.append(_choice(first, index, seed % _SEEDS, routed))
    return out


def _choice(first: m.Admit, index: int, seed: int, routed: RoutedHeaders) -> m.Admit:
    """`first` with its own number, seed and room."""
    return msgspec.structs.replace(first, index=index, seed=seed, room=routed.rooms[index] if routed.leg is not None else 0)


def _admit(request: GenerateRequest, worker: Worker, prompt: Prompt, max_new: int, rid: str, routed: RoutedHeaders, started_at: float) -> m.Admit:
    sampling, stop = request.sampling, request.stop
    router_id, pick = routed.pick if routed.pick is not None else ("", -1)
    return m.Admit(
        rid=rid,
        ids=encode_ids(prompt.ids),
        max_new=max_new,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=sampling.logit_bias,
        stop_ids=list(dict.fromkeys((*(() if stop.ignore_eos else (i for i in worker.eos_ids if i < worker.vocab_size)), *stop.ids))),
        stop=list(stop.strings),
        min_tokens=stop.min_tokens,
        include_stop=stop.include_string,
        keep_special=stop.keep_special,
        spaces_between_special=stop.spaces_between_special,
        logprobs=max(0, request.logprobs) if request.best_of > request.n else request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        grammar=request.grammar,
        leg=routed.leg or "",
        bootstrap=routed.bootstrap or "",
        prefill_incarnation=routed.prefill_incarnation or "",
        deadline=0.0 if routed.deadline_ms is None else started_at + routed.deadline_ms / 1000,
        router_id=router_id,
        pick=pick,
        priority=request.priority,
        salt=request.salt,
    )


def bounded(request: GenerateRequest, max_tokens: int, context: int) -> tuple[GenerateRequest, bool]:
    """With at most `max_tokens`, or what the context leaves if that is less: for APIs that end such an answer where the context ends.

    Returns also whether it is less."""
    capped = len(request.prompts[0].ids) + max_tokens > context
    return replace(request, max_new=None if capped else max_tokens), capped


def max_new_tokens(prompt_tokens: int, asked: int | None, context: int, *, default: int | None, param: str) -> int:
    """How many tokens may be made, at least 1: what was asked, else `default` or the rest of the context, whichever is less.

    Raises ApiError 400 when prompt, or prompt and asked tokens, do not fit; it never names a number that the user did not send.
    """
    room = context - prompt_tokens
    if room < 1:
        message = f"the prompt has {prompt_tokens} tokens, but the context is {context} tokens, prompt and answer together; shorten the prompt"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens and {asked} more are asked for, but the context is {context} tokens; "
            f"ask for at most {room}, or shorten the prompt",
            code="context_length_exceeded",
            param=param,
        )
    return max(1, asked)


def check_ids(ids: Iterable[int], vocab_size: int, param: str, *, keys: bool = False) -> None:
    """Raises ApiError 400 for a token id outside the vocabulary. `keys`: they are the keys of an object."""
    for i, token in enumerate(ids):
        if token >= vocab_size:
            path = param if keys else f"{param}[{i}]"
            message = f"{path} {'names' if keys else 'is'} {token}; token ids of this model go from 0 to {vocab_size - 1}"
            raise ApiError(400, message, code="token_out_of_vocabulary", param=path)


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raises ApiError 400 for a token that the model does not have, though its tokenizer may."""
    if prompt.text is None and prompt.name != CHAT_PROMPT:
        check_ids(prompt.ids, vocab_size, prompt.name)
    elif (token := max(prompt.ids, default=0)) >= vocab_size:
        message = f"the tokenizer makes token id {token} of {prompt.name}, but token ids of this model go from 0 to {vocab_size - 1}; "
        raise ApiError(400, message + "leave out the special token", code="token_out_of_vocabulary", param=prompt.name)


def signed_seed(seed: int) -> int:
    """A seed as a client may send it again: 64 bits with a sign."""
    return seed - _SEEDS if seed >= _SEEDS // 2 else seed
