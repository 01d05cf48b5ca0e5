"""``LayerNormMLP``: the feed-forward block of a Transformer in one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import LayerNormMLPFwdArgs, activate, layernorm_mlp
from ..quantizers import ActivationSettings
from ..recipe import LinearHandles, Recipe
from ..reference.activation import ACTIVATIONS, checked
from ..state import STATE, DelayedScalingState, checkpoint, register_delayed_state
from .module import parameter_device
from .norm import norm_settings
from .norm_linear import NormLinearModule, no_gathered_output
from .stages import Stage, checked_input, linear_needs, positive


def activation_settings(activation: str, params: Mapping[str, float] | None) -> ActivationSettings:
    """Which activation a module applies.

    Raises:
        ValueError: an unknown activation, or a parameter it does not have.
    """
    found = checked(activation, (2,), params)
    given = {**found.params, **(params or {})}
    return ActivationSettings(activation, tuple(float(given[name]) for name in found.params))


class LayerNormMLP(NormLinearModule):
    """y = activation(norm(x) w1^T + b1) w2^T + b2, quantized as the recipe in force says.

    Norm and activation quantize their outputs themselves. For the backward the layer keeps the quantized operands, the
    output of fc1 and the statistics of the norm; with ``checkpoint`` only the input and the parameters.

    Args:
        hidden_size: size of the last dim of input and output.
        ffn_hidden_size: size of the last dim of the activation.
        eps: added to the variance.
        bias: add learned biases in both layers.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu", "qgelu", "relu", "srelu", "silu", or gated: "geglu", "qgeglu", "glu", "reglu", "sreglu",
            "swiglu", "clamped_swiglu", "situ_glu". The first half of fc1's output is the gate of a gated one.
        activation_params: ``limit``, ``alpha`` and ``glu_linear_offset`` of "clamped_swiglu"; ``beta1``, ``beta2`` of
            "situ_glu".
        return_bias: return fc2's bias beside the output instead of adding it.
        return_layernorm_output: return the norm's output, too; a gradient that arrives there counts.
        return_layernorm_output_gathered: must be False; it is for sequence parallel layers.
        zero_centered_gamma: ``layer_norm_weight`` holds gamma - 1.
        checkpoint: save nothing but input and parameters, and compute the rest again in the backward.
        params_dtype: dtype of the parameters; default: torch's default dtype.
        device: where the parameters live; default: the accelerator, or the CPU without one.
        init_method, output_layer_init_method: fill fc1's and fc2's weight in place; default: normal with standard
            deviation 0.023.
        name: the layers' names in the quantizer roles of a custom recipe are ``<name>.fc1`` and ``<name>.fc2``.
        fuse_wgrad_accumulation, delay_wgrad_compute: as in :class:`Linear`, for both weights.
    Raises:
        ValueError: a size that is not positive, an unknown normalization, activation or activation parameter,
        ``return_layernorm_output_gathered``. In forward, before any kernel, ValueError: the input's last dim is not
        ``hidden_size``. TypeError: its dtype is not the parameters', outside ``torch.autocast``. RuntimeError: it lives
        on another device, parameters are on the meta device, or a quantized weight does not fit the recipe.
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
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        checkpoint: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        positive(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        no_gathered_output(return_layernorm_output_gathered)
        settings = norm_settings(normalization, eps, zero_centered_gamma)
        self_activation = activation_settings(activation, activation_params)
        place, dtype = parameter_device(device), params_dtype or torch.get_default_dtype()
        super().__init__(
            hidden_size,
            settings,
            name,
            dtype,
            place,
            return_bias,
            return_layernorm_output,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            gemms=(("fc2_weight", "fc2_bias"), ("fc1_weight", "fc1_bias")),
        )
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.activation, self.checkpoint = self_activation, checkpoint
        prefix = self.name and self.name + "."
        self._fc1 = Stage(prefix + "fc1", "fc1_weight", "fc1_bias", init_method)
        self._fc2 = Stage(prefix + "fc2", "fc2_weight", "fc2_bias", output_layer_init_method)
        fc1_rows = ffn_hidden_size * (2 if ACTIVATIONS[activation].gated else 1)
        self._add_linear(self._fc1, [fc1_rows], hidden_size, bias, dtype, place)
        self._add_linear(self._fc2, [hidden_size], ffn_hidden_size, bias, dtype, place)
        self.delayed_scaling.name = self._fc1.name
        self.delayed_scaling_fc2 = DelayedScalingState(self._fc2.name, place)
        register_delayed_state(self, self.delayed_scaling_fc2)
        if place.type != "meta":
            self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes, as printed by the module."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"bias={self.fc1_bias is not None}, normalization={self.norm.normalization}, "
            f"activation={self.activation.activation}, checkpoint={self.checkpoint}"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise parameters and state; parameters on the meta device are first made on the default device."""
        device = self._initial_device()
        self._reset_norm(device)
        for stage in (self._fc1, self._fc2):
            self._reset_linear(stage, device)
        for state in (self.delayed_scaling, self.delayed_scaling_fc2):
            state.to_empty(device=device)
            state.reset()
        self._drop_workspaces()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        ours = [key for key in state_dict if key.startswith(prefix)]
        if ours and not any(key.startswith(prefix + "delayed_scaling_fc2.") for key in ours):
            self.delayed_scaling_fc2.reset()  # saved before its first step, or under another recipe

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register_delayed_state(self, self.delayed_scaling_fc2)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Apply the block.

        Args:
            inp: (*lead, hidden_size).
            is_first_microbatch: None quantizes the weights on every call; True quantizes them and keeps the result;
                False uses the kept ones.
        Returns:
            (*lead, hidden_size); with ``return_bias`` and ``return_layernorm_output`` a tuple of output, fc2's bias
            and norm output (*lead, hidden_size).
        """
        inp = checked_input(inp, self.hidden_size, "hidden_size", self.fc1_weight)
        recipe = STATE.recipe
        if recipe is not None:
            out, normalized = self._quantized(inp, recipe, is_first_microbatch)
        elif self.checkpoint and torch.is_grad_enabled():
            out, normalized = checkpoint(self._in_high_precision, inp, is_first_microbatch)
        else:
            out, normalized = self._in_high_precision(inp, is_first_microbatch)
        return self._returned(out, self.fc2_bias, normalized)

    def _in_high_precision(self, inp: Tensor, is_first_microbatch: bool | None) -> tuple[Tensor, Tensor]:
        bias, first = None if self.return_bias else self.fc2_bias, is_first_microbatch
        normalized = self._normalize(inp)
        hidden = self._linear_in_high_precision(
            self._fc1, self.delayed_scaling, normalized, self.fc1_bias, first
        )
        activated = activate(hidden, self.activation)
        out = self._linear_in_high_precision(self._fc2, self.delayed_scaling_fc2, activated, bias, first)
        return out, normalized

    def _quantized(
        self, inp: Tensor, recipe: Recipe, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        fc2_bias = None if self.return_bias else self.fc2_bias
        norm_needs = self._norm_needs(inp)
        fc1_needs = linear_needs(norm_needs.any(), self.fc1_weight, self.fc1_bias)
        below = fc1_needs.inp or fc1_needs.weight or fc1_needs.bias
        fc2_needs = linear_needs(below, self.fc2_weight, fc2_bias)
        first = is_first_microbatch
        if self.checkpoint:
            for stage in (self._fc1, self._fc2):
                _check_repeatable(recipe.linear_handles(stage.name), stage.name)
        args = LayerNormMLPFwdArgs(
            norm=self.norm,
            norm_needs=norm_needs,
            activation=self.activation,
            fc1=self._stage_args(self._fc1, self.delayed_scaling, recipe, fc1_needs, inp.dtype, first),
            fc2=self._stage_args(self._fc2, self.delayed_scaling_fc2, recipe, fc2_needs, inp.dtype, first),
            return_layernorm_output=self.return_layernorm_output,
            checkpoint=self.checkpoint,
        )
        out, normalized, fc1_made, fc2_made = layernorm_mlp(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.fc1_weight,
            self.fc1_bias,
            self.fc2_weight,
            fc2_bias,
            args,
        )
        self._keep(self._fc1, recipe, fc1_made)
        self._keep(self._fc2, recipe, fc2_made)
        return out, normalized


def _check_repeatable(handles: LinearHandles, name: str) -> None:
    if handles.input.both.stochastic or handles.weight.both.stochastic:
        raise ValueError(
            f"checkpoint=True quantizes the operands of {name} twice, and the recipe in force rounds them "
            "stochastically; use narrowcast.checkpoint(module, inp), which repeats random numbers, instead"
        )
