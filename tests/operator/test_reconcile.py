"""From a service to its objects and its status, over an API server in memory."""

from __future__ import annotations

import random

import pytest

from fleet_contract import names
from fleet_operator.cluster import CONFIG_MAP, CONTROLLER_REVISION, INFERENCE_SERVICE, POD, SERVICE, STATEFUL_SET
from fleet_operator.errors import ClusterError
from fleet_testing.operator_world import World, pair


async def test_a_new_service_becomes_available_and_then_nothing_is_written_any_more() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    assert world.cluster.condition("chat", "Available")["status"] == "True"
    assert world.cluster.condition("chat", "Ready")["reason"] == "Ready"
    assert sorted(world.sets().values()) == [1, 1]
    assert [len(world.cluster.of_kind(k)) for k in (SERVICE, CONFIG_MAP, CONTROLLER_REVISION)] == [1, 1, 1]
    count = len(world.cluster.writes)
    for _ in range(5):
        await world.turn()
    assert len(world.cluster.writes) == count


async def test_conditions_exist_from_the_first_look_and_ready_is_never_true_before_a_pod_is() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.look()
    status = world.cluster.service("chat")["status"]
    assert [c["type"] for c in status["conditions"]][:3] == ["Available", "Progressing", "Ready"]
    assert {c["type"]: c["status"] for c in status["conditions"]}["Ready"] == "False"
    assert all(c["observedGeneration"] == 1 and c["reason"] and c["message"] for c in status["conditions"])
    assert status["summary"] == {"ready": "0/2", "prefill": "0/1", "decode": "0/1"}


async def test_ready_pods_without_a_router_are_not_available() -> None:
    world = World(routers=0)
    world.cluster.put_service("chat", pair())
    await world.settle()
    assert world.cluster.condition("chat", "Available")["reason"] == "NoRouter"
    assert world.cluster.condition("chat", "PrefillReady")["status"] == "True"


async def test_a_failed_probe_keeps_the_service_unavailable_and_is_asked_again() -> None:
    world = World()
    world.routers.probe_error = "no free pages"
    world.cluster.put_service("chat", pair())
    for _ in range(8):
        await world.turn()
    found = world.cluster.condition("chat", "Available")
    assert found["reason"] == "ProbeFailed" and "no free pages" in found["message"]
    world.routers.probe_error = ""
    for _ in range(40):
        await world.turn()
    assert world.cluster.condition("chat", "Available")["status"] == "True"


async def test_a_probe_is_asked_once_per_revision_and_operator_life() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    assert len(world.routers.probes) == 1
    world.start()
    await world.look()
    assert world.cluster.condition("chat", "Available")["status"] == "True", "a restart of the operator is no outage"
    await world.settle()
    assert len(world.routers.probes) == 2


async def test_a_changed_spec_brings_the_new_revision_up_before_the_old_one_goes() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    old = set(world.sets())
    world.cluster.put_service("chat", pair(engine={"contextLength": 2048}))
    seen_both = False
    for _ in range(20):
        await world.turn()
        ready = {p["metadata"]["name"].rpartition("-")[0] for p in world.cluster.of_kind(POD) if p["metadata"]["labels"].get(names.LABEL_SERVICE)}
        assert old <= ready or not (old & ready) or world.cluster.condition("chat", "Available")["status"] == "True"
        seen_both |= len(world.sets()) == 4
        assert world.cluster.condition("chat", "Available")["status"] == "True"
    assert seen_both and not old & set(world.sets()) and len(world.sets()) == 2
    assert len(world.cluster.of_kind(CONTROLLER_REVISION)) == 2, "the old one stays as history"
    assert world.cluster.condition("chat", "Ready")["status"] == "True"


async def test_ready_is_not_true_while_old_pods_satisfy_the_count() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    world.cluster.put_service("chat", pair(engine={"contextLength": 2048}))
    await world.look()
    assert world.cluster.condition("chat", "Ready")["status"] == "False"
    assert world.cluster.condition("chat", "Progressing")["status"] == "True"
    assert world.cluster.service("chat")["status"]["roles"]["decode"] == {"desired": 1, "ready": 0, "updated": 0}


