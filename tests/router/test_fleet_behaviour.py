"""Routing over several workers, services and revisions: affinity, weights, drains, queue, discovery snapshots, reports, probes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fleet_router.brain import registry
from fleet_router.brain.registry import Registry
from fleet_router.observed import Observed, PodFacts, ServiceFacts
from fleet_testing.fake_worker import DEFAULT_STREAM, FakeWorker, Script, error_body
from fleet_testing.router_fleet import Fleet, MakeFleet, MakeWorker
from fleet_testing.router_process import until

LONG = "the same long prompt, again and again. " * 40


@pytest.mark.rule("R9")
async def test_the_same_long_prompt_goes_to_the_worker_that_has_it(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefills = [await make_worker("prefill") for _ in range(3)]
    fleet = await make_fleet(*prefills, await make_worker("decode"))
    for topic in range(6):
        for turn in range(4):
            await fleet.chat(f"{topic} {LONG} {'and then ' * turn}")
    for topic in range(6):
        holders = [p for p in prefills if any(leg.json["messages"][0]["content"].startswith(f"{topic} ") for leg in p.legs)]
        assert len(holders) == 1, topic
    fleet.brain.index.check_integrity()


@pytest.mark.rule("R42")
async def test_paced_sessions_spread_and_stay_where_they_are(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker(), await make_worker()]
    fleet = await make_fleet(*workers)
    for session in range(40):
        await fleet.chat(f"session {session:03} {LONG}")
    counts = [len(w.legs) for w in workers]
    assert max(counts) <= 0.75 * 40
    homes = {leg.json["messages"][0]["content"][:11]: w for w in workers for leg in w.legs}
    for session in range(40):
        await fleet.chat(f"session {session:03} {LONG} more")
    for worker in workers:
        for leg in worker.legs:
            assert homes[leg.json["messages"][0]["content"][:11]] is worker


@pytest.mark.rule("R12")
async def test_many_equal_requests_of_one_moment_are_spread(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker() for _ in range(4)]
    fleet = await make_fleet(*workers)
    for w in workers:
        w.default = Script(delay_s=0.2)
    await asyncio.gather(*(fleet.chat(f"{n:03} " + "no common prefix here " * 10) for n in range(60)))
    assert max(len(w.legs) for w in workers) <= 1.5 * 60 / 4


async def test_a_load_report_moves_new_requests_away(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker(), await make_worker()]
    fleet = await make_fleet(*workers)

    def pend_seen() -> bool:
        return any(w["pend"] == 50_000 for w in fleet.told())

    async def report() -> None:
        while not pend_seen():
            await workers[0].publish(pend=50_000, run=4)
            await asyncio.sleep(0.02)

    await asyncio.wait_for(report(), 10)
    for n in range(8):
        await fleet.chat(f"{n} new")
        await workers[0].publish(pend=50_000, run=4)
    assert (len(workers[0].legs), len(workers[1].legs)) == (0, 8)


async def test_what_a_worker_had_cached_is_compared_with_the_prediction(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    await fleet.chat(LONG)
    prefill.scripts.append(Script(cached_tokens=512))
    await fleet.chat(LONG)
    assert fleet.counter("cached_tokens_total") == 512
    assert fleet.counter("predicted_cached_tokens_total") > 512


async def test_a_new_incarnation_starts_with_no_history(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    await fleet.chat(LONG)
    assert fleet.told()[0]["indexedTokens"] > 0
    worker.restart()
    incarnation = worker.record.incarnation
    fleet.edge.registry.poke(f"127.0.0.1:{worker.port}")
    await until(lambda: [w["incarnation"] for w in fleet.told()] == [incarnation], "the new incarnation is known")
    assert fleet.told()[0]["indexedTokens"] == 0


async def test_a_load_report_of_another_incarnation_makes_the_router_read_again(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, poll_interval=30.0)
    worker.restart()

    def known() -> bool:
        return bool(fleet.told()[0]["incarnation"] == worker.record.incarnation)

    async def report() -> None:
        while not known():
            await worker.publish()
            await asyncio.sleep(0.02)

    await asyncio.wait_for(report(), 10)


async def test_a_worker_that_reports_a_drain_gets_nothing_new_until_it_reports_the_end_of_it(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    workers = [await make_worker(), await make_worker()]
    fleet = await make_fleet(*workers)

    async def report(draining: bool, ready: int) -> None:
        while fleet.ready() != ready:
            await workers[0].publish(draining=draining)
            await asyncio.sleep(0.02)

    await asyncio.wait_for(report(True, 1), 10)
    for n in range(6):
        await fleet.chat(f"{n}")
    assert [len(w.legs) for w in workers] == [0, 6]
    await asyncio.wait_for(report(False, 2), 10)


async def test_one_poll_without_an_answer_says_nothing_about_a_worker(
    make_worker: MakeWorker, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ASK_TIMEOUT_S", 0.2)
    worker = await make_worker()
    fleet = await make_fleet(worker, queue_timeout=0.0)
    worker.silent_polls = 1
    endpoint = next(iter(fleet.edge.registry.endpoints.values()))
    await until(lambda: endpoint.missed == 1, "one poll was not answered")
    assert fleet.ready() == 1
    assert (await fleet.chat()).status_code == 200
    await until(lambda: endpoint.missed == 0, "the next one was")
    worker.silent_polls = -1
    await until(lambda: fleet.ready() == 0, "a worker that answers no poll is left")
    worker.silent_polls = 0
    await until(lambda: fleet.ready() == 1, "and taken again when it answers")


async def test_a_worker_whose_load_reports_come_is_kept_longer_though_its_polls_get_no_answer(
    make_worker: MakeWorker, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ASK_TIMEOUT_S", 0.2)
    worker = await make_worker()
    fleet = await make_fleet(worker, queue_timeout=0.0)
    endpoint = next(iter(fleet.edge.registry.endpoints.values()))

    async def report_until(condition: Callable[[], bool]) -> None:
        while not condition():
            await worker.publish()
            await asyncio.sleep(0.02)

    await asyncio.wait_for(report_until(lambda: endpoint.reported_at > 0), 10)
    worker.silent_polls = -1
    await asyncio.wait_for(report_until(lambda: endpoint.missed == registry.MISSES_OF_REPORTING - 1), 10)
    assert fleet.ready() == 1
    await asyncio.wait_for(report_until(lambda: fleet.ready() == 0), 10)  # reports alone do not keep it for ever


async def test_two_services_are_served_by_short_and_long_names(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    a = await make_worker(namespace="one", service="a")
    b = await make_worker(namespace="two", service="b", model_revision="ffeeddccbbaa9988")
    fleet = await make_fleet(a, b)
    for model, worker in (("a", a), ("one/a", a), ("b", b), ("two/b", b)):
        before = len(worker.legs)
        assert (await fleet.chat(model=model)).status_code == 200
        assert len(worker.legs) == before + 1
        assert worker.legs[-1].routed.rid is not None
    listed = (await fleet.http.get(f"{fleet.url}/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == ["a", "b", "one/a", "two/b"]
    assert (await fleet.http.get(f"{fleet.url}/v1/models/one/a")).json()["id"] == "one/a"
    assert (await fleet.http.get(f"{fleet.url}/v1/models/none")).status_code == 404
    assert (await fleet.http.get(f"{fleet.url}/v1/models/%6Fne%2Fa")).json()["id"] == "one/a", "a path's escapes are read, as for any name"


async def test_prefill_and_decode_of_different_revisions_never_pair(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    await_old = await make_worker("prefill", revision="aaaaaaaa")
    new = await make_worker("decode", revision="bbbbbbbb")
    fleet = await make_fleet(await_old, new, queue_timeout=0.2)
    response = await fleet.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_ready_worker")
    assert int(response.headers["retry-after"]) > 0
    assert await_old.legs == [] and new.legs == []


async def test_a_request_waits_a_moment_for_a_worker_to_become_ready(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, queue_timeout=10.0)
    worker.ready = False
    await until(lambda: fleet.ready() == 0, "the worker is not ready")
    task = asyncio.create_task(fleet.chat())
    await until(lambda: sum(fleet.brain.waiting.values()) == 1, "the request waits")
    assert fleet.report("demo", "tiny").revisions["aaaaaaaa"].queued == 1
    worker.ready = True
    assert (await task).status_code == 200
    assert fleet.brain.waiting == {}


@pytest.mark.rule("R18")
async def test_the_queue_is_bounded_in_count_and_a_client_that_leaves_it_is_forgotten(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker, queue_timeout=20.0, max_queue=3)
    worker.ready = False
    await until(lambda: fleet.ready() == 0, "the worker is not ready")
    writers = []
    body = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    for _ in range(3):
        _, writer = await fleet.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writers.append(writer)
    await until(lambda: sum(fleet.brain.waiting.values()) == 3, "three wait")
    response = await fleet.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
    for writer in writers:
        writer.transport.abort()
    await until(lambda: fleet.brain.waiting == {}, "nobody waits")


async def test_tokenize_is_answered_by_any_worker_of_the_service(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    for worker in (prefill, decode):
        worker.default = Script(body=b'{"tokens":[1,2]}')
    for body in ({"model": "tiny", "prompt": "x"}, {"prompt": "x"}):
        response = await fleet.post("/tokenize", body)
        assert (response.status_code, response.json()) == (200, {"tokens": [1, 2]})
    asked = [r for w in (prefill, decode) for r in w.received]
    assert [(r.path, r.routed.leg, r.ids) for r in asked] == [("/tokenize", None, None)] * 2


async def test_prompts_of_every_form_reach_the_worker(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    worker = await make_worker()
    fleet = await make_fleet(worker)
    for prompt, ids in (("ab", 2), ([5, 6, 7], 3), (["a", "b"], None), ([], None), ([[1], [2]], None), ([-1], None), (5, None)):
        await fleet.post("/v1/completions", {"model": "tiny", "prompt": prompt})
        got = worker.legs[-1]
        assert got.json["prompt"] == prompt
        assert (len(got.ids) if got.ids is not None else None) == ids


async def test_each_choice_of_a_batch_has_a_room_of_its_own(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    fleet = await make_fleet(prefill, decode)
    for n, (body, rooms) in enumerate((({"prompt": ["a", "b", "c"], "n": 2}, 6), ({"prompt": "a", "n": 2}, 2), ({"prompt": "a"}, 1)), 1):
        both_have_it = asyncio.Event()  # a decode that answers at once would end the other leg before it arrives
        decode.scripts.append(Script(wait=both_have_it))
        task = asyncio.create_task(fleet.post("/v1/completions", {"model": "tiny", **body}))
        await until(lambda n=n: len(prefill.legs) == len(decode.legs) == n, "both have it")  # type: ignore[misc]
        both_have_it.set()
        await task
        assert len(set(decode.legs[-1].routed.rooms)) == rooms
        assert decode.legs[-1].routed.rooms == prefill.legs[-1].routed.rooms


# -- snapshots of discovery, as the control process sends them


def pods_of(workers: list[FakeWorker], **changes: Any) -> list[PodFacts]:
    return [
        PodFacts(
            **{"uid": w.record.pod_uid, "name": f"pod{n}", "namespace": "demo", "service": "tiny", "role": w.record.role}
            | {"revision": w.record.revision, "ip": "127.0.0.1", "ready": True}
            | changes
        )
        for n, w in enumerate(workers)
    ]


@pytest.fixture
async def cluster(make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fleet that gets snapshots. Pods share 127.0.0.1 here, so each pod's internal port is its worker's."""

    async def make(workers: list[FakeWorker], **settings: Any) -> Fleet:
        ports = {w.record.pod_uid: w.port for w in workers}
        add = Registry._add

        def add_with_port(self: Registry, endpoint: Any) -> None:
            endpoint.port = ports.get(endpoint.key, endpoint.port)
            add(self, endpoint)

        monkeypatch.setattr(Registry, "_add", add_with_port)
        return await make_fleet(wait=False, static=(), kubernetes=True, **settings)

    return make


