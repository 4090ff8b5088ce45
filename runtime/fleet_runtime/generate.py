"""`radixfleet generate`: one prompt, one answer, no server. Run as `python -m fleet_runtime.generate`; see `offline.engine`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

from fleet_contract.errors import ApiError
from fleet_runtime.errors import StartError
from fleet_runtime.offline.answers import Answer
from fleet_runtime.offline.engine import Engine

_OPTIONS: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="radixfleet generate", description="Answers one prompt with a model, without a server.")
    p.add_argument("prompt", help="the prompt; - reads it from standard input")
    p.add_argument("--model", required=True, help="bundled://NAME, a .gguf file, a Hugging Face folder, or simulated://")
    p.add_argument("--system", help="system message in front of the prompt")
    p.add_argument("--raw", action="store_true", help="no chat template: the answer goes on where the prompt ends (16 tokens unless --max-tokens)")
    p.add_argument("--stream", action="store_true", help="write the answer as it comes")
    p.add_argument("--json", action="store_true", help="write JSON: the whole answer, or with --stream one object a line")
    p.add_argument("--max-tokens", type=int, help="most tokens of the answer (default: what the context leaves)")
    p.add_argument("--temperature", type=float, help="0: always the likeliest token (default 1)")
    p.add_argument("--top-p", type=float, help="draw from the likeliest tokens that together have this probability")
    p.add_argument("--top-k", type=int, help="draw from that many likeliest tokens")
    p.add_argument("--seed", type=int, help="the same seed draws the same answer")
    p.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer where this text would come; repeat for more")
    p.add_argument("--set", action="append", default=[], metavar="FLAG=VALUE", help="any flag of `radixfleet-runtime --help`; repeat for more")
    return p


def main(argv: Sequence[str]) -> int:
    """Exit code 0, 1 when it failed, 2 for a wrong command line, 130 after Ctrl-C."""
    given = parser().parse_args(argv)
    if given.raw and given.system is not None:
        return _complain("--raw sends the prompt as it is, so --system is not allowed with it", EXIT_USAGE)
    flags: dict[str, Any] = {}
    for item in given.set:
        name, eq, value = item.partition("=")
        if not eq:
            return _complain(f"--set {item!r}: FLAG=VALUE is needed, as in --set context-length=8192", EXIT_USAGE)
        flags[name.removeprefix("--").replace("-", "_")] = value
    text = sys.stdin.read() if given.prompt == "-" else given.prompt
    system = [{"role": "system", "content": given.system}] if given.system is not None else []
    prompt: Any = text if given.raw else [*system, {"role": "user", "content": text}]
    options = {name: value for name in _OPTIONS if (value := getattr(given, name)) is not None}
    try:
        with Engine(given.model, **flags) as engine, _output():
            if given.stream:
                _stream(engine, prompt, options, as_json=given.json)
            else:
                answer = engine.generate(prompt, **options)
                print(json.dumps(_told(answer), ensure_ascii=False) if given.json else answer.text)
    except StartError as e:
        return _complain(f"{e.reason}: {e.message}", EXIT_USAGE if e.reason == "BadFlag" else EXIT_FAILED)
    except ApiError as e:
        return _complain(e.message, EXIT_USAGE if e.status == 400 else EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # who read it has had enough
        return EXIT_FAILED
    return 0


def _stream(engine: Engine, prompt: Any, options: dict[str, Any], *, as_json: bool) -> None:
    with engine.stream(prompt, **options) as stream:
        for delta in stream:
            if as_json:
                print(json.dumps(asdict(delta), ensure_ascii=False), flush=True)
            else:
                print(delta.text, end="", flush=True)
        if as_json:
            print(json.dumps({"usage": asdict(stream.usage) if stream.usage is not None else None}), flush=True)
        else:
            print()


def _told(answer: Answer) -> dict[str, Any]:
    choice = asdict(answer.choices[0])
    return {k: v for k, v in choice.items() if k not in ("index", "logprobs")} | {"usage": asdict(answer.usage)}


@contextmanager
def _output() -> Iterator[None]:
    """Writes out what is printed, so that a reader that left is noticed here and not at the interpreter's end."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = sys.stderr
        raise


def _complain(message: str, code: int) -> int:
    print(f"radixfleet generate: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the engine is closed
    sys.exit(main(sys.argv[1:]))
