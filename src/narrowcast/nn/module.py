"""What every low-precision module shares: delayed-scaling state, the weight cache, quantized parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._device import default_device
from ..autograd import (
    DelayedTensors,
    LinearNumerics,
    LinearWgrad,
    add_to_main_grad_,
    compute_wgrad,
    concatenate,
)
from ..functional.wgrad_store import WeightGradStore
from ..quantizers import Float8CurrentScalingQuantizer, OperandHandles, Quantizer
from ..recipe import DelayedScaling, Recipe
from ..state import DelayedScalingState, register_delayed_state
from ..tensors import QuantizedTensor, QuantizedTensorStorage, storage_of
from ..tensors.storage import resolve_storage_class


class QuantizedModule(nn.Module):
    """Base of the low-precision modules.

    Args:
        name: the module's name in quantizer roles.
        device: where parameters and state are made; None takes the default accelerator, or the CPU without one.
        fuse_wgrad_accumulation: add weight gradients to the parameter's ``main_grad`` instead of its ``grad``.
        delay_wgrad_compute: weight and bias gradients wait for :meth:`backward_dw`.
        gemms: the parameters of each GEMM: (name of the weight, name of the bias).
        parts: names of the parameters that together are a weight or bias, by its name; none for one that is whole.
    """

    def __init__(
        self,
        name: str | None,
        device: torch.device | str | None,
        *,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        gemms: tuple[tuple[str, str], ...] = (),
        parts: dict[str, list[str]] | None = None,
    ) -> None:
        super().__init__()
        self.name = name or ""
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self._gemms = gemms
        self._parts = parts or {}
        # weight name -> its queue; in the order in which a backward meets them
        self.wgrad_stores = {w: WeightGradStore(device) for w, _ in gemms} if delay_wgrad_compute else {}
        self._wgrad_hooks: list[Callable[[], Any]] = []
        self._warned_of_delayed_input = False
        self.delayed_scaling = DelayedScalingState(self.name, device)
        register_delayed_state(self, self.delayed_scaling)
        # Parameter name -> (value of the quantizer that made it, quantized weight), or None. All names are there from
        # the start: a compiled graph is guarded on the keys of a dict that it writes to.
        self._fp8_workspaces: dict[str, tuple[str, QuantizedTensorStorage] | None] = {
            w: None for w, _ in gemms
        }

    def _whole(self, name: str) -> Tensor | None:
        """A weight or bias: the parameter, or what its parts are together."""
        if name not in self._parts:
            return getattr(self, name)
        parts = self._parts_of(name)
        return concatenate(parts) if parts else None

    def _parts_of(self, name: str) -> list[Tensor]:
        """The parameters that hold a weight or bias: one, several, or none where there is no bias."""
        found = [self._parameters.get(part) for part in self._part_names(name)]
        return [part for part in found if part is not None]

    def _part_names(self, name: str) -> list[str]:
        return self._parts.get(name, [name])

    def _delayed_tensors(
        self, managed: DelayedScaling | None, recipe: Recipe, state: DelayedScalingState | None = None
    ) -> DelayedTensors:
        """State tensors for quantizers that scale with delay, of the module's only layer or of ``state``.

        Empty without such quantizers.
        """
        if state is None:
            state = self.delayed_scaling
        if not torch.compiler.is_compiling():
            state.note(recipe, managed is not None)
        if managed is None:
            return DelayedTensors()
        return DelayedTensors(
            state.scale_fwd, state.amax_history_fwd, state.scale_bwd, state.amax_history_bwd
        )

    def _numerics(
        self,
        recipe: Recipe | None,
        activation_dtype: torch.dtype,
        weight_dtype: torch.dtype,
        save_original_input: bool = False,
    ) -> LinearNumerics:
        """How a GEMM of this module computes under a recipe; None is high precision."""
        if recipe is None:
            return LinearNumerics(
                activation_dtype, weight_dtype, "high_precision", False, False, False, False
            )
        return LinearNumerics(
            activation_dtype=activation_dtype,
            weight_dtype=weight_dtype,
            backward_override=recipe.backward_override,  # type: ignore[attr-defined]
            emulate=recipe.emulate,  # type: ignore[attr-defined]
            fast_fprop=not recipe.fp8_gemm_fprop.use_split_accumulator,
            fast_dgrad=not recipe.fp8_gemm_dgrad.use_split_accumulator,
            fast_wgrad=not recipe.fp8_gemm_wgrad.use_split_accumulator,
            save_original_input=save_original_input,
        )

    def _can_save_original(self, recipe: Recipe) -> bool:
        """Whether quantizing the input again in the backward gives what the forward saw.

        Raises:
            ValueError: under delayed scaling, whose scale may have moved since.
        """
        if not recipe.linear_handles(self.name).input.both.delayed:
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
                f"{self.name or type(self).__name__} with delay",
                stacklevel=2,
            )
        return False

    def _workspace(
        self, name: str, handles: OperandHandles, is_first_microbatch: bool | None
    ) -> QuantizedTensorStorage | None:
        """The quantized weight that need not be made: a quantized parameter, or what the first microbatch left.

        Raises:
            RuntimeError: the parameter is quantized in another format than the recipe's.
        """
        weight = self._parameters.get(name)
        if isinstance(weight, QuantizedTensor):
            storage = storage_of(weight)
            wanted = resolve_storage_class(handles.both.storage_name)
            if not isinstance(storage, wanted):
                raise RuntimeError(
                    f"parameter {name!r} of {self.name or type(self).__name__} is a {type(weight).__name__}, the "
                    f"recipe in force wants {wanted.__name__}; enter autocast with the recipe of quantized_model_init"
                )
            return storage
        cached = self._fp8_workspaces.get(name) if is_first_microbatch is False else None
        if cached is not None and cached[0] == handles.both.value:
            return cached[1]
        return None  # nothing kept, or kept for another recipe

    # -- where weight gradients go ----------------------------------------------------------------------------------

    def _wgrad(self, name: str, is_first_microbatch: bool | None) -> LinearWgrad:
        """Where the gradient of one weight goes.

        Raises:
            RuntimeError: it should go to ``main_grad``, and the parameter has none.
        """
        store = self.wgrad_stores.get(name)
        ticket = None if store is None else store.ticket
        if not (self.fuse_wgrad_accumulation and torch.is_grad_enabled()):
            return LinearWgrad(None, False, "", store, ticket)
        weight = getattr(self, name)
        if not weight.requires_grad:
            return LinearWgrad(None, False, "", store, ticket)
        owner = self.name or type(self).__name__
        main_grad, overwrite, dummy = main_grad_of(weight, name, owner)
        return LinearWgrad(main_grad, overwrite or is_first_microbatch is True, dummy, store, ticket)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients of this module wait for :meth:`backward_dw`."""
        return self.delay_wgrad_compute

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight and bias gradients of the oldest backward, and add them to ``grad`` or ``main_grad``.

        Does nothing without ``delay_wgrad_compute``. Then the hooks of
        :meth:`register_wgrad_accumulation_and_reduce_hooks` run.

        Raises:
            RuntimeError: there was no backward since the last call.
        """
        if not self.need_backward_dw():
            return
        self._compute_waiting_wgrads()
        for hook in self._wgrad_hooks:
            hook()

    def _compute_waiting_wgrads(self) -> None:
        """The gradients of one backward, to where they go."""
        for weight_name, bias_name in self._gemms:
            weights = self._parts_of(weight_name)
            if not any(weight.requires_grad for weight in weights):
                continue
            deferred = self.wgrad_stores[weight_name].pop()
            if self.fuse_wgrad_accumulation:
                (weight,) = weights
                add_to_main_grad_(deferred, weight.main_grad)  # type: ignore[attr-defined]
                _mark_added_to_main_grad(weight)
            else:
                shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
                _accumulate_rows(weights, compute_wgrad(deferred, shape, weights[0].dtype))
            if deferred.grad_bias is not None:
                _accumulate_rows(self._parts_of(bias_name), deferred.grad_bias)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Have ``hook()`` called at the end of every :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        for whole in self._fp8_workspaces:  # made from the parameter that was here
            if name in self._part_names(whole):
                self._fp8_workspaces[whole] = None
        self._prepare_parameters()

    def _prepare_parameters(self) -> None:
        """Tell data-parallel wrappers what to expect of the gradients; again for every new parameter object."""
        for weight_name, bias_name in self._gemms:
            weights, biases = self._parts_of(weight_name), self._parts_of(bias_name)
            for weight in weights:
                if self.fuse_wgrad_accumulation and not _is_marked(weight):
                    weight.register_post_accumulate_grad_hook(_mark_added_to_main_grad)
            for parameter in (*weights, *biases):
                if self.delay_wgrad_compute:
                    parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    # -- the weight cache dies with what it was made from -----------------------------------------------------------

    def _drop_workspaces(self) -> None:
        self._fp8_workspaces.update(dict.fromkeys(self._fp8_workspaces))

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedModule:
        self._drop_workspaces()
        super()._apply(fn, recurse)
        for store in self.wgrad_stores.values():
            store.ticket = fn(store.ticket)
        self._prepare_parameters()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._drop_workspaces()
        ours = [key for key in state_dict if key.startswith(prefix)]
        if ours and not any(key.startswith(prefix + "delayed_scaling.") for key in ours):
            self.delayed_scaling.reset()  # saved before its first step, or under another recipe
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Plain tensors only: a quantized parameter is saved as its high-precision value."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, parameter in self._parameters.items():
            if isinstance(parameter, QuantizedTensor):
                destination[prefix + name] = parameter.detach().dequantize()

    def __getstate__(self) -> dict[str, Any]:
        """State for pickling and deep copies; the cache is left behind."""
        return {**self.__dict__, "_fp8_workspaces": dict.fromkeys(self._fp8_workspaces)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register_delayed_state(self, self.delayed_scaling)
        self._prepare_parameters()


def main_grad_of(weight: Tensor, name: str, owner: str) -> tuple[Tensor, bool, str]:
    """(main_grad, whether to overwrite it, the placeholder for the gradient) as :class:`LinearWgrad` takes them.

    Raises:
        RuntimeError: the parameter has none.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            f"parameter {name!r} of {owner} needs a main_grad, where its gradient is to be accumulated; assign a fp32 "
            "tensor of its shape before the forward"
        )
    dummy = ""
    if hasattr(weight, "grad_added_to_main_grad"):
        dummy = "zeros" if getattr(weight, "zero_out_wgrad", False) else "empty"
    return main_grad, getattr(weight, "overwrite_main_grad", False), dummy


