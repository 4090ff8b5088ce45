"""Every write but the status: server-side apply of what differs, pod annotations, deletions. Refuses objects that are not ours."""

from __future__ import annotations

from typing import Any, Final

from fleet_contract import names
from fleet_operator.api import quantity
from fleet_operator.cluster import BY_KIND, POD, Cluster
from fleet_operator.facts import Obj, Observed
from fleet_operator.observe import is_ours
from fleet_operator.plan import Plan
from fleet_operator.status import Hindrance

_QUANTITY_PARENTS: Final = frozenset({"requests", "limits", "sizeLimit"})


async def apply(cluster: Cluster, observed: Observed, plan: Plan) -> Hindrance | None:
    """Does what the plan says, in its order; stops at the first thing in the way and returns it. Raises ClusterError."""
    for obj in plan.apply:
        kind = BY_KIND[obj["kind"]]
        live = observed.live.get((obj["kind"], obj["metadata"]["name"]))
        if live is None:
            if (hindrance := await _name_is_free(cluster, obj, observed.uid)) is not None:
                return hindrance
            await cluster.apply(kind, obj)
        elif "deletionTimestamp" in live["metadata"]:
            return Hindrance("WaitingForDeletion", f"{kind.kind} {obj['metadata']['name']} is being deleted; it is made anew when it is gone")
        elif not is_applied(live, obj):
            await cluster.apply(kind, {**obj, "metadata": {**obj["metadata"], "uid": live["metadata"]["uid"]}})
    for mark in plan.pod_marks:
        await cluster.annotate(POD, observed.key.namespace, mark.name, mark.uid, {names.ANNOTATION_DRAINING: mark.deadline})
    for ref in plan.delete:
        await cluster.delete(BY_KIND[ref.kind], observed.key.namespace, ref.name, ref.uid)
    return None


async def _name_is_free(cluster: Cluster, obj: Obj, uid: str) -> Hindrance | None:
    """Nobody else's object may be taken over because its name happens to be ours."""
    kind, name = BY_KIND[obj["kind"]], obj["metadata"]["name"]
    found = await cluster.get(kind, obj["metadata"]["namespace"], name)
    if found is None:
        return None
    owners = [o for o in found["metadata"].get("ownerReferences") or () if o.get("controller")]
    if is_ours(found) and all(o["uid"] == uid for o in owners):
        return None  # made a moment ago, after the listing
    if is_ours(found) and owners:
        return Hindrance("WaitingForDeletion", f"{kind.kind} {name} belongs to a deleted service of the same name; it is made anew when it is gone")
    return Hindrance("OwnershipConflict", f"{kind.kind} {name} exists and is not the operator's; delete or rename it, or rename the service")


def is_applied(live: Obj, wanted: Obj) -> bool:
    """True when an apply would change nothing: all we want is there, and no annotation of ours is left that we do not want."""
    ours = {k for k in live["metadata"].get("annotations") or () if k.startswith(names.API_GROUP + "/")}
    return ours <= set(wanted["metadata"].get("annotations") or ()) and _contains(live, wanted)


def _contains(live: Any, wanted: Any, key: str = "") -> bool:
    """`wanted` is a part of `live`; lists of objects in any order and among others, as the API server merges them by key."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(
            k in live and (_contains(live[k], v, k) or (key in _QUANTITY_PARENTS and quantity.is_equal(str(live[k]), str(v))))
            for k, v in wanted.items()
        )
    if isinstance(wanted, list) and any(isinstance(item, dict) for item in wanted):
        return isinstance(live, list) and all(any(_contains(there, item, key) for there in live) for item in wanted)
    if key in _QUANTITY_PARENTS:
        return bool(live == wanted) or quantity.is_equal(str(live), str(wanted))
    return bool(live == wanted)
