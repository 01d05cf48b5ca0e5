"""``LayerNormLinear``: a norm and a linear layer, with nothing in high precision between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import LayerNormLinearFwdArgs, layernorm_linear
from ..recipe import Recipe
from ..state import STATE
from .module import parameter_device
from .norm import norm_settings
from .norm_linear import NormLinearModule, no_gathered_output
from .parameters_split import ParametersSplit, parts_of
from .stages import Stage, checked_input, linear_needs, positive


class LayerNormLinear(NormLinearModule):
    """y = norm(x) w^T + b, quantized as the recipe in force says; outside ``autocast`` in high precision.

    The norm quantizes its output itself: in high precision it exists only where it is returned, or where the recipe's
    backward reads it.

    Args:
        in_features, out_features: sizes of the last dim of input and output.
        eps: added to the variance.
        bias: add a learned (out_features,) bias.
        normalization: "LayerNorm" or "RMSNorm".
        return_bias: return the bias beside the output instead of adding it.
        return_layernorm_output: return the norm's output, too; a gradient that arrives there counts.
        return_layernorm_output_gathered: must be False; it is for sequence parallel layers.
        zero_centered_gamma: ``layer_norm_weight`` holds gamma - 1.
        params_dtype: dtype of the parameters; default: torch's default dtype.
        device: where the parameters live; default: the accelerator, or the CPU without one.
        init_method: fills the weight in place; default: normal with standard deviation 0.023.
        name: name in the quantizer roles of a custom recipe.
        fuse_wgrad_accumulation, delay_wgrad_compute, parameters_split: as in :class:`Linear`.
    Raises:
        ValueError: a size that is not positive, an unknown normalization, ``return_layernorm_output_gathered``. In
        forward, before any kernel, ValueError: the input's last dim is not ``in_features``. TypeError: its dtype is not
        the parameters', outside ``torch.autocast``. RuntimeError: it lives on another device, parameters are on the
        meta device, or a quantized weight does not fit the recipe.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        parameters_split: ParametersSplit | None = None,
    ) -> None:
        positive(in_features=in_features, out_features=out_features)
        no_gathered_output(return_layernorm_output_gathered)
        settings = norm_settings(normalization, eps, zero_centered_gamma)
        place, dtype = parameter_device(device), params_dtype or torch.get_default_dtype()
        rows, parts = parts_of(parameters_split, out_features, place, fuse_wgrad_accumulation)
        super().__init__(
            in_features,
            settings,
            name,
            dtype,
            place,
            return_bias,
            return_layernorm_output,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            gemms=(("weight", "bias"),),
            parts=parts,
        )
        self.in_features, self.out_features = in_features, out_features
        self._stage = Stage(self.name, "weight", "bias", init_method)
        self._add_linear(self._stage, rows, in_features, bias, dtype, place)
        if place.type != "meta":
            self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes, as printed by the module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={bool(self._parts_of('bias'))}, normalization={self.norm.normalization}"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise parameters and state; parameters on the meta device are first made on the default device."""
        device = self._initial_device()
        self._reset_norm(device)
        self._reset_linear(self._stage, device)
        self.delayed_scaling.to_empty(device=device)
        self.delayed_scaling.reset()
        self._drop_workspaces()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Apply the layer.

        Args:
            inp: (*lead, in_features).
            is_first_microbatch: None quantizes the weight on every call; True quantizes it and keeps the result;
                False uses the kept one.
        Returns:
            (*lead, out_features); with ``return_bias`` and ``return_layernorm_output`` a tuple of output, bias and
            norm output (*lead, in_features).
        """
        inp = checked_input(inp, self.in_features, "in_features", self._parts_of("weight")[0])
        learned_bias = self._whole("bias")
        bias = None if self.return_bias else learned_bias
        recipe = STATE.recipe
        if recipe is None:
            normalized = self._normalize(inp)
            out = self._linear_in_high_precision(
                self._stage, self.delayed_scaling, normalized, bias, is_first_microbatch
            )
        else:
            out, normalized = self._quantized(inp, bias, recipe, is_first_microbatch)
        return self._returned(out, learned_bias, normalized)

    def _quantized(
        self, inp: Tensor, bias: Tensor | None, recipe: Recipe, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        weight = self._whole("weight")
        assert weight is not None
        norm_needs = self._norm_needs(inp)
        needs = linear_needs(norm_needs.any(), weight, bias)
        args = LayerNormLinearFwdArgs(
            norm=self.norm,
            norm_needs=norm_needs,
            linear=self._stage_args(
                self._stage, self.delayed_scaling, recipe, needs, inp.dtype, is_first_microbatch
            ),
            return_layernorm_output=self.return_layernorm_output,
        )
        out, normalized, made = layernorm_linear(
            inp, self.layer_norm_weight, self.layer_norm_bias, weight, bias, args
        )
        self._keep(self._stage, recipe, made)
        return out, normalized
