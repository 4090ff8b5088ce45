"""`/v1/completions`: how answers and stream chunks look, with echo of the prompt and the old kind of logprobs."""

from __future__ import annotations

from typing import Any

import msgspec

from fleet_runtime import messages as m
from fleet_runtime.server.answer import Answer, ChoiceResult, Piece
from fleet_runtime.server.generate import Prompt, signed_seed
from fleet_runtime.server.logprobs import completion_logprobs, prompt_logprobs
from fleet_runtime.server.openai_chat import stop_reason
from fleet_runtime.server.parsing.events import ContentDelta
from fleet_runtime.server.shape import OpenAiShape, Told
from fleet_runtime.server.token_texts import Offsets


class CompletionShape(OpenAiShape):
    """Choices of several prompts, prompt by prompt."""

    object_plain = "text_completion"
    object_chunk = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, told: Told, answer: Answer, *, echo: bool, prompt_logprobs: int) -> None:
        """Args: echo: the prompt stands before each answer. prompt_logprobs: what was asked for by that name; -1: nothing."""
        super().__init__(told, answer)
        self._echo = echo
        self._prompt_logprobs = prompt_logprobs
        self._offsets: dict[int, Offsets] = {}

    def plain(self) -> bytes:
        choices = [self._choice(i, r) for i, r in enumerate(self.answer.chosen())]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage()})

    def chunks(self, piece: Piece) -> bytes:
        choice = self.answer.results[piece.index]
        text = "".join(e.text for e in piece.events if isinstance(e, ContentDelta))
        out: dict[str, Any] = {}
        if piece.first:
            out = {"seed": signed_seed(choice.seed)} | self._of_prompt(piece.index, choice)
            if self._echo:
                text = self._prompt_text(self._prompt(piece.index)) + text
        elif not text and piece.finish is None and not piece.ids:
            return b""
        return self._event(
            {"index": piece.index, "text": text, "logprobs": self._logprobs(piece.index, choice, piece.logprobs, first=piece.first)}
            | {"finish_reason": piece.finish}
            | ({"token_ids": piece.ids} if self.told.request.return_token_ids else {})
            | ({"stop_reason": stop_reason(self.told, choice)} if piece.finish is not None else {})
            | out
        )

    def _choice(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        echoed = self._prompt_text(self._prompt(index)) if self._echo else ""
        return (
            {"index": index, "text": echoed + choice.text, "logprobs": self._logprobs(index, choice, choice.logprobs, first=True)}
            | {"finish_reason": choice.finish, "stop_reason": stop_reason(self.told, choice), "seed": signed_seed(choice.seed)}
            | ({"token_ids": choice.ids} if self.told.request.return_token_ids else {})
            | self._of_prompt(index, choice)
        )

    def _prompt(self, index: int) -> Prompt:
        return self.told.request.prompts[self.answer.prompt_of(index)]

    def _prompt_text(self, prompt: Prompt) -> str:
        """As the client wrote it; of token ids, their text."""
        if prompt.text is not None:
            return prompt.text
        return self.told.texts.decode(prompt.ids, skip_special=not self.told.request.stop.keep_special)

    def _of_prompt(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        request = self.told.request
        out: dict[str, Any] = {}
        if request.return_token_ids:
            out["prompt_token_ids"] = self._prompt(index).ids
        if self._prompt_logprobs >= 0:
            out["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self._prompt_logprobs, self.told.texts)
        return out

    def _logprobs(self, index: int, choice: ChoiceResult, new: list[m.TokenLogprob], *, first: bool) -> dict[str, Any] | None:
        """Of new tokens; with `echo`, those of the prompt come first, and its first token has none."""
        request, texts = self.told.request, self.told.texts
        if request.logprobs < 0:
            return None
        items: list[m.TokenLogprob | int] = list(new)
        if first:
            self._offsets[index] = Offsets(texts, 0, keep_special=request.stop.keep_special)
            if self._echo:
                prompt = self._prompt(index)
                items = [prompt.ids[0], *choice.prompt_logprobs, *new]
                self._offsets[index] = Offsets(texts, -self._dropped_space(prompt), keep_special=request.stop.keep_special)
        return completion_logprobs(items, request.logprobs, texts, self._offsets[index])

    def _dropped_space(self, prompt: Prompt) -> int:
        """1 if the tokenizer put a space before the text that is not in the text itself."""
        texts = self.told.texts
        first = next((t for t in prompt.ids if self.told.request.stop.keep_special or not texts.is_special(t)), None)
        return int(first is not None and texts.bytes_of(first).startswith(b" ") and not self._prompt_text(prompt).startswith(" "))
