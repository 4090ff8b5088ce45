"""From a body of the OpenAI API to a `GenerateRequest`: validate -> template -> tokenize -> options. Called by `app`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from fleet_contract.errors import CODE_STALE_WORKER, INVALID_REQUEST, ApiError
from fleet_contract.openai import CompletionRequest, GenerationOptions
from fleet_runtime import messages as m
from fleet_runtime.server import validate
from fleet_runtime.server.answer import Answer, OutputParser, PlainParser
from fleet_runtime.server.generate import CHAT_PROMPT, GenerateRequest, Prompt, SamplingOptions, StopOptions, Worker, plan
from fleet_runtime.server.grammars import grammar_of, schema_grammar
from fleet_runtime.server.manager import ReqState
from fleet_runtime.server.openai_chat import ChatShape
from fleet_runtime.server.openai_completions import CompletionShape
from fleet_runtime.server.parsing.output import output_parser
from fleet_runtime.server.parsing.reasoning import Thinking, thinking_at_start
from fleet_runtime.server.parsing.registry import NONE
from fleet_runtime.server.parsing.tools import ToolRequest, forced_schema, tool_request
from fleet_runtime.server.shape import Shape, Told
from fleet_runtime.server.state import HttpState, TextModel
from fleet_text.bounds import PromptTooLong
from fleet_text.chat import ChatInputs, PromptError, chat_inputs

COMPLETION_DEFAULT_TOKENS: Final = 16  # OpenAI's default of /v1/completions
_THREAD_ABOVE_CHARS: Final = 4096  # about a millisecond of tokenizing
_PROMPT_END_IDS: Final = 64
_FORMATS: Final = frozenset(("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"))


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request: its choices, and how to answer."""

    choices: list[m.Admit]
    shape: Shape
    stream: bool