SERVICE = ServiceFacts("demo", "tiny", "u", "2026-01-01T00:00:00Z", 4, "tiny")


async def test_pods_and_services_become_routable_and_weights_are_followed(cluster: Any, make_worker: MakeWorker) -> None:
    workers = [await make_worker(revision="aaaaaaaa"), await make_worker(revision="bbbbbbbb")]
    fleet = await cluster(workers)
    assert not fleet.brain.synced
    assert (await fleet.chat()).json()["error"]["code"] == "not_synced"
    fleet.edge.take_observed(Observed([msgspec.structs.replace(SERVICE, traffic=[("aaaaaaaa", 100), ("bbbbbbbb", 0)])], pods_of(workers)))
    await until(lambda: fleet.ready() == 2, "both are ready")
    assert fleet.brain.synced
    for n in range(10):
        await fleet.chat(f"{n}")
    assert [len(w.legs) for w in workers] == [10, 0]
    fleet.edge.take_observed(Observed([msgspec.structs.replace(SERVICE, traffic=[("bbbbbbbb", 100)])], pods_of(workers)))
    for n in range(10):
        await fleet.chat(f"{n}")
    assert [len(w.legs) for w in workers] == [10, 10]
    fleet.edge.take_observed(Observed([SERVICE], pods_of(workers)))  # the operator lost its status: the last weights stay
    for n in range(5):
        await fleet.chat(f"{n}")
    assert [len(w.legs) for w in workers] == [10, 15]
    report = fleet.report("demo", "tiny")
    assert report.observed_generation == 4 and set(report.revisions) == {"aaaaaaaa", "bbbbbbbb"}


