"""Cases of part runtime-http about bad input: one clear refusal, the engine lives on. Against the real scheduler and the simulated executor."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import openai
import pytest

from fleet_contract.errors import ApiError
from fleet_runtime.models.simulated_tokenizer import simulated_tokenizer_files
from fleet_runtime.server.requests import encode_chat, read_inputs
from fleet_testing.http_cases import CHAT, COMP, CTX, alive, body, post, raw, refused, worker
from fleet_testing.runtime import HTTP, Runtime
from fleet_text.prompt import PromptEncoder

if TYPE_CHECKING:
    from fleet_runtime.server.state import TextModel

TEMPLATE = 29 - len("hi count:2") + len("hi")  # tokens around "hi" in the simulated chat template


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with worker(tmp_path_factory.mktemp("refusals")) as runtime:
        yield runtime.wait_ready()


@pytest.fixture(autouse=True)
def living(runtime: Runtime) -> Iterator[None]:
    with alive(runtime):
        yield


@pytest.mark.case("C52")
@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_over_the_context_is_refused_before_any_status_line(runtime: Runtime, path: str, stream: bool) -> None:
    """Red with `generate.max_new_tokens` that returns what was asked for at once: the scheduler then fails, or the stream begins."""
    text = "x" * (CTX + 100)
    options: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    error = refused(post(runtime, path, body(path, stream=stream, **options)), str(CTX))
    assert error["code"] == "context_length_exceeded"
    assert str(CTX + 100 + (TEMPLATE - 2 if path == CHAT else 0)) in error["message"]


@pytest.mark.case("C53")
@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"),
    [
        (CTX - 1, None, True),
        (CTX - 1, 1, True),
        (CTX - 1, 10, False),
        (CTX, None, False),
        (CTX, 1, False),
        (CTX + 1, None, False),
        (CTX + 1, 10, False),
    ],
)
def test_a_prompt_at_the_edge_of_the_context(runtime: Runtime, length: int, max_tokens: int | None, fits: bool) -> None:
    """Red with `room < 0` for `room < 1`: a prompt of CTX tokens is then told of 0 tokens it never asked for."""
    answer = post(runtime, COMP, body(COMP, prompt="x" * length, max_tokens=max_tokens))
    if fits:
        assert answer.json()["usage"]["completion_tokens"] == 1 and answer.json()["choices"][0]["finish_reason"] == "length"
        return
    error = refused(answer, str(length), str(CTX))
    assert error["code"] == "context_length_exceeded" and "-" not in error["message"]
    assert ("10" in error["message"].replace(str(length), "").replace(str(CTX), "")) == (max_tokens == 10 and length < CTX)


@pytest.mark.case("C55")
@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"0.5"', "true", "[]", "11", "-3"])
def test_a_number_that_is_none_or_outside_its_range_is_refused_by_name(runtime: Runtime, path: str, name: str, value: str) -> None:
    """Red with `low <= value` turned to `not value < low` in `Within`: NaN passes. JSON has no NaN: those are refused as bad JSON."""
    error = refused(post(runtime, path, raw(f'"{name}":{value}', path)))
    assert error["param"] == name or (error["code"] == "invalid_json" and value.strip("-")[0] in "NI")


@pytest.mark.case("C56")
@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize(
    ("option", "word"),
    [
        ('"max_tokens":0', "1"), ('"max_tokens":-1', "-1"), ('"max_tokens":2.5', "2.5"), ('"max_tokens":"8"', '"8"'),
        ('"max_tokens":1e9', "1000000000"),
        ('"max_tokens":1000000000', "1000000000"), ('"n":0', "1"), ('"top_p":0', "above 0"), ('"n":-1', "-1"), ('"n":1.5', "1.5"),
        ('"max_tokens":true', "true"), ('"max_tokens":99999999999999999999', "2147483647"), ('"min_tokens":9', "8"),
    ],
)  # fmt: skip
def test_counts_that_cannot_be_reached_are_refused(runtime: Runtime, path: str, option: str, word: str) -> None:
    """Red without `ge=1` of max_tokens. A huge one is refused with what is left, not clipped."""
    name = option.split('"')[1]
    error = refused(post(runtime, path, raw(option, path)), word)
    assert error["param"] == name or error["code"] == "context_length_exceeded"


@pytest.mark.case("C56")
def test_no_new_tokens_are_for_echo_only(runtime: Runtime) -> None:
    """The documented exception: `max_tokens: 0` with `echo` answers with the prompt."""
    answer = post(runtime, COMP, body(COMP, max_tokens=0, echo=True)).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("hi", 0)


@pytest.mark.case("C58")
@pytest.mark.parametrize(
    ("path", "options", "param"),
    [
        (CHAT, {"logit_bias": {"99999999": 5}}, "logit_bias"),
        (CHAT, {"logit_bias": {"260": 5}}, "logit_bias"),
        (CHAT, {"logit_bias": {"-1": 5}}, "logit_bias"),
        (CHAT, {"logit_bias": {"abc": 5}}, "logit_bias"),
        (CHAT, {"logit_bias": {"": 5}}, "logit_bias"),
        (CHAT, {"logit_bias": {"٣": 5}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": 1000}}, "logit_bias"),
        (CHAT, {"logit_bias": {"5": None}}, "logit_bias"),
        (CHAT, {"stop_token_ids": [99999999], "min_tokens": 1}, "stop_token_ids[0]"),
        (CHAT, {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (COMP, {"prompt": [99999999]}, "prompt[0]"),
        (COMP, {"prompt": [[1], [2, 260]]}, "prompt[1][1]"),
        (COMP, {"prompt": [2**32]}, "prompt"),
        (COMP, {"prompt": [-1]}, "prompt"),
        (CHAT, {"top_k": 2**31}, "top_k"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(runtime: Runtime, path: str, options: dict[str, Any], param: str) -> None:
    """Red without `check_ids` in `generate.plan`."""
    refused(post(runtime, path, body(path, **options)), param=param)


@pytest.mark.case("C58")
@pytest.mark.parametrize(
    "options", [{"top_k": 9999999, "temperature": 1}, {"logit_bias": {"259": -100}}, {"stop_token_ids": [0, 259], "min_tokens": 1}]
)
def test_a_huge_top_k_and_the_last_id_are_fine(runtime: Runtime, options: dict[str, Any]) -> None:
    """The other side: inside the range nothing is refused."""
    assert post(runtime, CHAT, body(**options)).status_code == 200


BAD_GRAMMARS: list[tuple[str, dict[str, Any]]] = [
    ("unknown type", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "nosuch"}}}}}}),
    ("bad pattern", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "("}}}}),
    ("reference to nothing", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/nosuch"}}}}),
    ("reference to the net", {"guided_json": {"$ref": "http://example.com/schema.json"}}),
    ("what is not supported", {"guided_json": {"not": {"type": "string"}}}),
    ("2 MB", {"guided_json": {"enum": ["x" * 2_000_000]}}),
    ("deep", {"guided_json": '{"items":' * 20_000 + "{}" + "}" * 20_000}),
    ("bad regex", {"guided_regex": "("}),
    ("look-around", {"structured_outputs": {"regex": "(?=a)b"}}),
    ("bad grammar", {"guided_grammar": "start: nosuch"}),
    ("grammar that is none", {"guided_grammar": "%%%"}),
    ("no such backend", {"guided_decoding_backend": "nosuch", "guided_regex": "a"}),
    ("a format of nothing", {"response_format": {"type": "nosuch"}}),
]


@pytest.mark.case("C59")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "options"), BAD_GRAMMARS, ids=[name for name, _ in BAD_GRAMMARS])
def test_a_grammar_that_cannot_be_used_is_refused_before_generation(runtime: Runtime, name: str, options: dict[str, Any], stream: bool) -> None:
    """Red with `_checked` of `grammars` returning at once: the scheduler refuses most of them too, but cannot name the option."""
    assert refused(post(runtime, CHAT, body(stream=stream, **options)))["param"]


@pytest.mark.case("C59")
def test_others_in_the_batch_go_on_beside_bad_grammars(runtime: Runtime) -> None:
    """One long answer runs while bad ones are refused."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(runtime, COMP, body(COMP, max_tokens=400, ignore_eos=True))))
    thread.start()
    for _, options in BAD_GRAMMARS:
        refused(post(runtime, CHAT, body(**options)))
    thread.join(60)
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 400


