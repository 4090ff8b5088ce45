"""Flags that name other routers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fleet_router.settings import BadFlag, Settings


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")


@pytest.mark.usefixtures("in_a_pod")
def test_flags_of_peers(settings_of: Callable[..., Settings]) -> None:
    assert settings_of("--static", "http://h:1").peer_port == -1
    assert settings_of("--kubernetes").peer_port == 8002
    assert settings_of("--static", "http://h:1", "--peer-port", "9").peer_port == 9
    listed = settings_of("--static", "http://h:1", "--peers", "a:1,[fd00::1]:2", "--peers", "a:1")
    assert (listed.peers, listed.peer_port) == (("a:1", "[fd00::1]:2"), 8002)


@pytest.mark.usefixtures("in_a_pod")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kubernetes", "--peers", "a:1"), "--peers needs --static"),
        (("--kubernetes", "--peer-port", "0"), "could not find it"),
        (("--static", "http://h:1", "--peers", "a"), "HOST:PORT is needed"),
        (("--static", "http://h:1", "--peers", "a:0"), "HOST:PORT is needed"),
        (("--static", "http://h:1", "--peers", "fd00::1:2"), "HOST:PORT is needed"),
    ],
)
def test_wrong_flags_of_peers_are_told(settings_of: Callable[..., Settings], flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(BadFlag, match=words):
        settings_of(*flags)
