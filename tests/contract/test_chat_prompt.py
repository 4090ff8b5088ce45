"""From a chat body to its prompt: the same as transformers makes of the same template, and the same in router and runtime."""

import copy
import json
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fleet_text.chat import CHAT_FIELDS, PromptError, chat_inputs
from fleet_text.prompt import PromptEncoder, TokenizerFilesError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "[INST]", "[/INST]", "[TOOL_CALLS]"]

# Shapes of public templates, in words of our own.
HERMES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\nCall as <tool_call>{...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (m.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' }}{% if m.content %}{{ m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}
<|im_start|>system

Today is {{ date }}.
{% if tools is not none %}
Answer with JSON to call: {% for t in tools %}{{ t | tojson(indent=4) }}
{% endfor %}
{%- endif %}
<|eot|>
{%- for message in messages %}
    {%- if message.role in ['tool', 'ipython'] %}
        {{- '<|im_start|>ipython\\n\\n' }}{{ message.content | tojson if message.content is mapping else message.content }}{{ '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot|>' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}
        {%- if tools is not none and loop.last %}{{ '[TOOLS] [' }}{% for t in tools %}{{ t.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}{% endif %}
        {{- '[INST] ' + m['content'] + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson }}{% endfor %}{{ ']' + eos_token }}
    {%- elif m['role'] == 'assistant' %}
        {%- generation %}{{ ' ' + m['content'] | trim + eos_token }}{% endgeneration %}
    {%- elif m['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m['content'] + ', "call_id": "' + m.tool_call_id + '"}' }}
    {%- else %}{{ raise_exception('only user, assistant and tool') }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501
QWEN_THINKING = """\
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n' }}{% if loop.last or thought %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}{{ content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""  # noqa: E501
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN_THINKING}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Wetter <für> 'Köln' & \"Bonn\"",
     "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1.0}},
     "required": ["city"]}}},
    {"type": "function", "function": {"name": "f"}},
]  # fmt: skip
USER = {"role": "user", "content": "Wie ist das Wetter? 😀"}


def call(arguments: Any = '{"city": "Köln", "days": 2}', id: str = "abcdefghi") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER],
    "turns": [USER, {"role": "assistant", "content": " Gut. "}, {"role": "user", "content": "Und morgen?"}],
    "call": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "42"},
        USER,
    ],
    "reasoned": [USER, {"role": "assistant", "content": "Ja.", "reasoning_content": "Hm\n"}, {"role": "user", "content": "Gut", "name": "Bob"}],
}


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTES)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return made


def encoder(template: Any) -> PromptEncoder:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    return PromptEncoder({"tokenizer.json": tokenizer().to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()})


@pytest.fixture(scope="module")
def oracle() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token="<s>", eos_token="</s>")


def as_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What transformers wants to be given: arguments as objects."""
    out = copy.deepcopy(messages)
    for m in out:
        for c in m.get("tool_calls") or ():
            c["function"]["arguments"] = json.loads(c["function"]["arguments"])
    return out


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_that_of_transformers(oracle: Any, name: str, chat: str, tools: Any) -> None:
    body = {"messages": CHATS[chat], "tools": tools, "chat_template_kwargs": {"date": "1 May 2026"}}
    options = {"tools": tools, "chat_template": TEMPLATES[name], "add_generation_prompt": True, "date": "1 May 2026"}
    expected = oracle.apply_chat_template(as_objects(CHATS[chat]), tokenize=False, **options)
    made = encoder(TEMPLATES[name])
    assert made.render_chat(chat_inputs(body)) == expected
    assert made.encode_inputs(chat_inputs(body)) == oracle(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", ["Es ist", "Es {{ ist", "<think>\nx", "a\nb", "42 😀"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_continued_message_ends_the_prompt_as_in_transformers(oracle: Any, name: str, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": text}]
    inputs = chat_inputs({"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"date": "x"}})
    rendered = encoder(TEMPLATES[name]).render_chat(inputs)
    assert inputs.continued == text and rendered.endswith(text)
    assert rendered == oracle.apply_chat_template(messages, tokenize=False, chat_template=TEMPLATES[name], continue_final_message=True, date="x")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_continued_message_keeps_the_space_at_its_end_whatever_the_template_trims(name: str) -> None:
    for text in ("Answer: ", "List:\n\n", "  Indented "):
        body = {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": text}]}], "continue_final_message": True}
        assert encoder(TEMPLATES[name]).render_chat(chat_inputs(body)).endswith(text.lstrip())


def test_a_template_that_drops_or_changes_the_end_cannot_continue_it() -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "Hello there"}], "continue_final_message": True}
    for template, words in (
        ("{{ messages[0].content }}", "leaves out"),
        ("{{ messages[1].content[:4] }}", "leaves out"),
        ("{{ messages[1].content | upper }}", "leaves out|changes"),
    ):
        with pytest.raises(PromptError, match=words) as e:
            encoder(template).render_chat(chat_inputs(body))
        assert e.value.param == "messages[1].content"
    with pytest.raises(PromptError, match="changes"):
        encoder("{{ messages[1].content | replace('there', 'you') }}").render_chat(chat_inputs(body))


def test_variables_of_the_request_reach_the_template() -> None:
    made = encoder(QWEN_THINKING)
    assert made.render_chat(chat_inputs({"messages": [USER]})).endswith("assistant\n")
    off = chat_inputs({"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}})
    assert made.render_chat(off).endswith("<think>\n\n</think>\n\n")
    bare = chat_inputs({"messages": [USER], "add_generation_prompt": False})
    assert made.render_chat(bare).endswith("<|im_end|>\n")


def test_the_date_is_one_for_the_whole_prompt_and_given_by_the_caller() -> None:
    made = encoder(
        "{{ strftime_now('%S.%f') }} {% macro m() %}{{ strftime_now('%S.%f') }}{% endmacro %}{% for i in range(2000) %}{% endfor %}{{ m() }}"
    )
    first, second = made.render_chat(chat_inputs({"messages": [USER]})).split()
    assert first == second
    assert encoder(LLAMA).render_chat(chat_inputs({"messages": [USER]}), datetime(2024, 7, 26, tzinfo=UTC)).count("26 Jul 2024") == 1


def test_an_error_of_the_template_names_its_line() -> None:
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (MISTRAL, {"messages": [{"role": "system", "content": "x"}]}, r"only user, assistant and tool \(line 12 of the template\)"),
        ("a\n{{ messages[0].content.nosuch.deeper }}", {"messages": [USER]}, r"\(line 2 of the template\)"),
        ("\n\n{{ 1 / (messages | length - 1) }}", {"messages": [USER]}, r"zero.*\(line 3 of the template\)"),
        ("{{ messages[0].content + 5 }}", {"messages": [USER]}, r"\(line 1 of the template\)"),
        ("{{ messages[0].__class__.__mro__[1].__subclasses__() }}", {"messages": [USER]}, "unsafe|access"),
        ("{{ range(999999999) | list }}", {"messages": [USER]}, r"\(line 1 of the template\)"),
    ]
    for template, body, words in bodies:
        with pytest.raises(PromptError, match=words):
            encoder(template).render_chat(chat_inputs(body))
    with pytest.raises(TokenizerFilesError, match="line 2"):
        encoder("a\n{% if %}")


def test_a_model_with_several_templates_uses_the_one_for_tools() -> None:
    made = encoder([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}])
    assert made.render_chat(chat_inputs({"messages": [USER]})) == "plain"
    assert made.render_chat(chat_inputs({"messages": [USER], "tools": TOOLS})) == "2 tools"
    assert made.render_chat(chat_inputs({"messages": [USER], "tools": TOOLS, "tool_choice": "none"})) == "plain"


def test_a_developers_message_is_a_systems_where_the_template_knows_no_developer() -> None:
    chat = chat_inputs({"messages": [{"role": "developer", "content": "Be short."}, USER]})
    assert encoder(HERMES).render_chat(chat).startswith("<|im_start|>system\nBe short.")
    assert encoder("{{ messages[0].role }}{# developer #}").render_chat(chat) == "developer"


def test_messages_are_read_as_clients_send_them() -> None:
    """C80: calls with null content, tool content in parts, empty tool_calls; C64: fields that no template needs."""
    messages = [
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "id": 7},
        {"role": "assistant", "tool_calls": [call("{}"), call("no json"), call("[1]"), call(""), call({"a": 1})]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "reasoning": "Hm", "audio": None},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    got = list(chat_inputs({"messages": messages}).messages)
    assert got[0] == {"role": "user", "name": "bob", "content": "ab"}
    assert [c["function"]["arguments"] for c in got[1]["tool_calls"]] == [{}, "no json", "[1]", {}, {"a": 1}] and "content" not in got[1]
    assert got[2] == {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert got[3] == {"role": "assistant", "content": "x", "reasoning_content": "Hm"}
    assert got[4] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"), ({"messages": None}, "messages"), ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"), ({"messages": [{}]}, "messages[0].role"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0].content"),
        ({"messages": [USER], "tools": {}}, "tools"), ({"messages": [USER], "tools": ["x"]}, "tools"),
        ({"messages": [USER], "continue_final_message": 1}, "continue_final_message"),
        ({"messages": [USER], "add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"messages": [USER], "continue_final_message": True}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True, "add_generation_prompt": True},
         "add_generation_prompt"),
        ({"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [call()]}], "continue_final_message": True}, "messages[0].content"),
        ({"messages": [USER], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"messages": [USER], "chat_template_kwargs": {"bos_token": 5}}, "chat_template_kwargs.bos_token"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused_with_its_path(body: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptError, match=re.escape(param.partition("[")[0])) as e:
        chat_inputs(body)
    assert e.value.param == param


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda i: st.lists(i, max_size=3) | st.dictionaries(TEXT, i, max_size=3),
    max_leaves=6,
)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]), "content": st.none() | TEXT | PARTS},
    optional={"name": TEXT, "tool_calls": st.just([call()]) | st.none() | ANY, "tool_call_id": TEXT,
              "reasoning_content": TEXT | st.none(), "other": ANY},
)  # fmt: skip
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3)},
    optional={"tools": st.none() | st.lists(st.dictionaries(TEXT, ANY, max_size=2), max_size=2),
              "tool_choice": st.sampled_from([None, "none", "auto"]),
              "continue_final_message": st.sampled_from([None, True, False]), "add_generation_prompt": st.sampled_from([None, True, False]),
              "chat_template_kwargs": st.none() | st.dictionaries(TEXT, ANY, max_size=2), "temperature": ANY},
)  # fmt: skip
EVERYTHING = encoder(
    "{{ messages | tojson }}{{ tools | tojson }}{{ add_generation_prompt }}"
    "{% if messages | length and messages[-1].content %}{{ messages[-1].content }}{% endif %}"
)


@given(BODY, st.booleans())
def test_the_router_and_the_runtime_read_one_body_to_one_prompt(body: dict[str, Any], ascii_only: bool) -> None:
    """The router decodes with msgspec only the fields that are there; the runtime has the whole body from `json`."""
    data = json.dumps(body, ensure_ascii=ascii_only).encode()
    raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])

    def prompt(fields: dict[str, Any]) -> tuple[str, str]:
        try:
            return "prompt", EVERYTHING.render_chat(chat_inputs(fields))
        except PromptError as e:
            return "refused", f"{e.param}: {e}"

    got = prompt({name: msgspec.json.decode(raw[name]) for name in CHAT_FIELDS if name in raw}), prompt(json.loads(data))
    if body.get("continue_final_message") and got[0][0] == "prompt":  # the first copy of the text has a mark that differs
        got = (got[0][0], re.sub("\ue000\\w+\ue000", "", got[0][1])), (got[1][0], re.sub("\ue000\\w+\ue000", "", got[1][1]))
    assert got[0] == got[1]