async def test_a_rollout_does_not_look_like_an_outage() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    old = world.cluster.service("chat")["status"]["revision"]
    assert world.cluster.condition("chat", "Ready")["reason"] == "Ready"
    world.cluster.put_service("chat", pair(engine={"contextLength": 2048}))
    await world.look()
    ready = world.cluster.condition("chat", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "RollingOut")
    assert f"revision {old} serves meanwhile" in ready["message"]


async def test_a_broken_image_leaves_the_old_revision_serving_and_a_good_one_recovers() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    good = set(world.sets())
    world.cluster.broken_images.add("bad:1")
    broken = {"replicas": 1, "podTemplate": {"image": "bad:1"}}
    world.cluster.put_service("chat", pair(prefill=broken, decode=broken))
    for _ in range(20):
        await world.turn()
    assert good <= set(world.sets()) and world.cluster.condition("chat", "Available")["status"] == "True"
    assert world.cluster.condition("chat", "Ready")["reason"] == "ImagePullFailed"
    assert "serves meanwhile" in world.cluster.condition("chat", "Ready")["message"]
    world.cluster.put_service("chat", pair(engine={"contextLength": 1024}))
    await world.settle()
    assert world.cluster.condition("chat", "Ready")["status"] == "True" and len(world.sets()) == 2


async def test_going_back_in_the_middle_of_a_rollout_keeps_the_old_pods() -> None:
    for step in range(8):
        world = World()
        world.cluster.put_service("chat", pair())
        await world.settle()
        old = world.sets()
        world.cluster.put_service("chat", pair(engine={"contextLength": 2048}))
        for _ in range(step):
            await world.turn()
        world.cluster.put_service("chat", pair())
        for _ in range(25):
            await world.turn()
            assert world.cluster.condition("chat", "Available")["status"] == "True", f"step {step}"
        await world.settle()
        assert world.sets() == old


async def test_scaling_changes_replicas_only_and_drains_the_highest_ordinal_first() -> None:
    world = World()
    world.cluster.put_service("chat", pair(decode={"replicas": 3}))
    await world.settle()
    (decode,) = [n for n in world.sets() if n.endswith("-d")]
    world.routers.busy = {f"{decode}-1"}
    world.cluster.put_service("chat", pair(decode={"replicas": 1}))
    for _ in range(5):
        await world.turn()
    assert world.sets()[decode] == 2, "ordinal 2 is idle and gone, ordinal 1 has a request"
    world.routers.busy = set()
    await world.settle()
    assert world.sets()[decode] == 1
    sts = world.cluster.objects["StatefulSet", "demo", decode]
    assert names.ANNOTATION_DRAIN not in sts["metadata"].get("annotations", {})
    assert len(world.cluster.of_kind(CONTROLLER_REVISION)) == 1


@pytest.mark.parametrize("hold", ["busy", "frozen", "unsynced"])
async def test_a_pod_that_cannot_be_seen_idle_stays_until_the_deadline_and_goes_right_after(hold: str) -> None:
    world = World(routers=2)
    world.cluster.put_service("chat", pair(decode={"replicas": 2}))
    await world.settle()
    (decode,) = [n for n in world.sets() if n.endswith("-d")]
    getattr(world.routers, hold).add(f"{decode}-1" if hold == "busy" else "router-1")
    world.cluster.put_service("chat", pair(decode={"replicas": 1}))
    began = world.cluster.now
    while world.sets()[decode] == 2:
        await world.turn(seconds=0.5)
        assert (world.cluster.now - began).total_seconds() < 40
    assert 29 <= (world.cluster.now - began).total_seconds() <= 32


async def test_scaling_back_up_removes_both_annotations() -> None:
    world = World()
    world.cluster.put_service("chat", pair(decode={"replicas": 2}))
    await world.settle()
    (decode,) = [n for n in world.sets() if n.endswith("-d")]
    world.routers.busy = {f"{decode}-1"}
    world.cluster.put_service("chat", pair(decode={"replicas": 1}))
    for _ in range(3):
        await world.turn()
    pod = world.cluster.objects["Pod", "demo", f"{decode}-1"]
    assert names.ANNOTATION_DRAINING in pod["metadata"]["annotations"]
    world.cluster.put_service("chat", pair(decode={"replicas": 2}))
    await world.settle()
    pod = world.cluster.objects["Pod", "demo", f"{decode}-1"]
    assert names.ANNOTATION_DRAINING not in pod["metadata"]["annotations"] and world.sets()[decode] == 2


