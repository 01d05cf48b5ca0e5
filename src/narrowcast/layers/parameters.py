"""Parameters of layers: where they live, how they begin, what their gradients go to, and what inputs fit them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .._activations import ACTIVATIONS
from .._checks import function, shape_of, shown, tensor, typed
from .._device import HIGH_PRECISION, checked_device, default_device
from .._tracing import is_eager
from ..functional import running_backward
from ..quantizers import Quantizer
from ..recipe import Recipe, linear_plan
from ..tensors import GroupedTensor, QuantizedTensor, quantize_members
from ..upstream.autograd import graph_task_id
from ..upstream.tensors import accumulation_hooks, is_default_device_set

INIT_STD = 0.023


ONE_BYTE = (
    "no layer computes with such parameters: call .to(torch.bfloat16), load their values again, and choose FP8 with "
    "recipe='current'"
)
"""What to do about parameters of eight bits."""


_TRACKER = "lambda: tracker, of a narrowcast.CudaRNGStatesTracker"


def random_numbers_of(
    tracker: Callable[[], Any] | None, name: str | None = None
) -> AbstractContextManager[Any]:
    """Return context in which a weight is initialized: ``fork`` of a tracker of random states, or none.

    Args:
        tracker: returns the object with ``fork``; None: PyTorch's own numbers.
        name: given to ``fork`` where not None.
    """
    if tracker is None:
        return contextlib.nullcontext()
    function("get_rng_state_tracker", tracker, _TRACKER)
    states = tracker()
    if not hasattr(states, "fork"):
        raise TypeError(f"get_rng_state_tracker returned {typed(states)}, without fork(); pass {_TRACKER}")
    return states.fork() if name is None else states.fork(name)


def parameter_device(device: torch.device | str | None) -> torch.device:
    """Return where a layer makes its parameters: as given, else the ambient default device, else the accelerator.

    Ambient is what ``with torch.device(...)`` or ``torch.set_default_device`` say, "cpu" included.

    Raises:
        TypeError, ValueError: as :func:`checked_device` does.
    """
    if device is not None:
        return checked_device(device)
    if is_default_device_set():
        return torch.get_default_device()
    return default_device()


def parameter_dtype(params_dtype: torch.dtype | None, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a layer's parameters, by either of its names.

    Raises:
        ValueError: both are given, and differ.
        TypeError: no floating-point dtype, or one of eight bits or fewer.
    """
    for label, given in (("params_dtype", params_dtype), ("dtype", dtype)):
        known = isinstance(given, torch.dtype) and given.is_floating_point and given.itemsize > 1
        if given is not None and not known:
            raise TypeError(
                f"{label} is {shown(given)}; use torch.bfloat16, torch.float16 or torch.float32, or "
                "torch.float64, which no recipe quantizes"
            )
    if params_dtype is not None and dtype is not None and params_dtype != dtype:
        raise ValueError(f"params_dtype is {params_dtype} and dtype is {dtype}; give one of them")
    return params_dtype or dtype or torch.get_default_dtype()


def checked_input(
    layer: nn.Module,
    inp: Tensor,
    label: str,
    weight: Tensor | None,
    features: int | None = None,
    quantized_as_it_is: bool = False,
) -> Tensor:
    """Return the input of a layer, cast where torch.autocast says so.

    Args:
        layer: for the messages.
        label: the name of what the last dim must be.
        weight: a parameter to compare with.
        features: what the last dim must be; None is that of a weight (out_features, in_features).
        quantized_as_it_is: torch.autocast does not cast a quantized input.
    Raises:
        ValueError: another last dim, or none; or no weight, or one that is no matrix.
        TypeError: no dense tensor, or another dtype than the weight's outside torch.autocast.
        RuntimeError: another device.
    """
    tensor("input", inp)
    if weight is None or (features is None and weight.dim() != 2):
        raise no_matrix(layer, "the weight", weight)
    shape, device = inp.shape, inp.device
    wanted = weight.shape[-1] if features is None else features
    if not shape or shape[-1] != wanted:
        raise ValueError(
            f"input has shape {shape_of(inp)}; its last dim must be {label}={wanted}, the weight of "
            f"{named_layer(layer)} is {shape_of(weight)}"
        )
    if device != weight.device:
        raise RuntimeError(
            f"input is on {inp.device}, the parameters are on {weight.device} in {named_layer(layer)}; {remedy(weight)}"
        )
    kind = device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        if quantized_as_it_is and isinstance(inp, QuantizedTensor):
            return inp
        if inp.dtype in HIGH_PRECISION:
            return inp.to(torch.get_autocast_dtype(kind))
    if inp.dtype != weight.dtype:
        raise TypeError(
            f"input is {inp.dtype}, the parameters are {weight.dtype} in {named_layer(layer)} of {shape_of(weight)}; "
            f"{_other_dtype(inp, weight)}"
        )
    return inp


