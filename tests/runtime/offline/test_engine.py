"""`Engine`: the processes of one worker behind an object, with the simulated executor."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet_contract.errors import ApiError
from fleet_runtime import Engine, StartError, generate
from fleet_runtime.offline.process import launch
from fleet_testing.runtime import wait_for

FAST: dict[str, Any] = {"context_length": 512, "max_rows": 2, "threads": 1, "simulated_step_base_ms": 2}
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello!"}]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("simulated://", **FAST) as engine:
        yield engine


def processes(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def all_gone(some: list[psutil.Process]) -> None:
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in some), "all processes are gone")


def test_a_prompt_is_a_text_ids_or_messages(engine: Engine) -> None:
    text = engine.generate("abc", max_tokens=8, temperature=0)
    ids = engine.generate(list(b"abc"), max_tokens=8, temperature=0)
    chat = engine.generate(HELLO, max_tokens=8, temperature=0)
    assert text.text == ids.text and text.ids == ids.ids and len(text.ids) == 8 and text.finish_reason == "length"
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (3, 8)
    assert chat.usage.prompt_tokens == len(engine.tokenize(HELLO)) and chat.choices[0].seed is not None
    assert engine.detokenize(text.ids) == text.text and engine.tokenize("abc") == [97, 98, 99]


def test_a_batch_is_answered_in_its_order(engine: Engine) -> None:
    prompts = [f"number {i}" for i in range(70)]
    answers = engine.generate(prompts, max_tokens=3, temperature=0)
    alone = [engine.generate(prompts[i], max_tokens=3, temperature=0).ids for i in (0, 33, 69)]
    assert [answers[i].ids for i in (0, 33, 69)] == alone and len(answers) == 70
    assert engine.generate([]) == []
    chats = engine.generate([HELLO, HELLO], max_tokens=3, temperature=0, n=2)
    assert [len(a.choices) for a in chats] == [2, 2]


def test_a_stream_joins_to_the_whole_answer(engine: Engine) -> None:
    for prompt in ("abc", HELLO):
        whole = engine.generate(prompt, max_tokens=30, temperature=0)
        with engine.stream(prompt, max_tokens=30, temperature=0) as stream:
            deltas = list(stream)
        assert "".join(d.text for d in deltas) == whole.text and [i for d in deltas for i in d.ids] == whole.ids
        assert [d.finish_reason for d in deltas if d.finish_reason] == [whole.finish_reason]
        assert stream.usage is not None and stream.usage.completion_tokens == 30


def test_another_thread_aborts_by_id(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, "abc", request_id="mine", **LONG)
        wait_for(lambda: engine.abort("mine"), "it is under way")
        with pytest.raises(ApiError) as error:
            running.result(20)
    assert (error.value.status, error.value.code) == (499, "aborted")
    assert engine.abort("mine") is False
    stream = engine.stream("abc", **LONG)
    next(stream)
    assert engine.abort(stream.id)
    with pytest.raises(ApiError, match="aborted"):
        list(stream)


def test_streams_that_nobody_reads_to_their_end_free_their_rows(engine: Engine) -> None:
    for _ in range(6):  # the engine has two rows
        next(engine.stream("abc", **LONG))
    assert engine.generate("abc", max_tokens=2).finish_reason == "length"


def test_the_first_failure_of_a_batch_ends_the_rest(engine: Engine) -> None:
    with pytest.raises(ApiError, match="no tokens"):
        engine.generate(["abc", "", *["abc"] * 20], **LONG)
    assert len(engine.generate("abc", max_tokens=2).ids) == 2


def test_embeddings_have_length_one(engine: Engine) -> None:
    one = engine.embed("abc")
    several = engine.embed(["abc", "x"], pooling="mean")
    assert abs(sum(v * v for v in one) - 1) < 1e-5 and len(several) == 2 and len(several[0]) == len(one)


def test_what_the_server_refuses_is_an_api_error(engine: Engine) -> None:
    with pytest.raises(ApiError) as error:
        engine.generate("abc", temperature=9)
    assert (error.value.status, error.value.param) == (400, "temperature")
    with pytest.raises(ApiError, match="stream is set by the Engine"):
        engine.generate("abc", stream=True)
    with engine.stream("abc", request_id="twice", **LONG), pytest.raises(ApiError, match="under way"):
        engine.generate("abc", request_id="twice")


async def test_the_asyncio_forms_answer_the_same_and_end_when_cancelled(engine: Engine) -> None:
    plain = engine.generate("abc", max_tokens=6, temperature=0)
    answers = await asyncio.gather(*(engine.agenerate("abc", max_tokens=6, temperature=0) for _ in range(20)))
    assert {tuple(a.ids) for a in answers} == {tuple(plain.ids)}
    deltas = [d async for d in engine.astream("abc", max_tokens=6, temperature=0)]
    assert [i for d in deltas for i in d.ids] == plain.ids
    task = asyncio.create_task(engine.agenerate("abc", request_id="slow", **LONG))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async for _ in engine.astream("abc", request_id="left", **LONG):
        break
    gc.collect()
    with pytest.raises(ApiError, match="no tokens"):
        await engine.agenerate("")
    assert len((await engine.agenerate("abc", max_tokens=2)).ids) == 2


def test_requests_end_when_the_engine_dies_and_none_is_taken_after_that() -> None:
    engine = Engine("simulated://", **FAST | {"simulated_step_base_ms": 20})
    some = processes(engine.pid)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, "abc", request_id="mine", **LONG)
        wait_for(lambda: "mine" in engine._calls, "it is under way")
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(ApiError) as error:
            running.result(20)
    assert error.value.status in (502, 503)
    wait_for(lambda: engine._process.ended(), "its end is seen")
    with pytest.raises(ApiError, match="was ended by SIGKILL"):
        engine.generate("abc")
    engine.close()
    with pytest.raises(ApiError, match="closed"):
        engine.generate("abc")
    all_gone(some)


def test_an_engine_made_by_a_thread_that_ended_lives_until_it_is_garbage() -> None:
    made: list[Engine] = []
    thread = threading.Thread(target=lambda: made.append(Engine("simulated://", **FAST)))
    thread.start()
    thread.join()
    engine = made.pop()
    assert engine.generate("abc", max_tokens=2).ids
    some, folder = processes(engine.pid), engine._process._folder
    del engine
    gc.collect()
    all_gone(some)
    assert not folder.exists()


def test_nothing_is_left_when_the_program_is_killed(tmp_path: Path) -> None:
    code = f"from fleet_runtime import Engine; e = Engine('simulated://', **{FAST!r}); print(e.pid, flush=True); input()"
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert program.stdout is not None
    some = processes(int(program.stdout.readline()))
    assert len(some) == 4
    program.kill()
    program.communicate(timeout=20)
    all_gone(some)


def test_a_start_that_fails_says_why_in_one_word_and_a_sentence() -> None:
    with pytest.raises(StartError, match="does not exist") as error:
        Engine("/no/such/model")
    assert error.value.reason == "ModelNotFound"
    for flags, words in (({"nosuch": 1}, "--nosuch"), ({"max_rows": 0}, "--max-rows is '0'"), ({"data_port": 1}, "data_port")):
        with pytest.raises(StartError, match=words) as error:
            Engine("simulated://", **flags)
        assert error.value.reason == "BadFlag"


def test_flags_are_those_of_the_runtime() -> None:
    made = launch("simulated://", {"max_rows": 3, "overlap": False, "served_model_name": ["a", "b"]}, Path("x"))
    assert (made.max_rows, made.overlap, made.served_model_name, made.host, made.data_port) == (3, False, ("a", "b"), "127.0.0.1", 0)


def test_importing_engine_loads_neither_torch_nor_a_server() -> None:
    heavy = ("torch", "fastapi", "uvicorn", "zmq", "numpy", "tokenizers")
    code = f"import sys; from fleet_runtime import Engine; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_command_answers_what_the_engine_answers(engine: Engine) -> None:
    argv = ["generate", "-", "--model", "simulated://", "--stream", "--json", "--max-tokens", "5", "--temperature", "0"]
    argv += ["--set", "context-length=512", "--set", "threads=1"]
    done = subprocess.run([sys.executable, "-m", "fleet_cli", *argv], input="Hello!", capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    expected = engine.generate(HELLO, max_tokens=5, temperature=0)
    assert [i for line in lines[:-1] for i in line["ids"]] == expected.ids and lines[-1]["usage"]["completion_tokens"] == 5


class Borrowed:
    """The module's engine, for a command that would start one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __enter__(self) -> Engine:
        return self.engine

    def __exit__(self, *exc: object) -> None:
        pass


