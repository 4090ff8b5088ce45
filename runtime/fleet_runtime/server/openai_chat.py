"""`/v1/chat/completions`: how answers and stream chunks look; the shapes are those that the official client parses."""

from __future__ import annotations

from typing import Any

import msgspec

from fleet_runtime import messages as m
from fleet_runtime.server.answer import Answer, ChoiceResult, Piece
from fleet_runtime.server.generate import signed_seed
from fleet_runtime.server.logprobs import chat_logprobs, prompt_logprobs
from fleet_runtime.server.parsing.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from fleet_runtime.server.shape import OpenAiShape, Told


class ChatShape(OpenAiShape):
    """Of each choice, a chunk with the role comes first, one with the finish reason last.

    Tokens whose text a parser holds are told with the choice's next chunk: logprobs and ids are complete, each once.
    """

    object_plain = "chat.completion"
    object_chunk = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, told: Told, answer: Answer) -> None:
        super().__init__(told, answer)
        self._untold: dict[int, tuple[list[int], list[m.TokenLogprob]]] = {}

    def plain(self) -> bytes:
        chosen = self.answer.chosen()
        choices = [self._choice(i, r) for i, r in enumerate(chosen)]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage(), **self._of_prompt(chosen[0])})

    def chunks(self, piece: Piece) -> bytes:
        out = b""
        if piece.first:
            head = self._of_prompt(self.answer.results[piece.index]) if piece.index == 0 else {}
            seed = {"seed": signed_seed(self.answer.results[piece.index].seed)}
            out += self._delta(piece.index, {"role": "assistant", "content": "", "refusal": None}, more=seed, top=head)
        ids, logprobs = self._untold.pop(piece.index, ([], []))
        ids, logprobs = ids + piece.ids, logprobs + piece.logprobs
        for event in piece.events:
            delta = _delta_of(event)
            if delta is not None:
                out += self._delta(piece.index, delta, more=self._of_tokens(ids, logprobs))
                ids, logprobs = [], []
        if piece.finish is not None:
            reason = {"stop_reason": stop_reason(self.told, self.answer.results[piece.index])}
            out += self._delta(piece.index, {}, piece.finish, more=self._of_tokens(ids, logprobs) | reason)
        elif ids or logprobs:
            self._untold[piece.index] = ids, logprobs
        return out

    def _delta(
        self, index: int, delta: dict[str, Any], finish: str | None = None, *, more: dict[str, Any] | None = None, top: dict[str, Any] | None = None
    ) -> bytes:
        return self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **(more or {})}, top)

    def _of_tokens(self, ids: list[int], logprobs: list[m.TokenLogprob]) -> dict[str, Any]:
        """What a choice says of its tokens, if it was asked for."""
        request = self.told.request
        out: dict[str, Any] = {}
        if request.logprobs >= 0 and logprobs:
            out["logprobs"] = chat_logprobs(logprobs, request.logprobs, self.told.texts)
        if request.return_token_ids:
            out["token_ids"] = ids
        return out

    def _of_prompt(self, choice: ChoiceResult) -> dict[str, Any]:
        """What the answer says of its prompt, if it was asked for."""
        request = self.told.request
        out: dict[str, Any] = {}
        if request.return_token_ids:
            out["prompt_token_ids"] = request.prompts[0].ids
        if request.prompt_logprobs >= 0:
            out["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, request.prompt_logprobs, self.told.texts)
        return out

    def _choice(self, index: int, choice: ChoiceResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in choice.calls
            ]
        told = {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish}
        if self.told.request.logprobs >= 0:
            told["logprobs"] = chat_logprobs(choice.logprobs, self.told.request.logprobs, self.told.texts)
        if self.told.request.return_token_ids:
            told["token_ids"] = choice.ids
        return told | {"stop_reason": stop_reason(self.told, choice), "seed": signed_seed(choice.seed)}


def _delta_of(event: Event) -> dict[str, Any] | None:
    """A stream's `delta`; None for what only ends a call."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, ToolCallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.delta}}]}
    return None


def stop_reason(told: Told, choice: ChoiceResult) -> str | int | None:
    """Which of the request's own stops ended the choice: its text, or its token id. None: something else."""
    by = choice.stopped_by
    return by if isinstance(by, str) or by in told.request.stop.ids else None
