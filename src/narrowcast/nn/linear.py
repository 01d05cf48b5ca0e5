"""``Linear``: ``torch.nn.Linear`` that runs its three GEMMs in the precision of the recipe in force."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import (
    DelayedTensors,
    LinearCaching,
    LinearFwdArgs,
    LinearNeeds,
    linear,
    quantize_input_gradient,
    quantize_output,
)
from ..functional import calibrate_
from ..recipe import INPUT_SLOT, WEIGHT_SLOT, LinearHandles, Recipe
from ..state import STATE
from ..tensors import QuantizedTensor
from .module import QuantizedModule, parameter_device, quantize_parameter

_INIT_STD = 0.023


class Linear(QuantizedModule):
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
        save_original_input: keep the unquantized input for the backward and quantize it again there, for when others
            keep it alive anyway.
    Raises (in forward, before any kernel):
        ValueError: the input's last dim is not ``in_features``. TypeError: its dtype is not the parameters', outside
        ``torch.autocast``. RuntimeError: it lives on another device, parameters are on the meta device, or a
        quantized weight does not fit the recipe.
    """

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
        save_original_input: bool = False,
    ) -> None:
        for label, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{label} is {size}; use a positive number")
        place = parameter_device(device)
        super().__init__(
            name,
            place,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            gemms=(("weight", "bias"),),
        )
        self.in_features, self.out_features = in_features, out_features
        self.return_bias = return_bias
        self.save_original_input = save_original_input
        self._warned_of_delayed_input = False
        self._init_method = init_method
        self._init_recipe, self._init_preserve = STATE.init_recipe, STATE.init_preserve
        dtype = params_dtype or torch.get_default_dtype()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=place))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=place))
        else:
            self.register_parameter("bias", None)
        if place.type != "meta":
            self.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes, as printed by the module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weight, bias and state; parameters on the meta device are first made on the default device."""
        device = parameter_device(None) if self.weight.is_meta else self.weight.device
        value = torch.empty(self.out_features, self.in_features, dtype=self.weight.dtype, device=device)
        if self._init_method is None:
            value.normal_(0.0, _INIT_STD)
        else:
            self._init_method(value)
        if self._init_recipe is not None:
            self.weight = quantize_parameter(value, self._init_recipe, self._init_preserve, self.name)
        elif self.weight.is_meta:
            self.weight = nn.Parameter(value, self.weight.requires_grad)
        else:
            self.weight.copy_(value)
        if self.bias is not None:
            if self.bias.is_meta:
                self.bias = nn.Parameter(torch.empty_like(self.bias, device=device), self.bias.requires_grad)
            self.bias.zero_()
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
        inp = self._checked_input(inp)
        bias = None if self.return_bias else self.bias
        recipe = STATE.recipe
        if recipe is None:
            if fp8_output or fp8_grad:
                option = "fp8_output" if fp8_output else "fp8_grad"
                raise RuntimeError(f"{option}=True needs a recipe in force; enter autocast(recipe=...)")
            out = self._high_precision(inp, bias, is_first_microbatch)
        else:
            out = self._quantized(inp, bias, recipe, is_first_microbatch, fp8_output, fp8_grad)
        return (out, self.bias) if self.return_bias else out

    def _checked_input(self, inp: Tensor) -> Tensor:
        """The input, cast where torch.autocast says so."""
        weight = self.weight
        if inp.shape[-1] != self.in_features:
            raise ValueError(
                f"input has shape {tuple(inp.shape)}; its last dim must be in_features={self.in_features}, "
                f"the weight is {tuple(weight.shape)}"
            )
        if weight.is_meta:
            raise RuntimeError("parameters are on the meta device; call reset_parameters() first")
        if inp.device != weight.device:
            raise RuntimeError(
                f"input is on {inp.device}, the parameters are on {weight.device}; move one of them"
            )
        kind = inp.device.type
        if torch.is_autocast_enabled(kind):
            return inp if isinstance(inp, QuantizedTensor) else inp.to(torch.get_autocast_dtype(kind))
        if inp.dtype != weight.dtype:
            raise TypeError(
                f"input is {inp.dtype}, the parameters are {weight.dtype}; cast one of them or use torch.autocast"
            )
        return inp

    def _high_precision(self, inp: Tensor, bias: Tensor | None, is_first_microbatch: bool | None) -> Tensor:
        calibrating = STATE.calibrating
        managed = None if calibrating is None else calibrating.linear_handles(self.name).forward_state
        if calibrating is not None and managed is not None:
            history = self._delayed_tensors(managed, calibrating).amax_fwd
            calibrate_(_plain(inp).detach(), history, INPUT_SLOT)
            calibrate_(_plain(self.weight).detach(), history, WEIGHT_SLOT)
        if (
            self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        ):  # the gradient does not go autograd's way
            return linear(self.weight, inp, bias, self._arguments(inp, bias, None, is_first_microbatch))[0]
        x, weight = _plain(inp), _plain(self.weight)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _quantized(
        self,
        inp: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> Tensor:
        args = self._arguments(inp, bias, recipe, is_first_microbatch)
        if fp8_grad and args.needs.inp:
            inp = quantize_input_gradient(inp, recipe.boundary_handles(self.name).grad_input, args.delayed)
        out, new_workspace = linear(self.weight, inp, bias, args)
        if new_workspace is not None:
            handles = recipe.linear_handles(self.name)
            self._fp8_workspaces["weight"] = (handles.weight.both.value, new_workspace)
        if fp8_output:
            return quantize_output(out, recipe.boundary_handles(self.name).output, args.delayed)
        return out

    def _arguments(
        self, inp: Tensor, bias: Tensor | None, recipe: Recipe | None, is_first_microbatch: bool | None
    ) -> LinearFwdArgs:
        """What the boundary reads besides its operands; without a recipe for high precision."""
        weight = self.weight
        if recipe is None:
            handles, delayed, save_original = None, DelayedTensors(), False
        else:
            handles = recipe.linear_handles(self.name)
            delayed = self._delayed_tensors(handles.managed, recipe)
            save_original = self.save_original_input and self._can_save_original(recipe, handles)
        grad = torch.is_grad_enabled()
        return LinearFwdArgs(
            quantizers=handles,
            delayed=delayed,
            numerics=self._numerics(recipe, inp.dtype, weight.dtype, save_original),
            needs=LinearNeeds(
                inp=grad and inp.requires_grad,
                weight=grad and weight.requires_grad,
                bias=grad and bias is not None and bias.requires_grad,
            ),
            caching=LinearCaching(
                workspace=None
                if handles is None
                else self._workspace("weight", handles.weight, is_first_microbatch),
                cache_weight=handles is not None
                and is_first_microbatch is not None
                and not isinstance(weight, QuantizedTensor),
            ),
            wgrad=self._wgrad("weight", is_first_microbatch),
        )

    def _can_save_original(self, recipe: Recipe, handles: LinearHandles) -> bool:
        """Whether quantizing the input again in the backward gives what the forward saw.

        Raises:
            ValueError: under delayed scaling, whose scale may have moved since.
        """
        if not handles.input.both.delayed:
            return True
        if recipe.delayed():
            raise ValueError(
                "save_original_input=True does not work with DelayedScaling, whose scale moves between forward and "
                "backward; use another recipe or save_original_input=False"
            )
        if not self._warned_of_delayed_input and not torch.compiler.is_compiling():
            self._warned_of_delayed_input = True
            warnings.warn(
                "save_original_input is ignored: the custom recipe scales the input of "
                f"{self.name or 'Linear'} with delay",
                stacklevel=2,
            )
        return False


def _plain(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
