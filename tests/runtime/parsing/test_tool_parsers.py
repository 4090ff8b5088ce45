"""Tool calls of every format: exact for every split of the text, as early as possible, and no text is ever lost."""

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet_runtime.server.parsing.events import ContentDelta, Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from fleet_runtime.server.parsing.output import Collected, OutputParser, output_parser
from fleet_runtime.server.parsing.registry import OutputFormat
from fleet_runtime.server.parsing.tools import ToolRequest, tool_request

PARAMETERS = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"}, "s": {"type": "string"}, "o": {"type": "object"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "either": {"type": ["integer", "string"]}, "pick": {"enum": [1, 2]},
    },
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": n, "parameters": PARAMETERS}} for n in ("f", "get_weather", "get_time")]
ASKED = tool_request({"tools": TOOLS})
FORMATS = ("hermes", "llama3", "mistral", "qwen_coder", "required", "named")


def parser(format: str, asked: ToolRequest | None = None) -> OutputParser:
    count = itertools.count()
    if format == "required":
        asked = tool_request({"tools": TOOLS, "tool_choice": "required"})
    elif format == "named":
        asked = tool_request({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}})
    known = format if format not in ("required", "named") else "hermes"
    return output_parser(OutputFormat(known), asked or ASKED, new_id=lambda: f"call_{next(count)}")


def joined(events: list[Event]) -> list[Event]:
    """With neighbouring deltas of one kind made one."""
    out: list[Any] = []
    for e in events:
        last = out[-1] if out else None
        if isinstance(e, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + e.text)
        elif isinstance(e, ToolCallArguments) and isinstance(last, ToolCallArguments) and e.index == last.index:
            out[-1] = ToolCallArguments(e.index, last.delta + e.delta)
        else:
            out.append(e)
    return out


def events_of(p: OutputParser, pieces: list[str]) -> list[Event]:
    return [e for piece in pieces for e in p.feed(piece)] + p.finish()


def cut(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({c for c in cuts if 0 < c < len(text)})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def collect(format: str, text: str, asked: ToolRequest | None = None) -> tuple[str | None, list[tuple[str, str, bool]], str]:
    p, c = parser(format, asked), Collected()
    c.add(p.feed(text))
    c.add(p.finish())
    return c.content, [(call.name, call.arguments, call.complete) for call in c.calls], p.finish_reason("stop")


W = '{"city": "Köln }</tool_call>[TOOL_CALLS];\\"<tool_call>", "l": [{"a": [1, -2.5e3, null]}, "\\u00e9\\\\"]}'
EXAMPLES = [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {W}}}\n</tool_call>', None, [("f", W, True)]),
    ("hermes", f'Sure.\n<tool_call>{{"arguments":{W},"name":"f"}}</tool_call>', "Sure.\n", [("f", W, True)]),
    ("hermes", '\n\n<tool_call>{"name":"f"}</tool_call>\n<tool_call>{"name":"f","arguments":null}</tool_call>\n', None, [("f", "{}", True)] * 2),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}', True)]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}</tool_call>ok', "ok", [("f", '{"a":1}', True)]),  # a brace is missing
    ("hermes", '<tool_call>{"name":"f","arguments":{}}}</tool_call>', "}", [("f", "{}", True)]),  # one too many
    ("hermes", '<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"f","arguments":{}}', None, [("f", "{}", True)] * 2),
    ("llama3", f'{{"name": "f", "parameters": {W}}}', None, [("f", W, True)]),
    ("llama3", f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {W}}}', None, [("f", W, True)]),
    ("llama3", f' {{"name":"f","parameters":{{}}}} ; {{"name":"get_time","arguments":{W}}}', None, [("f", "{}", True), ("get_time", W, True)]),
    ("llama3", 'Hm. <|python_tag|>{"name":"f","parameters":{}}', "Hm. ", [("f", "{}", True)]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {W}}}, {{"name": "get_time", "arguments": {{}}}}]',
     None, [("f", W, True), ("get_time", "{}", True)]),
    ("mistral", f'[TOOL_CALLS]f[ARGS]{W}[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{{}}', None, [("f", W, True), ("get_time", "{}", True)]),
    ("mistral", "Ok[TOOL_CALLS]f{}, then", "Ok, then", [("f", "{}", True)]),
    ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=s>" +
     "\na \"b\"\n\n</x\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
     None, [("f", '{"s": "a \\"b\\"\\n\\n</x", "n": 5}', True)]),
    ("qwen_coder", "<function=f></function>\nDone", "\nDone", [("f", "{}", True)]),
    ("required", f'[{{"name": "f", "parameters": {W}}}, {{"name":"get_time","parameters":{{}}}}]', None, [("f", W, True), ("get_time", "{}", True)]),
    ("named", W, None, [("f", W, True)]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "calls"), EXAMPLES)
