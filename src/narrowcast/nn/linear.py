"""``Linear``: ``torch.nn.Linear`` that runs its three GEMMs in the precision of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._checks import flags, positive, text
from .._determinism import DETERMINISM
from .._keywords import given_input
from .._tracing import in_eager
from ..autograd import (
    AdaptedLinearFunction,
    LinearFunction,
    quantize_input_gradient,
    quantize_output,
    traced_adapted,
    traced_linear,
)
from ..layers import LinearLayer, Stage, checked_input, parameter_device
from ..layers.neutral import OverlapOptions, check_neutral
from ..layers.parameters import needs_recipe, parameter_dtype
from ..layers.tensor_parallel import Parallel, on_local, parallel_of
from ..recipe import Recipe
from ..state import THREAD
from ..tensors import local
from ..upstream.fsdp import placed_by_style
from ..upstream.modules import own_buffers
from ..upstream.tensors import is_autocast
from .parameters_split import ParametersSplit, parts_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Linear(LinearLayer, nn.Linear):
    """y = x w^T + b, quantized under its recipe or the current autocast's; without one in high precision.

    Any number of tokens and any feature sizes work. The layer pads to the multiples that a kernel needs and crops the
    result.

    Args:
        in_features, out_features: sizes of the last dim of input and output.
        bias: add a learned (out_features,) bias.
        recipe: the layer's own recipe, or its name (:data:`narrowcast.recipe.NAMES`); an ``autocast`` overrides it.
        return_bias: return the bias with the output instead of adding it.
        params_dtype, dtype: dtype of the parameters; default: torch's default dtype.
        device: device of the parameters; default: the accelerator, or the CPU without one.
        init_method: fills the weight in place; default: normal with standard deviation 0.023.
        name: name in the quantizer roles of a custom recipe.
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad`` (fp32 or bf16). The
            backward of a first microbatch overwrites it once, however often the layer is called. Each contribution
            overwrites it if ``weight.overwrite_main_grad`` is set. ``weight.grad`` stays None. A parameter with the
            attribute ``grad_added_to_main_grad`` gets it set to True and a placeholder as its gradient: zeros with
            ``zero_out_wgrad``, else uninitialized.
        delay_wgrad_compute: the backward queues the operands of the weight and bias gradients; :meth:`backward_dw`
            computes them, one backward per call, first in, first out.
        parameters_split: names of several parameters ``<name>_weight`` and ``<name>_bias`` with equally many rows,
            instead of weight and bias, or a dict from names to rows. They start as views of one buffer. If they are no
            longer adjacent, and in compiled code, every forward concatenates them.
        save_original_input: save the unquantized input and quantize it again in the backward; useful if other code
            keeps it alive.
        parallel_mode: "column": every process holds rows of the weight and computes columns of the output. "row": every
            process holds columns of the weight, gets columns of the input, and the outputs are summed, then the bias is
            added. The attributes ``in_features`` and ``out_features`` are the process's.
        tp_group: the processes that share the layer. One process alone communicates nothing.
        tp_size: their number, if :meth:`set_tensor_parallel_group` sets the group later.
        sequence_parallel: outside the layer every process holds a row shard: "column" gathers its input, "row" scatters
            its output, along the first dim. The gradient of a row-parallel bias then covers the process's rows, and the
            bias has the attribute ``sequence_parallel``.
        get_rng_state_tracker: returns an object whose ``fork()``, or ``fork(rng_tracker_name)``, surrounds the
            initialization of the weight, so that processes draw different numbers for their parts.
        rng_tracker_name: name of the state for ``fork``.
        **options: Transformer Engine's other options, at the values that request nothing (``ub_*=False,
            symmetric_ar_type=None``).

    Raises:
        ValueError: in forward, the input's last dim is not ``in_features``.
        TypeError: in forward, the input's dtype is not the parameters', outside ``torch.autocast``.
        RuntimeError: in forward, the input is on another device, a quantized weight does not fit the recipe, or
            ``tp_size`` has no group.
        NotImplementedError: an option of ``**options`` requests something.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        parameters_split: ParametersSplit | None = None,
        save_original_input: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        parallel_mode: str | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        **options: Unpack[OverlapOptions],
    ) -> None:
        check_neutral("Linear", options, OverlapOptions)
        positive(in_features=in_features, out_features=out_features)
        flags(bias=bias, return_bias=return_bias)
        flags(fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        text(name=name)
        place, kind = parameter_device(device), parameter_dtype(params_dtype, dtype)
        rows, parts = parts_of(parameters_split, out_features, place, fuse_wgrad_accumulation)
        ranks = tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        parallel = parallel_of({"": parallel_mode}, *ranks)
        in_features, rows = parallel.local_features(in_features, rows)
        stage = Stage("", name or "", "weight", "bias", init_method)
        super().__init__(
            name,
            (stage,),
            place,
            recipe=recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            parts=parts,
            parallel=parallel,
        )
        self.parallel_mode = parallel.mode
        self._bias_behind = "bias" if parallel.mode == "row" and parallel.size > 1 else ""
        self.in_features, self.out_features = in_features, sum(rows)
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self._add_linear(stage, rows, in_features, bias, dtype=kind, device=place)
        self.reset_parameters()
        self._prepare_for_recipe()

    def _take_over(self, name: str) -> None:
        """Set up the layer around the parameters of the ``nn.Linear`` it was."""
        LinearLayer.__init__(self, name, (Stage("", name, "weight", "bias"),), self.weight.device)
        self.return_bias = self.save_original_input = False

    def register_parameter(self, name: str, param: Any) -> None:
        """Register a parameter; if PyTorch's own style has split a weight, every process computes with its part.

        Raises:
            ValueError: features that do not divide among the processes, or an option that does not combine with it.
        """
        super().register_parameter(name, param)
        if not self._placed and placed_by_style(param):
            self._adopt_placement(param)

    def _adopt_placement(self, weight: Any) -> None:
        column, size = weight.placements[0].dim == 0, weight.device_mesh.size()
        obstacles = {
            f"tp_size={self.tp_size}": self.tp_size > 1,
            "parameters_split": bool(self._parts),
            "return_bias": self.return_bias,
            "fuse_wgrad_accumulation": self.fuse_wgrad_accumulation,
            "delay_wgrad_compute": self.delay_wgrad_compute,
            "quantized parameters": self._init_recipe is not None,
        }
        for what, there in obstacles.items():
            if there:
                raise ValueError(
                    f"Linear with {what} cannot be parallelized by PyTorch's style; use tp_group="
                )
        parallel = Parallel({"": "column" if column else "row"}, size)
        self.in_features, (self.out_features,) = parallel.local_features(
            self.in_features, [self.out_features]
        )
        self._placed = self._on_dtensors = True
        self.parallel_mode = parallel.mode

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> Any:
        """As of any module. PyTorch's style registers its own when it has made DTensors of all buffers, too: delayed
        scaling's become plain tensors again."""
        if self._on_dtensors:
            own_buffers(self).update({name: local(buffer) for name, buffer in own_buffers(self).items()})
        return super().register_forward_pre_hook(*args, **options)

    def extra_repr(self) -> str:
        """Return sizes and recipe, as printed by the module."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return self._with_recipe(sizes, f"bias={bool(self._parts_of('bias'))}")

    def reset_parameters(self) -> None:
        """Initialize weight, bias and state in place; do nothing on the meta device."""
        self._reset_linear(self._stages[0])
        self._reset_state()

    def _as_torch(self, inp: Tensor) -> Tensor | None:
        """Return the output if the layer is no more than ``nn.Linear`` now, in its time; None if there is more to
        do.
        """
        state = THREAD.state
        if state.depth or state.calibrating is not None or is_autocast() or DETERMINISM.batch_invariant:
            return None
        if self._parts or self._placed or self._parallel is not None or self.return_bias:
            return None
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute or self._recipe is not None:
            return None
        weight = self.weight
        if type(weight) is not nn.Parameter or type(inp) is not Tensor or inp.is_meta != weight.is_meta:
            return None
        ran = self._ran_under[self.training]
        if not ran:
            ran.append(None)
        elif len(ran) > 1 or ran[0] is not None:
            return None  # this may be a recomputation, whose recipe that tells
        try:
            return F.linear(inp, weight, self.bias)
        except RuntimeError:
            fits = inp.shape[-1:] == weight.shape[1:] and all(
                x.device == inp.device and x.dtype == inp.dtype for x in (weight, self.bias) if x is not None
            )
            if fits:  # out of memory, or a mode's refusal: run again, a selective checkpoint would give other tensors
                raise
            return None  # the checks say more

    def only_multiplies(self, dtype: torch.dtype) -> bool:
        """Return whether a forward is one product of an input in ``dtype`` with the whole weight of this process."""
        apart = self._parts or self._placed or self._parallel is not None or self.return_bias
        more = apart or self.save_original_input or self._on_dtensors
        return not more and type(self.weight) is nn.Parameter and self.weight.dtype == dtype

    def _with_adapter(self, inp: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor | None:
        """Return the output with that of an adapter, added in the GEMMs of per-tensor FP8; None if these do not run.

        Args:
            inp: (*lead, in_features), in high precision.
            lora_a: (r, in_features).
            lora_b: (out_features, r).
            scaling: factor of the adapter's output.
        """
        recipe, weight = self._recipe_in_force(), self._whole("weight")
        apart = self._parts or self._placed or self._parallel is not None or self.return_bias
        if recipe is None or apart or self._on_dtensors or weight.requires_grad:
            return None
        inp = checked_input(self, inp, "in_features", weight)
        stage = self._stages[0]
        plan = self._plan(recipe, stage, inp.requires_grad, weight)
        per_tensor = plan.quantized and plan.input.storage_name.endswith("Float8TensorStorage")
        if not per_tensor or plan.backward_override is not None or plan.eager_only or plan.batch_invariant:
            return None
        args = self._fwd_args(stage, plan, inp.dtype, weight, self.bias, None)
        return (traced_adapted if is_dynamo_compiling() else AdaptedLinearFunction.apply)(
            weight, inp, self.bias, lora_a, lora_b, scaling, args
        )  # type: ignore[no-any-return]

    def forward(
        self,
        inp: Tensor = None,  # type: ignore[assignment]
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        **unknown: NoReturn,
    ) -> Any:
        """Apply the layer.

        Args:
            inp: (*lead, in_features), plain or quantized; a quantized input is multiplied directly. The name
                ``input``, as in torch.nn, is known, too.
            is_first_microbatch: None quantizes the weight on every call; True quantizes it and keeps the result; False
                uses the kept one. If the weight has changed, eager code quantizes it again, compiled code raises.
            fp8_output: return a quantized tensor, in the recipe's format for outputs.
            fp8_grad: quantize the gradient of the input, in the recipe's format for it.
        Returns:
            (*lead, out_features); with ``return_bias`` a pair of output and bias.
        Raises:
            TypeError: ``is_first_microbatch``, ``fp8_output`` or ``fp8_grad`` is no bool.
            RuntimeError: ``fp8_output`` or ``fp8_grad`` without a recipe; in compiled code, a weight changed since
                True.
        """
        if unknown:
            inp = given_input(self, inp, unknown)
        plain = is_first_microbatch is None and fp8_output is False and fp8_grad is False
        if not plain:
            flags(is_first_microbatch=is_first_microbatch, fp8_output=fp8_output, fp8_grad=fp8_grad)
        if self._on_dtensors and hasattr(inp, "device_mesh"):
            return on_local(self, inp, is_first_microbatch, fp8_output, fp8_grad)
        if plain and not torch.compiler.is_compiling():
            out = self._as_torch(inp) if self._last_recipe is None else None
            if out is not None:
                return out
        weight, learned_bias = self._whole("weight"), self._whole("bias")
        inp = checked_input(self, inp, "in_features", weight, quantized_as_it_is=True)
        bias = None if self.return_bias or self._bias_behind else learned_bias
        stage, recipe = self._stages[0], self._recipe_in_force()
        if recipe is None:
            if fp8_output or fp8_grad:
                raise needs_recipe("fp8_output" if fp8_output else "fp8_grad")
            out = self._linear_in_high_precision(stage, inp, weight, bias, is_first_microbatch)
            if self._bias_behind:
                out = self._with_bias_behind(out, learned_bias)
        else:
            hands_over = fp8_output or fp8_grad
            plan = self._plan(recipe, stage, inp.requires_grad, weight, self.save_original_input, hands_over)
            if self.save_original_input and not plan.save_original_input:
                self._warn_of_delayed_input()
            args = self._fwd_args(stage, plan, inp.dtype, weight, bias, is_first_microbatch)
            if fp8_grad and plan.needs_input:
                inp = quantize_input_gradient(inp, plan.grad_input, args.scales)
            if plan.eager_only:
                out = in_eager(LinearFunction.apply, weight, inp, bias, args)
            else:
                out = (traced_linear if is_dynamo_compiling() else LinearFunction.apply)(
                    weight, inp, bias, args
                )
            if self._bias_behind:
                out = self._with_bias_behind(out, learned_bias)
            if fp8_output:
                out = quantize_output(out, plan.output, args.scales)
        return (out, learned_bias) if self.return_bias else out