def no_matrix(layer: nn.Module, label: str, weight: Tensor | None) -> ValueError:
    """Return the error of a weight that is no matrix; ``label``: its name."""
    found = "None" if weight is None else f"of shape {shape_of(weight)}"
    return ValueError(
        f"{label} of {named_layer(layer)} is {found}; assign an nn.Parameter (out_features, in_features)"
    )


def named_layer(layer: Any) -> str:
    """Return the name of a layer in quotes, or its class if it has none."""
    name = _name_of(layer)
    return shown(name) if name else type(layer).__name__


def layer_name(layer: Any) -> str:
    """Return the name of a layer, or its class if it has none."""
    return _name_of(layer) or type(layer).__name__


def _name_of(layer: Any) -> str:
    """Return a layer's name in the module that made or converted it, else the name that it was given."""
    return getattr(layer, "_module_name", "") or getattr(layer, "name", "")


def _other_dtype(inp: Tensor, weight: Tensor) -> str:
    """Return what to do about an input of another dtype than the parameters."""
    if weight.dtype.itemsize == 1:
        return ONE_BYTE
    if inp.dtype in HIGH_PRECISION:
        return "cast one of them or use torch.autocast"
    if inp.is_complex():
        return "a layer multiplies real numbers: pass x.real or x.abs(), or torch.view_as_real(x)"
    if inp.is_floating_point():
        return "cast the input, as torch.autocast does not"
    if inp.dtype == torch.bool:
        return (
            f"a layer multiplies numbers: cast it with x.to({weight.dtype}), which makes True 1 and False 0"
        )
    return "integers such as token ids go through an embedding first; cast numbers with .float()"


def check_hidden(layer: nn.Module, fc1: Tensor, fc2: Tensor | None, activation: str) -> None:
    """Check that a layer behind an activation takes what that makes of the layer before it.

    Args:
        layer: for the messages.
        fc1, fc2: their weights.
    Raises:
        ValueError: it does not.
    """
    if fc2 is None or fc2.dim() != 2:
        raise no_matrix(layer, "the weight of fc2", fc2)
    hidden = fc1.shape[0] // 2 if ACTIVATIONS[activation].gated else fc1.shape[0]
    if fc2.shape[-1] != hidden:
        raise ValueError(
            f"the weight of fc2 is {shape_of(fc2)}; its last dim must be {hidden}, the width of {activation} behind "
            f"a weight of fc1 of {shape_of(fc1)}"
        )


def casts(tensor: Tensor) -> bool:
    """Return whether torch.autocast is in force where a tensor lives."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def needs_recipe(option: str) -> RuntimeError:
    """Return the error of a layer that must quantize something without a recipe."""
    return RuntimeError(f"{option}=True needs a recipe; give the layer one or enter autocast(recipe=...)")


def remedy(weight: Tensor) -> str:
    """Return the remedy for input and parameters on different devices."""
    return "make them real with to_empty and reset_parameters" if weight.is_meta else "move one of them"


def main_grad_of(weight: Tensor, name: str, owner: str) -> tuple[Tensor, bool, str]:
    """Return main_grad, whether to overwrite it, and the placeholder for the gradient as ``LinearWgrad`` takes them.

    Raises:
        RuntimeError: the parameter has none.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            f"parameter {shown(name)} of {owner} needs a main_grad, where its gradient is to be accumulated; assign "
            "a fp32 tensor of its shape before the forward"
        )
    dummy = ""
    if hasattr(weight, "grad_added_to_main_grad"):
        dummy = "zeros" if getattr(weight, "zero_out_wgrad", False) else "empty"
    return main_grad, getattr(weight, "overwrite_main_grad", False), dummy


