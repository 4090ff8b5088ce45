"""Names, launch flags, routed headers, prefix keys, errors."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fleet_contract import errors, flags_page, names, prefix, wire
from fleet_contract.launch import USER_FLAGS, BadFlag, RuntimeLaunch, user_args_to_fields


@given(st.from_regex(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True), st.sampled_from(names.ROLES), st.integers(0, 999))
def test_every_child_name_leaves_room_for_what_controllers_add(service: str, role: str, group: int) -> None:
    workload = names.workload_name(service, "5f3a9c1e", role, group)
    assert len(workload) + 11 <= 63  # controller-revision-hash label: name + '-' + up to 10
    assert len(names.revision_object_name(service, "5f3a9c1e")) <= 63


def test_two_long_names_with_one_beginning_get_different_children() -> None:
    a, b = "x" * 60 + "-a", "x" * 60 + "-b"
    assert names.child_service_name(a) != names.child_service_name(b)
    assert names.child_service_name("y" * 38) == "y" * 38


def test_launch_flags_survive_the_round_trip() -> None:
    launch = RuntimeLaunch(
        model="bundled://x", served_model_name=("a", "ns/a"), role="decode", revision="5f3a9c1e", debug_checks=True, simulated_load_s=1.5
    )
    assert RuntimeLaunch.from_argv(launch.to_argv()) == launch
    assert RuntimeLaunch.from_argv(["--model=bundled://x"]) == RuntimeLaunch(model="bundled://x")


@pytest.mark.parametrize(
    ("argv", "internal"),
    [
        ([], "0.0.0.0"), (["--host", "127.0.0.1"], "127.0.0.1"), (["--host", "::1"], "::1"), (["--host", "10.0.0.1"], "0.0.0.0"),
        (["--host", "127.0.0.1", "--internal-host", "0.0.0.0"], "0.0.0.0"),
    ],
)  # fmt: skip
def test_a_worker_of_this_machine_alone_has_no_port_on_the_network_unless_told_so(argv: list[str], internal: str) -> None:
    launch = RuntimeLaunch.from_argv(["--model", "m", *argv])
    assert launch.internal_host == internal
    assert RuntimeLaunch.from_argv(launch.to_argv()) == launch


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["--model is missing"]),
        (["--model", "m", "--max-rows", "0"], ["--max-rows is '0'", "greater than or equal to 1"]),
        (["--model", "m", "--max-rows", "x", "--dtype", "int3"], ["--max-rows is 'x'", "--dtype is 'int3'", "float32"]),
        (["--model", "m", "--colour", "red"], ["'--colour' is not a flag"]),
        (["--model"], ["--model needs a value"]),
        (["--model", "m", "--model", "n"], ["--model is given twice"]),
        (["serve"], ["'serve' is not a flag"]),
    ],
)
def test_wrong_flags_are_named_with_what_is_allowed(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(BadFlag) as e:
        RuntimeLaunch.from_argv(argv)
    for part in parts:
        assert part in str(e.value)


def test_help_lists_every_flag_with_what_it_may_be() -> None:
    text = RuntimeLaunch.help()
    for words in ("(integer ≥ 1, ≤ 4096; default: 64)", "(prefill, decode, unified; default: unified)", "(true, false; default: true)", "(required)"):
        assert words in text
    for field in RuntimeLaunch.model_fields:
        assert "--" + field.replace("_", "-") in text
    assert len(RuntimeLaunch.model_fields) < 60


def test_engine_args_may_not_set_what_the_operator_sets() -> None:
    assert user_args_to_fields({"max-rows": "4"}) == {"max_rows": "4"}
    for flag in ("model", "role", "data-port", "drain-timeout", "served-model-name"):
        assert flag not in USER_FLAGS
        with pytest.raises(BadFlag, match=f"names {flag}; allowed: "):
            user_args_to_fields({flag: "1"})


routed = st.builds(
    wire.RoutedHeaders,
    rid=st.none() | st.binary(min_size=16, max_size=16).map(bytes.hex),
    pick=st.none() | st.tuples(st.from_regex(r"[a-z0-9:-]{1,20}", fullmatch=True), st.integers(0, 2**63 - 1)),
    deadline_ms=st.none() | st.integers(0, 2**53 - 1),
    leg=st.none() | st.just("prefill"),
    rooms=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4).map(tuple),
    bootstrap=st.sampled_from([None, "10.0.0.1:8998", "[fd00::1]:8998"]),
    prefill_incarnation=st.none() | st.binary(min_size=8, max_size=8).map(bytes.hex),
)


def test_the_short_way_to_write_a_lone_workers_headers_writes_the_same() -> None:
    assert wire.routed_alone("ab" * 16, "router.1", 3, 900) == wire.RoutedHeaders(rid="ab" * 16, pick=("router.1", 3), deadline_ms=900).items()


@given(routed)
def test_routed_headers_survive_the_round_trip_in_any_case(headers: wire.RoutedHeaders) -> None:
    assert wire.parse_routed_headers([(n.lower(), v) for n, v in headers.items()]) == headers


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (names.HEADER_RID, "0F" * 16), (names.HEADER_RID, "0f" * 15), (names.HEADER_ROOM, str(2**63)), (names.HEADER_ROOM, "-1"),
        (names.HEADER_ROOM, "\u0661"), (names.HEADER_ROOM, "9" * 400), (names.HEADER_LEG, "both"),
        (names.HEADER_LEG, "prefill"), (names.HEADER_PICK, "7"),
        (names.HEADER_PICK, ":7"), (names.HEADER_BOOTSTRAP, "host"), (names.HEADER_BOOTSTRAP, "host:99999"),
        (names.HEADER_PREFILL_INCARNATION, "xyz"), (names.HEADER_DEADLINE_MS, "1.5"),
    ],
)  # fmt: skip
def test_a_wrong_routed_header_is_named(header: str, value: str) -> None:
    with pytest.raises(wire.WireError, match="X-Radixfleet-"):
        wire.parse_routed_headers([(header, value)])


def test_a_doubled_routed_header_is_refused() -> None:
    with pytest.raises(wire.WireError, match="2 times"):
        wire.parse_routed_headers([(names.HEADER_RID, "0f" * 16)] * 2)


@given(st.binary(max_size=50), st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_ids_bodies_split_exactly(json_bytes: bytes, ids: list[int]) -> None:
    body = json_bytes + wire.encode_ids(ids)
    assert wire.encode_ids(ids) == struct.pack(f"<{len(ids)}I", *ids)
    assert wire.split_ids_body(len(json_bytes), body) == (json_bytes, ids)
    with pytest.raises(wire.WireError):
        wire.split_ids_body(len(body) + 1, body)
    with pytest.raises(wire.WireError):
        wire.split_ids_body(len(json_bytes), body + b"x")


def _naive_chain(ids: list[int], namespace: tuple[str, str, str], page: int) -> list[int]:
    def h(b: bytes) -> int:
        return xxhash.xxh3_64(b, seed=1337).intdigest()

    previous, out = h(msgspec.msgpack.encode(list(namespace))), []
    while len(ids) >= page:
        previous = h(struct.pack("<QQ", previous, h(struct.pack(f"<{page}I", *ids[:page]))))
        out.append(previous)
        ids = ids[page:]
    return out


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.tuples(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4)))
def test_prefix_keys_equal_the_formula(ids: list[int], namespace: tuple[str, str, str]) -> None:
    assert prefix.chain_hashes(ids, prefix.namespace_hash(*namespace)) == _naive_chain(ids, namespace, 16)


@given(st.lists(st.integers(0, 999), min_size=32, max_size=80), st.integers(0, 79))
def test_keys_agree_exactly_up_to_the_page_of_the_first_difference(ids: list[int], at: int) -> None:
    at %= len(ids)
    other = [*ids[:at], ids[at] + 1000, *ids[at + 1 :]]
    n = prefix.namespace_hash("rev")
    a, b = prefix.chain_hashes(ids, n), prefix.chain_hashes(other, n)
    same = at // 16
    assert a[:same] == b[:same]
    assert all(x != y for x, y in zip(a[same:], b[same:], strict=True))


def test_an_error_has_the_one_shape_and_is_read_back() -> None:
    e = errors.ApiError(400, "bad", code="invalid_value", param="messages.0.role")
    body = msgspec.json.decode(e.body("req-1"))
    assert body == {
        "error": {"message": "bad", "type": "invalid_request_error", "code": "invalid_value", "param": "messages.0.role", "request_id": "req-1"}
    }
    back = errors.ApiError.from_body(400, e.body("req-1"))
    assert (back.status, back.message, back.type, back.code, back.param) == (400, "bad", e.type, e.code, e.param)
    assert "502: <html>" in errors.ApiError.from_body(502, b"<html>").message


def test_the_page_of_flags_is_what_the_flags_say() -> None:
    assert flags_page.PAGE.read_text() == flags_page.page(), "run: python -m fleet_contract.flags_page"


def test_there_are_fewer_than_sixty_flags_and_each_is_described() -> None:
    assert len(RuntimeLaunch.model_fields) < 60
    assert all(info.description for info in RuntimeLaunch.model_fields.values())


@pytest.mark.parametrize("name", ["simulated-step-base-ms", "simulated-prefill-tokens-per-s", "new-token-ratio"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_flag_is_a_finite_number(name: str, value: str) -> None:
    """Seen red: with steps that take for ever the worker never became ready."""
    with pytest.raises(BadFlag, match=f"--{name} is '{value}'"):
        RuntimeLaunch.from_argv(["--model=simulated://", f"--{name}={value}"])