async def test_a_pod_that_is_recreated_in_a_drain_is_marked_again() -> None:
    world = World()
    world.cluster.put_service("chat", pair(decode={"replicas": 2}))
    await world.settle()
    (decode,) = [n for n in world.sets() if n.endswith("-d")]
    world.routers.busy = {f"{decode}-1"}
    world.cluster.put_service("chat", pair(decode={"replicas": 1}))
    for _ in range(3):
        await world.turn()
    first = world.cluster.objects["Pod", "demo", f"{decode}-1"]["metadata"]["annotations"]
    del world.cluster.objects["Pod", "demo", f"{decode}-1"]
    world.cluster.run_controllers()
    for _ in range(3):
        await world.turn()
    assert world.cluster.objects["Pod", "demo", f"{decode}-1"]["metadata"]["annotations"] == first


async def test_a_new_operator_image_changes_no_live_revision_but_is_used_for_a_new_one() -> None:
    world = World(image="runtime:1")
    world.cluster.put_service("chat", pair())
    await world.settle()
    pods = [p["metadata"]["uid"] for p in world.cluster.of_kind(POD)]
    count = len(world.cluster.writes)
    world.image = "runtime:2"
    world.start()
    await world.settle()
    assert [p["metadata"]["uid"] for p in world.cluster.of_kind(POD)] == pods and len(world.cluster.writes) == count
    world.cluster.put_service("chat", pair(engine={"contextLength": 2048}))
    await world.settle()
    assert {o["spec"]["template"]["spec"]["containers"][0]["image"] for o in world.cluster.of_kind(STATEFUL_SET)} == {"runtime:2"}


async def test_losing_all_annotations_and_the_status_changes_nothing_but_one_status() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    shape, count = world.shape(), len([w for w in world.cluster.writes if "status" not in w and w != "event"])
    world.cluster.service("chat").pop("status")
    for slot, obj in world.cluster.objects.items():
        if slot[0] != INFERENCE_SERVICE.kind:
            obj["metadata"].pop("annotations", None)
    await world.settle()
    assert world.shape() == shape
    assert len([w for w in world.cluster.writes if "status" not in w and w != "event"]) == count


@pytest.mark.parametrize("write", range(12))
async def test_an_operator_that_dies_between_any_two_writes_ends_where_it_would_have(write: int) -> None:
    plain = World()
    for spec in (pair(), pair(engine={"contextLength": 2048}), pair(engine={"contextLength": 2048}, decode={"replicas": 2})):
        plain.cluster.put_service("chat", spec)
        await plain.settle()
    world = World()
    for spec in (pair(), pair(engine={"contextLength": 2048}), pair(engine={"contextLength": 2048}, decode={"replicas": 2})):
        world.cluster.put_service("chat", spec)
        world.cluster.crash_before_write = write
        await world.settle()
        world.cluster.crash_before_write = None
    assert world.shape() == plain.shape()
    assert world.cluster.condition("chat", "Ready")["status"] == "True"


@pytest.mark.parametrize("seed", range(10))
async def test_conflicts_and_random_order_lead_to_the_same_end(seed: int) -> None:
    rng = random.Random(seed)
    world = World()
    world.cluster.fail_write = lambda what: ClusterError(409, "Conflict", "changed") if rng.random() < 0.3 else None
    specs = [pair(), pair(decode={"replicas": 3}), pair(engine={"contextLength": 512}), {"model": {"uri": "simulated://"}, "unified": {}}]
    for _ in range(40):
        action = rng.random()
        if action < 0.15:
            world.cluster.put_service("chat", rng.choice(specs))
        elif action < 0.25:
            world.start()
        elif action < 0.5:
            world.cluster.run_controllers()
        elif action < 0.6:
            world.cluster.pass_time(rng.choice([0.1, 1, 40]))
        else:
            await world.look()
    world.cluster.fail_write = lambda what: None
    world.cluster.put_service("chat", pair(decode={"replicas": 2}))
    await world.settle()
    assert sorted(world.sets().values()) == [1, 2] and len(world.cluster.of_kind(POD)) == 1 + 3
    assert world.cluster.condition("chat", "Ready")["status"] == "True"


