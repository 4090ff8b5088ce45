"""`/v1/messages` as Anthropic's own client uses it, over a scheduler whose text the prompt scripts."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from fleet_testing.dialects import KEY
from fleet_testing.runtime import HTTP, Runtime

TOOL = {"name": "get", "description": "Gets.", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
CALL = '<tool_call>{"name":"get","arguments":{"city":"Rome"}}</tool_call>'


def ask(prompt: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": prompt}], **options}


def post(runtime: Runtime, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    return httpx.post(runtime.data + path, json=body, timeout=20)


def said(text: str) -> str:
    """A prompt whose answer is this text."""
    return "hex:" + text.encode().hex()


def test_the_official_client_reads_a_plain_answer(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(**ask(said("Hello there")))
    assert answer.id.startswith("msg_") and answer.type == "message" and answer.role == "assistant" and answer.model == "tiny"
    assert [(b.type, b.text) for b in answer.content] == [("text", "Hello there")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.cache_read_input_tokens == 16 and answer.usage.output_tokens == len("Hello there")
    assert answer._request_id and len(answer._request_id) == 32, "the client reads it from the header request-id"
    counted = claude.messages.count_tokens(model="tiny", messages=ask(said("Hello there"))["messages"])
    assert counted.input_tokens == answer.usage.input_tokens + 16


def test_the_official_client_reads_a_stream_in_the_order_of_the_protocol(claude: anthropic.Anthropic) -> None:
    events = list(claude.messages.create(**ask(said("Hi you")), stream=True))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    start, delta = events[0], events[-2]
    assert start.message.content == [] and start.message.stop_reason is None and start.message.usage.cache_read_input_tokens == 16
    assert delta.delta.stop_reason == "end_turn" and delta.usage.output_tokens == len("Hi you")


def test_the_raw_stream_names_each_event_and_pings_once(scripted: Runtime) -> None:
    text = post(scripted, **ask(said("Hi"), stream=True)).text
    blocks = [b.split("\n") for b in text.strip().split("\n\n")]
    assert [b[0] for b in blocks][:3] == ["event: message_start", "event: ping", "event: content_block_start"]
    for name, data in blocks:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


@pytest.mark.parametrize(
    ("text", "blocks", "reason"),
    [
        ("Plain.", ["text"], "end_turn"),
        ("", [], "end_turn"),
        (" \n", ["text"], "end_turn"),
        ("<think>So it is.</think>Yes.", ["thinking", "text"], "end_turn"),
        ("<think>Only that", ["thinking"], "end_turn"),
        (CALL, ["tool_use"], "tool_use"),
        (f"Let me see.\n{CALL}", ["text", "tool_use"], "tool_use"),
        (f"<think>Hm 中.</think>See 😀:\n{CALL}\n{CALL}", ["thinking", "text", "tool_use", "tool_use"], "tool_use"),
        (f"{CALL} and then {CALL} done", ["tool_use", "text", "tool_use", "text"], "tool_use"),
    ],
)
@pytest.mark.parametrize("burst", [1, 7])
def test_the_deltas_of_a_stream_join_to_the_plain_answer(claude: anthropic.Anthropic, text: str, blocks: list[str], reason: str, burst: int) -> None:
    prompt = f"{said(text)} burst:{burst}" if text else "say:"
    options: Any = ask(prompt, tools=[TOOL])
    plain = claude.messages.create(**options)
    with claude.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert [b.type for b in plain.content] == blocks and plain.stop_reason == reason
    told = [[b.model_dump(exclude={"id", "parsed_output"}) for b in m.content] for m in (plain, streamed)]
    assert told[0] == told[1]
    assert (streamed.stop_reason, streamed.usage) == (plain.stop_reason, plain.usage)
    for block in plain.content:
        assert block.type != "tool_use" or (block.name, block.input) == ("get", {"city": "Rome"})


def test_only_one_call_comes_without_parallel_use(claude: anthropic.Anthropic) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = claude.messages.create(**ask(said(CALL * 2), tools=[TOOL], tool_choice=choice))
    assert [b.type for b in answer.content] == ["tool_use"] and answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens == len(CALL.removesuffix("</tool_call>")), "nothing is made behind it"


def test_a_call_that_was_cut_ends_with_max_tokens_and_an_empty_input(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(**ask(said(CALL[:-20]), tools=[TOOL]))
    assert [(b.type, b.input) for b in answer.content] == [("tool_use", {})] and answer.stop_reason == "max_tokens"


def test_a_conversation_with_tools_goes_on(claude: anthropic.Anthropic, scripted: Runtime) -> None:
    first = claude.messages.create(**ask(said(f"<think>t</think>{CALL}"), tools=[TOOL]))
    call = next(b for b in first.content if b.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}], "is_error": True}
    turns: Any = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "say:Warm."}]},
    ]
    second = claude.messages.create(model="tiny", max_tokens=50, system=[{"type": "text", "text": "Be brief."}], messages=turns, tools=[TOOL])
    assert second.content[0].type == "text" and second.content[0].text == "Warm."
    prompt = bytes(i if i < 256 else 10 for i in scripted.sent("Admit")[-1]["ids"]).decode()
    parts = ("system\nBe brief.", '"name": "get"', '{"name": "get", "arguments": {"city": "Rome"}}', "tool\nError: 21 degrees", "user\nsay:Warm.")
    assert all(part in prompt for part in parts)


def test_a_last_message_of_the_assistant_is_continued(scripted: Runtime) -> None:
    turns = [{"role": "user", "content": "say:on"}, {"role": "assistant", "content": "It goes "}]
    answer = post(scripted, **ask("") | {"messages": turns}).json()
    assert answer["content"] == [{"type": "text", "text": "on"}]
    assert bytes(scripted.sent("Admit")[-1]["ids"][-8:]) == b"It goes "


def test_turns_of_one_side_become_one(scripted: Runtime) -> None:
    turns = [{"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": "say:x"}]}]
    post(scripted, **ask("") | {"messages": turns})
    assert b"one\n\nsay:x" in bytes(i if i < 256 else 0 for i in scripted.sent("Admit")[-1]["ids"])


def test_what_is_asked_reaches_the_scheduler(claude: anthropic.Anthropic, scripted: Runtime) -> None:
    claude.messages.create(
        **ask("say:abc", stop_sequences=["c"], metadata={"user_id": "u"}, service_tier="auto"),
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7},
        extra_headers={"anthropic-beta": "something-2030-01-01"},
    )
    sent = scripted.sent("Admit")[-1]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["stop"], sent["max_new"]) == (0.5, 0.25, 7, ["c"], 300)


def test_a_stop_sequence_is_told(claude: anthropic.Anthropic) -> None:
    for streamed in (False, True):
        options: Any = ask(said("one two three"), stop_sequences=[" th", "zzz"])
        if streamed:
            with claude.messages.stream(**options) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = claude.messages.create(**options)
        assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one two", "stop_sequence", " th")


def test_the_end_of_max_tokens_and_of_the_context_are_told(claude: anthropic.Anthropic) -> None:
    assert claude.messages.create(**ask("fill", max_tokens=5)).stop_reason == "max_tokens"
    whole = claude.messages.create(**ask("fill burst:50", max_tokens=20_000))
    assert whole.stop_reason == "model_context_window_exceeded"
    usage = whole.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens == 2048


@pytest.mark.parametrize(
    ("choice", "prompt"), [({"type": "any"}, '[{"name":"get","parameters":{"city":"Rome"}}]'), ({"type": "tool", "name": "get"}, '{"city":"Rome"}')]
)
def test_a_forced_tool_is_forced_by_a_grammar(claude: anthropic.Anthropic, scripted: Runtime, choice: Any, prompt: str) -> None:
    answer = claude.messages.create(**ask(said(prompt), tools=[TOOL], tool_choice=choice))
    assert [(b.type, b.name, b.input) for b in answer.content] == [("tool_use", "get", {"city": "Rome"})] and answer.stop_reason == "tool_use"
    assert scripted.sent("Admit")[-1]["grammar"][0] == "json_schema"


def test_an_output_format_is_a_grammar(scripted: Runtime) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    post(scripted, **ask('say:{"a":1}', output_config={"format": {"type": "json_schema", "schema": schema}}))
    grammar = scripted.sent("Admit")[-1]["grammar"]
    assert grammar[0] == "json_schema" and json.loads(grammar[1]) == schema


def test_thinking_is_asked_of_the_template_and_may_be_hidden(claude: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    options: Any = ask(said("<think>secret</think>open"), max_tokens=1200, thinking=thinking)
    plain = claude.messages.create(**options)
    with claude.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    for answer in (plain, streamed):
        assert [(b.type, getattr(b, "thinking", getattr(b, "text", None))) for b in answer.content] == [("thinking", ""), ("text", "open")]
    assert plain.usage.output_tokens_details is not None and plain.usage.output_tokens_details.thinking_tokens > 0


def test_a_model_that_does_not_reason_refuses_thinking(computing: Runtime) -> None:
    client = anthropic.Anthropic(base_url=computing.data, api_key=KEY, max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match="does not reason"):
        client.messages.create(**ask("x", max_tokens=1500, thinking={"type": "enabled", "budget_tokens": 1024}))
    assert client.messages.create(**ask("x", max_tokens=3, thinking={"type": "adaptive"})).usage.output_tokens > 0


def test_a_wrong_key_is_refused_in_the_apis_shape(computing: Runtime) -> None:
    with pytest.raises(anthropic.AuthenticationError) as error:
        anthropic.Anthropic(base_url=computing.data, api_key="another-key", max_retries=0).messages.create(**ask("x"))
    assert error.value.type == "authentication_error"


def turn(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"temperature": 1.5}, "temperature is 1.5: a number from 0 to 1 is allowed"),
    ({"top_k": -1}, "top_k is -1"),
    ({"messages": []}, "messages is a list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (turn({"type": "image", "source": {}}), 'messages[0].content[0].type is "image"; this server takes only text'),
    (turn({"type": "tool_result", "tool_use_id": "nosuch"}), "messages[0].content[0].tool_use_id"),
    (turn({"type": "text", "text": "x", "citations": [{}]}), "citations is not an option"),
    (turn({"type": "tool_use", "id": "a", "name": "get", "input": {}}, role="assistant"), "a tool_result for each is needed"),
    (turn({"type": "tool_use", "id": "a", "name": "get", "input": "{}"}, role="assistant"), 'input is "{}"; an object is needed'),
    (turn({"type": "redacted_thinking", "data": "x"}, role="assistant"), "redacted_thinking"),
    ({"system": 3}, "system is 3"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type is \"web_search_20250305\""),
    ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name is \"a b\""),
    ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice is 'any', but there are no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name is 'b'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens is 1024"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"output_config": {"effort": "max"}}, "output_config.effort is \"max\""),
    ({"mcp_servers": []}, "mcp_servers is not an option"),
    ({"n": 2}, "n is not an option"),
    ({"priority": 2}, "priority is an internal option"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BAD)
def test_what_cannot_be_done_is_refused_by_name(scripted: Runtime, change: dict[str, Any], words: str) -> None:
    answer = post(scripted, **ask("say:x") | change)
    told = answer.json()
    assert answer.status_code == 400 and told["type"] == "error" and told["error"]["type"] == "invalid_request_error", answer.text
    assert words in told["error"]["message"] and told["request_id"] == answer.headers["x-request-id"]
    assert "function" not in told["error"]["message"], "it speaks of another API"


def test_errors_have_the_apis_types_also_where_no_endpoint_is_reached(claude: anthropic.Anthropic, scripted: Runtime) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(**ask("x") | {"model": "nosuch"})
    assert missing.value.type == "not_found_error" and "tiny" in missing.value.message
    with pytest.raises(anthropic.RateLimitError) as full:
        claude.messages.create(**ask("fail:queue_full"))
    assert full.value.type == "rate_limit_error"
    told = {
        "there is no such path": HTTP.post(scripted.data + "/v1/messages/batches", json={}),
        "wrong method": HTTP.get(scripted.data + "/v1/messages"),
        "no JSON": HTTP.post(scripted.data + "/v1/messages", content=b"{"),
        "internal header": HTTP.post(scripted.data + "/v1/messages", json=ask("x"), headers={"X-Radixfleet-Rid": "0" * 32}),
    }
    for what, answer in told.items():
        assert answer.json()["type"] == "error" and answer.json()["request_id"] == answer.headers["x-request-id"], what


def test_a_failure_in_a_stream_is_an_error_event(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="the device failed"):
        list(claude.messages.create(**ask("break:2"), stream=True))


def test_routed_requests_bring_their_ids_and_headers(scripted: Runtime) -> None:
    body = json.dumps(ask("x")).encode()
    ids = list(b"say:routed")
    headers = {
        "Content-Type": "application/vnd.radixfleet.ids", "X-Radixfleet-Json-Length": str(len(body)), "X-Radixfleet-Rid": "ab" * 16,
        "X-Radixfleet-Model-Revision": scripted.record()["modelRevision"], "X-Radixfleet-Pick": "r:3",
    }  # fmt: skip
    answer = HTTP.post(scripted.internal + "/v1/messages", content=body + b"".join(i.to_bytes(4, "little") for i in ids), headers=headers)
    assert answer.json()["content"] == [{"type": "text", "text": "routed"}] and answer.json()["id"] == "msg_" + "ab" * 16
    assert (scripted.sent("Admit")[-1]["ids"], scripted.sent("Admit")[-1]["pick"]) == (ids, 3)


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_a_prefill_leg_answers_as_in_any_dialect(scripted: Runtime, path: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": ask("x")["messages"]} | ({"max_tokens": 5} if path == "/v1/messages" else {})
    rid = {"/v1/messages": "cd", "/api/chat": "ef"}[path] * 16
    headers = {"X-Radixfleet-Rid": rid, "X-Radixfleet-Leg": "prefill", "X-Radixfleet-Room": "7"}
    answer = HTTP.post(scripted.internal + path, json=body, headers=headers)
    sent = scripted.sent("Admit")[-1]
    assert answer.json() == {"rid": rid, "cached_tokens": 16, "prompt_tokens": len(sent["ids"])}
    assert (sent["leg"], sent["room"]) == ("prefill", 7)
