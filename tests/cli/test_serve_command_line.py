"""`radixfleet serve`: what the command line becomes, and what it refuses before anything is started."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fleet_cli import serve
from fleet_cli.__main__ import main


def test_default_is_one_unified_worker_on_free_loopback_ports() -> None:
    plan = serve.parse(["bundled://smollm2-135m-instruct"])
    assert plan.roles == ("unified",)
    launch = plan.launch("unified", Path("/x/a.json"))
    assert (launch.host, launch.internal_host) == ("127.0.0.1", "127.0.0.1")
    assert launch.data_port == launch.internal_port == launch.load_port == launch.transfer_port == launch.bootstrap_port == 0
    assert launch.events_port == launch.replay_port == 0
    assert launch.served_model_name == ("smollm2-135m-instruct",)
    assert launch.announce == "/x/a.json"


def test_prefill_and_decode_make_that_many_of_each() -> None:
    assert serve.parse(["m", "--prefill", "2", "--decode", "1"]).roles == ("prefill", "prefill", "decode")
    assert serve.parse(["m", "--workers", "3"]).roles == ("unified",) * 3


def test_simulated_models_use_the_simulated_executor_and_have_a_name() -> None:
    plan = serve.parse(["simulated://", "--set", "max-rows=8"])
    launch = plan.launch("unified", Path("a"))
    assert (launch.executor, launch.max_rows, launch.served_model_name) == ("simulated", 8, ("simulated",))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--prefill", "1"], "go together"),
        (["m", "--workers", "1", "--prefill", "1", "--decode", "1"], "not both"),
        (["m", "--workers", "0"], "--workers is 0; at least 1"),
        (["m", "--set", "max-rows"], "FLAG=VALUE is needed"),
        (["m", "--set", "role=decode"], "--set names role; allowed: executor"),
    ],
)
def test_a_wrong_command_line_says_what_to_do(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_value_of_a_runtime_flag_is_refused_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--port", "0", "--set", "max-rows=none"]) == 2
    assert "--max-rows is 'none'" in capsys.readouterr().err


def test_a_taken_port_is_refused_before_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "m", "--port", str(port)]) == 2
    assert f"--port {port} on 127.0.0.1 cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("512Mi", 512 << 20), ("2Gi", 2 << 30), ("64Ki", 64 << 10), ("1048576", 1 << 20)])
def test_memory_is_written_as_in_the_yaml_or_in_bytes(text: str, value: int) -> None:
    assert serve.parse(["m", "--kv-cache-memory", text]).kv_cache_memory == value


@pytest.mark.parametrize(("argv", "code", "text"), [([], 2, "usage"), (["--help"], 0, "serve MODEL"), (["version"], 0, "0.1.0")])
def test_usage(argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    assert text in capsys.readouterr().out


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "'sevre' is not a command" in capsys.readouterr().err


def test_replay_is_the_router_s_program(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"time": 0, "input_length": 700, "output_length": 3}\n')
    done = subprocess.run([sys.executable, "-m", "fleet_cli", "replay", str(log), "--workers", "2"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "1 requests, 2 workers" in done.stdout


def test_what_clients_have_to_bring_is_asked_for_by_the_router() -> None:
    plan = serve.parse(["m", "--set", "api-key-file=k", "--set", "tls-cert-file=c", "--set", "tls-key-file=t", "--set", "max-rows=8"])
    assert plan.router_flags == {"api-key-file": "k", "tls-cert-file": "c", "tls-key-file": "t"}
    launch = plan.launch("unified", Path("a"))
    assert (launch.api_key_file, launch.tls_cert_file, launch.max_rows) == ("", "", 8)