async def test_drift_is_repaired_and_foreign_fields_stay() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    (service,) = world.cluster.of_kind(SERVICE)
    service["metadata"]["annotations"] = {"team/owner": "me"}
    (decode,) = [o for o in world.cluster.of_kind(STATEFUL_SET) if o["metadata"]["name"].endswith("-d")]
    decode["spec"]["replicas"] = 3
    config = world.cluster.of_kind(CONFIG_MAP)[0]["metadata"]
    world.cluster.remove(CONFIG_MAP, config["namespace"], config["name"])
    await world.settle()
    assert world.cluster.of_kind(SERVICE)[0]["metadata"]["annotations"] == {"team/owner": "me"}
    assert sorted(world.sets().values()) == [1, 1] and len(world.cluster.of_kind(CONFIG_MAP)) == 1


async def test_a_foreign_object_of_our_name_is_never_taken_over() -> None:
    probe = World()
    probe.cluster.put_service("chat", pair())
    await probe.settle()
    name = probe.cluster.of_kind(CONFIG_MAP)[0]["metadata"]["name"]
    world = World()
    world.cluster.put(CONFIG_MAP, {"metadata": {"name": name, "namespace": "demo"}, "data": {"mine": "yes"}})
    world.cluster.put_service("chat", pair())
    await world.settle()
    assert world.cluster.condition("chat", "Ready")["reason"] == "OwnershipConflict"
    assert world.cluster.objects["ConfigMap", "demo", name]["data"] == {"mine": "yes"} and not world.sets()


async def test_orphans_are_adopted_without_a_restart() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    pods = [p["metadata"]["uid"] for p in world.cluster.of_kind(POD)]
    world.cluster.remove(INFERENCE_SERVICE, "demo", "chat", orphan=True)
    uid = world.cluster.put_service("chat", pair())["metadata"]["uid"]
    await world.settle()
    assert [p["metadata"]["uid"] for p in world.cluster.of_kind(POD)] == pods
    assert all(o["metadata"]["ownerReferences"][0]["uid"] == uid for o in world.cluster.of_kind(STATEFUL_SET))


async def test_objects_of_a_deleted_service_of_the_same_name_are_waited_for() -> None:
    world = World()
    old = world.cluster.put_service("chat", pair())["metadata"]["uid"]
    await world.settle()
    world.cluster.service("chat")["metadata"]["uid"] = "uid-new"
    await world.look()
    assert world.cluster.condition("chat", "Ready")["reason"] == "WaitingForDeletion"
    for slot in [s for s, o in world.cluster.objects.items() if any(r["uid"] == old for r in o["metadata"].get("ownerReferences", ()))]:
        if slot in world.cluster.objects:
            world.cluster.remove({k.kind: k for k in (STATEFUL_SET, SERVICE, CONFIG_MAP, CONTROLLER_REVISION)}[slot[0]], slot[1], slot[2])
    await world.settle()
    assert world.cluster.condition("chat", "Ready")["status"] == "True"
    assert {o["metadata"]["ownerReferences"][0]["uid"] for o in world.cluster.of_kind(STATEFUL_SET)} == {"uid-new"}