@pytest.mark.case("C61")
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("[]", "messages"), ("null", "messages"), ("{}", "messages"), ('"hi"', "messages"), (None, "messages"), ("[{}]", "messages[0].role"),
        ('[{"role":"nosuch","content":"x"}]', "messages[0].role"), ("[null]", "messages[0]"), ("[[]]", "messages[0]"), ("0", "messages"),
        ('[{"role":"user"}]', "messages[0].content"), ('[{"role":"user","content":null}]', "messages[0].content"),
        ('[{"role":"user","content":"x"},{"role":null,"content":"x"}]', "messages[1].role"),
    ],
)  # fmt: skip
def test_messages_that_are_none_are_refused_by_name(runtime: Runtime, messages: str | None, param: str) -> None:
    """Red with `role: StrictStr` in Message: a role that the template does not know is rendered. An empty list is refused twice, by the model and by
    `chat_inputs`."""
    given = "" if messages is None else f',"messages":{messages}'
    refused(post(runtime, CHAT, ('{"model":"tiny"' + given + "}").encode()), param=param)


@pytest.mark.case("C62")
@pytest.mark.parametrize(
    "roles", [["assistant"], ["system"], ["user", "user"], ["user", "system", "user"], ["assistant", "assistant"], ["developer", "user"], ["tool"]]
)
def test_odd_orders_of_roles_are_never_a_fault_of_ours(runtime: Runtime, roles: list[str]) -> None:
    """The template decides: 200, or its own complaint. This model's takes them all; the next test has one that does not."""
    answer = post(runtime, CHAT, body(messages=[{"role": r, "content": "Hello, I"} for r in roles]))
    assert answer.status_code == 200, answer.text


