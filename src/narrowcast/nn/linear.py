"""``Linear``: ``torch.nn.Linear`` that runs its three GEMMs in the precision of the recipe in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import LinearCaching, LinearFwdArgs, LinearNeeds, LinearNumerics, linear
from ..functional import calibrate_
from ..recipe import INPUT_SLOT, WEIGHT_SLOT, LinearHandles, Recipe
from ..state import STATE
from ..tensors import QuantizedTensor, QuantizedTensorStorage, storage_of
from ..tensors.storage import resolve_storage_class
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
    ) -> None:
        for label, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{label} is {size}; use a positive number")
        place = parameter_device(device)
        super().__init__(name, place)
        self.in_features, self.out_features = in_features, out_features
        self.return_bias = return_bias
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
        self._fp8_workspaces.clear()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Apply the layer.

        Args:
            inp: (*lead, in_features).
            is_first_microbatch: None quantizes the weight on every call; True quantizes it and keeps the result;
                False uses the kept one without looking at the weight.
        Returns:
            (*lead, out_features); with ``return_bias`` a pair of output and bias.
        """
        inp = self._checked_input(inp)
        bias = None if self.return_bias else self.bias
        recipe = STATE.recipe
        if recipe is None:
            out = self._high_precision(inp, bias)
        else:
            out = self._quantized(inp, bias, recipe, is_first_microbatch)
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
            return inp.to(torch.get_autocast_dtype(kind))
        if inp.dtype != weight.dtype:
            raise TypeError(
                f"input is {inp.dtype}, the parameters are {weight.dtype}; cast one of them or use torch.autocast"
            )
        return inp

    def _high_precision(self, inp: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight.dequantize() if isinstance(self.weight, QuantizedTensor) else self.weight
        calibrating = STATE.calibrating
        managed = None if calibrating is None else calibrating.linear_handles(self.name).forward_state
        if calibrating is not None and managed is not None:
            history = self._delayed_tensors(managed, calibrating).amax_fwd
            calibrate_(inp.detach(), history, INPUT_SLOT)
            calibrate_(weight.detach(), history, WEIGHT_SLOT)
        return F.linear(inp, weight.to(inp.dtype), None if bias is None else bias.to(inp.dtype))

    def _quantized(
        self, inp: Tensor, bias: Tensor | None, recipe: Recipe, is_first_microbatch: bool | None
    ) -> Tensor:
        handles = recipe.linear_handles(self.name)
        weight = self.weight
        args = LinearFwdArgs(
            quantizers=handles,
            delayed=self._delayed_tensors(handles.managed, recipe),
            numerics=LinearNumerics(
                activation_dtype=inp.dtype,
                weight_dtype=weight.dtype,
                backward_override=recipe.backward_override,  # type: ignore[attr-defined]
                emulate=recipe.emulate,  # type: ignore[attr-defined]
                fast_fprop=not recipe.fp8_gemm_fprop.use_split_accumulator,
                fast_dgrad=not recipe.fp8_gemm_dgrad.use_split_accumulator,
                fast_wgrad=not recipe.fp8_gemm_wgrad.use_split_accumulator,
            ),
            needs=LinearNeeds(
                inp=inp.requires_grad,
                weight=weight.requires_grad,
                bias=bias is not None and bias.requires_grad,
            ),
            caching=LinearCaching(
                workspace=self._workspace(handles, is_first_microbatch),
                cache_weight=is_first_microbatch is not None and not isinstance(weight, QuantizedTensor),
            ),
        )
        out, new_workspace = linear(weight, inp, bias, args)
        if new_workspace is not None:
            self._fp8_workspaces["weight"] = (handles.weight.both.value, new_workspace)
        return out

    def _workspace(
        self, handles: LinearHandles, is_first_microbatch: bool | None
    ) -> QuantizedTensorStorage | None:
        """The quantized weight that need not be made: a quantized parameter, or what the first microbatch left."""
        if isinstance(self.weight, QuantizedTensor):
            storage = storage_of(self.weight)
            wanted = resolve_storage_class(handles.weight.both.storage_name)
            if not isinstance(storage, wanted):
                raise RuntimeError(
                    f"parameter 'weight' of {self.name or 'Linear'} is a {type(self.weight).__name__}, the recipe in "
                    f"force wants {wanted.__name__}; enter autocast with the recipe of quantized_model_init"
                )
            return storage
        cached = self._fp8_workspaces.get("weight") if is_first_microbatch is False else None
        if cached is not None and cached[0] == handles.weight.both.value:
            return cached[1]
        return None  # nothing kept, or kept for another recipe