async def chat_generation(state: HttpState, request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Generation:
    """Args: ids: the prompt as the router tokenized it. Raises ApiError."""
    return generation(state, request, await read_chat(state, body, ids), ChatShape)


async def read_chat(state: HttpState, body: dict[str, Any], ids: list[int] | None) -> GenerateRequest:
    """A chat body as the internal request. Other dialects may write themselves as such a body, and answer in a shape of their own.

    Args: ids: as in `chat_generation`. Raises ApiError.
    """
    options = validate.chat_request(body)
    validate.check_model(options.model, state.config.served_names)
    text = state.ready_text()
    asked = tool_request(body)
    grammar = await _grammar(options)
    if asked.active and grammar is not None:
        raise ApiError(
            400,
            "tools that may be called do not go with a format of the answer: an answer follows one grammar; set tool_choice to none, or leave out "
            "the format",
            param="tools",
        )
    if asked.forced:
        schema = forced_schema(asked.tools, asked.choice, named=asked.named, parallel=asked.parallel)
        grammar = await asyncio.to_thread(schema_grammar, schema, "tools")
    inputs = read_inputs(body)
    if ids is None:
        ids = await encode_chat(text, inputs, context=state.flags.context_length)
    make_parser, thinks = _parsing(text, asked, inputs, ids)
    if grammar is not None and thinks:
        grammar = msgspec.structs.replace(grammar, after_ids=text.think_end_ids)
    return GenerateRequest(
        model=options.model,
        prompts=[Prompt(ids, CHAT_PROMPT)],
        max_new=options.max_completion_tokens if options.max_completion_tokens is not None else options.max_tokens,
        logprobs=options.top_logprobs if options.logprobs else -1,
        prompt_logprobs=-1 if options.prompt_logprobs is None else options.prompt_logprobs,
        grammar=grammar,
        make_parser=make_parser,
        **_shared(options),
    )


def _parsing(text: TextModel, asked: ToolRequest, inputs: ChatInputs, ids: list[int]) -> tuple[Callable[[], OutputParser], bool]:
    """What makes each choice's parser, and whether the prompt ends within the reasoning: a grammar then waits for its end."""
    if not asked.active and text.format.reasoning == NONE:
        return PlainParser, False
    prompt_end = text.texts.decode(ids[-_PROMPT_END_IDS:], skip_special=False)
    thinks = text.format.reasoning != NONE and thinking_at_start(prompt_end, inputs.continued) is Thinking.OPEN
    return partial(output_parser, text.format, asked, prompt_end=prompt_end, continued=inputs.continued), thinks


async def completion_generation(state: HttpState, request: ReqState, body: dict[str, Any], ids: list[int] | None) -> Generation:
    """Args: ids: as in `chat_generation`. Raises ApiError."""
    options = validate.completion_request(body)
    made = await read_completion(state, options, ids)
    of_prompt = -1 if options.prompt_logprobs is None else options.prompt_logprobs
    return generation(state, request, made, lambda told, answer: CompletionShape(told, answer, echo=options.echo, prompt_logprobs=of_prompt))


async def read_completion(state: HttpState, options: CompletionRequest, ids: list[int] | None) -> GenerateRequest:
    """A checked completion body as the internal request, for this and other dialects. Args: ids: as in `chat_generation`. Raises ApiError."""
    validate.check_model(options.model, state.config.served_names)
    grammar = await _grammar(options)
    prompts = await _prompts(state.ready_text(), options, ids, state.flags.context_length)
    logprobs = -1 if options.logprobs is None else options.logprobs
    of_prompt = -1 if options.prompt_logprobs is None else options.prompt_logprobs
    return GenerateRequest(
        model=options.model,
        prompts=prompts,
        max_new=options.max_tokens,
        default_max_new=COMPLETION_DEFAULT_TOKENS,
        best_of=options.n if options.best_of is None else options.best_of,
        logprobs=logprobs,
        prompt_logprobs=max(logprobs if options.echo else -1, of_prompt),
        grammar=grammar,
        **_shared(options),
    )


def generation(state: HttpState, request: ReqState, made: GenerateRequest, shape: Any) -> Generation:
    """The last step of every dialect. Args: shape: makes one of what it tells and the answer. Raises ApiError 400."""
    text = state.ready_text()
    worker = Worker(state.flags.context_length, state.model_vocab_size(), text.encoder.eos_ids)
    choices = plan(made, worker, request.rid, request.routed, request.started_at)
    seeds = [choice.seed for choice in choices]
    answer = Answer(made.make_parser, seeds, n=made.n, per_prompt=made.per_prompt, discard=made.max_new == 0)
    return Generation(choices, shape(Told(made, request.rid, state.config.model_revision, text.texts), answer), made.stream)


def _shared(options: GenerationOptions) -> dict[str, Any]:
    """What chat and completions have in common, as fields of `GenerateRequest`."""
    stream = options.stream_options
    return {
        "n": options.n,
        "sampling": SamplingOptions(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            frequency_penalty=options.frequency_penalty,
            presence_penalty=options.presence_penalty,
            logit_bias=options.logit_bias,
            seed=options.seed,
        ),
        "stop": StopOptions(
            strings=tuple(validate.stop_strings(options.stop)),
            ids=tuple(options.stop_token_ids),
            ignore_eos=options.ignore_eos,
            min_tokens=options.min_tokens,
            include_string=options.include_stop_str_in_output,
            keep_special=not options.skip_special_tokens,
            spaces_between_special=options.spaces_between_special_tokens,
        ),
        "stream": options.stream,
        "include_usage": stream is not None and stream.include_usage,
        "continuous_usage": stream is not None and stream.continuous_usage_stats,
        "return_token_ids": options.return_token_ids,
        "salt": options.cache_salt or "",
        "priority": options.priority or 0,
    }


async def _grammar(options: GenerationOptions) -> m.Grammar | None:
    """In a thread: the check of a hostile schema takes a third of a second. Raises ApiError 400."""
    given = options.model_fields_set & _FORMATS
    return await asyncio.to_thread(grammar_of, options) if given else None


def read_inputs(body: dict[str, Any]) -> ChatInputs:
    """What of a body decides its prompt. Raises ApiError 400."""
    try:
        return chat_inputs(body)
    except PromptError as e:
        raise ApiError(400, str(e)[:1000], param=e.param) from e


async def encode_chat(text: TextModel, inputs: ChatInputs, *, context: int | None = None) -> list[int]:
    """Template and tokenizer, in a thread when it may take long. Args: context: as in `encode_text`. Raises ApiError 400."""
    try:
        if inputs.tools or inputs.variables or len(inputs.messages) > 100 or _is_long(inputs):
            return await asyncio.to_thread(text.encoder.encode_inputs, inputs, context)
        return text.encoder.encode_inputs(inputs, context)
    except PromptTooLong as e:
        raise _too_long(e, context, "messages") from e
    except PromptError as e:
        raise ApiError(400, str(e)[:1000], param=e.param) from e


def _is_long(inputs: ChatInputs) -> bool:
    """Whether the prompt may take long. Calls of earlier answers are objects, whose size is not looked for."""
    if any("tool_calls" in message for message in inputs.messages):
        return True
    return sum(len(text) for message in inputs.messages for text in message.values() if isinstance(text, str)) > _THREAD_ABOVE_CHARS


async def encode_text(text: TextModel, prompt: str, *, add_special_tokens: bool, context: int | None = None, name: str = "prompt") -> list[int]:
    """Token ids of a text, in a thread when it is long.

    Args: context: a text that surely has more tokens is refused before it is tokenized. Raises ApiError 400.
    """
    try:
        if len(prompt) > _THREAD_ABOVE_CHARS:
            return await asyncio.to_thread(text.encoder.encode, prompt, add_special_tokens=add_special_tokens, limit=context)
        return text.encoder.encode(prompt, add_special_tokens=add_special_tokens, limit=context)
    except PromptTooLong as e:
        raise _too_long(e, context, name) from e


def _too_long(error: PromptTooLong, context: int | None, name: str) -> ApiError:
    message = f"the prompt has at least {error.least} tokens, but the context is {context} tokens, prompt and answer together; shorten the prompt"
    return ApiError(400, message, code="context_length_exceeded", param=name)


async def encode_inputs(text: TextModel, given: Any, name: str, *, add_special_tokens: bool, context: int | None = None) -> list[Prompt]:
    """A text, a list of ids, a list of texts or a list of lists of ids, as prompts. Args: context: as in `encode_text`, of a single text.

    Raises ApiError 400, also for an empty list.
    """
    if isinstance(given, str):
        return [Prompt(await encode_text(text, given, add_special_tokens=add_special_tokens, context=context, name=name), name, given)]
    if not given:
        raise ApiError(400, f"{name} is an empty list; at least one token id or text is needed", param=name)
    if isinstance(given[0], int):
        return [Prompt(list(given), name)]
    texts = [item for item in given if isinstance(item, str)]
    if texts:  # then all are
        lists = await _encode_texts(text, texts, add_special_tokens=add_special_tokens)
    else:
        lists = [list(item) for item in given]
    names = [name] if len(given) == 1 else [f"{name}[{i}]" for i in range(len(given))]
    return [Prompt(ids, path, item if isinstance(item, str) else None) for ids, path, item in zip(lists, names, given, strict=True)]


async def _encode_texts(text: TextModel, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    def encode() -> list[list[int]]:
        return [text.encoder.encode(t, add_special_tokens=add_special_tokens) for t in texts]

    return await asyncio.to_thread(encode) if sum(map(len, texts)) > _THREAD_ABOVE_CHARS or len(texts) > 100 else encode()


async def _prompts(text: TextModel, options: CompletionRequest, ids: list[int] | None, context: int) -> list[Prompt]:
    if ids is not None:
        given = options.prompt
        only = given if isinstance(given, str) else given[0] if len(given) == 1 and isinstance(given[0], str) else None
        return [Prompt(ids, "prompt", only)]
    return await encode_inputs(text, options.prompt, "prompt", add_special_tokens=options.add_special_tokens, context=context)


def check_leg(state: HttpState, request: ReqState) -> None:
    """A leg must reach a worker that can serve it, of the incarnation that the router meant. Raises ApiError 409 or 400."""
    routed = request.routed
    if routed.leg is None:
        return
    if state.flags.role not in (routed.leg, "unified"):
        raise stale(f"this is a {state.flags.role} worker; it serves no {routed.leg} legs")
    mine = state.mailbox.peers.get(m.SCHEDULER, "")
    if routed.leg == "prefill" and routed.prefill_incarnation is not None and routed.prefill_incarnation != mine:
        raise stale(f"the request is for incarnation {routed.prefill_incarnation}; this worker's is {mine}")


def stale(message: str) -> ApiError:
    """The router's table is older than this worker."""
    return ApiError(409, f"{message}; read GET /worker again", type=INVALID_REQUEST, code=CODE_STALE_WORKER)
