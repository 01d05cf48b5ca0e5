"""``GroupedLinear``: linear layers on consecutive groups of rows, such as the experts of a mixture."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..._checks import flags, positive, shape_of
from ...autograd import Groups, LinearFwdArgs
from ...autograd.arguments import DelayedScales
from ...autograd.gemms import linear_bwd_args
from ...autograd.grouped_linear import biases_of_rows, grouped_backward, grouped_forward
from ...autograd.groups import GatedActivation
from ...autograd.operands import saved_operands
from ...layers import GroupedLinearLayer, parameter_device
from ...layers.grouped_layer import plan_for_rows, rows_of_buffer
from ...layers.parameters import casts, parameter_dtype
from ...recipe import LinearPlan, Mode, linear_plan
from ...roles import QuantizerRole
from ...tensors import TensorOrQuantized
from ..context import OperationContext
from ..contract import ExtraTensors, Gradients, TensorsToSave
from ..op import BasicOperation
from .basic_linear import initialize


class GroupedLinear(GroupedLinearLayer, BasicOperation):
    """y_g = x_g w_g^T + b_g for every group g of rows, each group quantized separately.

    It runs under its recipe or the current autocast's; without one in high precision.

    Extra inputs: the rows of each group, int32 or int64 (num_groups,), on the host, or on the device of the input,
    where the host does not read them. Groups may be empty, and rows beyond their sum become zero. With ``scale_bias``
    also a factor per row of the input for its bias: y_g = x_g w_g^T + s b_g, differentiable.

    Keyword arguments of a call are buffers with the shape of a result: ``output`` for the output, and ``grad_input``,
    in the backward, for the gradient of the input. Eager code continues with their memory.

    Args:
        num_groups: groups, each with a weight and a bias.
        in_features, out_features: sizes of the last dim of input and output.
        bias: add a learned bias per group.
        device: device of the parameters; default: the accelerator, or the CPU without one.
        dtype: dtype of the parameters; default: torch's default dtype.
        rng_state_tracker_function: returns an object whose ``fork()`` surrounds the initialization of a weight.
        accumulate_into_main_grad: add the gradient of each weight to its ``main_grad``, as in ``BasicLinear``; a single
            weight has one of shape (num_groups, out_features, in_features). Set ``overwrite_main_grad`` on all weights
            or on none.
        single_grouped_weight: hold all weights in one parameter ``weight`` (num_groups, out_features, in_features)
            instead of ``weight0``, ``weight1`` and so on.
        single_grouped_bias: hold all biases in one parameter ``bias`` (num_groups, out_features).
        delay_wgrad_compute: the backward queues the operands of weight and bias gradients; :meth:`backward_dw` computes
            them, one backward per call, first in, first out.
        scale_bias: take the second extra input.
        name: name in the quantizer roles of a custom recipe.
    Raises:
        ValueError: a size is not positive, or ``scale_bias`` has no bias; in forward, the input's last dim is not
            ``in_features``, splits have another length or dtype, are negative, or exceed the rows (if the host knows
            them), scales are not one per row, or a buffer does not fit.
        TypeError: in forward, the input is quantized with scales that rows share, or its dtype is not the parameters',
            outside ``torch.autocast``.
        RuntimeError: in forward, the input is on another device, parameters are on the meta device, a quantized weight
            does not fit the recipe, or a ``main_grad`` is missing.
    """

    num_extra_inputs = 1
    _reads_codes = True

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        name: str | None = None,
    ) -> None:
        positive(num_groups=num_groups)
        flags(bias=bias, scale_bias=scale_bias)
        if scale_bias and not bias:
            raise ValueError("scale_bias=True with bias=False; there is no bias to scale, use one of them")
        super().__init__(
            num_gemms=num_groups,
            in_features=in_features,
            out_features=out_features,
            bias=bias,
            dtype=parameter_dtype(None, dtype),
            device=device,
            init_method=functools.partial(initialize, rng_state_tracker_function, in_features),
            name=name,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self._init_operation()
        self.scale_bias = bool(scale_bias)
        self.num_extra_inputs = 2 if scale_bias else 1

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self.num_gemms

    def extra_repr(self) -> str:
        """Return sizes, as printed by the module."""
        scaled = ", scale_bias=True" if self.scale_bias else ""
        return (
            f"num_groups={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}{scaled}"
        )

    def reset_parameters(self) -> None:
        """Initialize all groups and start over with the state; what is on the meta device is first made for real."""
        if self._parts_of("weight")[0].is_meta:
            self.to_empty(device=parameter_device(None))
        super().reset_parameters()

    def num_quantizers(self, mode: Mode) -> int:
        """Return two forward (inputs, weights), one backward (gradients of the outputs), each for all groups."""
        return 2 if mode == "forward" else 1

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole]:
        kinds = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [QuantizerRole(self._module_type, kind, self.name) for kind in kinds]

    def forward_arguments(self, requires_grad: bool, input_requires_grad: bool) -> dict[str, Any]:
        plan = self._plan_of(requires_grad, input_requires_grad)
        return {"plan": plan, **self._state_arguments(plan)}

    def _plan_of(
        self, requires_grad: bool, input_requires_grad: bool, save_original_input: bool = False
    ) -> LinearPlan:
        needs_weight = requires_grad and self.wants_wgrad
        recipe = self._recipe_in_force()
        wanted = (input_requires_grad, needs_weight, save_original_input)
        return linear_plan(recipe, self.name, *wanted, module_type=self._module_type)

    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: ExtraTensors,
        basic_op_kwargs: list[dict[str, Any]],
        requires_grad: bool,
        save_input: bool = False,
        activation: GatedActivation | None = None,
        inside: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ExtraTensors, list[TensorsToSave]]:
        """Compute the forward of this operation, and of the fused one it is part of.

        Args:
            activation: between the input and this operation, computed as its result is quantized.
            inside: rows of no group are not read of the result, and may stay as the memory was.
            save_input: keep the input in high precision, at :attr:`input_position` of what is saved, and quantize it
                again for the weight gradient; not with delayed scaling.
        """
        (extra_inputs,), (own,) = basic_op_extra_inputs, basic_op_kwargs
        weights, biases = self._parts_of("weight"), self._parts_of("bias")
        width = self.in_features if activation is None else 2 * self.in_features
        inp = self._checked_input(input_, weights, width)  # type: ignore[arg-type]
        x = inp.reshape(-1, width)
        splits, covered = self._checked_splits(extra_inputs[0], x, "the tensor of splits")
        bias_scales = extra_inputs[1] if self.scale_bias else None
        if bias_scales is not None and bias_scales.shape != inp.shape[:-1]:
            raise ValueError(
                f"the scales of the bias have shape {shape_of(bias_scales)}; give one for each row of the input, "
                f"{tuple(inp.shape[:-1])}"
            )
        covered = covered or (inside and own.get("output") is None)
        args, groups = self._call_args(inp.dtype, x.shape[0], own, requires_grad, save_input, covered)
        groups.out, groups.dgrad_out = self._checked_buffers(inp, **own)
        out, saved_input, saved_weight = grouped_forward(
            x, splits, weights, biases, args, groups, bias_scales, activation
        )
        out = out.view(*inp.shape[:-1], self.out_features)
        if not requires_grad:
            return out, [()], [()]
        kept = biases if self.scale_bias else ()
        # tensors before the None belong to the input
        saved = splits, bias_scales, *kept, *saved_input.tensors, None, *saved_weight.tensors
        return out, [()], [saved]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[TensorsToSave],
        *,
        basic_op_kwargs: list[dict[str, Any]],
        save_input: bool = False,
        **kwargs: Any,
    ) -> None:
        (ctx,), (own,), rows = basic_op_ctxs, basic_op_kwargs, math.prod(input_.shape[:-1])
        dtype, biases = self.activation_dtype(input_.dtype), self._parts_of("bias")
        args, groups = self._call_args(dtype, rows, own, True, save_input, False, described=True)
        place = own.get("grad_input")
        groups.dgrad_out = None if place is None else place.view(-1, self.in_features)
        ctx.save_for_backward(*tensors_to_save[0])
        ctx.input_dtype, ctx.groups = input_.dtype, groups
        operands = saved_operands(args, tensors_to_save[0][self.input_position :])
        bias = biases[0] if biases else None
        ctx.backward_args = linear_bwd_args(args, self._parts_of("weight")[0], bias, *operands)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: TensorOrQuantized,
        *,
        basic_op_grad_extra_outputs: ExtraTensors,
        activation: GatedActivation | None = None,
        inside: bool = False,
    ) -> Gradients:
        """Compute the backward of this operation, and of the fused one it is part of.

        Args:
            activation: behind this operation; ``grad_output`` is that of its result.
            inside: rows of no group are not read of the input's gradient, and may stay as the memory was.
        """
        ctx: Any = basic_op_ctxs[0]
        tensors = ctx.take()
        splits: Any = tensors[0]
        scales: Any = tensors[1]
        saved: list[Any] = [tensor for tensor in tensors[self.input_position :] if tensor is not None]
        dy = grad_output.reshape(-1, grad_output.shape[-1])  # type: ignore[union-attr]
        grad_scales: tuple[Tensor | None, ...] = ()
        if self.scale_bias:
            biases: list[Any] = list(tensors[2 : self.input_position])
            grad_scales = (_grad_of_scales(dy, biases, splits, scales),)
        del tensors  # the GEMMs let go of each operand once it is read
        scale = None if ctx.scales is None else ctx.scales.scale
        groups = ctx.groups
        if inside and groups.dgrad_out is None:
            groups = replace(groups, covered=True)
        grad_input, grads = grouped_backward(
            ctx.backward_args, groups, dy, splits, saved, scale, scales, activation
        )
        if grad_input is not None:
            grad_input = grad_input.view(*grad_output.shape[:-1], self.in_features).to(ctx.input_dtype)
        return grad_input, [tuple(grads)], [(None, *grad_scales)]

    @property
    def input_position(self) -> int:
        """Where in what is saved the input begins."""
        return 2 + (len(self._parts_of("bias")) if self.scale_bias else 0)

    def activation_dtype(self, input_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the output, and of the input as the GEMMs take it."""
        weight = self._parts_of("weight")[0]
        return torch.get_autocast_dtype(weight.device.type) if casts(weight) else input_dtype

    def _call_args(
        self,
        dtype: torch.dtype,
        rows: int,
        kwargs: dict[str, Any],
        requires_grad: bool,
        save_input: bool,
        covered: bool,
        described: bool = False,
    ) -> tuple[LinearFwdArgs, Groups]:
        """Return the GEMMs' arguments besides their operands.

        Args:
            kwargs: of the call, or without plan to look one up.
            described: for the backward's arguments, which hold no operands: quantized weights are not joined for it.
        """
        plan = kwargs.get("plan") or self._plan_of(requires_grad, requires_grad)
        if save_input and plan.quantized:
            plan = self._plan_of(requires_grad, plan.needs_input, True)
        plan = plan_for_rows(plan, rows, self.num_gemms)
        needs_bias = requires_grad and any(bias.requires_grad for bias in self._parts_of("bias"))
        scales = kwargs.get("scales") or DelayedScales()
        return self._grouped_args(plan, scales, dtype, needs_bias, covered, described=described)

    def _checked_buffers(
        self,
        inp: Tensor,
        output: Tensor | None = None,
        grad_input: Tensor | None = None,
        plan: LinearPlan | None = None,
        scales: DelayedScales | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        return (
            rows_of_buffer(
                output, "output", (*inp.shape[:-1], self.out_features), inp.dtype, inp.device, inp
            ),
            rows_of_buffer(grad_input, "grad_input", inp.shape, inp.dtype, inp.device),
        )


def _grad_of_scales(dy: Tensor, biases: list[Tensor], splits: Tensor, scales: Tensor) -> Tensor:
    added = biases_of_rows(biases, splits, dy.shape[0])
    return (dy.float() * added.float()).sum(-1).view(scales.shape).to(scales.dtype)