STRICT = """{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}
{{ messages[0].content.nosuch.deeper if messages[0].content == 'break' else 'fine' }}"""


@pytest.mark.case("C62")
@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([("assistant", "x")], "begin with a user"),
        ([("user", "x"), ("user", "y")], "roles must alternate"),
        ([("user", "break")], "line 3"),
        ([("user", "x"), ("assistant", "y")], ""),
    ],
)
async def test_the_templates_own_complaint_is_passed_on(messages: list[tuple[str, str]], word: str) -> None:
    """Red with `jinja2.TemplateError` taken out of `render_chat`'s except: a fault of ours, 500."""
    encoder = PromptEncoder(simulated_tokenizer_files() | {"chat_template.jinja": STRICT.encode()})
    inputs = read_inputs({"messages": [{"role": role, "content": content} for role, content in messages]})
    text = cast("TextModel", SimpleNamespace(encoder=encoder))
    if not word:
        assert await encode_chat(text, inputs)
        return
    with pytest.raises(ApiError, match=word) as e:
        await encode_chat(text, inputs)
    assert (e.value.status, e.value.param) == (400, "messages")


@pytest.mark.case("C64")
def test_fields_that_ask_for_nothing_are_ignored(runtime: Runtime) -> None:
    """Red with `extra="forbid"` of Message. A field of a body that could change the answer is refused by name instead (docs/api.md)."""
    message = {"role": "user", "name": "bob", "content": "hi", "id": 7, "annotations": [], "refusal": None, "audio": None}
    options = {
        "store": False, "metadata": {"a": "b"}, "user": "u", "parallel_tool_calls": True, "service_tier": "auto", "safety_identifier": "s",
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "messages": [message],
    }  # fmt: skip
    assert post(runtime, CHAT, body(**options)).status_code == 200


