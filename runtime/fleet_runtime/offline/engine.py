"""`Engine`: a model as an object of your program. Behind it are the processes of one worker, on loopback, with all that a server has.

    with Engine("bundled://smollm2-135m-instruct") as engine:
        print(engine.generate("The capital of France is", max_tokens=8, temperature=0).text)
        for delta in engine.stream([{"role": "user", "content": "Hello!"}]):
            print(delta.text, end="")

A prompt is a text, a list of token ids, or a list of messages (then the model's chat template is used); a list of prompts is a batch.
Options are those of `/v1/completions` (text, ids) and `/v1/chat/completions` (messages). Errors are ApiError; StartError for a start that failed.
"""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar, overload

from fleet_contract.errors import ApiError
from fleet_runtime.offline.answers import Answer, Delta, Usage, read_answer, read_delta, read_usage
from fleet_runtime.offline.client import Call, Client
from fleet_runtime.offline.process import HOST, EngineProcess

Message = Mapping[str, Any]
Prompt = str | list[int] | list[Message]
MAX_AT_ONCE: Final = 64  # requests of one batch that are under way
_INPUTS_AT_ONCE: Final = 2048
_OURS: Final = ("model", "prompt", "messages", "stream", "stream_options", "return_token_ids")

T = TypeVar("T")