async def test_a_new_pod_is_believed_to_be_as_fast_as_its_deployment(cluster: Any, make_worker: MakeWorker) -> None:
    """What it measures while it starts beside busy pods says little; where it looked slower it never got a request to show better."""
    old, new, other = [await make_worker(prefill_tokens_per_s=speed, revision=rev) for speed, rev in ((10_000, "aa"), (2_000, "aa"), (2_000, "bb"))]
    fleet = await cluster([old, new, other])
    fleet.edge.take_observed(Observed([SERVICE], pods_of([old])))
    await until(lambda: fleet.ready() == 1, "the old one is ready")
    (first,) = fleet.brain.workers
    first.load.prefill.add(1000.0, 500.0)
    first.load.step.add(1000.0, 800.0)
    fleet.edge.take_observed(Observed([SERVICE], pods_of([old, new, other])))
    await until(lambda: fleet.ready() == 3, "all are")
    by_pod = {w.record.pod_uid: w.load for w in fleet.brain.workers}
    one, its, apart = (by_pod[w.record.pod_uid] for w in (old, new, other))
    assert its.prefill_rate == pytest.approx(one.prefill_rate) == pytest.approx(20_000)
    assert its.step.factor == pytest.approx(one.step.factor) == pytest.approx(1.25)
    assert apart.prefill_rate == pytest.approx(2_000) and apart.step.factor == 1.0, "another revision is another deployment"
    its.prefill.add(50.0, 100.0)
    assert its.prefill.factor < 1.0 < one.prefill.factor, "and then each shows what it can"
    fleet.brain.deciding.check_integrity()


