"""Request bodies of the OpenAI endpoints, as the runtime accepts them; the router only reads `model`, `stream` and the prompt.

pydantic: loaded by the runtime's http process and by tests, never by the router's data path. An option that we do not support is
refused by name, never ignored; a number outside its range is refused, never clamped. The ranges stand here and nowhere else: the published
OpenAPI document is made of these models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

MAX_N: Final = 128
MAX_BEST_OF: Final = 20
MAX_CHOICES: Final = 512  # of one request, over all its prompts
MAX_PROMPTS: Final = 128
MAX_EMBEDDING_INPUTS: Final = 2048
MAX_LOGPROBS: Final = 20
MAX_BIASED_IDS: Final = 1024
MAX_STOP_IDS: Final = 64
MAX_SALT_CHARS: Final = 256
MAX_PRIORITY: Final = 1000  # to both sides of 0; internal port only

# Options of the OpenAI API that mean nothing to a text model's answer: accepted and without effect.
NEUTRAL_OPTIONS: Final = (
    "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
# Options refused unless they have a value that asks for nothing.
NEUTRAL_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "suffix": (None, ""), "functions": (None, []), "function_call": (None, "none"), "modalities": (None, ["text"]),
    "audio": (None,), "prediction": (None,), "reasoning_effort": (None,), "web_search_options": (None,), "verbosity": (None,),
    "use_beam_search": (None, False), "length_penalty": (None, 1, 1.0), "early_stopping": (None, False), "dimensions": (None,),
    "guided_decoding_backend": (None,), "guided_whitespace_pattern": (None,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Within:
    """A JSON number in a range, as a pydantic annotation; no bool, no text, nothing that is not finite."""

    low: float
    high: float
    open_low: bool = False

    def check(self, value: Any) -> float:
        """Raises PydanticCustomError."""
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not fits or not (self.low < value <= self.high if self.open_low else self.low <= value <= self.high):
            start = f"above {self.low:g} and up to" if self.open_low else f"from {self.low:g} to"
            raise PydanticCustomError("range", "a number {range} is allowed", {"range": f"{start} {self.high:g}"})
        return float(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "number", "exclusiveMinimum" if self.open_low else "minimum": self.low, "maximum": self.high}


def _check_bias(value: Any) -> Any:
    """`{"token id": bias}`; whether the ids are of the vocabulary is not known here."""
    if not isinstance(value, dict) or len(value) > MAX_BIASED_IDS:
        raise PydanticCustomError("bias", "an object of at most {most} token ids and their biases is allowed", {"most": MAX_BIASED_IDS})
    out: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise PydanticCustomError("bias", "the key {key} is no token id; keys are token ids, written as text", {"key": repr(key[:40])})
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise PydanticCustomError("bias", "the bias of {key} must be a number from -100 to 100", {"key": key})
        out[int(key)] = float(bias)
    return out


Bias = Annotated[
    dict[int, float],
    BeforeValidator(_check_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "maxProperties": MAX_BIASED_IDS}),
]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**32)]
Tokens = Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]
Priority = Annotated[StrictInt, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Logprobs = Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)]
Salt = Annotated[StrictStr, Field(min_length=1, max_length=MAX_SALT_CHARS)]
JsonObject = dict[str, Any]
T = TypeVar("T")
# A list of which the first wrong item is told: a body may hold millions, and each fault takes a hundred times its own bytes.
Items = Annotated[list[T], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """`continuous_usage_stats`: every chunk says what has been used so far."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class TextPart(BaseModel):
    """A content part. Only text: other kinds are refused."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text"]
    text: StrictStr


class FunctionCall(BaseModel):
    """What a model asked to be called; `arguments` is JSON text (an object is understood too)."""

    model_config = ConfigDict(extra="ignore")
    name: StrictStr = Field(min_length=1)
    arguments: StrictStr | JsonObject | None = None


class ToolCall(BaseModel):
    """One call in an assistant's message."""

    model_config = ConfigDict(extra="ignore")
    id: StrictStr | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(BaseModel):
    """One chat message. Fields that we do not know are ignored: clients send back what servers once gave them."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Items[TextPart] | None = None
    name: StrictStr | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`. `strict` or not, the answer follows the schema."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: StrictStr | None = Field(default=None, max_length=256)
    description: StrictStr | None = None
    schema_: JsonObject | StrictBool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """What the answer must be. regex, grammar (Lark) and choice are of other servers' APIs."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "choice"]
    json_schema: JsonSchemaFormat | None = None
    regex: StrictStr | None = None
    grammar: StrictStr | None = None
    choice: Items[StrictStr] | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of these."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    json_: JsonObject | StrictStr | StrictBool | None = Field(default=None, alias="json")
    regex: StrictStr | None = None
    choice: Items[StrictStr] | None = None
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None


