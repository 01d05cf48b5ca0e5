"""``Linear``: ``torch.nn.Linear`` that runs its three GEMMs in the precision of the recipe in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import linear, quantize_input_gradient, quantize_output
from ..recipe import Recipe
from ..state import STATE
from .module import parameter_device
from .parameters_split import ParametersSplit, parts_of
from .stages import LinearModule, Stage, checked_input, linear_needs, positive


class Linear(LinearModule):
    """y = x w^T + b, quantized as the recipe in force says; outside ``autocast`` in high precision.

    Any number of tokens and any feature sizes work; where a kernel needs multiples, zeros are added and cut away.

    Args:
        in_features, out_features: sizes of the last dim of input and output.
        bias: add a learned (out_features,) bias.
        return_bias: return the bias beside the output instead of adding it.
        params_dtype: dtype of the parameters; default: torch's default dtype.
        device: where the parameters live; default: the accelerator, or the CPU without one.
        init_method: fills the weight in place; default: normal with standard deviation 0.023.
        name: name in the quantizer roles of a custom recipe.
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad`` (fp32 or bf16), or overwrite it in the
            first microbatch and where ``weight.overwrite_main_grad`` is set. ``weight.grad`` stays None; a parameter
            with the attribute ``grad_added_to_main_grad`` gets that set to True and a placeholder as its gradient,
            zeros with ``zero_out_wgrad``, else uninitialised.
        delay_wgrad_compute: the backward queues what the weight and bias gradients are made from;
            :meth:`backward_dw` makes them, one backward per call, first in, first out.
        parameters_split: names of several parameters ``<name>_weight`` and ``<name>_bias`` in place of weight and bias,
            of equally many rows, or a dict from names to rows. They start as views of one buffer; where they are no
            longer adjacent, and in compiled code, every forward concatenates them.
        save_original_input: keep the unquantized input for the backward and quantize it again there, for when others
            keep it alive anyway.
    Raises (in forward, before any kernel):
        ValueError: the input's last dim is not ``in_features``. TypeError: its dtype is not the parameters', outside
        ``torch.autocast``. RuntimeError: it lives on another device, parameters are on the meta device, or a
        quantized weight does not fit the recipe.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        parameters_split: ParametersSplit | None = None,
        save_original_input: bool = False,
    ) -> None:
        positive(in_features=in_features, out_features=out_features)
        place, dtype = parameter_device(device), params_dtype or torch.get_default_dtype()
        rows, parts = parts_of(parameters_split, out_features, place, fuse_wgrad_accumulation)
        super().__init__(
            name,
            place,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            gemms=(("weight", "bias"),),
            parts=parts,
        )
        self.in_features, self.out_features = in_features, out_features
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self._stage = Stage(self.name, "weight", "bias", init_method)
        self._add_linear(self._stage, rows, in_features, bias, dtype, place)
        if place.type != "meta":
            self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes, as printed by the module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={bool(self._parts_of('bias'))}"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weight, bias and state; parameters on the meta device are first made on the default device."""
        weight = self._parts_of("weight")[0]
        device = parameter_device(None) if weight.is_meta else weight.device
        self._reset_linear(self._stage, device)
        self.delayed_scaling.to_empty(device=device)
        self.delayed_scaling.reset()
        self._drop_workspaces()

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Apply the layer.

        Args:
            inp: (*lead, in_features), plain or quantized. A quantized one is multiplied as it is.
            is_first_microbatch: None quantizes the weight on every call; True quantizes it and keeps the result;
                False uses the kept one without looking at the weight.
            fp8_output: return a quantized tensor, as the recipe quantizes outputs.
            fp8_grad: quantize the gradient of the input, as the recipe quantizes such.
        Returns:
            (*lead, out_features); with ``return_bias`` a pair of output and bias.
        """
        weight = self._parts_of("weight")[0]
        inp = checked_input(inp, self.in_features, "in_features", weight, quantized_as_it_is=True)
        learned_bias = self._whole("bias")
        bias = None if self.return_bias else learned_bias
        recipe = STATE.recipe
        if recipe is None:
            if fp8_output or fp8_grad:
                option = "fp8_output" if fp8_output else "fp8_grad"
                raise RuntimeError(f"{option}=True needs a recipe in force; enter autocast(recipe=...)")
            out = self._linear_in_high_precision(
                self._stage, self.delayed_scaling, inp, bias, is_first_microbatch
            )
        else:
            out = self._quantized(inp, bias, recipe, is_first_microbatch, fp8_output, fp8_grad)
        return (out, learned_bias) if self.return_bias else out

    def _quantized(
        self,
        inp: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> Tensor:
        save_original = self.save_original_input and self._can_save_original(recipe)
        weight = self._whole("weight")
        assert weight is not None
        needs = linear_needs(inp.requires_grad, weight, bias)
        args = self._stage_args(
            self._stage, self.delayed_scaling, recipe, needs, inp.dtype, is_first_microbatch, save_original
        )
        if fp8_grad and needs.inp:
            inp = quantize_input_gradient(inp, recipe.boundary_handles(self.name).grad_input, args.delayed)
        out, made = linear(weight, inp, bias, args)
        self._keep(self._stage, recipe, made)
        if fp8_output:
            return quantize_output(out, recipe.boundary_handles(self.name).output, args.delayed)
        return out