async def test_a_probe_goes_through_its_revision_whatever_its_weight(cluster: Any, make_worker: MakeWorker) -> None:
    workers = [await make_worker(revision="aaaaaaaa"), await make_worker(revision="bbbbbbbb")]
    fleet = await cluster(workers)
    fleet.edge.take_observed(Observed([msgspec.structs.replace(SERVICE, traffic=[("aaaaaaaa", 100)])], pods_of(workers)))
    await until(lambda: fleet.ready() == 2, "both are ready")
    answer = await fleet.edge.service.probe("demo", "tiny", "bbbbbbbb")
    assert answer.ok and answer.ttft_ms is not None and len(workers[1].legs) == 1
    workers[1].default = Script(status=500, body=error_body("x", "scripted cause"))
    answer = await fleet.edge.service.probe("demo", "tiny", "bbbbbbbb")
    assert not answer.ok and answer.error == "scripted cause"
    assert "no ready worker" in ((await fleet.edge.service.probe("demo", "tiny", "cccccccc")).error or "")
    assert "not in this router's table" in ((await fleet.edge.service.probe("demo", "none", "cccccccc")).error or "")


async def test_a_draining_pod_gets_nothing_new_finishes_what_runs_and_is_reported_with_its_deadline(cluster: Any, make_worker: MakeWorker) -> None:
    workers = [await make_worker(), await make_worker()]
    fleet = await cluster(workers)
    pods = pods_of(workers)
    fleet.edge.take_observed(Observed([SERVICE], pods))
    await until(lambda: fleet.ready() == 2, "both are ready")
    go = asyncio.Event()
    for w in workers:
        w.default = Script(wait=go)
    task = asyncio.create_task(fleet.chat(stream=True))
    await until(lambda: any(w.legs for w in workers), "one works")
    busy = next(n for n, w in enumerate(workers) if w.legs)
    pods[busy] = msgspec.structs.replace(pods[busy], drain_deadline="2026-01-01T00:05:00Z")
    fleet.edge.take_observed(Observed([SERVICE], pods))
    listed = {w.pod: w for w in fleet.report("demo", "tiny").revisions["aaaaaaaa"].workers}[f"pod{busy}"]
    assert (listed.state, listed.inflight, listed.drain_deadline) == ("draining", 1, "2026-01-01T00:05:00Z")
    other = workers[1 - busy]
    other.default = Script()
    for n in range(6):
        assert (await fleet.chat(f"{n}")).status_code == 200
    assert len(workers[busy].legs) == 1 and len(other.legs) == 6
    fleet.edge.take_observed(Observed([SERVICE], [p for n, p in enumerate(pods) if n != busy]))  # the pod is gone from the API
    still = {w.pod: w.inflight for w in fleet.report("demo", "tiny").revisions["aaaaaaaa"].workers}
    assert still[f"pod{busy}"] == 1
    go.set()
    assert (await task).content == DEFAULT_STREAM
    await fleet.idle()
    assert [w.pod for w in fleet.report("demo", "tiny").revisions["aaaaaaaa"].workers] == [f"pod{1 - busy}"]