def test_a_call_is_read_as_the_model_wrote_it(format: str, text: str, content: str | None, calls: list[Any]) -> None:
    assert collect(format, text) == (content, calls, "tool_calls")


@pytest.mark.parametrize(("format", "text", "content", "calls"), EXAMPLES)
def test_every_split_into_two_and_into_characters_says_the_same(format: str, text: str, content: Any, calls: Any) -> None:
    whole = joined(events_of(parser(format), [text]))
    assert joined(events_of(parser(format), list(text))) == whole
    for at in range(1, len(text)):
        assert joined(events_of(parser(format), [text[:at], text[at:]])) == whole


@pytest.mark.parametrize(("format", "text", "content", "calls"), EXAMPLES)
def test_a_cut_answer_says_the_same_for_every_split_and_never_calls_a_part_complete(format: str, text: str, content: Any, calls: Any) -> None:
    for end in range(len(text)):
        p = parser(format)
        events = joined(events_of(p, [text[:end]]))
        assert joined(events_of(parser(format), list(text[:end]))) == events
        c = Collected()
        c.add(events)
        for call in c.calls:
            if call.complete:
                json.loads(call.arguments)
        assert all(call.complete for call in c.calls) or p.finish_reason("stop") == "length"
        assert p.finish_reason("length") == "length"
        starts, ends = [e for e in events if isinstance(e, ToolCallStart)], [e for e in events if isinstance(e, ToolCallEnd)]
        assert [s.index for s in starts] == [e.index for e in ends] == list(range(len(starts)))


PIECES = st.sampled_from([
    "<tool_call>", "</tool_call>", "<tool", "\n", " ", '{"name": "f", "arguments": {"a": "', '"}}', "<|python_tag|>", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]",
    "f", "get_", "get_weather", '"', "\\", "{", "}", "[", "]", ",", ";", ":", '{"name":', '"f"', '"g"', '"arguments":', '"parameters":',
    '{"a":1}', "null", "12",
    "<function=", "f>", "</function>", "<parameter=", "s>", "n>", "</parameter>", "<think>", "</think>", "é😀", "x",
])  # fmt: skip
NOISE = st.lists(PIECES, max_size=16).map("".join)


@given(st.sampled_from(FORMATS), NOISE, st.lists(st.integers(1, 120), max_size=8))
@settings(max_examples=1500, deadline=None)
@example("llama3", '{"extra": 1, "name": "f"}', [3])
@example("mistral", '[TOOL_CALLS] [{"name":"g"}, {"name":"f"}]', [20])
def test_no_split_of_any_text_changes_what_is_said(format: str, text: str, cuts: list[int]) -> None:
    whole = joined(events_of(parser(format), [text]))
    assert joined(events_of(parser(format), cut(text, cuts))) == whole
    assert joined(events_of(parser(format), list(text))) == whole


@given(st.sampled_from(FORMATS), NOISE)
@settings(max_examples=800, deadline=None)
def test_without_a_call_the_text_comes_out_as_it_is(format: str, text: str) -> None:
    events = joined(events_of(parser(format), [text]))
    if not any(isinstance(e, ToolCallStart) for e in events):
        assert events == ([ContentDelta(text)] if text else [])


@given(st.sampled_from(FORMATS), NOISE)
@settings(max_examples=800, deadline=None)
def test_arguments_are_a_json_object_or_the_call_is_not_complete(format: str, text: str) -> None:
    p, c = parser(format), Collected()
    c.add(events_of(p, [text]))
    for call in c.calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    if c.calls:
        assert p.finish_reason("stop") == ("tool_calls" if all(call.complete for call in c.calls) else "length")


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {"a": "<tool_call>"}}\n</tool_call> so'),
        ("hermes", "a <tool_cal l> <tool_call> no json"),
        ("hermes", '<tool_call>{"name": "f" "arguments": }'[:20]),
        ("llama3", '{"answer": {"name": "f"}}'),
        ("llama3", '{"name": "unknown", "parameters": {}}; x'),
        ("llama3", '<|python_tag|>brave_search.call(query="x")'),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral", "[TOOL_CALLS] []"),
        ("qwen_coder", "<tool_call>\n<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("required", "I cannot."),
        ("named", " no"),
    ],
)
def test_what_is_no_call_of_a_known_tool_is_content_as_written(format: str, text: str) -> None:
    assert collect(format, text) == (text, [], "stop")


