"""Every process of the product logs the same fields."""

from __future__ import annotations

import json
import logging

from fleet_contract.logs import JsonLines, facts


def _line(**extra: object) -> dict[str, object]:
    record = logging.makeLogRecord({"name": "fleet_x", "levelname": "INFO", "msg": "model %s loaded", "args": ("m",), **extra})
    return json.loads(JsonLines("http").format(record))  # type: ignore[no-any-return]


def test_a_line_has_time_level_process_logger_event_and_facts() -> None:
    line = _line(**facts(request_id="r1", name="a name that logging uses itself"), worker="w")
    assert line.pop("ts").endswith("Z")  # type: ignore[attr-defined]
    assert line == {
        "level": "info", "process": "http", "logger": "fleet_x", "event": "model m loaded", "request_id": "r1", "worker": "w",
        "name": "a name that logging uses itself",
    }  # fmt: skip


def test_what_is_no_plain_value_does_not_break_a_line() -> None:
    assert _line(**facts(path=object))["path"] == "<class 'object'>"
    assert "strange" not in _line(strange=object())


def test_an_exception_leaves_its_traceback_in_the_same_line() -> None:
    try:
        raise ValueError("boom")
    except ValueError as e:
        info = (type(e), e, e.__traceback__)
    assert "ValueError: boom" in str(_line(exc_info=info)["traceback"])
