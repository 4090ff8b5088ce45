"""Which formats a model writes: named by flags, or seen in its chat template. Called once at the start of the http process. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fleet_runtime.server.parsing import hermes, llama3, mistral, qwen_coder
from fleet_runtime.server.parsing.reasoning import THINK

AUTO: Final = "auto"
NONE: Final = "none"
HERMES: Final = "hermes"
LLAMA3: Final = "llama3"
MISTRAL: Final = "mistral"
QWEN_CODER: Final = "qwen_coder"
TOOL_FORMATS: Final = (AUTO, HERMES, LLAMA3, MISTRAL, QWEN_CODER, NONE)
REASONING_FORMATS: Final = (AUTO, "think", NONE)

# Texts that a format needs to see. Where one is a special token of the model, the detokenizer must not skip it.
MARKUP: Final[dict[str, tuple[str, ...]]] = {
    HERMES: (hermes.OPEN, hermes.CLOSE),
    LLAMA3: (llama3.TAG,),
    MISTRAL: (mistral.TAG, mistral.CALL_ID, mistral.ARGS),
    QWEN_CODER: (qwen_coder.OPEN, qwen_coder.CLOSE, qwen_coder.FUNCTION, qwen_coder.END_FUNCTION, qwen_coder.PARAMETER, qwen_coder.END_PARAMETER),
    NONE: (),
    "think": THINK,
}
_IPYTHON: Final = re.compile(r"Environment:\s*ipython|['\"]ipython['\"]|<\|start_header_id\|>ipython")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What a model writes: `tools` is hermes, llama3, mistral, qwen_coder or none; `reasoning` is think or none."""

    tools: str = NONE
    reasoning: str = NONE

    @property
    def markup(self) -> tuple[str, ...]:
        """Texts that must reach the parsers, also where the tokenizer calls them special."""
        return MARKUP[self.tools] + MARKUP[self.reasoning]


def resolve(template: str | None, tools: str = AUTO, reasoning: str = AUTO) -> OutputFormat:
    """The formats of a model.

    Args:
        template: source of its chat template.
        tools: of TOOL_FORMATS.
        reasoning: of REASONING_FORMATS.
    Raises ValueError for another name.
    """
    for value, allowed in ((tools, TOOL_FORMATS), (reasoning, REASONING_FORMATS)):
        if value not in allowed:
            raise ValueError(f"{value!r} is no format; there is {', '.join(allowed)}")
    source = template or ""
    return OutputFormat(
        detect_tools(source) if tools == AUTO else tools,
        ("think" if THINK[0] in source or THINK[1] in source else NONE) if reasoning == AUTO else reasoning,
    )


def detect_tools(source: str) -> str:
    """By the markup that a template shows or asks for."""
    if qwen_coder.FUNCTION in source and qwen_coder.PARAMETER in source:
        return QWEN_CODER
    if hermes.OPEN in source:
        return HERMES
    if mistral.TAG in source:
        return MISTRAL
    if llama3.TAG in source or _IPYTHON.search(source) is not None:
        return LLAMA3
    return NONE
