"""``BasicLinear``: the GEMM of a linear layer, without bias."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...autograd import LinearFwdArgs, LinearNeeds, LinearWgrad
from ...autograd.arguments import LinearBwdArgs, LinearSaved
from ...autograd.linear import linear_backward, linear_forward, linear_setup_ctx
from ...autograd.stages import after, usage
from ...dynamo import TensorProto
from ...nn.module import main_grad_of, parameter_device
from ...nn.stages import LinearModule, Stage, checked_input, positive
from ...recipe import Mode
from ...roles import QuantizerRole
from ...state import STATE
from ...tensors import QuantizedTensor, QuantizedTensorStorage, TensorOrQuantized
from ..collectives import group_size
from ..context import OperationContext
from ..op import BasicOperation, TensorsToSave
from ..quantizer import BoundQuantizer
from ..tensor_parallel import local_features, tensor_parallel
from .linear_functional import (
    functional_backward,
    functional_backward_fake,
    functional_forward,
    functional_forward_fake,
)


class BasicLinear(BasicOperation, LinearModule):
    """y = x w^T, quantized as the recipe in force says; outside ``autocast`` in high precision.

    Args:
        in_features, out_features: sizes of the last dim of input and output, of all processes together.
        device: where the weight lives; default: the accelerator, or the CPU without one.
        dtype: of the weight; default: torch's default dtype.
        tensor_parallel_mode: "column": every process holds rows of the weight and makes columns of the output; "row":
            every process holds columns of the weight, gets columns of the input, and the products are summed.
        tensor_parallel_group: process group that shares the layer; None is the default group.
        sequence_parallel: outside of a tensor-parallel layer every process holds a share of the rows: "column" gathers
            its input, "row" scatters its output, along the first dim.
        rng_state_tracker_function: returns an object whose ``fork()`` is entered while the weight is initialised, as
            the processes of a tensor-parallel layer should draw different numbers.
        accumulate_into_main_grad: add the weight gradient to ``weight.main_grad`` (fp32 or bf16), or overwrite it
            where ``weight.overwrite_main_grad`` is set. ``weight.grad`` stays None; a parameter with the attribute
            ``grad_added_to_main_grad`` gets that set to True and a fresh placeholder as its gradient, zeros with
            ``zero_out_wgrad``, else uninitialised.
        userbuffers_options: not supported, must be None.
        name: name in the quantizer roles of a custom recipe.
    Raises:
        ValueError: a size that is not positive or does not divide among the processes, another mode, or
        ``sequence_parallel`` without one. NotImplementedError: ``userbuffers_options``. In forward, before any kernel,
        ValueError: the input's last dim is not that of the weight. TypeError: its dtype is not the weight's, outside
        ``torch.autocast``. RuntimeError: it lives on another device, the weight is on the meta device, a quantized
        weight does not fit the recipe, or there is no ``main_grad`` to accumulate into.
    """

    weight: torch.nn.Parameter

    _functional_forward = staticmethod(functional_forward)
    _functional_forward_fake = staticmethod(functional_forward_fake)
    _functional_backward = staticmethod(functional_backward)
    _functional_backward_fake = staticmethod(functional_backward_fake)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        positive(in_features=in_features, out_features=out_features)
        if userbuffers_options is not None:
            raise NotImplementedError("userbuffers_options is not supported; leave it None")
        parallel = tensor_parallel(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        columns, rows = local_features(parallel, in_features, out_features)
        place, kind = parameter_device(device), dtype or torch.get_default_dtype()
        super().__init__(
            name=name,
            place=place,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            gemms=(("weight", "bias"),),
        )
        self.in_features, self.out_features = in_features, out_features
        self.parallel = parallel
        self._rng_state_tracker_function = rng_state_tracker_function
        self._stage = Stage(self.name, "weight", "bias", self._initialize)
        self._add_linear(self._stage, [rows], columns, False, kind, place)
        if place.type != "meta":
            self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes and split, as printed by the module."""
        split = f", tensor_parallel_mode={self.parallel.mode!r}" if self.parallel.mode else ""
        return f"in_features={self.in_features}, out_features={self.out_features}{split}"

    @property
    def tensor_parallel_mode(self) -> str | None:
        """How the layer is split; None also for a group of one process."""
        return self.parallel.mode

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight from U(-1/sqrt(in_features), 1/sqrt(in_features)), Kaiming's rule with a = sqrt(5).

        A weight on the meta device is first made on the default device; delayed scaling starts over.
        """
        device = parameter_device(None) if self.weight.is_meta else self.weight.device
        self._reset_linear(self._stage, device)
        self.delayed_scaling.to_empty(device=device)
        self.delayed_scaling.reset()

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self.reset_parameters()

    def _initialize(self, weight: Tensor) -> None:
        tracker = self._rng_state_tracker_function
        bound = 1 / math.sqrt(self.in_features)
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            weight.uniform_(-bound, bound)

    # -- quantizers --------------------------------------------------------------------------------------------------

    def num_quantizers(self, mode: Mode) -> int:
        """Two forward (input, weight), one backward (gradient of the output)."""
        return 2 if mode == "forward" else 1

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole]:
        kinds = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [QuantizerRole("linear", kind, self.name) for kind in kinds]

    def get_input_quantizer(self) -> BoundQuantizer | None:
        """How the GEMMs read the input; None where they, or a gather in front of them, read it in high precision."""
        recipe = STATE.recipe
        if recipe is None or self.parallel.gathers_input:
            return None
        wgrad = torch.is_grad_enabled() and self.weight.requires_grad
        override = recipe.backward_override  # type: ignore[attr-defined]
        if wgrad and override == "high_precision":
            return None
        handles = recipe.linear_handles(self.name)
        handle = handles.input.both if wgrad and override is None else handles.input.rowwise
        state = self._delayed_tensors(handles.managed, recipe)
        return BoundQuantizer(handle, state.scale_fwd, state.amax_fwd)

    def get_grad_output_quantizer(self) -> BoundQuantizer | None:
        """How the GEMMs read the gradient of the output; None as for the input, and without gradients."""
        recipe = STATE.recipe
        if recipe is None or self.parallel.gathers_grad_output or not torch.is_grad_enabled():
            return None
        if recipe.backward_override is not None:  # type: ignore[attr-defined]
            return None
        handles = recipe.linear_handles(self.name)
        handle = usage(handles.grad_output, True, self.weight.requires_grad)
        assert handle is not None
        state = self._delayed_tensors(handles.managed, recipe)
        return BoundQuantizer(handle, state.scale_bwd, state.amax_bwd)

    # -- forward and backward ----------------------------------------------------------------------------------------

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: BoundQuantizer | None,
        next_op_input_quantizer: BoundQuantizer | None,
        requires_grad: bool,
    ) -> tuple[Tensor, TensorsToSave]:
        return self.compute(input_, None, requires_grad)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: TensorOrQuantized,
        tensors_to_save: TensorsToSave,
        *,
        prev_op_grad_output_quantizer: BoundQuantizer | None,
        next_op_input_quantizer: BoundQuantizer | None,
        requires_grad: bool,
    ) -> None:
        self.save(ctx, input_, tensors_to_save)

    def compute(
        self, input_: TensorOrQuantized, bias: Tensor | None, requires_grad: bool
    ) -> tuple[Tensor, TensorsToSave]:
        """(x w^T + bias, tensors to save), for this operation and the fused ones it is part of.

        Args:
            input_: (*lead, K), plain or quantized as :meth:`get_input_quantizer` says.
            bias: added where the GEMM ends; None with ``tensor_parallel_mode="row"``, whose sums come after that.
        """
        inp = self._checked(input_)
        if STATE.calibrating is not None and isinstance(inp, Tensor):
            self._calibrate(self._stage, self.delayed_scaling, inp, self.weight)
        args = self._arguments(self._activation_dtype(inp), requires_grad, requires_grad)
        out, (kept, weight) = linear_forward(args.bind(self.weight, self._whole_input(inp), bias))
        if self.parallel.gathers_input and isinstance(kept, Tensor):
            kept = inp  # this process's share: gathered again in the backward
        return self.parallel.reduced_output(out), (kept, weight) if requires_grad else ()

    def save(self, ctx: OperationContext, input_: TensorOrQuantized, tensors_to_save: TensorsToSave) -> None:
        """Put on the context what :meth:`gradients` reads."""
        kept, weight = tensors_to_save
        ctx.save_for_backward(kept, weight if ctx.input_requires_grad else None)
        ctx.input_dtype = input_.dtype  # type: ignore[attr-defined]
        args = self._arguments(self._activation_dtype(input_), True, ctx.input_requires_grad)
        ctx.backward_args = linear_setup_ctx(args.bind(self.weight, input_, None))  # type: ignore[attr-defined]

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        grad_input, grad_weight = self.gradients(ctx, grad_output)
        return grad_input, (grad_weight,)

    def gradients(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[Tensor | None, Tensor | None]:
        """(gradient of the input, gradient of the weight), each None where nobody wants it here.

        Args:
            grad_output: (*lead, N), plain or quantized as :meth:`get_grad_output_quantizer` says.
        """
        args: LinearBwdArgs = ctx.backward_args  # type: ignore[attr-defined]
        parallel = self.parallel
        inp, weight = ctx.saved_tensors
        if isinstance(grad_output, Tensor):
            grad_output = parallel.whole_grad_output(grad_output)
        if parallel.gathers_input and isinstance(inp, Tensor):
            inp = parallel.whole_input(after(grad_output, inp))
        grad_weight, grad_input, _ = linear_backward(args.bind(LinearSaved(inp, weight), grad_output))
        if grad_input is not None:
            grad_input = parallel.reduced_grad_input(grad_input).to(ctx.input_dtype)  # type: ignore[attr-defined]
        return grad_input, grad_weight

    def output_proto(self, input_: TensorOrQuantized) -> TensorProto:
        """What :meth:`compute` makes of this input, without data."""
        size = group_size(self.parallel.group) if self.parallel.sequence_parallel else 1
        shape = self.parallel.output_shape(tuple(input_.shape), self.weight.shape[0], size)
        return TensorProto(shape, self._activation_dtype(input_), device=input_.device)

    def _checked(self, input_: TensorOrQuantized) -> TensorOrQuantized:
        if not isinstance(input_, Tensor):
            return input_
        columns = self.weight.shape[1]
        return checked_input(input_, columns, "in_features", self.weight, quantized_as_it_is=True)

    def _whole_input(self, inp: TensorOrQuantized) -> TensorOrQuantized:
        if not self.parallel.gathers_input:
            return inp
        if isinstance(inp, QuantizedTensorStorage):
            raise TypeError(
                "the input of a sequence-parallel 'column' layer is quantized; pass it in high precision, it is "
                "gathered before it is quantized"
            )
        return self.parallel.whole_input(inp)

    def _activation_dtype(self, input_: TensorOrQuantized) -> torch.dtype:
        kind = input_.device.type
        if isinstance(input_, QuantizedTensor) or not torch.is_autocast_enabled(kind):
            return input_.dtype
        return torch.get_autocast_dtype(kind)

    def _arguments(self, dtype: torch.dtype, requires_grad: bool, input_requires_grad: bool) -> LinearFwdArgs:
        """What the GEMMs read besides their operands; a pure function of its arguments and the recipe in force."""
        recipe, weight = STATE.recipe, self.weight
        wgrad = requires_grad and weight.requires_grad
        handles = None if recipe is None else recipe.linear_handles(self.name)
        # what was gathered is not kept; but a delayed scale may have moved when it is quantized again
        again = self.parallel.gathers_input and handles is not None and not handles.input.both.delayed
        args = self._stage_args(
            self._stage,
            self.delayed_scaling,
            recipe,
            LinearNeeds(inp=input_requires_grad, weight=wgrad, bias=False),
            dtype,
            None,
            again,
        )
        if not (wgrad and self.fuse_wgrad_accumulation):
            return args
        main_grad, overwrite, dummy = main_grad_of(weight, "weight", self.name or type(self).__name__)
        return replace(args, wgrad=LinearWgrad(main_grad, overwrite, dummy))