@pytest.mark.parametrize("change", [{"ready": False}, {"deleting": True}, {"terminal": True}])
@pytest.mark.rule("R17")
async def test_a_pod_that_is_no_longer_ready_is_left_at_once(change: dict[str, bool], cluster: Any, make_worker: MakeWorker) -> None:
    workers = [await make_worker(), await make_worker()]
    fleet = await cluster(workers, poll_interval=30.0)
    pods = pods_of(workers)
    fleet.edge.take_observed(Observed([SERVICE], pods))
    await until(lambda: fleet.ready() == 2, "both are ready")
    fleet.edge.take_observed(Observed([SERVICE], [msgspec.structs.replace(pods[0], **change), pods[1]]))
    assert fleet.ready() == 1
    for n in range(6):
        await fleet.chat(f"{n}")
    assert [len(w.legs) for w in workers] == [0, 6]


@pytest.mark.rule("R17")
async def test_a_pod_whose_address_answers_as_another_pod_is_not_used(cluster: Any, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    fleet = await cluster([worker], queue_timeout=0.1)
    pods = pods_of([worker])
    worker.record = msgspec.structs.replace(worker.record, pod_uid="somebody-else")
    fleet.edge.take_observed(Observed([SERVICE], pods))
    await until(lambda: fleet.brain.synced, "it was asked")
    assert (await fleet.chat()).json()["error"]["code"] == "no_ready_worker"
    assert [w.state for w in fleet.report("demo", "tiny").revisions["aaaaaaaa"].workers] == ["starting"]


@pytest.mark.rule("R33")
async def test_a_starting_router_waits_for_a_ready_worker_that_is_slow_to_answer(
    cluster: Any, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ASK_TIMEOUT_S", 0.2)
    workers = [await make_worker(), await make_worker(), await make_worker()]
    workers[0].silent_polls = 2
    workers[1].silent_polls = -1
    fleet = await cluster(workers)
    (slow, silent, starting) = pods_of(workers)
    fleet.edge.take_observed(Observed([SERVICE], [slow]))
    await until(lambda: fleet.brain.synced, "the router is ready")
    assert fleet.ready() == 1, "and knows its worker"
    other = await cluster(workers)
    workers[2].silent_polls = -1
    other.edge.take_observed(Observed([SERVICE], [slow, silent, msgspec.structs.replace(starting, ready=False)]))
    await until(lambda: other.brain.synced, "a worker that does not answer at all is not waited for long")
    assert other.ready() == 1
    assert other.edge.registry.endpoints[silent.uid].missed == registry.MISSES_AT_START


async def test_the_router_stays_synced_when_a_new_pod_does_not_answer_yet(cluster: Any, make_worker: MakeWorker) -> None:
    worker = await make_worker()
    fleet = await cluster([worker])
    pods = pods_of([worker])
    fleet.edge.take_observed(Observed([SERVICE], pods))
    await until(lambda: fleet.brain.synced, "synced")
    fleet.edge.take_observed(Observed([SERVICE], [*pods, msgspec.structs.replace(pods[0], uid="new", name="new")]))
    assert fleet.brain.synced


@pytest.mark.rule("R39")
async def test_a_decision_is_explained_and_nothing_changes_by_it(make_worker: MakeWorker, make_fleet: MakeFleet) -> None:
    prefills = [await make_worker("prefill"), await make_worker("prefill")]
    fleet = await make_fleet(*prefills, await make_worker("decode"))
    await fleet.chat(LONG)
    holder = next(p for p in prefills if p.legs)
    before = (fleet.told(), list(fleet.brain.decisions))
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": LONG}]}).encode()
    for _ in range(20):
        decision = await fleet.edge.service.explain(body)
    assert (fleet.told(), list(fleet.brain.decisions)) == before
    chosen = {w["role"]: w for w in decision["workers"] if w["chosen"]}
    assert chosen["prefill"]["worker"] == f"127.0.0.1:{holder.port}" and chosen["prefill"]["hitTokens"] > 1000
    assert set(chosen) == {"prefill", "decode"} and decision["tokenized"]
    terms = ("wait", "work", "decode", "room", "penalty")
    assert all(w["costSeconds"] == pytest.approx(sum(w[t] for t in terms)) for w in decision["workers"])


async def test_a_service_that_is_scaled_to_zero_says_so_at_once(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(wait=False, queue_timeout=60.0)
    fleet.edge.take_observed(Observed([msgspec.structs.replace(SERVICE, is_off=True)], []))
    response = await fleet.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "scaled_to_zero")
    assert "replicas" in response.json()["error"]["message"]
