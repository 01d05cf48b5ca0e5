"""What a module does for each of the linear layers inside it: checks, parameters, arguments, the weight cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd import DelayedTensors, LinearCaching, LinearFwdArgs, LinearNeeds, linear
from ..functional import calibrate_
from ..recipe import INPUT_SLOT, WEIGHT_SLOT, Recipe
from ..state import STATE, DelayedScalingState, delayed_generation
from ..tensors import QuantizedTensor, QuantizedTensorStorage
from .module import QuantizedModule, quantize_parameter

INIT_STD = 0.023


def positive(**sizes: int) -> None:
    """Check sizes by name.

    Raises:
        ValueError: one that is not positive.
    """
    for label, size in sizes.items():
        if size < 1:
            raise ValueError(f"{label} is {size}; use a positive number")


def checked_input(
    inp: Tensor, features: int, label: str, weight: Tensor, quantized_as_it_is: bool = False
) -> Tensor:
    """The input of a module, cast where torch.autocast says so.

    Args:
        features: what the last dim must be; ``label`` is its name.
        weight: a parameter to compare with.
        quantized_as_it_is: torch.autocast does not cast a quantized input.
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
        if quantized_as_it_is and isinstance(inp, QuantizedTensor):
            return inp
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
        self.last_args: _LastArgs | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling and deep copies; what the last forward read is left behind."""
        return {**self.__dict__, "last_args": None}


class _LastArgs(NamedTuple):
    """Arguments of an eager forward, and what they were made from: the next one mostly wants the same."""

    recipe: Recipe | None
    generation: int
    asked: tuple[Any, ...]
    args: LinearFwdArgs

    def serve(self, recipe: Recipe | None, asked: tuple[Any, ...], state: DelayedScalingState) -> bool:
        """Whether they are what would be made now."""
        scale = self.args.delayed.scale_fwd
        return (
            self.recipe is recipe
            and self.generation == delayed_generation()
            and self.asked == asked
            and (scale is None or scale is state._buffers["scale_fwd"])  # a functional call swaps buffers
        )


class LinearModule(QuantizedModule):
    """Base of the modules with linear layers inside: what they do for each of these."""

    def __init__(self, name: str | None, place: torch.device, **wgrad: Any) -> None:
        super().__init__(name, place, **wgrad)
        self._init_recipe, self._init_preserve = STATE.init_recipe, STATE.init_preserve

    # -- initialisation --------------------------------------------------------------------------------------------

    def _add_linear(
        self,
        stage: Stage,
        rows: list[int],
        in_features: int,
        bias: bool,
        dtype: torch.dtype,
        place: torch.device,
    ) -> None:
        """Uninitialised parameters of ``rows`` each, parts of one allocation."""
        weight = torch.empty(sum(rows), in_features, dtype=dtype, device=place)
        self._add_parts(stage.weight, weight, rows)
        self._add_parts(stage.bias, torch.empty(sum(rows), dtype=dtype, device=place) if bias else None, rows)

    def _add_parts(self, name: str, value: Tensor | None, rows: list[int]) -> None:
        names = self._part_names(name)
        if value is None:
            parts = [None] * len(names)
        else:
            parts = [nn.Parameter(part) for part in (value.split(rows) if len(names) > 1 else (value,))]
        for part_name, part in zip(names, parts, strict=True):
            self.register_parameter(part_name, part)

    def _reset_linear(self, stage: Stage, device: torch.device) -> None:
        weights = self._parts_of(stage.weight)
        rows = [weight.shape[0] for weight in weights]
        value = torch.empty(sum(rows), weights[0].shape[1], dtype=weights[0].dtype, device=device)
        if stage.init_method is None:
            value.normal_(0.0, INIT_STD)
        else:
            stage.init_method(value)
        if self._init_recipe is not None:
            made = quantize_parameter(value, self._init_recipe, self._init_preserve, stage.name)
            setattr(self, stage.weight, made)
        else:
            for name, part in zip(self._part_names(stage.weight), value.split(rows), strict=True):
                self._materialize(name, device)
                getattr(self, name).copy_(part)
        for name in self._part_names(stage.bias):
            self._materialize(name, device)
        for bias in self._parts_of(stage.bias):
            bias.zero_()

    def _materialize(self, name: str, device: torch.device) -> None:
        parameter = getattr(self, name)
        if parameter is not None and parameter.is_meta:
            made = torch.empty_like(parameter, device=device)
            setattr(self, name, nn.Parameter(made, parameter.requires_grad))

    # -- forward ---------------------------------------------------------------------------------------------------

    def _stage_args(
        self,
        stage: Stage,
        state: DelayedScalingState,
        recipe: Recipe | None,
        needs: LinearNeeds,
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
        save_original_input: bool = False,
    ) -> LinearFwdArgs:
        """What the boundary reads of one linear layer besides its operands; without a recipe for high precision."""
        weight = self._parts_of(stage.weight)[0]
        special = self.fuse_wgrad_accumulation or self.delay_wgrad_compute or is_first_microbatch is not None
        if special or isinstance(weight, QuantizedTensor) or torch.compiler.is_compiling():
            return self._new_stage_args(
                stage, state, recipe, needs, dtype, is_first_microbatch, save_original_input
            )
        last = stage.last_args
        asked = (needs.inp, needs.weight, needs.bias, dtype, weight.dtype, save_original_input)
        if last is None or not last.serve(recipe, asked, state):
            args = self._new_stage_args(stage, state, recipe, needs, dtype, None, save_original_input)
            last = stage.last_args = _LastArgs(recipe, delayed_generation(), asked, args)
        return last.args

    def _new_stage_args(
        self,
        stage: Stage,
        state: DelayedScalingState,
        recipe: Recipe | None,
        needs: LinearNeeds,
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
        save_original_input: bool,
    ) -> LinearFwdArgs:
        weight = self._parts_of(stage.weight)[0]
        handles = None if recipe is None else recipe.linear_handles(stage.name)
        if recipe is None or handles is None:
            delayed, caching = DelayedTensors(), LinearCaching(workspace=None, cache_weight=False)
        else:
            delayed = self._delayed_tensors(handles.managed, recipe, state)
            caching = LinearCaching(
                workspace=self._workspace(stage.weight, handles.weight, is_first_microbatch),
                cache_weight=is_first_microbatch is not None and not isinstance(weight, QuantizedTensor),
            )
        return LinearFwdArgs(
            quantizers=handles,
            delayed=delayed,
            numerics=self._numerics(recipe, dtype, weight.dtype, save_original_input),
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
        weight = self._whole(stage.weight)
        assert weight is not None
        self._calibrate(stage, state, inp, weight)
        if (
            self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        ):  # the gradient does not go autograd's way
            needs = linear_needs(inp.requires_grad, weight, bias)
            args = self._stage_args(stage, state, None, needs, inp.dtype, is_first_microbatch)
            return linear(weight, inp, bias, args)[0]
        x = _plain(inp)
        return F.linear(x, _plain(weight).to(x.dtype), None if bias is None else bias.to(x.dtype))

    def _calibrate(self, stage: Stage, state: DelayedScalingState, inp: Tensor, weight: Tensor) -> None:
        """Collect the amax of both operands, where an autocast asks for nothing else."""
        calibrating = STATE.calibrating
        managed = None if calibrating is None else calibrating.linear_handles(stage.name).forward_state
        if calibrating is not None and managed is not None:
            history = self._delayed_tensors(managed, calibrating, state).amax_fwd
            calibrate_(_plain(inp).detach(), history, INPUT_SLOT)
            calibrate_(_plain(weight).detach(), history, WEIGHT_SLOT)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
