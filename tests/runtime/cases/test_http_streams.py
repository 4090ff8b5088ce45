"""Cases of part runtime-http about streams, stops and text. SELF-CAL ones run against the real scheduler, whose text nobody chose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_testing.http_cases import CHAT, COMP, alive, body, chunks, post, refused, text_of, worker
from fleet_testing.runtime import Runtime


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with worker(tmp_path_factory.mktemp("streams")) as runtime:
        runtime.wait_ready()
        with alive(runtime):
            yield runtime


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with worker(tmp_path_factory.mktemp("scripted"), fake=True) as runtime:
        yield runtime.wait_ready()


def calibrated(runtime: Runtime, path: str, seed: int = 0, **options: Any) -> tuple[dict[str, Any], str]:
    """Options of a deterministic request, and its text T."""
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 60, **options}
    if path == CHAT:
        given["messages"] = [{"role": "user", "content": f"calibrate {seed}"}]
    else:
        given["prompt"] = f"calibrate {seed}"
    choice = post(runtime, path, body(path, **given)).json()["choices"][0]
    return given, choice["message"]["content"] if path == CHAT else choice["text"]


@pytest.mark.case("C68")
@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize("usage", [True, False, None, "absent", "null"])
def test_usage_comes_once_at_the_end_if_asked(runtime: Runtime, path: str, usage: bool | str | None) -> None:
    """Red with `usage` in each chunk (`continuous_usage` for `include_usage` in `shape._event`)."""
    options: dict[str, Any] = {"stream": True}
    if usage != "absent":
        options["stream_options"] = None if usage == "null" else {"include_usage": usage}
    got = chunks(runtime, path, body(path, temperature=0, **options))
    plain = post(runtime, path, body(path, temperature=0)).json()["usage"]
    if usage is not True:
        assert all(c["choices"] for c in got) and not any(c.get("usage") for c in got)
        return
    assert got[-1]["choices"] == [] and all(c["choices"] and c["usage"] is None for c in got[:-1])
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [got[-1]["usage"][n] for n in counts] == [plain[n] for n in counts]


@pytest.mark.case("C68")
def test_stream_options_are_for_streams(runtime: Runtime) -> None:
    """And an unknown one is refused."""
    refused(post(runtime, CHAT, body(stream_options={"include_usage": True})), "stream: true", param="stream_options")
    refused(post(runtime, COMP, body(COMP, stream=True, stream_options={"nosuch": True})), param="stream_options.nosuch")


@pytest.mark.case("C70")
@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize("end", ["length", "stop string", "stop id", "both at once"])
@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_ends_once_after_all_its_content(runtime: Runtime, path: str, end: str, n: int) -> None:
    """Red with a second finish chunk in `ChatShape.chunks` and `CompletionShape.chunks`."""
    given, text = calibrated(runtime, path)
    stops: dict[str, dict[str, Any]] = {
        "length": {},
        "stop string": {"stop": [text[20:23]]},
        "stop id": {"stop_token_ids": [ord(text[10])]},
        "both at once": {"stop": [text[:6]], "max_tokens": 6},
    }
    got = chunks(runtime, path, body(path, **given | stops[end] | {"stream": True, "n": n}))
    for index in range(n):
        choices = [c for chunk in got for c in chunk["choices"] if c["index"] == index]
        finishes = [c["finish_reason"] for c in choices if c["finish_reason"]]
        assert finishes == ["length" if end == "length" else "stop"] and choices[-1]["finish_reason"]


@pytest.mark.case("C71")
@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize(("start", "end"), [(5, 25), (0, 3), (1, 2), (30, 60)])
def test_nothing_of_a_stop_that_spans_tokens_is_sent(runtime: Runtime, path: str, start: int, end: int) -> None:
    """Red with `keep = 0` in `StopFilter.push`: the first part of the stop goes out.

    A stop that starts inside a token: see tests/runtime/detokenizer."""
    given, text = calibrated(runtime, path)
    stop = text[start:end]
    cut = text[: text.find(stop)]
    got = chunks(runtime, path, body(path, **given, stop=[stop], stream=True))
    assert text_of(got) == cut and got[-1]["choices"][0]["finish_reason"] == "stop"
    plain = post(runtime, path, body(path, **given, stop=stop)).json()
    assert (plain["choices"][0]["message"]["content"] if path == CHAT else plain["choices"][0]["text"]) == cut
    assert plain["usage"]["completion_tokens"] == text.find(stop) + len(stop), "a token a character here: it ends with the one that completed it"


@pytest.mark.case("C73")
@pytest.mark.parametrize("path", [CHAT, COMP])
def test_what_was_held_for_a_stop_that_never_came_is_not_lost(runtime: Runtime, path: str) -> None:
    """Red with `StopFilter.flush` returning nothing. Held are only real beginnings: each chunk but the held ones comes with its token."""
    given, text = calibrated(runtime, path)
    for stop in (text[30] + "\x00ZZZ", text[-10:] + "\x00", text[:50] + "\x00" * 1950, "\x00" * 2000):
        got = chunks(runtime, path, body(path, **given, stop=[stop], stream=True))
        assert text_of(got) == text and got[-1]["choices"][0]["finish_reason"] == "length"
    never = chunks(runtime, path, body(path, **given, stop=["\x00" * 2000], stream=True))
    texts = [c["choices"][0]["delta"].get("content", "") if path == CHAT else c["choices"][0]["text"] for c in never]
    assert max(map(len, texts)) == 1, "nothing is held without cause"


@pytest.mark.case("C73")
def test_held_text_passes_the_parsers_at_the_end(scripted: Runtime) -> None:
    """A relative: what the stop filter held is the end of a tool call; it must not come out raw."""
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    options: dict[str, Any] = {
        "tools": tools,
        "messages": [{"role": "user", "content": f"hex:{call.encode().hex()}"}],
        "max_tokens": 99,
        "stop": ["_call>\x00"],
    }
    choice = post(scripted, CHAT, body(**options)).json()["choices"][0]
    assert (choice["message"]["content"], choice["message"]["tool_calls"][0]["function"]["name"]) == (None, "f")


SIGNS = ("😀", "🇫🇷", "👩\u200d👩\u200d👧", "ď", "中", "한", "e\u0301")


@pytest.mark.case("C74")
@pytest.mark.parametrize("path", [CHAT, COMP])
@pytest.mark.parametrize("sign", SIGNS)
def test_a_character_of_several_tokens_is_never_cut(scripted: Runtime, path: str, sign: str) -> None:
    """One byte a token. Red with `_without_open_end` returning the text as it is: U+FFFD in the chunks."""
    prompt = f"say:{sign * 20}"
    given: dict[str, Any] = {"max_tokens": 500} | ({"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt})
    plain = post(scripted, path, body(path, **given)).json()["choices"][0]
    assert (plain["message"]["content"] if path == CHAT else plain["text"]) == sign * 20
    got = chunks(scripted, path, body(path, **given, stream=True))
    assert text_of(got) == sign * 20 and "\ufffd" not in json.dumps(got, ensure_ascii=False)


@pytest.mark.case("C74")
@pytest.mark.parametrize("path", [CHAT, COMP])
def test_a_character_that_max_tokens_cuts_shows_once(scripted: Runtime, path: str) -> None:
    """The forced cut: what is there of the character shows as U+FFFD, streamed as not streamed."""
    prompt = "hex:" + "😀中".encode()[:6].hex()
    given: dict[str, Any] = {"max_tokens": 500} | ({"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt})
    plain = post(scripted, path, body(path, **given)).json()["choices"][0]
    assert (plain["message"]["content"] if path == CHAT else plain["text"]) == "😀\ufffd"
    assert text_of(chunks(scripted, path, body(path, **given, stream=True))) == "😀\ufffd"


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
CALLS = '<tool_call>{"name":"f","arguments":{"a":"é{}"}}</tool_call><tool_call>{"name":"g","arguments":{}}</tool_call>'


@pytest.mark.case("C76")
@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("plain", {}),
        ("aé中😀b", {}),
        ("stopped here", {"stop": ["here"]}),
        (f"look: {CALLS}", {"tools": TOOLS}),
        (CALLS, {"tools": TOOLS}),
        ("a burst of tokens", {}),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_logprobs_are_one_entry_a_token_with_tools_stops_and_bursts(scripted: Runtime, text: str, more: dict[str, Any]) -> None:
    """Red with `_untold` of `ChatShape` dropped: entries of held tokens are lost."""
    prompt = f"hex:{text.encode().hex()}" + " burst:3" * text.startswith("a b")
    messages = [{"role": "user", "content": prompt}]
    options = {"messages": messages, "max_tokens": 400, "logprobs": True, "top_logprobs": 3, "temperature": 0, **more}
    plain = post(scripted, CHAT, body(**options)).json()
    entries = plain["choices"][0]["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == text
    assert len(entries) == plain["usage"]["completion_tokens"] == len(text.encode())
    assert ("tool_calls" in plain["choices"][0]["message"]) == ("tools" in more)
    assert all(len(e["top_logprobs"]) == 3 and e["logprob"] <= 0 for e in entries)
    got = chunks(scripted, CHAT, body(**options, stream=True))
    assert [e for c in got for e in (c["choices"][0]["logprobs"] or {}).get("content", [])] == entries


@pytest.mark.case("C77")
def test_zero_logprobs_mean_the_chosen_token(scripted: Runtime) -> None:
    """Red with `if options.logprobs` for `is not None`."""
    told = post(scripted, COMP, body(COMP, prompt="say:ab", logprobs=0)).json()["choices"][0]["logprobs"]
    assert len(told["token_logprobs"]) == 2 and told["tokens"] == ["a", "b"] and all(len(t) == 1 for t in told["top_logprobs"])
    chat = post(scripted, CHAT, body(logprobs=True, top_logprobs=0)).json()["choices"][0]["logprobs"]["content"]
    assert chat and all(e["top_logprobs"] == [] for e in chat)


@pytest.mark.case("C77")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_gives_the_prompts_logprobs(scripted: Runtime, stream: bool, max_tokens: int) -> None:
    """Red with `prompt_logprobs=-1` in `completion_generation`: no entry for the prompt."""
    options = {"prompt": "A B é", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    if stream:
        got = chunks(scripted, COMP, body(COMP, **options, stream=True))
        text = text_of(got)
        told = {k: [v for c in got for v in c["choices"][0]["logprobs"][k]] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    else:
        choice = post(scripted, COMP, body(COMP, **options)).json()["choices"][0]
        text, told = choice["text"], choice["logprobs"]
    assert text == "A B é" + "a" * max_tokens
    assert len(told["tokens"]) == len("A B é".encode()) + max_tokens
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None and None not in told["token_logprobs"][1:]
    assert told["text_offset"] == [0, 1, 2, 3, 4, 4, 5][: 6 + max_tokens]


@pytest.mark.case("C79")
def test_parallel_calls_have_their_own_index_id_and_arguments(scripted: Runtime) -> None:
    """Accumulated as openai-python does. Red with index 0 for each call in `_delta_of`."""
    options = {"messages": [{"role": "user", "content": f"hex:{CALLS.encode().hex()}"}], "tools": TOOLS, "max_tokens": 400}
    got = chunks(scripted, CHAT, body(**options, stream=True))
    calls: dict[int, dict[str, Any]] = {}
    for chunk in got:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", []):
            call = calls.setdefault(delta["index"], {"ids": [], "names": [], "arguments": ""})
            call["ids"] += [delta["id"]] if "id" in delta else []
            call["names"] += [delta["function"]["name"]] if "name" in delta["function"] else []
            assert isinstance(delta["function"]["arguments"], str)
            call["arguments"] += delta["function"]["arguments"]
    assert sorted(calls) == [0, 1] and all(len(c["ids"]) == len(c["names"]) == 1 for c in calls.values())
    assert calls[0]["ids"] != calls[1]["ids"]
    assert [json.loads(calls[i]["arguments"]) for i in (0, 1)] == [{"a": "é{}"}, {}]
    assert got[-1]["choices"][0]["finish_reason"] == "tool_calls"
    message = post(scripted, CHAT, body(**options)).json()["choices"][0]["message"]
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == [calls[0]["arguments"], calls[1]["arguments"]]


@pytest.mark.case("C79")
def test_a_call_that_is_cut_is_no_call(scripted: Runtime) -> None:
    """A relative: finish is `length`, also where the engine ended by itself with broken JSON."""
    cut = CALLS[:45]
    for options in ({"max_tokens": 30}, {}):
        choice = post(
            scripted,
            CHAT,
            body(**{"messages": [{"role": "user", "content": f"hex:{cut.encode().hex()}"}], "tools": TOOLS, "max_tokens": 400, **options}),
        ).json()["choices"][0]
        assert choice["finish_reason"] in ("length", "stop") and choice["finish_reason"] != "tool_calls"


@pytest.mark.case("C80")
@pytest.mark.parametrize(
    "assistant",
    [
        {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"content": "", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}]},
        {"content": "I call", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "not json"}}]},
        {"content": None, "tool_calls": []},
        {"content": "x", "tool_calls": None},
    ],
    ids=lambda v: json.dumps(v)[:40],
)
def test_histories_with_tool_calls_are_rendered_whole(runtime: Runtime, assistant: dict[str, Any]) -> None:
    """Red with `content: StrictStr` in Message. All messages are in the prompt: its tokens grow with each."""
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "what?"},
        {"role": "assistant", **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "user", "content": "and?"},
    ]
    counts = []
    for length in range(1, 5):
        answer = post(runtime, CHAT, body(messages=history[:length], tools=TOOLS, max_tokens=1))
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usage"]["prompt_tokens"])
    assert counts == sorted(set(counts))