@pytest.mark.parametrize(
    ("format", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":1,,"b":2}}</tool_call> on', '{"a":1,,"b":2}}', " on"),
        ("hermes", '<tool_call>{"name":"f","arguments":[1]}</tool_call>', "[1]}", None),
        ("hermes", '<tool_call>{"name":"f","arguments":"no json"}</tool_call>', '"no json"}', None),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a', '"{\\"a', None),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":"two\nlines"}}</tool_call>', '{"a":"two\nlines"}}', None),
        ("llama3", '{"name":"f","parameters":{"a":tru3}}', '{"a":tru3}}', None),
        ("mistral", "[TOOL_CALLS]f[ARGS]nothing", "nothing", None),
        ("named", '{"a" 1}', '{"a" 1}', None),
    ],
)
def test_broken_json_of_a_begun_call_loses_nothing_and_is_not_complete(format: str, text: str, arguments: str, content: str | None) -> None:
    assert collect(format, text) == (content, [("f", arguments, False)], "length")


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"'),
        ("llama3", '{"name": "f"'),
        ("mistral", '[TOOL_CALLS] [{"name": "f"'),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("qwen_coder", "<tool_call>\n<function=f>"),
        ("required", '[{"name": "f"'),
        ("named", "{"),
    ],
)
def test_a_call_starts_as_soon_as_its_name_is_complete(format: str, text: str) -> None:
    p = parser(format)
    before = [e for c in text[:-1] for e in p.feed(c)]
    assert not [e for e in before if isinstance(e, ToolCallStart)]
    assert ToolCallStart(0, "call_0", "f") in p.feed(text[-1])


def test_arguments_stream_character_by_character() -> None:
    p = parser("hermes")
    p.feed('<tool_call>{"name": "f", "arguments": ')
    for c in W:
        assert p.feed(c) == [ToolCallArguments(0, c)]
    p = parser("qwen_coder")
    p.feed("<function=f><parameter=s>")
    assert p.feed("\n") == []  # belongs to the tag
    for c in "text":
        assert p.feed(c) == [ToolCallArguments(0, c)]
    assert p.feed("\n") == []  # may belong to the close tag
    assert p.feed("x") == [ToolCallArguments(0, "\\nx")]


@pytest.mark.parametrize(
    ("format", "pieces", "outs"),
    [
        (
            "hermes",
            ["a<", "b", "<tool", "_x", "<tool_call>", "{", '"', "a", '"', ":1", "}z"],
            ["a", "<b", "", "<tool_x", *[""] * 6, '<tool_call>{"a":1}z'],
        ),
        ("hermes", ["<tool_call>", "x"], ["", "<tool_call>x"]),
        ("hermes", ["<tool_call>", '{"name": "', "get_", "x"], ["", "", "", '<tool_call>{"name": "get_x']),
        ("llama3", ["Hi {"], ["Hi {"]),
        ("llama3", ["{", '"', "na", "o"], ["", "", "", '{"nao']),
        ("mistral", ["[", "1]", "[TOOL_CALLS]", "g", "et_", "out"], ["", "[1]", "", "", "", "[TOOL_CALLS]get_out"]),
        ("qwen_coder", ["<func", "y", "<function=", "x"], ["", "<funcy", "", "<function=x"]),
    ],
)
def test_text_that_resembles_markup_is_held_no_longer_than_it_does(format: str, pieces: list[str], outs: list[str]) -> None:
    p = parser(format)
    got = ["".join(e.text for e in p.feed(piece) if isinstance(e, ContentDelta)) for piece in pieces]
    assert got == outs


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("n", "5", 5), ("n", " 5 ", 5), ("n", "five", "five"), ("n", "5.5", "5.5"), ("x", "1", 1), ("x", "1.5e3", 1500.0), ("b", "true", True),
        ("b", "True", True), ("b", "no", "no"), ("n", "null", None), ("s", "5", "5"), ("s", "null", "null"), ("s", "", ""),
        ("s", "\n", ""), ("s", "\na\n", "\na\n"),
        ("o", '{"a": [1]}', {"a": [1]}), ("o", "{'a'}", "{'a'}"), ("maybe", "null", None), ("maybe", "x", "x"), ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", '"5"', '"5"'), ("pick", "2", 2), ("unheard", "2", "2"),
    ],
)  # fmt: skip
def test_qwen_coder_values_have_the_type_of_the_schema(key: str, written: str, read: object) -> None:
    body = f"<tool_call>\n<function=f>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    if written in ("", "\n"):
        body = f"<tool_call>\n<function=f>\n<parameter={key}>{written}\n</parameter>\n</function>\n</tool_call>"
    (call,) = collect("qwen_coder", body)[1]
    assert json.loads(call[1]) == {key: read} and type(json.loads(call[1])[key]) is type(read)


