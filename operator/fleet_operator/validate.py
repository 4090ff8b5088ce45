"""Checks of a spec that CEL cannot make: values of engine.args, and all of it again for objects stored under an older CRD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fleet_contract.launch import BadFlag, flag_name
from fleet_operator.api.v1alpha1 import InferenceServiceSpec
from fleet_operator.facts import Key, Obj
from fleet_operator.render.revision import revision_of
from fleet_operator.render.workload import runtime_launch


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with a spec."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def validate(key: Key, raw: Obj) -> tuple[InferenceServiceSpec | None, tuple[Violation, ...]]:
    """The spec, or all violations."""
    try:
        spec = InferenceServiceSpec.model_validate(raw)
    except ValidationError as e:
        return None, tuple(Violation("spec." + ".".join(map(str, err["loc"])), err["msg"]) for err in e.errors())
    has_pair = spec.prefill is not None and spec.decode is not None
    has_half = spec.prefill is not None or spec.decode is not None
    if (spec.unified is not None) == has_half or (has_half and not has_pair):
        return None, (Violation("spec", "set either spec.unified, or both spec.prefill and spec.decode"),)
    try:
        runtime_launch(key.namespace, key.name, spec, revision_of(spec), next(iter(spec.roles())))
    except ValidationError as e:
        return None, tuple(_flag_violation(err) for err in e.errors())
    except (BadFlag, ValueError) as e:
        return None, (Violation("spec.engine", str(e)),)
    return spec, ()


def _flag_violation(err: Any) -> Violation:
    """One bad flag, by the name that the user wrote."""
    flag = flag_name(str(err["loc"][0])).removeprefix("--")
    return Violation(f"spec.engine.args.{flag}", f"got {err['input']!r}; {err['msg'][0].lower()}{err['msg'][1:]}")