def test_the_command_writes_text_lines_or_json(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(generate, "Engine", lambda model, **flags: Borrowed(engine))
    expected = engine.generate(HELLO, max_tokens=5, temperature=0)

    def run(*argv: str) -> str:
        assert generate.main([*argv, "--model=simulated://", "--max-tokens=5", "--temperature=0"]) == 0
        return capsys.readouterr().out

    assert run("Hello!") == run("Hello!", "--stream") == expected.text + "\n"
    raw = json.loads(run("abc", "--raw", "--json"))
    assert raw["ids"] == engine.generate("abc", max_tokens=5, temperature=0).ids and raw["finish_reason"] == "length"
    assert "".join(json.loads(line).get("text", "") for line in run("Hello!", "--json", "--stream").splitlines()) == expected.text
    assert run("Hello!", "--system=Be brief.", "--json", "--stop=zzz", "--seed=1", "--top-k=1", "--top-p=0.5") != ""


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["x", "--set", "nonsense"], 2, "FLAG=VALUE is needed"),
        (["x", "--raw", "--system", "y"], 2, "--system is not allowed"),
        (["x" * 600], 2, "the context is 512 tokens"),
        (["x", "--temperature", "9"], 2, "temperature is 9"),
    ],
)
def test_the_command_says_what_is_wrong(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str
) -> None:
    monkeypatch.setattr(generate, "Engine", lambda model, **flags: Borrowed(engine))
    assert generate.main([*argv, "--model", "simulated://"]) == code
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("radixfleet generate: ") and words in told.err


def test_the_command_passes_on_why_a_start_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["x", "--model", "simulated://", "--set", "nosuch=1"]) == 2
    assert "BadFlag: '--nosuch=1' is not a flag" in capsys.readouterr().err
    assert generate.main(["x", "--model", "/no/such/model"]) == 1
    assert "ModelNotFound: " in capsys.readouterr().err