def _accumulate_rows(parameters: list[Tensor], grad: Tensor) -> None:
    """Give each parameter its rows of a gradient."""
    for parameter, own in zip(parameters, grad.split([parameter.shape[0] for parameter in parameters])):
        if parameter.requires_grad:
            _accumulate(parameter, own)


def _accumulate(parameter: Tensor, grad: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def _mark_added_to_main_grad(parameter: Tensor) -> None:
    """Say that ``main_grad`` has what ``grad`` would hold, to those who asked by setting the attribute."""
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _is_marked(parameter: Tensor) -> bool:
    hooks = parameter._post_accumulate_grad_hooks or {}
    return _mark_added_to_main_grad in hooks.values()


def quantize_parameter(value: Tensor, recipe: Recipe, preserve: bool, name: str) -> nn.Parameter:
    """Quantized parameter holding ``value`` in the format of the recipe's weights.

    Args:
        value: (N, K) initial value.
        recipe: whose weight quantizer to use; delayed scaling takes current scaling, it has no history yet.
        preserve: keep a CPU copy of ``value`` on the parameter.
        name: module name, for a custom recipe's role.
    """
    quantizer = _weight_quantizer(recipe, name).with_usage(rowwise=True, columnwise=True)
    quantized = quantizer.quantize(value.detach())
    parameter = nn.Parameter(quantized, requires_grad=True)
    if preserve:
        parameter._high_precision_init_val = value.detach().cpu()  # type: ignore[attr-defined]
    return parameter


def _weight_quantizer(recipe: Recipe, name: str) -> Quantizer:
    quantizer = recipe.linear_handles(name).weight.both.quantizer
    if quantizer._is_delayed():
        return Float8CurrentScalingQuantizer(quantizer.dtype)  # type: ignore[attr-defined]
    return quantizer


def parameter_device(device: torch.device | str | None) -> torch.device:
    """Where a module makes its parameters: as asked, else the ambient default device, else the accelerator."""
    if device is not None:
        return (
            default_device()
            if str(device) == "cuda" and not torch.cuda.is_available()
            else torch.device(device)
        )
    ambient = torch.get_default_device()
    return default_device() if ambient.type == "cpu" else ambient
