"""``BasicLinear``: the GEMM of a linear layer, without bias."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._checks import flags, positive, shown, text
from ..._device import HIGH_PRECISION
from ...autograd import DelayedScales, LinearBwdArgs, LinearFwdArgs
from ...autograd.gemms import linear_backward, linear_bwd_args, linear_forward, rows_of
from ...autograd.operands import saved_operands
from ...autograd.tensor_parallel import TensorParallel, local_features, tensor_parallel
from ...functional import replay_of
from ...functional.collectives import group_size
from ...layers import LinearLayer, Stage, checked_input, parameter_device
from ...layers.parameters import parameter_dtype, random_numbers_of
from ...layers.tensor_parallel import Split
from ...quantizers import Operand
from ...recipe import LinearPlan, Mode, Recipe, linear_plan
from ...roles import QuantizerRole
from ...tensors import QuantizedTensorStorage, TensorOrQuantized
from ..context import OperationContext
from ..contract import TensorsToSave
from ..handover import ScaledOperand
from ..op import BasicOperation
from .linear_functional import functional_backward, functional_forward


class BasicLinear(LinearLayer, BasicOperation, values=()):
    """y = x w^T, quantized under its recipe or the current autocast's; without one in high precision.

    Args:
        in_features, out_features: sizes of the last dim of input and output, of all processes together.
        device: device of the weight; default: the accelerator, or the CPU without one.
        dtype: dtype of the weight; default: torch's default dtype.
        tensor_parallel_mode: "column": every process holds rows of the weight and computes columns of the output;
            "row": every process holds columns of the weight, gets columns of the input, and the products are summed.
        tensor_parallel_group: process group that shares the layer; None is the default group.
        sequence_parallel: outside a tensor-parallel layer every process holds a row shard: "column" gathers its input,
            "row" scatters its output, along the first dim.
        rng_state_tracker_function: returns an object whose ``fork()`` surrounds the initialization of the weight, so
            that the processes of a tensor-parallel layer draw different numbers.
        accumulate_into_main_grad: add the weight gradient to ``weight.main_grad`` (fp32 or bf16), or overwrite it if
            ``weight.overwrite_main_grad`` is set. ``weight.grad`` stays None. A parameter with the attribute
            ``grad_added_to_main_grad`` gets it set to True and a new placeholder as its gradient: zeros with
            ``zero_out_wgrad``, else uninitialized.
        userbuffers_options: not supported, must be None.
        name: name in the quantizer roles of a custom recipe.
    Raises:
        ValueError: a size is not positive or does not divide among the processes, the mode is unknown, or
            ``sequence_parallel`` has no mode; in forward, the input's last dim is not the weight's.
        NotImplementedError: ``userbuffers_options``.
        TypeError: in forward, the input's dtype is not fp32, bf16 or fp16; these are cast to the weight's, or under
            ``torch.autocast`` to the autocast's.
        RuntimeError: in forward, the input is on another device, the weight is on the meta device, a quantized weight
            does not fit the recipe, or there is no ``main_grad`` to accumulate into.
    """

    weight: torch.nn.Parameter

    _functional_forward = _functional_forward_fake = staticmethod(functional_forward)
    _functional_backward = _functional_backward_fake = staticmethod(functional_backward)

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
        flags(sequence_parallel=sequence_parallel, accumulate_into_main_grad=accumulate_into_main_grad)
        text(name=name)
        if userbuffers_options is not None:
            raise NotImplementedError("userbuffers_options is not supported; leave it None")
        parallel = tensor_parallel(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        columns, rows = local_features(parallel, in_features, out_features)
        place, kind = parameter_device(device), parameter_dtype(None, dtype)
        stage = Stage(
            "",
            name or "",
            "weight",
            "bias",
            functools.partial(initialize, rng_state_tracker_function, in_features),
        )
        super().__init__(name, (stage,), place, fuse_wgrad_accumulation=accumulate_into_main_grad)
        self._init_operation()
        self.in_features, self.out_features = in_features, out_features
        self.parallel, self._parallel = parallel, {"": parallel} if parallel.mode else None
        self._shared_as = parallel  # also once another operation sums
        self._add_linear(stage, [rows], columns, False, dtype=kind, device=place)
        if place.type != "meta":
            self.reset_parameters()

    def extra_repr(self) -> str:
        """Return sizes and split, as printed by the module."""
        split = f", tensor_parallel_mode={shown(self.parallel.mode)}" if self.parallel.mode else ""
        return f"in_features={self.in_features}, out_features={self.out_features}{split}"

    def _split_of(self, name: str) -> Split | None:
        """Return how ranks share the weight."""
        mode, group = self._shared_as.mode, self._shared_as.group
        if mode is None or name != "weight":
            return None
        return Split(1 if mode == "row" else 0, group, group_size(group), "tensor")

    @property
    def tensor_parallel_mode(self) -> str | None:
        """The split of the layer; None also for a group of one process."""
        return self.parallel.mode

    def _leave_sum(self) -> None:
        """Leave the sum of a "row" layer to an operation after it: what is left multiplies this process's columns.

        The weight is drawn as that of the whole layer still.
        """
        self.in_features = self.weight.shape[1]
        self.parallel, self._parallel = TensorParallel(), None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight from U(-1/sqrt(in_features), 1/sqrt(in_features)), Kaiming's rule with a = sqrt(5).

        A weight on the meta device is first made on the default device; delayed scaling starts over.
        """
        if self.weight.is_meta:
            self.to_empty(device=parameter_device(None))
        self._reset_linear(self._stages[0])
        self._reset_state()

    def pre_first_fuser_forward(self) -> None:
        if self.weight.is_meta:
            self.reset_parameters()

    # -- quantizers --------------------------------------------------------------------------------------------------

    def num_quantizers(self, mode: Mode) -> int:
        """Return two forward (input, weight), one backward (gradient of the output)."""
        return 2 if mode == "forward" else 1

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole]:
        kinds = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [QuantizerRole(self._module_type, kind, self.name) for kind in kinds]

    def get_input_quantizer(self) -> Operand | None:
        """Return how the GEMMs quantize the input; None if they, or a gather before them, take it in high precision."""
        recipe = self._recipe_in_force()
        if recipe is None or self.parallel.gathers_input:
            return None
        plan = self._plan_of(recipe, torch.is_grad_enabled(), True)
        return None if plan.needs_weight and plan.backward_override == "high_precision" else plan.input

    def get_grad_output_quantizer(self) -> Operand | None:
        """Return how the GEMMs read the gradient of the output; None as for the input, and without gradients."""
        recipe = self._recipe_in_force()
        if recipe is None or not torch.is_grad_enabled():
            return None
        if self.parallel.mode is not None and self.parallel.gathers_grad_output:
            return None
        plan = self._plan_of(recipe, True, True)
        return plan.grad_output if plan.backward_override is None else None

    def _plan_of(self, recipe: Recipe | None, requires_grad: bool, input_requires_grad: bool) -> LinearPlan:
        wanted = requires_grad and input_requires_grad, requires_grad and self.weight.requires_grad
        return linear_plan(
            recipe,
            self.name,
            *wanted,
            module_type=self._module_type,
            weight_elements=self.weight.numel(),
            joins=self._parallel is not None,
        )

    def forward_arguments(self, requires_grad: bool, input_requires_grad: bool) -> dict[str, Any]:
        plan = self._plan_of(self._recipe_in_force(), requires_grad, input_requires_grad)
        scales = None
        if plan.delayed is not None:
            scales = self._scales_of(("",), (plan,))[0]
        weight, kind = self.weight, self.weight.device.type
        dtype = weight.dtype
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        args = self._fwd_args(self._stages[0], plan, dtype, weight, None, None, scales or DelayedScales())
        return {"args": args, "scales": scales}

    # -- forward and backward ----------------------------------------------------------------------------------------

    def op_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        prev_op_grad_output_quantizer: ScaledOperand | None,
        next_op_input_quantizer: ScaledOperand | None,
        requires_grad: bool,
        args: LinearFwdArgs | None = None,
        scales: DelayedScales | None = None,
    ) -> tuple[Tensor, TensorsToSave]:
        own: LinearFwdArgs = args or self.forward_arguments(requires_grad, requires_grad)["args"]
        return self.compute(input_, None, own)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: TensorOrQuantized,
        tensors_to_save: TensorsToSave,
        *,
        requires_grad: bool,
        args: LinearFwdArgs | None = None,
        scales: DelayedScales | None = None,
        **kwargs: Any,
    ) -> None:
        own: LinearFwdArgs = args or self.forward_arguments(requires_grad, requires_grad)["args"]
        plan, weight = own.plan, self.weight
        # gathered rows are saved as received, unless they were gathered quantized
        gathered = self.parallel.mode is not None and self.parallel.gathers_input
        plain = (
            gathered
            and plan.backward_override is None
            and not self.parallel.joins(plan.input, rows_of(input_))
        )
        saved_input, saved_weight = saved_operands(own, tensors_to_save)
        if isinstance(input_, QuantizedTensorStorage):  # the quantizer of the received codes
            own = _of_input(own, input_)
            saved_input = saved_input._replace(quantizer=input_._quantizer)
        elif plain:
            saved_input = saved_input._replace(quantizer=None)
        if isinstance(weight, QuantizedTensorStorage):
            saved_weight = saved_weight._replace(quantizer=weight._quantizer)
        ctx.save_for_backward(*tensors_to_save)
        ctx.input_dtype = input_.dtype
        ctx.backward_args = linear_bwd_args(own, weight, None, saved_input, saved_weight)

    def compute(
        self, input_: TensorOrQuantized, bias: Tensor | None, args: LinearFwdArgs
    ) -> tuple[Tensor, TensorsToSave]:
        """Return (x w^T + bias, tensors to save), for this operation and the fused ones it is part of.

        Args:
            input_: (*lead, K), plain or quantized as :meth:`get_input_quantizer` says.
            bias: added where the GEMM ends; None with ``tensor_parallel_mode="row"``, whose sums come after that.
            args: as :meth:`forward_arguments` gives them.
        """
        weight, plan, args = self.weight, args.plan, _of_input(args, input_)
        if isinstance(input_, Tensor):
            widens = input_.dtype in HIGH_PRECISION and weight.dtype.itemsize > 1
            if input_.dtype != weight.dtype and widens:
                input_ = input_.to(args.dtype)
            input_ = checked_input(self, input_, "in_features", weight, quantized_as_it_is=True)
        forward = _replay_of(linear_forward, input_, plan.input, [weight, bias], args)
        out, saved_input, saved_weight = forward(weight, input_, bias, args)
        if not (plan.needs_input or plan.needs_weight):
            return out, ()
        # tensors before the None belong to the input
        return out, (*saved_input.tensors, None, *saved_weight.tensors)

    def op_backward(
        self, ctx: OperationContext, grad_output: TensorOrQuantized
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        args: LinearBwdArgs = ctx.backward_args
        saved: Any = ctx.saved_tensors
        count = args.saved_input[0]
        inp, rest = list(saved[:count]), list(saved[count + 1 :])
        scale = None if ctx.scales is None else ctx.scales.scale
        # codes that were made for this layer are freed once they are read
        grads: list[Any] = [grad_output if isinstance(grad_output, Tensor) else grad_output.take()]
        backward = _replay_of(linear_backward, grads[0], args.plan.grad_output, [*inp, *rest, scale], args)
        grad_weight, grad_input, _ = backward(args, grads, inp, rest, scale)
        if grad_input is not None:
            grad_input = grad_input.to(ctx.input_dtype)
        return grad_input, (grad_weight,)

    def output_shape(self, input_: TensorOrQuantized) -> tuple[int, ...]:
        """Return the shape of what :meth:`compute` makes of this input."""
        size = group_size(self.parallel.group) if self.parallel.sequence_parallel else 1
        return self.parallel.output_shape(tuple(input_.shape), self.weight.shape[0], size)


def initialize(tracker: Callable[[], Any] | None, in_features: int, weight: Tensor) -> None:
    """Draw a weight, or this process's part of it, from U(-b, b), b = 1 / sqrt(in_features): Kaiming's rule."""
    bound = 1 / math.sqrt(in_features)
    with random_numbers_of(tracker):
        weight.uniform_(-bound, bound)


def _replay_of(stage: Any, given: Any, operand: Operand, tensors: list[Any], args: Any) -> Any:
    """Return what to call instead of a stage, in a list that is not replayed; ``given`` reads as ``operand``."""
    if isinstance(given, Tensor):
        return replay_of(stage, [given, *tensors], (args,)) if args.plan.quantized else stage
    return replay_of(stage, tensors, (args, given)) if given._quantizer is operand.quantizer else stage


def _of_input(args: LinearFwdArgs, input_: TensorOrQuantized) -> LinearFwdArgs:
    """Return the arguments for this input: a quantized one says the dtype of the activations."""
    if isinstance(input_, QuantizedTensorStorage) and input_.dtype != args.dtype:
        return args._replace(dtype=input_.dtype)
    return args
