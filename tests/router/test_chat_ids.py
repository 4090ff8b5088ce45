"""The ids that the router makes of a chat are those that the runtime would make of the same body; what it cannot read it leaves to it."""

import json
import subprocess
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fleet_contract.wire import encode_ids
from fleet_router.api.body import Prompt, parse_body
from fleet_router.api.paths import CHAT, COMPLETIONS, PATHS
from fleet_testing.prompts import read_prompt
from fleet_text.chat import chat_inputs
from fleet_text.prompt import PromptEncoder

TEMPLATE = """\
{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}{{ 'quick' if enable_thinking is defined and not enable_thinking }}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "number", "minimum": 1e-7}}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1.50, "s": "é\\u00e9"}'}}
REV = "00112233445566aa"
USER = {"role": "user", "content": "Grüße 😀"}


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:

    made = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PromptEncoder({"tokenizer.json": made.to_str().encode(), "chat_template.jinja": TEMPLATE.encode()})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER]},
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                      {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]}]},
        {"messages": [USER, {"role": "assistant", "content": "Ja, "}], "continue_final_message": True},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [USER], "add_generation_prompt": False, "tools": None, "chat_template_kwargs": None},
    ],
)  # fmt: skip
async def test_router_and_runtime_make_the_same_ids(encoder: PromptEncoder, body: dict[str, Any]) -> None:
    data = json.dumps({"model": "m", **body, "temperature": 1, "metadata": {"a": "b"}}).encode()
    prompt = await read_prompt(parse_body(CHAT, data), encoder, REV)
    assert prompt.ids == encode_ids(encoder.encode_inputs(chat_inputs(json.loads(data))))
    assert prompt.ids and prompt.tokens == len(prompt.ids) // 4


@pytest.mark.rule("R1")
async def test_what_only_the_tools_change_changes_the_keys(encoder: PromptEncoder) -> None:
    other = json.loads(json.dumps(TOOL).replace("number", "string"))
    prompts = [
        await read_prompt(parse_body(CHAT, json.dumps({"model": "m", "messages": [USER], "tools": [t]}).encode()), encoder, REV)
        for t in (TOOL, other)
    ]
    assert prompts[0].keys[-1] != prompts[1].keys[-1]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": 5}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "continue_final_message": true}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": 1e999}}',
    ],
)
async def test_what_the_router_cannot_render_goes_to_the_runtime_as_it_is(encoder: PromptEncoder, body: bytes) -> None:
    prompt = await read_prompt(parse_body(CHAT, body), encoder, REV)
    assert prompt.ids is None and prompt.tokens > 0


def test_the_prompt_code_of_the_edge_loads_no_pydantic() -> None:
    code = "import sys, fleet_router.api.body, fleet_text.prompt; sys.exit(any(m in sys.modules for m in ('pydantic', 'fastapi', 'httpx', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("fields", "choices"),
    [
        ({"prompt": "a", "n": 3}, 3), ({"prompt": ["a", "b"], "n": 2}, 4), ({"prompt": [[1, 2], [3]]}, 2), ({"prompt": [1, 2]}, 1),
        ({"prompt": "a", "n": 2, "best_of": 5}, 5), ({"prompt": "a", "n": "x"}, 1),
    ],
)  # fmt: skip
async def test_a_pair_gets_a_room_for_every_choice_that_is_computed(encoder: PromptEncoder, fields: dict[str, object], choices: int) -> None:
    prompt = await read_prompt(parse_body(COMPLETIONS, json.dumps({"model": "m", **fields}).encode()), encoder, REV)
    assert prompt.choices == choices


@pytest.mark.rule("R2")
async def test_salts_and_revisions_share_no_key(encoder: PromptEncoder) -> None:
    async def keys(revision: str, **fields: str) -> set[int]:
        body = json.dumps({"model": "m", "prompt": "word " * 100, **fields}).encode()
        return set((await read_prompt(parse_body(COMPLETIONS, body), encoder, revision)).keys)

    plain, salted, other = await keys(REV), await keys(REV, cache_salt="a"), await keys("f" * 16)
    assert plain and not plain & salted and not plain & other and plain == await keys(REV)


async def prompt_in(encoder: PromptEncoder, path: str, **fields: Any) -> Prompt:
    """The prompt of a body of any path."""
    return await read_prompt(parse_body(PATHS[path], json.dumps({"model": "m", **fields}).encode()), encoder, REV)


@pytest.mark.rule("R1")
async def test_one_conversation_has_the_same_keys_in_every_dialect_and_its_tools_and_texts_change_them(encoder: PromptEncoder) -> None:
    system, asked, said = "Be brief. " * 8, "Grüße 😀 " * 20, "Hallo. " * 20
    schema = TOOL["function"]["parameters"]  # type: ignore[index]

    async def everywhere(schema: Any, asked: str) -> list[tuple[int, ...]]:
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}, {"role": "user", "content": "Und?"}]
        chat = [{"role": "system", "content": system}, *turns]
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        blocks = [{**t, "content": [{"type": "text", "text": t["content"], "cache_control": {"type": "ephemeral"}}]} for t in turns]
        prompts = [
            await prompt_in(encoder, "/v1/chat/completions", messages=chat, tools=[tool]),
            await prompt_in(encoder, "/v1/messages", messages=blocks, system=system, tools=[{"name": "f", "input_schema": schema}], max_tokens=1),
            await prompt_in(encoder, "/api/chat", messages=chat, tools=[tool]),
        ]
        assert len({p.ids for p in prompts}) == 1 and prompts[0].ids
        return [p.keys for p in prompts]

    first = await everywhere(schema, asked)
    other = await everywhere(json.loads(json.dumps(schema).replace("number", "string")), asked)
    late = await everywhere(schema, asked + "!")
    for keys, tools, text in zip(first, other, late, strict=True):
        assert len(keys) > 6 and not set(keys[1:]) & set(tools[1:])  # the template writes the tools first, and they differ behind 64 bytes
        assert keys[0] == text[0] and keys[-1] != text[-1]


@pytest.mark.parametrize(
    ("path", "fields", "kind", "answer", "stream"),
    [
        ("/v1/chat/completions", {"max_tokens": 5, "max_completion_tokens": 7, "stream": True}, "generate", 7, True),
        ("/v1/messages", {"max_tokens": 9}, "generate", 9, False),
        ("/api/chat", {"messages": [USER], "options": {"num_predict": 3}}, "generate", 3, True),
        ("/api/chat", {"messages": [USER], "stream": False, "options": {"num_predict": -1}}, "generate", 128, False),
        ("/api/chat", {"messages": []}, "any", 128, True),
        ("/api/generate", {"prompt": ""}, "any", 128, True),
        ("/api/generate", {"prompt": "x", "options": [1]}, "generate", 128, True),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4}, "generate", 4, False),
        ("/v1/embeddings", {"input": "x"}, "embed", 128, False),
        ("/tokenize", {"prompt": "x"}, "any", 128, False),
    ],
)
def test_what_a_body_asks_for(path: str, fields: dict[str, Any], kind: str, answer: int, stream: bool) -> None:
    parsed = parse_body(PATHS[path], json.dumps({"model": "m", **fields}).encode())
    assert (parsed.kind.value, parsed.answer_tokens, parsed.stream) == (kind, answer, stream)


async def test_special_tokens_and_batches_of_one_are_as_the_runtime_reads_them(encoder: PromptEncoder) -> None:
    plain = await prompt_in(encoder, "/v1/completions", prompt="ab")
    assert plain.ids == encode_ids(encoder.encode("ab", add_special_tokens=True)) == (await prompt_in(encoder, "/v1/completions", prompt=["ab"])).ids
    assert (await prompt_in(encoder, "/v1/completions", prompt="ab", add_special_tokens=False)).ids == encode_ids(
        encoder.encode("ab", add_special_tokens=False)
    )
    assert (await prompt_in(encoder, "/v1/embeddings", input=["ab"])).ids == plain.ids and (
        await prompt_in(encoder, "/v1/embeddings", input=["ab", "c"])
    ).ids is None
    assert (await prompt_in(encoder, "/api/embeddings", prompt="ab")).ids == plain.ids
