"""What a module does for each of the linear layers inside it: checks, arguments, the weight cache."""

from __future__ import annotations

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
    NormNeeds,
    linear,
    normalize,
)
from ..functional import calibrate_
from ..quantizers import NormSettings
from ..recipe import INPUT_SLOT, WEIGHT_SLOT, DelayedScaling, Recipe
from ..state import STATE, DelayedScalingState
from ..tensors import QuantizedTensor, QuantizedTensorStorage
from .module import QuantizedModule, parameter_device, quantize_parameter
from .norm import norm_parameters, reset_norm_parameters

INIT_STD = 0.023


def checked_input(inp: Tensor, features: int, label: str, weight: Tensor) -> Tensor:
    """The input of a module, cast where torch.autocast says so.

    Args:
        features: what the last dim must be; ``label`` is its name.
        weight: a parameter to compare with.
    Raises:
        ValueError: another last dim. TypeError: another dtype than the weight's, outside torch.autocast. RuntimeError:
        another device, or a weight on the meta device.
    """
    if inp.shape[-1] != features:
        raise ValueError(
            f"input has shape {tuple(inp.shape)}; its last dim must be {label}={features}, "
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


def linear_needs(inp: bool, weight: Tensor, bias: Tensor | None) -> LinearNeeds:
    """Which gradients a linear layer is asked for; ``inp``: its input, or something in front of it, wants its own."""
    grad = torch.is_grad_enabled()
    return LinearNeeds(
        inp=grad and inp,
        weight=grad and weight.requires_grad,
        bias=grad and bias is not None and bias.requires_grad,
    )


def new_linear_parameters(
    out_features: int, in_features: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Uninitialised (weight, bias)."""
    weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
    return weight, nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None


class Stage:
    """One linear layer inside a module: its name, its parameters and how they begin.

    Args:
        name: the layer's name in quantizer roles.
        weight, bias: names of the module's parameters.
        init_method: fills the weight in place; None is normal with standard deviation 0.023.
    """

    def __init__(
        self, name: str, weight: str, bias: str, init_method: Callable[[Tensor], Any] | None
    ) -> None:
        self.name, self.weight, self.bias, self.init_method = name, weight, bias, init_method


class NormLinearModule(QuantizedModule):
    """Base of the modules that begin with a norm: its parameters, and what they do for each linear layer.

    Parameters ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``. ``wgrad``: keyword arguments of
    :class:`QuantizedModule`, about the gradients of the weights.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        settings: NormSettings,
        name: str | None,
        dtype: torch.dtype,
        place: torch.device,
        return_bias: bool,
        return_layernorm_output: bool,
        **wgrad: Any,
    ) -> None:
        super().__init__(name, place, **wgrad)
        self.norm = settings
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self._init_recipe, self._init_preserve = STATE.init_recipe, STATE.init_preserve
        self.layer_norm_weight, norm_bias = norm_parameters(features, settings, dtype, place)
        self.register_parameter("layer_norm_bias", norm_bias)

    # -- initialisation --------------------------------------------------------------------------------------------

    def _add_linear(
        self, stage: Stage, out_features: int, in_features: int, bias: bool, dtype: torch.dtype
    ) -> None:
        place = self.layer_norm_weight.device
        weight, bias_parameter = new_linear_parameters(out_features, in_features, bias, dtype, place)
        self.register_parameter(stage.weight, weight)
        self.register_parameter(stage.bias, bias_parameter)

    def _reset_norm(self, device: torch.device) -> None:
        self._materialize("layer_norm_weight", device)
        self._materialize("layer_norm_bias", device)
        reset_norm_parameters(self.layer_norm_weight, self.layer_norm_bias, self.norm)

    def _reset_linear(self, stage: Stage, device: torch.device) -> None:
        weight = getattr(self, stage.weight)
        value = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        if stage.init_method is None:
            value.normal_(0.0, INIT_STD)
        else:
            stage.init_method(value)
        if self._init_recipe is not None:
            made = quantize_parameter(value, self._init_recipe, self._init_preserve, stage.name)
            setattr(self, stage.weight, made)
        else:
            self._materialize(stage.weight, device)
            getattr(self, stage.weight).copy_(value)
        self._materialize(stage.bias, device)
        if getattr(self, stage.bias) is not None:
            getattr(self, stage.bias).zero_()

    def _materialize(self, name: str, device: torch.device) -> None:
        parameter = getattr(self, name)
        if parameter is not None and parameter.is_meta:
            made = torch.empty_like(parameter, device=device)
            setattr(self, name, nn.Parameter(made, parameter.requires_grad))

    def _initial_device(self) -> torch.device:
        """Where to initialise: parameters on the meta device are made on the default one."""
        norm_weight = self.layer_norm_weight
        return parameter_device(None) if norm_weight.is_meta else norm_weight.device

    # -- forward ---------------------------------------------------------------------------------------------------

    def _normalize(self, inp: Tensor) -> Tensor:
        return normalize(inp, self.layer_norm_weight, self.layer_norm_bias, self.norm)

    def _norm_needs(self, inp: Tensor) -> NormNeeds:
        needs = linear_needs(inp.requires_grad, self.layer_norm_weight, self.layer_norm_bias)
        return NormNeeds(needs.inp, needs.weight, needs.bias)

    def _stage_args(
        self,
        stage: Stage,
        state: DelayedScalingState,
        recipe: Recipe | None,
        needs: LinearNeeds,
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
    ) -> LinearFwdArgs:
        """What the boundary reads of one linear layer besides its operands; without a recipe for high precision."""
        weight = getattr(self, stage.weight)
        handles = None if recipe is None else recipe.linear_handles(stage.name)
        if recipe is None or handles is None:
            delayed, caching = DelayedTensors(), LinearCaching(workspace=None, cache_weight=False)
        else:
            delayed = delayed_tensors(state, handles.managed, recipe)
            caching = LinearCaching(
                workspace=self._workspace(stage.weight, handles.weight, is_first_microbatch),
                cache_weight=is_first_microbatch is not None and not isinstance(weight, QuantizedTensor),
            )
        return LinearFwdArgs(
            quantizers=handles,
            delayed=delayed,
            numerics=self._numerics(recipe, dtype, weight.dtype),
            needs=needs,
            caching=caching,
            wgrad=self._wgrad(stage.weight, is_first_microbatch),
        )

    def _keep(self, stage: Stage, recipe: Recipe, made: QuantizedTensorStorage | None) -> None:
        if made is not None:
            value = recipe.linear_handles(stage.name).weight.both.value
            self._fp8_workspaces[stage.weight] = (value, made)

    def _linear_in_high_precision(
        self,
        stage: Stage,
        state: DelayedScalingState,
        inp: Tensor,
        bias: Tensor | None,
        is_first_microbatch: bool | None,
    ) -> Tensor:
        weight = getattr(self, stage.weight)
        calibrating = STATE.calibrating
        managed = None if calibrating is None else calibrating.linear_handles(stage.name).forward_state
        if calibrating is not None and managed is not None:
            history = delayed_tensors(state, managed, calibrating).amax_fwd
            calibrate_(inp.detach(), history, INPUT_SLOT)
            calibrate_(_plain(weight).detach(), history, WEIGHT_SLOT)
        if (
            self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        ):  # the gradient does not go autograd's way
            needs = linear_needs(inp.requires_grad, weight, bias)
            args = self._stage_args(stage, state, None, needs, inp.dtype, is_first_microbatch)
            return linear(weight, inp, bias, args)[0]
        return F.linear(inp, _plain(weight).to(inp.dtype), None if bias is None else bias.to(inp.dtype))

    def _returned(self, out: Tensor, bias: Tensor | None, normalized: Tensor | None) -> Any:
        """The output alone, or a tuple with the bias and the norm's output as they were asked for."""
        extra = ((bias,) if self.return_bias else ()) + (
            (normalized,) if self.return_layernorm_output else ()
        )
        return (out, *extra) if extra else out


def _plain(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def delayed_tensors(
    state: DelayedScalingState, managed: DelayedScaling | None, recipe: Recipe
) -> DelayedTensors:
    """State tensors for quantizers that scale with delay; empty without any."""
    if managed is None:
        return DelayedTensors()
    if not torch.compiler.is_compiling():
        state.ran_under = recipe
    return DelayedTensors(state.scale_fwd, state.amax_history_fwd, state.scale_bwd, state.amax_history_bwd)


def positive(**sizes: int) -> None:
    """Check sizes by name.

    Raises:
        ValueError: one that is not positive.
    """
    for label, size in sizes.items():
        if size < 1:
            raise ValueError(f"{label} is {size}; use a positive number")


def no_gathered_output(asked: bool) -> None:
    """Check ``return_layernorm_output_gathered``.

    Raises:
        ValueError: it is set; the layer is not sequence parallel.
    """
    if asked:
        raise ValueError(
            "return_layernorm_output_gathered=True needs sequence_parallel and parallel_mode='column'; this layer is "
            "not sequence parallel, use return_layernorm_output=True"
        )
