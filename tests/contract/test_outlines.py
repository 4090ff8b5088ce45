"""A chat that is filled into its outline is the chat that the template renders; where that cannot be known, the template is asked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet_testing.tiny_bpe import tiny_bpe
from fleet_text.chat import ChatInputs
from fleet_text.outlines import MAX_FAILURES, MAX_ROWS, Outlines
from fleet_text.prompt import PromptEncoder, PromptError

TOKENIZER = tiny_bpe().to_str().encode()
LOOP = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}<|a|>{%% endif %%}"
FILLED = {
    "plain": LOOP % "<|{{ m.role }}|>{{ m['content'] }}<|e|>\n",
    "joined": LOOP % "{{ '<|' + m.role + '|>' + m.content + '<|e|>' }}",
    "trimmed": LOOP % "{% set c = '<|' ~ m.role ~ '|>' ~ m.content | trim %}{% if loop.first %}{{ bos_token }}{% endif %}{{ c }}\n",
    "stripped": LOOP % "<|{{ m.role }}|>{{ m.content.strip() }}<|e|>",
    "some": LOOP % "{% if m.role == 'assistant' %}{{ m.content }}</s>{% elif m.content %}[I]{{ m.content | trim }}[/I]{% endif %}",
    "kept": "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content | trim %}{% endif %}{% endfor %}"
    "{{ ns.s }}{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|{{ m['role'] }}|>{{ m.content }}{% endif %}{% endfor %}",
    "string": LOOP % "{% if m.content is string and m.content is not none %}{{ m.content }}{% endif %}|",
    "system first": "{% if messages[0].role != 'system' %}<|system|>You help.{% endif %}" + LOOP % "<|{{ m.role }}|>{{ m.content }}",
}
ASKED = {
    "thoughts": LOOP % "{{ m.content.split('</think>')[-1] }}",
    "contains": LOOP % "{% if '<x>' in m.content %}{{ m.content }}{% else %}[{{ m.content }}]{% endif %}",
    "length": LOOP % "{{ m.content }}{% if m.content | length > 3 %}!{% endif %}",
    "equal": LOOP % "{{ m.content }}{% if m.content == 'x' %}!{% endif %}",
    "compared": LOOP % "{{ m.content }}{% if 'k' < m.content %}!{% endif %}",
    "json": LOOP % "{{ m.content | tojson }}",
    "whole": LOOP % "{{ m | tojson }}",
    "upper": LOOP % "{{ m.content | upper }}",
    "begins": LOOP % "{{ m.content }}{% if m.content.startswith('x') %}!{% endif %}",
    "letters": LOOP % "{% for c in m.content %}{{ c }}{% endfor %}",
    "index": LOOP % "{{ m.content }}{% if m.content[0] == 'x' %}!{% endif %}",
    "looked up": LOOP % "{{ m.content }}{{ {'x': 1}.get(m.content, 2) }}",
    "inside another": LOOP % "{{ m.content }}{% if m.content in 'x y' %}!{% endif %}",
    "number": LOOP % "{{ m.content }}{% if m.content | int(0) > 3 %}!{% endif %}",
    "padded": LOOP % "{{ '%5s' % m.content }}",
    "trimmed of more": LOOP % "{{ m.content.strip('x') }}",
    "twice": LOOP % "{{ m.content }}{{ m.content }}",
    "last first": LOOP.replace("in messages", "in messages | reverse") % "{{ m.content }}",
    "only the last": "{{ messages[-1].content }}",
    "dated": "{{ strftime_now('%Y') }}" + LOOP % "{{ m.content }}",
    "joined, then looked at": LOOP % "{{ m.content }}{% if (m.content ~ '.') == 'x.' %}!{% endif %}",
    "added, then looked at": LOOP % "{% set c = '.' + m.content %}{{ c }}{% if 'x' in c %}!{% endif %}",
    "by a macro": "{% macro t(x) %}{{ x }}{% endmacro %}" + LOOP % "{{ m.content }}{% if t(m.content) == 'x' %}!{% endif %}",
    "by a block": LOOP % "{% set c %}{{ m.content }}{% endset %}{{ m.content }}{% if c == 'x' %}!{% endif %}",
    "all joined": "{% if messages | map(attribute='content') | join == 'x' %}!{% endif %}" + LOOP % "{{ m.content }}",
    "found in": LOOP % "{{ m.content }}{{ 'abcx'.find(m.content) }}",
    "lower": LOOP % "{{ m.content }}{% if m.content is lower %}!{% endif %}",
    "written out": LOOP % "{{ m.content }}{% if [m.content] | string == \"['x']\" %}!{% endif %}",
    "trimmed of both": LOOP % "{{ ('x' ~ m.content) | trim }}",
    "left": LOOP % "{{ m.content.lstrip() }}",
    "repeated before": LOOP % "{{ m.content }}{% if not loop.first and m.content == loop.previtem.content %}!{% endif %}",
}
texts = st.one_of(
    st.text(max_size=12), st.sampled_from(["x", " x ", "5", "", " ", "\n", "<x>", "x y", "</think>b", "\ue001", "zz", "a\x1c", "<|e|>"])
)


def encoder(template: str) -> PromptEncoder:
    return PromptEncoder({"tokenizer.json": TOKENIZER, "chat_template.jinja": template.encode()})


ENCODERS = {name: encoder(template) for name, template in (FILLED | ASKED).items()}


def rendered(e: PromptEncoder, chat: ChatInputs) -> str | None:
    """Without outlines."""
    asked = PromptEncoder.__new__(PromptEncoder)
    asked.__dict__.update(e.__dict__)
    asked._outlines = [Outlines(o._render, o._watched, max_failures=0) for o in e._outlines]
    try:
        return asked.render_chat(chat)
    except PromptError:
        return None


@pytest.mark.parametrize("name", FILLED)
def test_templates_that_only_copy_texts_are_asked_once(name: str) -> None:
    e = encoder(FILLED[name])
    row = ("system", "user", "assistant", "user")
    for n in range(3):
        chat = ChatInputs([{"role": role, "content": f" {n} {role}\n"} for role in row])
        assert e.render_chat(chat) == rendered(e, chat)
    assert e._outlines[True]._rows[row] is not None


@pytest.mark.parametrize("name", ASKED)
def test_templates_that_look_at_texts_are_always_asked(name: str) -> None:
    e = ENCODERS[name]
    e.render_chat(ChatInputs([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]))
    assert e._outlines[True]._rows.get(("user", "assistant")) is None


@given(
    st.sampled_from(sorted(ENCODERS)),
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "developer", "<|e|>"]), texts), min_size=1, max_size=5),
    st.booleans(),
)
@example("number", [("user", "7")], True)
@example("inside another", [("user", "x y")], True)
@settings(max_examples=400, deadline=None)
def test_a_chat_is_what_the_template_renders(name: str, said: list[tuple[str, str]], generation: bool) -> None:
    e = ENCODERS[name]
    chat = ChatInputs([{"role": role, "content": text} for role, text in said], add_generation_prompt=generation)
    want = rendered(e, chat)
    if want is None:
        with pytest.raises(PromptError):
            e.render_chat(chat)
    else:
        assert e.render_chat(chat) == want


def test_what_the_template_may_see_beside_roles_and_texts_is_left_to_it() -> None:
    e = encoder(LOOP % "{{ m.name }}{{ m.content }}{{ extra }}{% for t in tools or [] %}{{ t.x }}{% endfor %}")
    plain: Any = {"role": "user", "content": "x"}
    assert e.render_chat(ChatInputs([plain])) == "x<|a|>"
    assert e.render_chat(ChatInputs([{**plain, "name": "n"}])) == "nx<|a|>"
    assert e.render_chat(ChatInputs([plain], tools=[{"x": "t"}])) == "xt<|a|>"
    assert e.render_chat(ChatInputs([plain], variables={"extra": "v"})) == "xv<|a|>"
    assert e.render_chat(ChatInputs([plain], continue_final=True, add_generation_prompt=False)) == "x"
    assert e.render_chat(ChatInputs([{"role": "user", "content": [{"type": "text", "text": "x"}]}])).startswith("[{")


def test_rows_are_bounded_and_a_template_that_is_never_understood_is_tried_no_more() -> None:
    tried = 0

    def render(messages: list[Any]) -> str:
        nonlocal tried
        tried += 1
        return "".join(m["content"] for m in messages) if messages[0]["role"] != "odd" else ""

    outlines = Outlines(render, render)
    for n in range(MAX_ROWS + 5):
        assert outlines.fill([{"role": f"r{n}", "content": "x"}]) == "x"
    assert len(outlines._rows) <= MAX_ROWS
    assert outlines.fill([{"role": "odd", "content": "x"}]) is None
    before = tried
    assert outlines.fill([{"role": "odd", "content": "x"}]) is None and tried == before
    for n in range(2 * MAX_FAILURES):
        assert outlines.fill([{"role": "odd", "content": "x"}] * (n + 2)) is None
    assert tried - before < MAX_FAILURES
