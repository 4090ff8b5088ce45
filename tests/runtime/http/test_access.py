"""API keys, origins and TLS of the data port."""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from fleet_contract.access import LOOK_AGAIN_S
from fleet_contract.errors import ApiError
from fleet_contract.launch import RuntimeLaunch
from fleet_runtime.errors import StartError
from fleet_runtime.server.access import ApiKeys, check_tls_flags, parse_keys, parse_origins
from fleet_testing.certificates import self_signed
from fleet_testing.runtime import HTTP, Runtime, wait_for

KEY = "rf-0123456789"


@pytest.mark.parametrize(
    ("text", "count"),
    [(KEY, 1), (f"# team a\n{KEY}\n\n  {KEY}2  \n", 2), (f"sha256:{hashlib.sha256(KEY.encode()).hexdigest().upper()}\n{KEY}", 1)],
)
def test_a_file_of_keys(text: str, count: int) -> None:
    digests = parse_keys(text)
    assert len(digests) == count and hashlib.sha256(KEY.encode()).digest() in digests


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "there is no key"),
        ("# only words", "there is no key"),
        ("short", "line 1"),
        (f"{KEY}\nsha256:12", "line 2"),
        ("a key of words", "line 1"),
    ],
)
def test_a_file_that_is_not_one_is_refused_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_keys(text)


def _status(keys: ApiKeys, **headers: str) -> int:
    try:
        keys.check({name.replace("_", "-").encode(): value.encode() for name, value in headers.items()})
    except ApiError as e:
        return e.status if e.type == "authentication_error" else 0
    return 200


def test_keys_are_checked_and_read_again_when_the_file_changes(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "keys"
    path.write_text(KEY)
    keys = ApiKeys(str(path), clock=lambda: now[0])
    assert _status(keys, authorization=f"Bearer {KEY}") == _status(keys, authorization=f"bearer  {KEY}") == _status(keys, x_api_key=KEY) == 200
    assert _status(keys) == _status(keys, authorization="Basic abc") == _status(keys, authorization=f"Bearer {KEY}x") == 401
    other = tmp_path / "new"
    other.write_text("another-key-entirely")
    os.replace(other, path)
    assert _status(keys, x_api_key=KEY) == 200  # not looked at yet
    now[0] += LOOK_AGAIN_S
    assert _status(keys, x_api_key=KEY) == 401 and _status(keys, x_api_key="another-key-entirely") == 200
    path.write_text("bad")
    now[0] += LOOK_AGAIN_S
    assert _status(keys, x_api_key="another-key-entirely") == 200  # a file that is wrong locks nobody out
    path.unlink()
    now[0] += LOOK_AGAIN_S
    assert _status(keys, x_api_key="another-key-entirely") == 200


def test_origins() -> None:
    assert parse_origins(" https://a.example , http://b:3000/ ,*") == ["https://a.example", "http://b:3000", "*"] and parse_origins("") == []
    with pytest.raises(StartError, match=r"--cors-origins has 'a.example'"):
        parse_origins("a.example")


def _flags(**fields: object) -> RuntimeLaunch:
    return RuntimeLaunch.model_validate({"model": "simulated://", **fields})


def test_tls_files_are_checked_at_the_start(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, "a")
    _, other = self_signed(tmp_path, "b")
    assert not check_tls_flags(_flags()) and check_tls_flags(_flags(tls_cert_file=str(cert), tls_key_file=str(key)))
    with pytest.raises(StartError, match="--tls-key-file is not"):
        check_tls_flags(_flags(tls_cert_file=str(cert)))
    for pair in ({"tls_cert_file": str(cert), "tls_key_file": str(other)}, {"tls_cert_file": str(tmp_path / "none"), "tls_key_file": str(key)}):
        with pytest.raises(StartError, match="PEM files that belong together"):
            check_tls_flags(_flags(**pair))


def _peer_name(address: tuple[str, int]) -> str:
    pem = ssl.get_server_certificate(address)
    return str(x509.load_pem_x509_certificate(pem.encode()).subject.rfc4514_string())


@pytest.mark.processes
def test_a_worker_with_key_origin_and_tls(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, "one")
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    flags = (f"--tls-cert-file={cert}", f"--tls-key-file={key}", f"--api-key-file={keys}", "--cors-origins=https://chat.example")
    with Runtime(tmp_path / "run", *flags) as runtime:
        runtime.wait_ready()
        host, port = runtime.data_address
        url = f"https://{host}:{port}"
        with httpx.Client(verify=False, timeout=60) as client:
            body = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            refused = client.post(f"{url}/v1/chat/completions", json=body)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "missing_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
            assert client.get(f"{url}/metrics").status_code == 401 and client.get(f"{url}/readyz").status_code == 200
            with_key = {"authorization": f"Bearer {KEY}", "origin": "https://chat.example"}
            answer = client.post(f"{url}/v1/chat/completions", json=body, headers=with_key)
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://chat.example"
            streamed = client.post(f"{url}/v1/chat/completions", json={**body, "stream": True}, headers=with_key)
            assert streamed.text.rstrip().endswith("data: [DONE]")
            asked = client.options(f"{url}/v1/chat/completions", headers={"origin": "https://chat.example", "access-control-request-method": "POST"})
            assert asked.status_code == 200 and "POST" in asked.headers["access-control-allow-methods"]
            assert "access-control-allow-origin" not in client.get(f"{url}/readyz", headers={"origin": "https://evil.example"}).headers
            early = client.post(f"{url}/v1/chat/completions", content=b"x" * (9 << 20), headers=with_key)
            assert early.status_code == 413  # refused before the body's end, which TLS must survive
        assert HTTP.get(f"{runtime.internal}/worker").status_code == 200  # the internal port asks for none of this
        assert _peer_name((host, port)) == "CN=one"
        new_cert, new_key = self_signed(tmp_path, "two")
        os.replace(new_key, key)
        os.replace(new_cert, cert)
        wait_for(lambda: _peer_name((host, port)) == "CN=two", "new connections get the new certificate")
        runtime.child("http").kill()
        wait_for(lambda: httpx.get(f"{url}/readyz", verify=False, timeout=60).status_code == 200, "TLS is back with the next http process")


@pytest.mark.processes
def test_a_wrong_key_file_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    with Runtime(tmp_path, f"--api-key-file={tmp_path / 'none'}") as runtime:
        assert runtime.process.wait(30) == 1
        assert "--api-key-file" in runtime.termination.read_text() and "BadFlag" in runtime.termination.read_text()