def _with_memory(weight: Any) -> Tensor:
    """Return what tells a weight from another by its memory, in graphs, too: there ``main_grad`` may be a copy."""
    if isinstance(weight, QuantizedTensor):
        return next(buffer for buffer in weight.get_data_tensors() if buffer is not None)
    return weight if type(weight) is nn.Parameter else weight.main_grad


_LAST = torch.full((), -1, dtype=torch.int64)


def begun_main_grads(weights: Sequence[Any], is_first_microbatch: bool | None) -> tuple[list[Any], Any]:
    """Return ``begins`` and ``recomputed_in`` of ``LinearWgrad`` for weights that have a ``main_grad``."""
    if not is_first_microbatch:
        return [], -1
    with_memory = [_with_memory(weight) for weight in weights]
    return with_memory, graph_task_id() if is_eager() else running_backward(_LAST)


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add to ``parameter.grad`` as a backward does."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def mark_added_to_main_grad(parameter: Tensor) -> None:
    """Mark that ``main_grad`` holds the gradient, if the parameter has the attribute for it."""
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def mark_after_accumulation(parameter: Tensor) -> None:
    """Run :func:`mark_added_to_main_grad` once in every backward."""
    if mark_added_to_main_grad not in accumulation_hooks(parameter):
        parameter.register_post_accumulate_grad_hook(mark_added_to_main_grad)


def accumulates_elsewhere(parameter: Tensor) -> bool:
    """Return whether a layer adds the parameter's gradient to its ``main_grad``, now or once it is assigned."""
    return hasattr(parameter, "main_grad") or mark_added_to_main_grad in accumulation_hooks(parameter)


def largest_magnitude(weight: Any, grouped: bool = False) -> Tensor:
    """Return max|w| of a weight, fp32 (1,); with ``grouped`` of every group of (G, N, K), (G,).

    For a sharded weight it is that of the whole, so that all ranks start from the same scales: every rank that holds a
    part must call this.
    """
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    rows = local.shape[0] if grouped else 1
    magnitudes = local.detach().abs().reshape(rows, -1) if local.numel() else local.new_zeros(rows, 1)
    largest = magnitudes.amax(1).float()
    if local is weight:
        return largest
    placed = torch.distributed.tensor  # type: ignore[attr-defined]  # there, as the weight is
    placements = [
        one if one.is_replicate() or (grouped and one.is_shard(0)) else placed.Partial("max")
        for one in weight.placements
    ]
    shape = (weight.shape[0] if grouped else 1,)
    of_rank = placed.DTensor.from_local(
        largest, weight.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=(1,)
    )
    return of_rank.full_tensor()


def weight_quantizer(recipe: Recipe, name: str, module_type: str) -> Quantizer:
    """Return what quantizes a weight to be stored.

    Raises:
        RuntimeError: the quantizer makes bare storages, which cannot be parameters.
    """
    quantizer = linear_plan(recipe, name, True, True, module_type=module_type).kept_weight.quantizer
    if quantizer.internal:
        raise RuntimeError(
            f"the weight quantizer of {name or 'a layer'} has internal=True: {shown(quantizer)} makes a bare "
            "storage, and a parameter must be a tensor; use quantizer.replace(internal=False) for weights"
        )
    return quantizer


def quantize_parameter(
    value: Tensor, quantizer: Quantizer, preserve: bool, requires_grad: bool = True
) -> nn.Parameter:
    """Return quantized parameter holding ``value`` (N, K), or (G, N, K) as one tensor of groups.

    Args:
        value: a matrix may be on the meta device.
        preserve: keep a CPU copy of ``value`` on the parameter.
    """
    quantized: Any
    if value.is_meta:
        quantized = quantizer.make_empty(tuple(value.shape), dtype=value.dtype, device=value.device)
    elif value.dim() == 3:
        quantized = GroupedTensor(quantize_members([value.detach()], quantizer))
    else:
        quantized = quantizer.quantize(value.detach())
    parameter: Any = nn.Parameter(quantized, requires_grad)
    if preserve and not value.is_meta:
        parameter._high_precision_init_val = value.detach().cpu()
    return parameter