class GenerationOptions(BaseModel):
    """What chat and completions share."""

    model_config = ConfigDict(extra="allow")
    model: StrictStr = Field(min_length=1)
    n: StrictInt = Field(default=1, ge=1, le=MAX_N)
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    min_tokens: StrictInt = Field(default=0, ge=0, le=2**31 - 1)
    temperature: Annotated[float, Within(0, 2)] = 1.0
    top_p: Annotated[float, Within(0, 1, open_low=True)] = 1.0
    top_k: StrictInt = Field(default=0, ge=-1, le=2**31 - 1)  # 0 and -1: all
    min_p: Annotated[float, Within(0, 1)] = 0.0
    repetition_penalty: Annotated[float, Within(0, 10, open_low=True)] = 1.0
    frequency_penalty: Annotated[float, Within(-2, 2)] = 0.0
    presence_penalty: Annotated[float, Within(-2, 2)] = 0.0
    logit_bias: Bias = Field(default_factory=dict)
    seed: StrictInt | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: StrictStr | Items[StrictStr] = Field(default_factory=list)
    stop_token_ids: Items[TokenId] = Field(default_factory=list, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    spaces_between_special_tokens: StrictBool = True  # as the tokenizer writes them; few put any there
    prompt_logprobs: Logprobs | None = None
    return_token_ids: StrictBool = False  # the prompt's token ids and, in each choice, the answer's
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | StrictStr | StrictBool | None = None
    guided_regex: StrictStr | None = None
    guided_grammar: StrictStr | None = None
    guided_choice: Items[StrictStr] | None = None
    user: StrictStr | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None  # internal port only; more is sooner


class ChatRequest(GenerationOptions):
    """Body of `POST /v1/chat/completions`."""

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: Tokens | None = None
    logprobs: StrictBool = False
    top_logprobs: Logprobs = 0
    tools: Items[JsonObject] = Field(default_factory=list)
    tool_choice: StrictStr | JsonObject | None = None
    parallel_tool_calls: StrictBool = True
    add_generation_prompt: StrictBool | None = None  # as `continue_final_message` needs it
    continue_final_message: StrictBool = False
    chat_template_kwargs: JsonObject = Field(default_factory=dict)


class CompletionRequest(GenerationOptions):
    """Body of `POST /v1/completions`: one or more prompts, as text or token ids. `max_tokens: 0` is for `echo`."""

    prompt: StrictStr | Items[TokenId] | Items[StrictStr] | Items[Items[TokenId]]
    max_tokens: StrictInt | None = Field(default=None, ge=0, le=2**31 - 1)
    best_of: StrictInt | None = Field(default=None, ge=1, le=MAX_BEST_OF)
    logprobs: Logprobs | None = None
    echo: StrictBool = False
    add_special_tokens: StrictBool = True


class EmbeddingRequest(BaseModel):
    """Body of `POST /v1/embeddings`."""

    model_config = ConfigDict(extra="allow")
    model: StrictStr = Field(min_length=1)
    input: StrictStr | Items[TokenId] | Items[StrictStr] | Items[Items[TokenId]]
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["last", "mean"] = "last"
    normalize: StrictBool = True
    add_special_tokens: StrictBool = True
    user: StrictStr | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None


class TokenizeRequest(BaseModel):
    """Body of `POST /tokenize`: a prompt or messages."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Items[Message] | None = Field(default=None, min_length=1)
    tools: Items[JsonObject] = Field(default_factory=list)
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool | None = None  # as `continue_final_message` needs it
    continue_final_message: StrictBool = False
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    return_token_strs: StrictBool = False


class DetokenizeRequest(BaseModel):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(extra="forbid")
    model: StrictStr | None = None
    tokens: Items[TokenId]
    skip_special_tokens: StrictBool = False
