"""``LayerNormLinear``: a norm and a linear layer, with nothing in high precision between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import autograd
from .._checks import flags, positive, text
from .._keywords import refuse_keywords
from .._tracing import in_eager, record
from ..autograd import (
    NormArgs,
    Program,
    ProgramArgs,
    ProgramFunction,
    quantize_input_gradient,
    quantize_output,
    traced_program,
)
from ..layers import Stage, checked_input, parameter_device
from ..layers.neutral import OverlapOptions, check_neutral
from ..layers.norm import norm_settings
from ..layers.parameters import needs_recipe, parameter_dtype
from ..layers.tensor_parallel import parallel_of
from ..recipe import Recipe
from .norm_linear import NormLinearLayer, check_column, check_gathered_output
from .parameters_split import ParametersSplit, parts_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

NORM_LINEAR = Program([autograd.Norm(1, 2), autograd.Linear(3, 4)], 5)


class LayerNormLinear(NormLinearLayer):
    """y = norm(x) w^T + b, quantized under its recipe or the current autocast's; else in high precision.

    The norm quantizes its output itself. The output exists in high precision only if it is returned or the recipe's
    backward reads it.

    Args:
        in_features, out_features: sizes of the last dim of input and output.
        eps: added to the variance.
        bias: add a learned (out_features,) bias.
        recipe: the layer's own recipe, or its name; an ``autocast`` overrides it.
        normalization: "LayerNorm" or "RMSNorm".
        return_bias: return the bias with the output instead of adding it.
        return_layernorm_output: also return the norm's output, with a gradient.
        return_layernorm_output_gathered: return the rows of all processes of it; only with ``sequence_parallel``.
        zero_centered_gamma: ``layer_norm_weight`` holds gamma - 1.
        params_dtype, dtype: dtype of the parameters; default: torch's default dtype.
        device: device of the parameters; default: the accelerator, or the CPU without one.
        init_method: fills the weight in place; default: normal with standard deviation 0.023.
        name: name in the quantizer roles of a custom recipe.
        fuse_wgrad_accumulation, delay_wgrad_compute, parameters_split: as in :class:`Linear`.
        parallel_mode: None, or "column": every process holds rows of the weight.
        tp_group, tp_size, get_rng_state_tracker, rng_tracker_name: as in :class:`Linear`.
        sequence_parallel: as in :class:`Linear`. The norm's parameters get the attribute ``sequence_parallel`` if its
            input is a row shard: their gradients cover the process's rows.
        **options: Transformer Engine's other options, at the values that request nothing (``ub_*=False,
            symmetric_ar_type=None``).
    Raises:
        ValueError: a size is not positive, the normalization is unknown, or ``return_layernorm_output_gathered`` lacks
            ``sequence_parallel``; in forward, the input's last dim is not ``in_features``.
        TypeError: in forward, the input's dtype is not the parameters', outside ``torch.autocast``.
        RuntimeError: in forward, the input is on another device, or a quantized weight does not fit the recipe.
        NotImplementedError: an option of ``**options`` requests something.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        recipe: Recipe | str | None = None,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        parameters_split: ParametersSplit | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        parallel_mode: str | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        **options: Unpack[OverlapOptions],
    ) -> None:
        check_neutral("LayerNormLinear", options, OverlapOptions)
        positive(in_features=in_features, out_features=out_features)
        flags(bias=bias, return_bias=return_bias)
        flags(fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        flags(return_layernorm_output=return_layernorm_output)
        text(name=name)
        ranks = tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        parallel = parallel_of({"": parallel_mode}, *ranks)
        check_column(parallel)
        check_gathered_output(return_layernorm_output_gathered, parallel, parallel.mode)
        settings = norm_settings(normalization, eps, zero_centered_gamma)
        place, kind = parameter_device(device), parameter_dtype(params_dtype, dtype)
        rows, parts = parts_of(parameters_split, out_features, place, fuse_wgrad_accumulation)
        _, rows = parallel.local_features(in_features, rows)
        stage = Stage("", name or "", "weight", "bias", init_method)
        super().__init__(
            in_features,
            settings,
            name,
            (stage,),
            kind,
            place,
            return_bias,
            return_layernorm_output or return_layernorm_output_gathered,
            parallel=parallel,
            recipe=recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            parts=parts,
        )
        self.in_features, self.out_features = in_features, sum(rows)
        self.parallel_mode = parallel.mode
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._add_linear(stage, rows, in_features, bias, dtype=kind, device=place)
        self.reset_parameters()
        self._prepare_for_recipe()

    def extra_repr(self) -> str:
        """Return sizes, norm and recipe, as printed by the module."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        norm = f"normalization={self.norm.normalization}"
        return self._with_recipe(sizes, f"bias={bool(self._parts_of('bias'))}", norm)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        return_input: bool = False,
        **unknown: NoReturn,
    ) -> Any:
        """Apply the layer.

        Args:
            inp: (*lead, in_features).
            is_first_microbatch: None quantizes the weight on every call; True quantizes it and keeps the result; False
                uses the kept one.
            fp8_output: return a quantized tensor, in the recipe's format for outputs.
            fp8_grad: quantize the gradient of the input, in the recipe's format for it.
            return_input: also return the input, for a residual; the kernel of the norm's backward adds its gradient.
        Returns:
            (*lead, out_features); with ``return_bias``, ``return_layernorm_output`` and ``return_input`` a tuple of
            output, bias, norm output (*lead, in_features) and input.
        Raises:
            TypeError: ``fp8_output`` or ``fp8_grad`` is no bool.
            RuntimeError: ``fp8_output`` or ``fp8_grad`` without a recipe.
        """
        if unknown:
            refuse_keywords(self, unknown)
        if fp8_output is not False or fp8_grad is not False:
            flags(fp8_output=fp8_output, fp8_grad=fp8_grad)
        weight, learned_bias = self._whole("weight"), self._whole("bias")
        given, inp = inp, checked_input(self, inp, "in_features", weight)
        passes = (
            return_input and given.dtype == inp.dtype
        )  # through the boundary, unless torch.autocast has cast it
        bias = None if self.return_bias else learned_bias
        stage, recipe, first = self._stages[0], self._recipe_in_force(), is_first_microbatch
        hands_over = fp8_output or fp8_grad
        if recipe is None:
            if hands_over:
                raise needs_recipe("fp8_output" if fp8_output else "fp8_grad")
            normalized = self._normalize(inp)
            out = self._linear_in_high_precision(stage, normalized, weight, bias, first)
            return self._returned(out, learned_bias, normalized, (given,) if return_input else ())
        plan = self._plan(recipe, stage, self._norm_has_backward(inp), weight, hands_over=hands_over)
        linear = self._fwd_args(stage, plan, inp.dtype, weight, bias, first)
        how = record(NormArgs, (self.norm, self.return_layernorm_output, passes))
        call = record(ProgramArgs, (NORM_LINEAR, (how, linear), None))
        if fp8_grad and inp.requires_grad:
            inp = quantize_input_gradient(inp, plan.grad_input, linear.scales)
        norm_weight, norm_bias = self.layer_norm_weight, self.layer_norm_bias
        if self._placed:
            norm_weight, norm_bias = self._norm_parameters()
        operands = (call, inp, norm_weight, norm_bias, weight, bias)
        if plan.eager_only:
            result = in_eager(ProgramFunction.apply, *operands)
        else:
            result = (traced_program if is_dynamo_compiling() else ProgramFunction.apply)(*operands)
        out, *beside = (result,) if isinstance(result, Tensor) else result
        normalized, beside = (beside[0], beside[1:]) if self.return_layernorm_output else (None, beside)
        if fp8_output:
            out = quantize_output(out, plan.output, linear.scales)
        if return_input and not passes:
            beside = (given,)
        return self._returned(out, learned_bias, normalized, beside)
