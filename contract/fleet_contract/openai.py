"""Request bodies of the OpenAI endpoints, as the runtime accepts them; the router only reads `model`, `stream` and the prompt.

pydantic: loaded by the runtime's http process and by tests, never by the router's data path. An option that we do not support is
refused by name, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

Number = StrictInt | StrictFloat

# Options of the OpenAI API that mean nothing to a text model's answer: accepted and without effect.
NEUTRAL_OPTIONS: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
# Options refused unless they have a value that asks for nothing.
NEUTRAL_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False, None), "top_logprobs": (0, None), "echo": (False,), "suffix": (None, ""),
    "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "logit_bias": (None, {}), "tools": (None, []), "tool_choice": (None, "none"),
    "functions": (None, []), "function_call": (None, "none"), "response_format": (None, {"type": "text"}), "modalities": (None, ["text"]),
    "audio": (None,), "prediction": (None,), "reasoning_effort": (None,), "web_search_options": (None,), "verbosity": (None,),
}  # fmt: skip


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False


class TextPart(BaseModel):
    """A content part. Only text: other kinds are refused."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: StrictStr


class Message(BaseModel):
    """One chat message."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None


class GenerationOptions(BaseModel):
    """What chat and completions share."""

    model_config = ConfigDict(extra="allow")
    model: StrictStr = Field(min_length=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = Field(default=None, ge=1, le=2**31 - 1)
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    seed: StrictInt | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StrictStr | list[StrictStr] | None = None
    ignore_eos: StrictBool = False
    return_token_ids: StrictBool = False  # the answer's token ids beside its text, in each choice


class ChatRequest(GenerationOptions):
    """Body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1, le=2**31 - 1)


TokenId = Annotated[StrictInt, Field(ge=0, lt=2**32)]


class CompletionRequest(GenerationOptions):
    """Body of `POST /v1/completions`: one prompt, as text or token ids."""

    prompt: StrictStr | list[TokenId] | list[StrictStr]


class TokenizeRequest(BaseModel):
    """Body of `POST /tokenize`: a prompt or messages."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: StrictBool = True
