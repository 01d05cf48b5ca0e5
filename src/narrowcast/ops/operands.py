"""``OperationPlan``: how an operation's own tensors are quantized under a recipe, by the roles that it gives them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from .._determinism import DETERMINISM
from .._tracing import refuse_in_one_graph, traced_local, while_tracing
from ..quantizers import Operand
from ..recipe import DelayedScaling, Recipe, eager_only, remember, resolve_both
from ..roles import QuantizerRole
from .contract import BasicOperationLike


@dataclass(frozen=True)
class OperationPlan:
    """The quantizers of an operation's tensors, in both directions, and the recipe that renews delayed ones."""

    forward: tuple[Operand, ...]
    backward: tuple[Operand, ...]
    delayed: DelayedScaling | None


def operation_plan(recipe: Recipe, op: BasicOperationLike) -> OperationPlan:
    """Return the plan of an operation: built once for the roles of its tensors, then read off the recipe.

    Raises:
        ValueError: what a custom recipe's factory returned, or two tensors of one kind under delayed scaling.
    """
    compiling = while_tracing(_remember_while_tracing)
    roles = op.get_quantizer_roles("forward"), op.get_quantizer_roles("backward")
    key = _key(roles, DETERMINISM.batch_invariant)
    plan = getattr(recipe, key, None)
    if plan is None:
        plan = _build(recipe, roles, DETERMINISM.batch_invariant)
        if not compiling:
            remember(recipe, key, plan)
    return plan


_Roles = tuple[list[QuantizerRole], list[QuantizerRole]]


def _key(roles: _Roles, batch_invariant: int) -> str:
    names = [
        "|".join([f"{role.module_type}:{role.tensor_type}:{role.name}" for role in some]) for some in roles
    ]
    return f"_operands_{batch_invariant}_{names[0]}/{names[1]}".replace(
        ".", "_dot_"
    )  # guards take no dots in attributes


def _build(recipe: Recipe, roles: _Roles, batch_invariant: int) -> OperationPlan:
    forward, backward, delayed = resolve_both(recipe, roles[0], roles[1], batch_invariant > 0)
    for some in (forward, backward):
        slots = [quantizer.slot for quantizer in some if quantizer._is_delayed()]  # type: ignore[attr-defined]
        if len(set(slots)) < len(slots):
            raise ValueError(
                f"two tensors of one operation are of one kind, in roles {roles}, and would share a delayed scale; "
                "have get_quantizer_roles tell different tensor types"
            )
    operands = [tuple([Operand.of(quantizer) for quantizer in some]) for some in (forward, backward)]
    return OperationPlan(operands[0], operands[1], delayed)


def _remember_while_tracing(context: Any) -> None:
    recipe, op = traced_local(context, "recipe"), traced_local(context, "op")
    if recipe is not None and op is not None:
        reason = ""
        # a failure occurs again in traced code, which raises where the user sees it
        with contextlib.suppress(Exception):
            roles = op.get_quantizer_roles("forward"), op.get_quantizer_roles("backward")
            plan = _build(recipe, roles, DETERMINISM.batch_invariant)
            remember(recipe, _key(roles, DETERMINISM.batch_invariant), plan)
            reason = eager_only([operand.quantizer for operand in (*plan.forward, *plan.backward)])
        if reason:
            refuse_in_one_graph(context, reason)
