"""F11: the experts of a mixture, with the gated activation computed as the second layer's input is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._activations import ACTIVATIONS
from ..._checks import shown
from ...autograd.groups import GatedActivation
from ...recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from ...tensors import TensorOrQuantized
from ..basic.activation import ActivationOperation
from ..basic.grouped_linear import GroupedLinear
from ..context import OperationContext
from ..contract import ExtraTensors, FusibleOperation, Gradients, ParameterGradients, TensorsToSave
from ..op import FusedOperation
from .grouped_mlp import features_reason, groups_reason, save_experts
from .pattern import Fusion, Match, Matched, NearMiss

RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)
_NONE: dict[str, Any] = {"basic_op_grad_extra_outputs": [()]}


class GroupedGatedMLP(FusedOperation):
    """y_g = act(x_g w1_g^T) w2_g^T for every group g of rows; also the backward.

    Neither the activation's result nor its gradient is written in high precision: the second layer's input, and the
    gradient of the first one's output, are quantized as they are computed. Values are those of the three operations by
    themselves.
    """

    @property
    def _parts(self) -> tuple[GroupedLinear, ActivationOperation, GroupedLinear]:
        return self.basic_ops  # type: ignore[return-value]

    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: ExtraTensors,
        basic_op_kwargs: list[dict[str, Any]],
        requires_grad: bool,
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, ExtraTensors, list[TensorsToSave]]:
        fc1, activation, fc2 = self._parts
        own: list[dict[str, Any]] = [
            {
                "basic_op_extra_inputs": [basic_op_extra_inputs[index]],
                "basic_op_kwargs": [basic_op_kwargs[index]],
                "requires_grad": requires_grad,
            }
            for index in (0, 2)
        ]
        hidden, _, saved1 = fc1.fuser_forward_compute(input_, **own[0], inside=True)
        gated = GatedActivation(*activation.formula)
        y, _, saved2 = fc2.fuser_forward_compute(hidden, **own[1], activation=gated)
        return y, [(), (), ()], [*saved1, (hidden,) if requires_grad else (), *saved2]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[TensorsToSave],
        *,
        basic_op_kwargs: list[dict[str, Any]],
        **kwargs: Any,
    ) -> None:
        save_experts(self._parts, basic_op_ctxs, input_, tensors_to_save, basic_op_kwargs)

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: TensorOrQuantized, **kwargs: Any
    ) -> Gradients:
        fc1, activation, fc2 = self._parts
        first, between, last = basic_op_ctxs
        grad, grads2, extra2 = fc2.fuser_backward([last], grad_output, **_NONE, inside=True)
        grads1: ParameterGradients = [(None,) * len(list(fc1.parameters()))]
        extra1: ExtraTensors = [(None,) * fc1.num_extra_inputs]
        grad_input: TensorOrQuantized | None = None
        if between.requires_grad and first.requires_grad and grad is not None:
            hidden: Any = between.saved_tensors[0]
            gated = GatedActivation(*activation.formula, hidden.reshape(-1, hidden.shape[-1]))
            grad_input, grads1, extra1 = fc1.fuser_backward([first], grad, **_NONE, activation=gated)
        return grad_input, [*grads1, (), *grads2], [*extra1, (), *extra2]


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    run: Sequence[Any] = ops[start : start + 3]
    if len(run) < 3 or not type(run[0]) is type(run[2]) is GroupedLinear:
        return None
    fc1, activation, fc2 = run
    if not isinstance(activation, ActivationOperation) or not ACTIVATIONS[activation.formula[0]].gated:
        return None
    reason = _reason(fc1, activation, fc2, recipe)
    return Match(3) if reason is None else NearMiss(reason)


def _reason(
    fc1: GroupedLinear, activation: ActivationOperation, fc2: GroupedLinear, recipe: Recipe | None
) -> str | None:
    """Return why the operations run one by one; None if they do not."""
    if not isinstance(recipe, RECIPES):
        name = "none" if recipe is None else type(recipe).__name__
        return f"the recipe is {name}; {', '.join(kind.__name__ for kind in RECIPES)} get it"
    if recipe.backward_override is not None:
        return f"the recipe has backward_override={shown(recipe.backward_override)}"
    if fc1.use_bias:
        return "the first layer has biases, whose gradients sum what is not written"
    reason = groups_reason(fc1, fc2) or features_reason(fc1, fc2, True)
    if reason is not None:
        return reason
    if activation.glu_interleave_size is not None or activation.cache_quantized_input:
        return "the activation has glu_interleave_size or cache_quantized_input"
    return None


GROUPED_GATED_MLP = Fusion("GroupedGatedMLP", "both", _match, GroupedGatedMLP)