@given(
    st.dictionaries(st.sampled_from("s maybe other".split()), st.text(st.characters(exclude_categories=["Cs"])).filter(lambda t: "</param" not in t))
)
@settings(deadline=None)
def test_qwen_coder_texts_come_back_exactly(values: dict[str, str]) -> None:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    (call,) = collect("qwen_coder", f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")[1]
    got = json.loads(call[1])
    assert got == {k: (None if k == "maybe" and v.strip(" \t\r\n") in ("null", "None") else v) for k, v in values.items()}


@pytest.mark.parametrize("format", FORMATS)
def test_twice_the_answer_costs_about_twice_the_time(format: str) -> None:
    """Eight times as long: linear is 8, quadratic 64. Text, many calls, and one long call; by single characters and at once."""
    one = {
        "hermes": EXAMPLES[0],
        "llama3": EXAMPLES[7],
        "mistral": EXAMPLES[12],
        "qwen_coder": EXAMPLES[14],
        "required": EXAMPLES[16],
        "named": EXAMPLES[17],
    }
    call = one[format][1]
    long_json = json.dumps({"k": ["word {} \\ " * 4] * 40})
    long_call = {
        "hermes": f'<tool_call>{{"name":"f","arguments":{long_json * 1}}}</tool_call>', "llama3": f'{{"name":"f","parameters":{long_json}}}',
        "mistral": f"[TOOL_CALLS]f[ARGS]{long_json}", "qwen_coder": f"<function=f><parameter=s>{long_json}</parameter></function>",
        "required": f'[{{"name":"f","parameters":{long_json}}}]', "named": long_json,
    }[format]  # fmt: skip
    for text in (call * 4, long_call, "<tool_call> [TOOL_CALLS]<|python_tag|><function= <" * 30, " \n" * 500):

        def seconds(times: int, *, whole: bool, text: str = text) -> float:
            best = 1e9
            for _ in range(3):
                p = parser(format)
                began = time.process_time()
                for piece in [text * times] if whole else text * times:
                    p.feed(piece)
                p.finish()
                best = min(best, time.process_time() - began)
            return best

        for whole in (True, False):
            assert seconds(8, whole=whole) < 24 * seconds(1, whole=whole) + 0.005


def test_only_one_call_is_let_through_when_parallel_calls_are_refused() -> None:
    asked = tool_request({"tools": TOOLS, "parallel_tool_calls": False})
    text = 'a<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"get_time","arguments":{}}</tool_call> b'
    assert collect("hermes", text, asked) == ("a", [("f", "{}", True)], "tool_calls")
    p = parser("hermes", asked)
    end = text.index("}}") + 2
    p.feed(text[: end - 1])
    assert not p.wants_end
    p.feed(text[end - 1 : end])
    assert p.wants_end


def test_without_tools_markup_is_just_text() -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        assert collect("hermes", EXAMPLES[0][1], tool_request(body)) == (EXAMPLES[0][1], [], "stop")


def test_a_finished_parser_says_nothing_twice() -> None:
    p = parser("hermes")
    p.feed("a <tool")
    assert p.finish() == [ContentDelta("<tool")]
    assert p.finish() == []


def test_ids_are_like_openais_and_like_mistrals() -> None:
    for known, text, size in (("hermes", EXAMPLES[0][1], 29), ("mistral", EXAMPLES[11][1], 9)):
        p, c = output_parser(OutputFormat(known), ASKED), Collected()
        c.add(events_of(p, [text]))
        assert {len(call.id) for call in c.calls} == {size} and len({call.id for call in c.calls}) == len(c.calls)
    c = Collected()
    c.add(events_of(parser("mistral"), [EXAMPLES[12][1]]))
    assert [call.id for call in c.calls] == ["call_0", "abcdefghi"]  # the model's own id is kept


@pytest.mark.parametrize("reason", ["length", "abort", "error", "content_filter"])
def test_another_reason_than_stop_stays(reason: str) -> None:
    p = parser("hermes")
    events_of(p, [EXAMPLES[0][1]])
    assert p.finish_reason(reason) == reason
