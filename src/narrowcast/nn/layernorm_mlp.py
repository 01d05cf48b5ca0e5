"""``LayerNormMLP``: the feed-forward block of a Transformer in one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import autograd
from .._activations import ACTIVATIONS, checked
from .._checks import flags, positive, shape_of, text
from .._keywords import refuse_keywords
from .._tracing import in_eager, record
from ..autograd import (
    ActivationSettings,
    NormArgs,
    Program,
    ProgramArgs,
    ProgramFunction,
    activate,
    traced_program,
)
from ..layers import Stage, checked_input, parameter_device
from ..layers.neutral import MLPOptions, check_neutral
from ..layers.norm import norm_settings
from ..layers.parameters import check_hidden, parameter_dtype
from ..layers.tensor_parallel import parallel_of, shared
from ..recipe import LinearPlan, Recipe, linear_plan
from ..state import checkpoint
from .norm_linear import NormLinearLayer, check_gathered_output

if TYPE_CHECKING:
    from typing_extensions import Unpack

NORM_MLP = Program(
    [autograd.Norm(1, 2, 7), autograd.Linear(3, 4), autograd.Activation(), autograd.Linear(5, 6)], 8
)


def activation_settings(activation: str, params: Mapping[str, float] | None) -> ActivationSettings:
    """Return which activation a module applies.

    Raises:
        ValueError: an unknown activation, or a parameter it does not have.
    """
    found = checked(activation, (2,), params)
    given = {**found.params, **(params or {})}
    return ActivationSettings(activation, tuple(float(given[name]) for name in found.params))


class LayerNormMLP(NormLinearLayer):
    """y = activation(norm(x) w1^T + b1) w2^T + b2, quantized under its recipe or the current autocast's.

    Norm and activation quantize their outputs themselves. The layer saves the quantized operands, the output of fc1 and
    the statistics of the norm; with ``checkpoint`` only the input and the parameters.

    Args:
        hidden_size: size of the last dim of input and output.
        ffn_hidden_size: size of the last dim of the activation.
        eps: added to the variance.
        bias: add learned biases in both layers.
        recipe: the layer's own recipe, or its name; an ``autocast`` overrides it.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu", "swiglu" or another of the table in ``docs/modules.md``. Of gated ones, the first half of
            fc1's output is the gate.
        activation_params: ``limit``, ``alpha`` and ``glu_linear_offset`` of "clamped_swiglu"; ``beta1``, ``beta2`` of
            "situ_glu".
        return_bias: return fc2's bias with the output instead of adding it.
        return_layernorm_output: also return the norm's output, with a gradient.
        return_layernorm_output_gathered: return the rows of all processes of it; only with ``sequence_parallel``.
        zero_centered_gamma: ``layer_norm_weight`` holds gamma - 1.
        checkpoint: save only input and parameters, and recompute the rest in the backward.
        params_dtype, dtype: dtype of the parameters; default: torch's default dtype.
        device: device of the parameters; default: the accelerator, or the CPU without one.
        init_method, output_layer_init_method: fill fc1's and fc2's weight in place; default: normal with standard
            deviation 0.023.
        name: the layers' names in the quantizer roles of a custom recipe are ``<name>.fc1`` and ``<name>.fc2``.
        fuse_wgrad_accumulation, delay_wgrad_compute: as in :class:`Linear`, for both weights.
        set_parallel_mode: split the block: fc1 as a "column" layer and fc2 as a "row" layer.
        tp_group, sequence_parallel, get_rng_state_tracker, rng_tracker_name: as in :class:`Linear`.
        tp_size: as in :class:`Linear`. Each process's rows of a gated fc1 are its share of the gates, then its share of
            the rest.
        **options: Transformer Engine's other options, at the values that request nothing (``ub_*=False,
            symmetric_ar_type=None``).
    Raises:
        ValueError: a size is not positive, the normalization, activation or an activation parameter is unknown, or
            ``return_layernorm_output_gathered`` lacks ``sequence_parallel``; in forward, the input's last dim is not
            ``hidden_size``.
        TypeError: in forward, the input's dtype is not the parameters', outside ``torch.autocast``.
        RuntimeError: in forward, the input is on another device, or a quantized weight does not fit the recipe.
        NotImplementedError: an option of ``**options`` requests something.
    """

    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        recipe: Recipe | str | None = None,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        checkpoint: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        set_parallel_mode: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        **options: Unpack[MLPOptions],
    ) -> None:
        check_neutral("LayerNormMLP", options, MLPOptions)
        positive(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        flags(bias=bias, return_bias=return_bias, checkpoint=checkpoint, set_parallel_mode=set_parallel_mode)
        flags(fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute)
        flags(return_layernorm_output=return_layernorm_output)
        text(name=name)
        modes: dict[str, str | None] = {"fc1_": "column", "fc2_": "row"} if set_parallel_mode else {}
        ranks = tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        parallel = parallel_of(modes, *ranks)
        size = parallel.size if set_parallel_mode else 1
        check_gathered_output(return_layernorm_output_gathered, parallel, modes.get("fc1_"))
        ffn_hidden_size = shared("ffn_hidden_size", ffn_hidden_size, size)
        settings = norm_settings(normalization, eps, zero_centered_gamma)
        self_activation = activation_settings(activation, activation_params)
        place, kind = parameter_device(device), parameter_dtype(params_dtype, dtype)
        roles = f"{name}." if name else ""
        fc1 = Stage("fc1_", roles + "fc1", "fc1_weight", "fc1_bias", init_method)
        fc2 = Stage("fc2_", roles + "fc2", "fc2_weight", "fc2_bias", output_layer_init_method)
        super().__init__(
            hidden_size,
            settings,
            name,
            (fc2, fc1),
            kind,
            place,
            return_bias,
            return_layernorm_output or return_layernorm_output_gathered,
            parallel=parallel,
            recipe=recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.activation, self.checkpoint = self_activation, checkpoint
        self.set_parallel_mode, self._bias_behind = set_parallel_mode, "fc2_bias" if size > 1 else ""
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        fc1_rows = ffn_hidden_size * (2 if ACTIVATIONS[activation].gated else 1)
        if fc1_rows > ffn_hidden_size:
            self._row_blocks = {"fc1_weight": (ffn_hidden_size, ffn_hidden_size)}
        self._add_linear(fc1, [fc1_rows], hidden_size, bias, dtype=kind, device=place)
        self._add_linear(fc2, [hidden_size], ffn_hidden_size, bias, dtype=kind, device=place)
        self.reset_parameters()
        self._prepare_for_recipe()

    def extra_repr(self) -> str:
        """Return sizes, options and recipe, as printed by the module."""
        return self._with_recipe(
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.fc1_bias is not None}, normalization={self.norm.normalization}, "
            f"activation={self.activation.activation}, checkpoint={self.checkpoint}"
        )

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        residual: Tensor | None = None,
        **unknown: NoReturn,
    ) -> Any:
        """Apply the block.

        Args:
            inp: (*lead, hidden_size).
            is_first_microbatch: None quantizes the weights on every call; True quantizes them and keeps the result;
                False uses the kept ones.
            residual: shape and dtype of ``inp``; the block is applied to ``inp + residual``. The norm's kernel computes
                the sum, and its backward adds the sum's gradient.
        Returns:
            (*lead, hidden_size); with ``return_bias``, ``return_layernorm_output`` and ``residual`` a tuple of output,
            fc2's bias, norm output (*lead, hidden_size) and sum (*lead, hidden_size).
        Raises:
            ValueError: the residual has another shape, dtype or device.
        """
        if unknown:
            refuse_keywords(self, unknown)
        fc1_weight, fc2_weight = self.fc1_weight, self.fc2_weight
        inp = checked_input(self, inp, "hidden_size", fc1_weight)
        check_hidden(self, fc1_weight, fc2_weight, self.activation.activation)
        if residual is not None:
            _check_residual(residual, inp)
        recipe = self._recipe_in_force()
        if recipe is None:
            if residual is not None:
                inp = inp + residual
            if self.checkpoint and torch.is_grad_enabled():
                # the parameters are arguments for autograd to notice when they are changed before the recomputation
                out, normalized = checkpoint(
                    self._in_high_precision, inp, is_first_microbatch, *self.parameters()
                )
            else:
                out, normalized = self._in_high_precision(inp, is_first_microbatch)
            if self._bias_behind:
                out = self._with_bias_behind(out, self.fc2_bias)
            return self._returned(out, self.fc2_bias, normalized, () if residual is None else (inp,))
        fc2, fc1 = self._stages
        fc1_bias = self.fc1_bias
        fc2_bias = None if self.return_bias or self._bias_behind else self.fc2_bias
        of_norm = self._norm_has_backward(inp) or (residual is not None and residual.requires_grad)
        of_fc1 = of_norm or fc1_weight.requires_grad or (fc1_bias is not None and fc1_bias.requires_grad)
        plans = (
            self._plan(recipe, fc1, of_norm, fc1_weight),
            self._plan(recipe, fc2, of_fc1, fc2_weight),
        )
        scales = self._scales_of(("fc1_", "fc2_"), plans)
        recomputes, forward_plans = self.checkpoint and torch.is_grad_enabled(), None
        if recomputes:
            for plan, stage in zip(plans, (fc1, fc2)):
                _check_repeatable(plan, stage.name)
            split = self._parallel is not None
            forward_plans = tuple(
                [
                    linear_plan(recipe, stage.name, False, False, module_type=self._module_type, joins=split)
                    for stage in (fc1, fc2)
                ]
            )
        first, dtype = is_first_microbatch, inp.dtype
        args = (
            record(NormArgs, (self.norm, self.return_layernorm_output, residual is not None)),
            self._fwd_args(fc1, plans[0], dtype, fc1_weight, fc1_bias, first, scales[0]),
            self.activation,
            self._fwd_args(fc2, plans[1], dtype, fc2_weight, fc2_bias, first, scales[1]),
        )
        norm = (self.layer_norm_weight, self.layer_norm_bias)
        call = record(ProgramArgs, (NORM_MLP, args, forward_plans))
        operands = (call, inp, *norm, fc1_weight, fc1_bias, fc2_weight, fc2_bias, residual)
        if plans[0].eager_only or plans[1].eager_only:
            result = in_eager(ProgramFunction.apply, *operands)
        else:
            result = (traced_program if is_dynamo_compiling() else ProgramFunction.apply)(*operands)
        out, *beside = (result,) if isinstance(result, Tensor) else result
        if self._bias_behind:
            out = self._with_bias_behind(out, self.fc2_bias)
        normalized, beside = (beside[0], beside[1:]) if self.return_layernorm_output else (None, beside)
        return self._returned(out, self.fc2_bias, normalized, beside)

    def _in_high_precision(
        self, inp: Tensor, first: bool | None, *_parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        fc2, fc1 = self._stages
        normalized = self._normalize(inp)
        hidden = self._linear_in_high_precision(fc1, normalized, self.fc1_weight, self.fc1_bias, first)
        bias = None if self.return_bias or self._bias_behind else self.fc2_bias
        out = self._linear_in_high_precision(
            fc2, activate(hidden, self.activation), self.fc2_weight, bias, first
        )
        return out, normalized


def _check_residual(residual: Tensor, inp: Tensor) -> None:
    ours, theirs = ((one.shape, one.dtype, one.device) for one in (inp, residual))
    if ours != theirs:
        raise ValueError(
            f"residual is {residual.dtype} {shape_of(residual)} on {residual.device}, the input {inp.dtype} "
            f"{shape_of(inp)} on {inp.device}; make them alike, or add them up before the call"
        )


def _check_repeatable(plan: LinearPlan, name: str) -> None:
    if plan.input.stochastic or plan.weight.stochastic:
        raise ValueError(
            f"checkpoint=True quantizes the operands of {name} twice, and the recipe in force rounds them "
            "stochastically; use narrowcast.checkpoint(module, inp), which repeats random numbers, instead"
        )