async def test_a_service_that_is_going_is_not_built() -> None:
    world = World()
    world.cluster.put_service("chat", pair())["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    await world.look()
    assert world.cluster.writes == []


async def test_a_bad_flag_is_told_in_the_status_and_nothing_is_applied() -> None:
    world = World()
    world.cluster.put_service("chat", pair(engine={"args": {"max-rows": "many"}}))
    await world.settle()
    found = world.cluster.condition("chat", "Ready")
    assert found["reason"] == "InvalidSpec" and "spec.engine.args.max-rows" in found["message"] and "'many'" in found["message"]
    assert not world.sets()


async def test_a_bad_flag_on_a_serving_service_keeps_it_available() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    world.cluster.put_service("chat", pair(engine={"args": {"max-rows": "many"}}))
    await world.settle()
    assert world.cluster.condition("chat", "Available")["status"] == "True"
    assert world.cluster.condition("chat", "Ready")["reason"] == "InvalidSpec"
    assert sorted(world.sets().values()) == [1, 1]


async def test_a_refused_write_is_told_with_the_servers_words() -> None:
    world = World()
    world.cluster.fail_write = lambda what: ClusterError(403, "Forbidden", "no rights for services") if what.startswith("apply Service") else None
    world.cluster.put_service("chat", pair())
    for _ in range(3):
        await world.turn()
    found = world.cluster.condition("chat", "Ready")
    assert found["reason"] == "ApplyFailed" and "no rights for services" in found["message"]


async def test_an_unreadable_cluster_is_told_too() -> None:
    world = World()
    world.cluster.fail_read = lambda kind: ClusterError(403, "Forbidden", "cannot list statefulsets") if kind is STATEFUL_SET else None
    world.cluster.put_service("chat", pair())
    for _ in range(3):
        await world.turn()
    found = world.cluster.condition("chat", "Ready")
    assert found["reason"] == "ClusterUnreadable" and "cannot list statefulsets" in found["message"]


async def test_zero_replicas_end_all_workers_and_say_so() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    world.cluster.put_service("chat", pair(prefill={"replicas": 0}, decode={"replicas": 0}))
    await world.settle()
    assert set(world.sets().values()) == {0}
    assert world.cluster.condition("chat", "Available")["reason"] == "ScaledToZero"
    world.cluster.put_service("chat", pair())
    await world.settle()
    assert world.cluster.condition("chat", "Ready")["status"] == "True"


async def test_switching_from_a_pair_to_unified_and_back_leaves_no_workload_behind() -> None:
    world = World()
    for spec in (pair(), {"model": {"uri": "simulated://"}, "unified": {"replicas": 2}}, pair()):
        world.cluster.put_service("chat", spec)
        await world.settle()
        assert world.cluster.condition("chat", "Ready")["status"] == "True"
    assert sorted(n[-1] for n in world.sets()) == ["d", "p"]


async def test_history_is_bounded() -> None:
    world = World()
    for length in range(16, 26):
        world.cluster.put_service("chat", pair(engine={"contextLength": length}))
        await world.settle()
    assert len(world.cluster.of_kind(CONTROLLER_REVISION)) == 1 + 5


async def test_an_explicit_name_of_an_older_service_is_a_conflict_and_a_default_name_is_not() -> None:
    world = World()
    world.cluster.put_service("first", pair(model={"uri": "simulated://", "name": "m"}))
    world.cluster.pass_time(5)
    world.cluster.put_service("chat", pair(model={"uri": "simulated://", "name": "m"}))
    await world.settle()
    found = world.cluster.condition("chat", "Ready")
    assert found["reason"] == "NameConflict" and "demo/first" in found["message"] and "demo/chat" in found["message"]
    assert world.cluster.condition("chat", "Available")["status"] == "True"


async def test_an_event_is_written_per_change_and_none_at_rest() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    reasons = [e["reason"] for e in world.cluster.events]
    assert reasons[-1] == "Ready" and len(reasons) == len(set(reasons))
    for _ in range(5):
        await world.turn()
    assert len(world.cluster.events) == len(reasons)


async def test_a_service_that_flaps_for_hours_gets_few_events_and_a_later_change_gets_one_again() -> None:
    world = World()
    world.cluster.put_service("chat", pair())
    await world.settle()
    for turn in range(300):
        world.routers.frozen = {"router-0"} if turn % 2 == 0 else set()
        await world.turn(seconds=2)
    flaps = len(world.cluster.events)
    assert 10 < flaps <= 25, "the first changes are told, then few"
    world.routers.frozen = set()
    await world.settle()
    world.cluster.pass_time(1200)
    world.cluster.put_service("chat", pair(prefill={"replicas": 0}, decode={"replicas": 0}))
    await world.settle()
    assert [e["reason"] for e in world.cluster.events[flaps:]][-1] == "ScaledToZero"
