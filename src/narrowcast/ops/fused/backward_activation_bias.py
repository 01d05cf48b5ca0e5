"""F8: the gradient of an activation, quantized for the linear layer, with the bias gradient from the same kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._checks import shown
from ...recipe import Recipe
from ...tensors import TensorOrQuantized
from ..basic.activation import ActivationOperation
from ..basic.basic_linear import BasicLinear
from ..basic.bias import Bias
from ..basic.inputs import plain
from ..context import OperationContext
from ..contract import FusibleOperation, Gradients
from ..op import FusedOperation
from .pattern import Fusion, Match, Matched, NearMiss, follows


class BackwardActivationBias(FusedOperation, values=()):
    """Gradient of a bias and the activation after it: one kernel reads what came in and writes codes and sums."""

    quantizes_grad_input = True

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: TensorOrQuantized, **kwargs: Any
    ) -> Gradients:
        operations: Any = self.basic_ops
        bias, activation = operations
        wanted = basic_op_ctxs[0].prev_op_grad_output_quantizer
        if wanted is None:
            # the previous layer is part of another fused operation, which takes a plain gradient
            grad, _ = activation.op_backward(basic_op_ctxs[1], grad_output)
            dx, grad_bias = bias.op_backward(basic_op_ctxs[0], grad)
            return dx, [grad_bias, ()], [(), ()]
        grad, x = plain(grad_output), activation.saved_input(basic_op_ctxs[1], grad_output)
        dx, sums = activation.quantized_gradient(grad, x, wanted, True)
        return dx, [(sums.to(bias.bias.dtype),), ()], [(), ()]


def _match(ops: Sequence[FusibleOperation], start: int, recipe: Recipe | None) -> Matched:
    if start == 0 or not follows(ops, start, Bias, ActivationOperation):
        return None
    front, activation = ops[start - 1], ops[start + 1]
    layer = front.basic_ops[-1] if front.is_fused_op else front
    if not isinstance(layer, BasicLinear):
        return NearMiss(f"{type(layer).__name__} in front takes its gradient in high precision")
    if layer.parallel.gathers_grad_output:
        return NearMiss("the layer is sequence-parallel: the gradient is gathered before it is quantized")
    if recipe is None:
        return NearMiss("no recipe is in force, so nothing is quantized")
    if recipe.backward_override is not None:  # type: ignore[attr-defined]
        return NearMiss(f"backward_override={shown(recipe.backward_override)} leaves gradients unquantized")  # type: ignore[attr-defined]
    if activation.glu_interleave_size is not None:  # type: ignore[attr-defined]
        return NearMiss("glu_interleave_size moves the gradient's channels, so the kernel cannot quantize it")
    return Match(2)


BACKWARD_ACTIVATION_BIAS = Fusion("BackwardActivationBias", "backward", _match, BackwardActivationBias)