OPTIONAL = (
    "frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens metadata modalities n parallel_tool_calls prediction"
    " presence_penalty prompt_cache_key reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options"
    " temperature tool_choice tools top_p user verbosity web_search_options audio function_call functions top_k min_p repetition_penalty min_tokens"
    " ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens spaces_between_special_tokens guided_json guided_regex"
    " guided_grammar guided_choice structured_outputs cache_salt return_token_ids prompt_logprobs add_generation_prompt continue_final_message"
    " chat_template_kwargs"
).split()


@pytest.mark.case("C65")
def test_null_is_the_default_of_every_option(runtime: Runtime) -> None:
    """Red without `if v is not None` in `validate.checked`."""
    for names in (OPTIONAL, *([name] for name in OPTIONAL)):
        answer = post(runtime, CHAT, body(**{"max_tokens": 2, **dict.fromkeys(names)}))
        assert answer.status_code == 200, (names, answer.text)
    nested = {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}}
    assert post(runtime, CHAT, body(**nested)).status_code == 200
    schema = {"type": "json_schema", "json_schema": {"name": "x", "description": None, "strict": None, "schema": {"type": "string"}}, "regex": None}
    assert post(runtime, CHAT, body(response_format=schema)).status_code == 200
    message = {"role": "user", "content": "x", "name": None, "tool_calls": None, "tool_call_id": None}
    assert post(runtime, CHAT, body(messages=[message])).status_code == 200
    for name in ("suffix", "echo", "best_of", "logprobs", "n", "stop", "seed", "user", "logit_bias", "stream_options"):
        assert post(runtime, COMP, body(COMP, **{name: None})).status_code == 200, name


@pytest.mark.case("C82")
@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        (COMP, {"prompt": ["a"] * 10_000}, ("10000", "128")),
        (COMP, {"prompt": [[1]] * 10_000}, ("10000", "128")),
        (CHAT, {"n": 100_000}, ("100000", "128")),
        (COMP, {"n": 128, "prompt": ["a"] * 128}, ("16384", "512")),
        (COMP, {"best_of": 100}, ("100", "20")),
        ("/v1/embeddings", {"input": ["a"] * 10_000}, ("10000", "2048")),
    ],
)
def test_one_call_cannot_fan_out_without_limit(runtime: Runtime, path: str, options: dict[str, Any], words: tuple[str, ...]) -> None:
    """Red with MAX_PROMPTS of 10**9: ten thousand requests are admitted."""
    given = body(path, **options) if path != "/v1/embeddings" else json.dumps({"model": "tiny", **options}).encode()
    refused(post(runtime, path, given), *words)


@pytest.mark.case("C82")
def test_two_requests_with_one_id_are_both_answered(runtime: Runtime) -> None:
    """`X-Request-Id` is for people; inside each request has an id of its own. A field `rid` is refused by name. Red with the state's rid made of
    the request id: 409."""
    answers: list[httpx.Response] = []

    def one() -> None:
        answers.append(post(runtime, COMP, body(COMP, max_tokens=200, ignore_eos=True), **{"X-Request-Id": "same"}))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [a.status_code for a in answers] == [200] * 4 and {a.headers["x-request-id"] for a in answers} == {"same"}
    assert len({a.json()["id"] for a in answers}) == 4
    refused(post(runtime, CHAT, body(rid="same")), param="rid")