class Stream:
    """An answer as it comes; iterate over it. Dropped or closed early, its request ends."""

    def __init__(self, events: Iterator[dict[str, Any]], call: Call) -> None:
        self.usage: Usage | None = None  # once it has ended
        self._events = events
        self._call = call
        self._pending: list[Delta] = []

    @property
    def id(self) -> str:
        """For `Engine.abort`."""
        return self._call.id

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        """Raises ApiError when the answer breaks off."""
        while not self._pending:
            try:
                event = next(self._events)
            except BaseException:
                self._call.over = True
                raise
            if event.get("usage"):
                self.usage = read_usage(event["usage"])
            self._pending = [d for choice in event["choices"] if (d := read_delta(choice)) is not None]
        return self._pending.pop(0)

    def close(self) -> None:
        """Ends the request if it runs."""
        self._call.abort()
        self._call.over = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Engine:
    """See the module. Threads may share it. It ends when it is closed, is garbage, or the program ends, however that comes."""

    def __init__(self, model: str, *, log: str | Path | None = None, start_timeout_s: float = 900.0, **flags: Any) -> None:
        """Blocks until the model is loaded.

        Args:
            model: bundled://NAME, a Hugging Face folder, or simulated://.
            log: file that gets the processes' log; default: a temporary one.
            flags: those of `radixfleet-runtime --help`, with `_`: context_length=8192, max_rows=32.
        Raises StartError, whose `reason` says in one word what is wrong.
        """
        self._process = EngineProcess(model, flags, Path(log) if log is not None else None)
        self._end = weakref.finalize(self, self._process.stop)
        try:
            record = self._process.wait_ready(start_timeout_s)
        except BaseException:
            self.close()
            raise
        self.model = record.served_names[0]
        self.context_length = record.context_length
        self._client = Client(HOST, record.ports.data, self._process.ended)
        self._calls: weakref.WeakValueDictionary[str, Call] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the processes; requests that run end with an ApiError. Again: nothing."""
        self._end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the worker's supervisor."""
        return self._process.pid

    @overload
    def generate(self, prompt: str | list[int] | list[Message], *, request_id: str | None = None, **options: Any) -> Answer: ...
    @overload
    def generate(
        self, prompt: list[str] | list[list[int]] | list[list[Message]], *, request_id: str | None = None, **options: Any
    ) -> list[Answer]: ...
    def generate(self, prompt: Any, *, request_id: str | None = None, **options: Any) -> Answer | list[Answer]:
        """The whole answer; of a batch a list of them, in its order. Blocks. Raises ApiError, of a batch the first one: the rest is ended."""
        return self._generate(self._call(request_id), prompt, options)

    def _generate(self, call: Call, prompt: Any, options: Mapping[str, Any]) -> Answer | list[Answer]:
        try:
            return self._answers(call, prompt, options) if _is_batch(prompt) else self._answer(prompt, options, call)
        finally:
            call.over = True

    def _answers(self, call: Call, prompts: list[Prompt], options: Mapping[str, Any]) -> list[Answer]:
        if not prompts:
            return []
        with ThreadPoolExecutor(min(len(prompts), MAX_AT_ONCE), thread_name_prefix="engine-batch") as pool:
            futures = [pool.submit(self._answer, one, options, call) for one in prompts]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = next((e for f in done if (e := f.exception()) is not None), None)
                if failed is not None:
                    raise failed
            except BaseException:
                call.abort()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [f.result() for f in futures]

    def stream(self, prompt: Prompt, *, request_id: str | None = None, **options: Any) -> Stream:
        """The answer as it comes. Blocks until the first token. Raises ApiError."""
        return self._stream(self._call(request_id), prompt, options)

    def _stream(self, call: Call, prompt: Prompt, options: Mapping[str, Any]) -> Stream:
        try:
            path, body = self._body(prompt, options)
            events = self._client.events(path, body | {"stream": True, "stream_options": {"include_usage": True}}, call)
        except BaseException:
            call.over = True
            raise
        return Stream(events, call)

    def abort(self, request_id: str) -> bool:
        """Ends a request from another thread; its `generate` or stream raises ApiError 499. False: none of that id is under way."""
        call = self._calls.get(request_id)
        if call is None or call.over:
            return False
        call.abort()
        return True

    @overload
    def embed(self, texts: str, *, pooling: str = "last", normalize: bool = True) -> list[float]: ...
    @overload
    def embed(self, texts: list[str], *, pooling: str = "last", normalize: bool = True) -> list[list[float]]: ...
    def embed(self, texts: str | list[str], *, pooling: str = "last", normalize: bool = True) -> list[float] | list[list[float]]:
        """Vectors of texts. Args: pooling: last or mean. Raises ApiError."""
        call = self._call(None)
        given = [texts] if isinstance(texts, str) else texts
        vectors: list[list[float]] = []
        for start in range(0, len(given), _INPUTS_AT_ONCE):
            body: dict[str, Any] = {"model": self.model, "input": given[start : start + _INPUTS_AT_ONCE], "encoding_format": "base64"}
            answer = self._client.post("/v1/embeddings", body | {"pooling": pooling, "normalize": normalize}, call)
            vectors += [_floats(entry["embedding"]) for entry in answer["data"]]
        return vectors[0] if isinstance(texts, str) else vectors

    def tokenize(self, prompt: str | list[Message], **options: Any) -> list[int]:
        """Token ids of a text or, with the chat template, of messages. Args: options: of `POST /tokenize`. Raises ApiError."""
        given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        ids: list[int] = self._client.post("/tokenize", options | given, self._call(None))["tokens"]
        return ids

    def detokenize(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids. Raises ApiError."""
        text: str = self._client.post("/detokenize", {"tokens": ids, "skip_special_tokens": skip_special_tokens}, self._call(None))["prompt"]
        return text

    async def agenerate(self, prompt: Any, *, request_id: str | None = None, **options: Any) -> Any:
        """`generate` for asyncio. Cancelled, its request ends."""
        call = self._call(request_id)
        try:
            return await _in_thread(partial(self._generate, call, prompt, options))
        except asyncio.CancelledError:
            call.abort()
            raise

    async def astream(self, prompt: Prompt, *, request_id: str | None = None, **options: Any) -> AsyncIterator[Delta]:
        """`stream` for asyncio: `async for delta in engine.astream(…)`. Cancelled or closed, its request ends."""
        call = self._call(request_id)
        queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def pump() -> None:
            with self._stream(call, prompt, options) as stream:
                for delta in stream:
                    loop.call_soon_threadsafe(queue.put_nowait, delta)

        def ended(task: asyncio.Future[None]) -> None:
            queue.put_nowait(None if task.cancelled() else _as_exception(task.exception()))

        running = _in_thread(pump)
        running.add_done_callback(ended)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            call.abort()

    def _answer(self, prompt: Prompt, options: Mapping[str, Any], call: Call) -> Answer:
        path, body = self._body(prompt, options)
        return read_answer(call.id, self._client.post(path, body, call))

    def _body(self, prompt: Prompt, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Endpoint and body. Raises ApiError 400 for an option that is not the caller's."""
        for name in _OURS:
            if name in options:
                raise ApiError(400, f"{name} is set by the Engine; leave it out", param=name)
        body = {"model": self.model, "return_token_ids": True, **options}
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            return "/v1/chat/completions", body | {"messages": prompt}
        return "/v1/completions", body | {"prompt": prompt}

    def _call(self, request_id: str | None) -> Call:
        """Raises ApiError 503 when the engine is gone, 409 when that id is under way."""
        if (cause := self._process.ended()) is not None:
            raise ApiError(503, cause, type="server_error", code="engine_ended")
        call = Call(request_id or _new_id())
        with self._lock:
            if (other := self._calls.get(call.id)) is not None and not other.over:
                raise ApiError(409, f"a request with id {call.id} is under way; ids must differ", code="duplicate_id", param="request_id")
            self._calls[call.id] = call
        return call


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and (not prompt or isinstance(prompt[0], (str, list)))


def _floats(text: str) -> list[float]:
    """A vector of little-endian float32 in base64."""
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def _new_id() -> str:
    return os.urandom(16).hex()


def _as_exception(error: BaseException | None) -> Exception | None:
    return error if error is None or isinstance(error, Exception) else RuntimeError(repr(error))


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of a call in a thread of its own: those of the loop's pool are few, and requests wait long."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type] # None only if that is the result

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as e:  # the thread's border: it is raised where the result is awaited
            error = e
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="engine-call", daemon=True).start()
    return future
