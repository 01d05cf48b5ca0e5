"""Activations whose result is multiplied by one number per row, as the outputs of experts are by router weights."""

from __future__ import annotations

from typing import Any

from ..._checks import flags, numbers, shape_of
from ...functional import scaled_act, scaled_act_backward
from ...tensors import TensorOrQuantized
from ..context import OperationContext
from ..contract import ExtraTensors, Gradients, TensorsToSave
from ..handover import ScaledOperand
from .activation import ActivationBase
from .glu_channels import channels_from_halves, channels_to_halves, checked_interleave_size
from .inputs import plain, plain_input
from .swiglu import checked_betas


class ScaledActivationOperation(ActivationBase):
    """Base of the scaled activations; a subclass names its own.

    One extra input: the scales, of the shape of the input without its last dim, fp32, bf16 or fp16; they have a
    gradient. The product is rounded once, to the dtype of the input.

    Args:
        activation_recompute_in_mlp: a grouped MLP made of this keeps the activation's input and computes the activation
            once more for the weight gradient of its second layer; alone the operation always recomputes.

    Errors are raised in forward.

    Raises:
        ValueError: scales of another shape, or an odd last dim of a gated activation.
        TypeError: an input or scales that are not fp32, bf16 or fp16.
    """

    num_extra_inputs: int = 1

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        flags(activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.activation_recompute_in_mlp = bool(activation_recompute_in_mlp)

    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: ExtraTensors,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        basic_op_kwargs: list[dict[str, Any]],
        requires_grad: bool,
    ) -> tuple[TensorOrQuantized, ExtraTensors, list[TensorsToSave]]:
        x, (scale,) = plain_input(input_), basic_op_extra_inputs[0]
        if scale.shape != x.shape[:-1]:
            raise ValueError(
                f"the scales have shape {shape_of(scale)}; give one per row of the input, {tuple(x.shape[:-1])}"
            )
        product = scaled_act(channels_to_halves(x, self.glu_interleave_size), scale, *self.formula)
        wanted = next_op_input_quantizer
        output = product if wanted is None else wanted.quantize(product)
        return output, [()], [(x, scale) if requires_grad else ()]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[TensorsToSave],
        **kwargs: Any,
    ) -> None:
        basic_op_ctxs[0].save_for_backward(*tensors_to_save[0])

    def fuser_backward(
        self, basic_op_ctxs: list[OperationContext], grad_output: TensorOrQuantized, **kwargs: Any
    ) -> Gradients:
        x, scale = basic_op_ctxs[0].take()
        wanted = basic_op_ctxs[0].prev_op_grad_output_quantizer
        halves = channels_to_halves(plain(x), self.glu_interleave_size)  # type: ignore[arg-type]
        dx, dscale = scaled_act_backward(plain(grad_output), halves, scale, *self.formula)
        dx = channels_from_halves(dx, self.glu_interleave_size)
        return dx if wanted is None else wanted.quantize(dx), [()], [(dscale,)]


class ScaledSwiGLU(ScaledActivationOperation, values=("settings", "glu_interleave_size")):
    """``y = silu(a) * b * scale``: :class:`~narrowcast.ops.SwiGLU` times one scale per row.

    Args:
        glu_interleave_size: as of :class:`~narrowcast.ops.SwiGLU`.
        activation_recompute_in_mlp: as of
            :class:`~narrowcast.ops.basic.scaled_activation.ScaledActivationOperation`; so are inputs and errors.
    Raises:
        ValueError: ``glu_interleave_size`` is not positive; in forward, the last dim does not divide into pairs of
            blocks.
    """

    _activation = "swiglu"

    def __init__(
        self, *, glu_interleave_size: int | None = None, activation_recompute_in_mlp: bool = False
    ) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.glu_interleave_size = checked_interleave_size(glu_interleave_size)


class ScaledClampedQGeGLU(ScaledSwiGLU, values=("settings", "glu_interleave_size")):
    """:class:`~narrowcast.ops.ClampedSwiGLU` times one scale per row.

    Args:
        limit, alpha, glu_linear_offset: as of :class:`~narrowcast.ops.ClampedSwiGLU`.
        glu_interleave_size: as of :class:`ScaledSwiGLU`; so are inputs and errors.
        activation_recompute_in_mlp: must be False.
    Raises:
        ValueError: ``activation_recompute_in_mlp``.
    """

    _activation = "clamped_swiglu"
    _numbers = ("limit", "alpha", "glu_linear_offset")

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        flags(activation_recompute_in_mlp=activation_recompute_in_mlp)
        numbers(limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)
        if activation_recompute_in_mlp:
            raise ValueError(
                "activation_recompute_in_mlp=True is not supported by ScaledClampedQGeGLU; leave it False"
            )
        self.limit, self.alpha, self.glu_linear_offset = float(limit), float(alpha), float(glu_linear_offset)
        super().__init__(glu_interleave_size=glu_interleave_size)


class ScaledSiTUGLU(ScaledSwiGLU, values=("settings", "glu_interleave_size")):
    """:class:`~narrowcast.ops.SiTUGLU` times one scale per row.

    Args:
        beta1, beta2: as of :class:`~narrowcast.ops.SiTUGLU`.
        glu_interleave_size, activation_recompute_in_mlp: as of :class:`ScaledSwiGLU`; so are inputs and errors.
    Raises:
        ValueError: a beta that is not finite and above 0.
    """

    _activation = "situ_glu"
    _numbers = ("beta1", "beta2")

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        glu_interleave_size: int | None = None,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        self.beta1, self.beta2 = checked_betas(beta1, beta2)
        super().__init__(
            glu_interleave_size=glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp
        )


class ScaledSReLU(ScaledActivationOperation, values=("settings", "glu_interleave_size")):
    """``y = max(x, 0)**2 * scale``: :class:`~narrowcast.ops.SReLU` times one scale per row.

    Takes (*lead, F), gives the same shape and dtype. Arguments, inputs and errors are those of
    :class:`~narrowcast.ops.basic.scaled_activation.ScaledActivationOperation`.
    """

    _activation = "srelu"