MALFORMED: list[tuple[str, bytes, str]] = [
    ("cut", b'{"model":', "line 1, column 10"),
    ("a list", b"[]", "object"),
    ("null", b"null", "object"),
    ("empty", b"", "empty"),
    ("not UTF-8", b'{"model":"\xff"}', "position 10"),
    ("lone surrogate", raw('"user":"\\ud800"'), "surrogate"),
    ("lone surrogate in a message", b'{"model":"tiny","messages":[{"role":"user","content":"a\\udfff"}]}', "messages[0].content"),
    ("5,000 wrong messages", body(messages=[{"role": "user", "content": 5}] * 5000), "messages[0].content"),
    ("5,000 long wrong messages", body(messages=[{"role": "user", "content": {"x" * 400: 1}}] * 5000), "messages[0].content"),
    ("5,000 unknown names", raw(", ".join(f'"nosuch{i}":1' for i in range(5000))), "nosuch0"),
    ("seed of 65 bits", raw('"seed":9223372036854775808'), "9223372036854775807"),
    ("seed that is no whole number", raw('"seed":1.5'), "seed"),
    ("two bodies", raw("") + raw(""), "column"),
    ("nested", b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
    ("number of 100,000 digits", raw('"seed":' + "1" * 100_000), "not valid JSON"),
]


@pytest.mark.case("C83")
@pytest.mark.parametrize("path", [CHAT, COMP, "/v1/embeddings", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(("name", "data", "word"), MALFORMED, ids=[name for name, _, _ in MALFORMED])
def test_a_malformed_body_is_refused_in_few_words(runtime: Runtime, path: str, name: str, data: bytes, word: str) -> None:
    """Red with lists that tell each fault (`Items` without `fail_fast`) and the first faults' limit (`_MAX_FAULTS`) at 10**9: the refusal
    of 5,000 messages is 400 KB."""
    answer = post(runtime, path, data)
    error = refused(answer)
    assert path != CHAT or word in error["message"]


@pytest.mark.case("C83")
def test_a_negative_seed_is_a_seed(runtime: Runtime) -> None:
    """As OpenAI's: any 64-bit integer, and the one that is returned can be sent again."""
    answer = post(runtime, CHAT, body(seed=-1)).json()
    assert answer["choices"][0]["seed"] == -1
    first = post(runtime, CHAT, body(temperature=1)).json()["choices"][0]
    again = post(runtime, CHAT, body(temperature=1, seed=first["seed"])).json()["choices"][0]
    assert again["message"] == first["message"]


@pytest.mark.case("C67")
def test_every_error_has_the_one_shape_and_the_official_client_shows_it(runtime: Runtime) -> None:
    """Red without the application's handler of the framework's own errors: `{"detail": "Not Found"}`."""
    client = openai.OpenAI(base_url=runtime.data + "/v1", api_key="none", max_retries=0)
    calls: list[tuple[type[openai.APIStatusError], Any]] = [
        (openai.NotFoundError, lambda: client.post("/nosuch", cast_to=object, body={})),
        (openai.NotFoundError, lambda: client.chat.completions.create(model="nosuch", messages=[{"role": "user", "content": "x"}])),
        (openai.BadRequestError, lambda: client.chat.completions.create(model="tiny", messages=[])),
        (openai.BadRequestError, lambda: client.completions.create(model="tiny", prompt="x", temperature=9)),
        (openai.BadRequestError, lambda: client.embeddings.create(model="tiny", input=[])),
        (openai.APIStatusError, lambda: client.get("/chat/completions", cast_to=object)),
        (openai.APIStatusError, lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5_000_000}])),
    ]
    for kind, call in calls:
        with pytest.raises(kind) as e:
            call()
        assert isinstance(e.value.body, dict) and e.value.body["message"] and e.value.body["message"] in e.value.message
        assert e.value.body["param"] is None or isinstance(e.value.body["param"], str)
        assert e.value.body["type"] and e.value.body["code"] and e.value.request_id == e.value.body["request_id"]
    refused(HTTP.get(runtime.data + "/nosuch"), "/nosuch", status=404)
    refused(HTTP.get(runtime.data + CHAT), "POST", status=405)
    refused(HTTP.delete(runtime.data + "/v1/models"), "GET", status=405)
    refused(post(runtime, CHAT, b"a=b", **{"content-type": "application/x-www-form-urlencoded"}), "JSON")
    refused(post(runtime, CHAT, body(), **{"X-Radixfleet-Rid": "a"}), "internal")


@pytest.mark.case("C67")
def test_what_is_not_http_gets_the_same_shape(runtime: Runtime) -> None:
    """A relative: an answer that the application never sees."""
    with socket.create_connection(runtime.data_address) as s:
        s.sendall(b"NONSENSE\r\n\r\n")
        s.settimeout(10)
        got = b""
        while part := s.recv(65536):
            got += part
    assert json.loads(got.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_http"
