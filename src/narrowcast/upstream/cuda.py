"""PyTorch's short ways to the current device and stream, to memory and to the library's scaled GEMMs.

Each has a public counterpart with the same result that takes the host more time, which is what is used on a release
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .private import entry, private

_WITHOUT = "the public {} is called, which takes the host longer"
_BUILT = torch.backends.cuda.is_built()


def _cpu_device() -> int:
    return -1


current_device: Callable[[], int] = (
    private(
        "torch._C._cuda_getDevice",
        follows="torch/csrc/cuda/Module.cpp",
        without=_WITHOUT.format("torch.cuda.current_device"),
        fallback=torch.cuda.current_device,
    )
    if _BUILT
    else _cpu_device
)
"""Return the index of the current CUDA device; -1 in a build of PyTorch for CPUs."""


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_stream: Callable[[int], int] = (
    private(
        "torch._C._cuda_getCurrentRawStream",
        follows="torch/csrc/cuda/Module.cpp; torch/_inductor/runtime/triton_heuristics.py",
        without=_WITHOUT.format("torch.cuda.current_stream"),
        fallback=_stream_of,
    )
    if _BUILT
    else _stream_of
)
"""Return the address of the current stream of the device with that index."""


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = (
    private(
        "torch._C._dynamo.guards._empty_strided_cuda",
        follows="torch/csrc/dynamo/guards.cpp; torch/_inductor/codegen/wrapper.py",
        without=_WITHOUT.format("torch.empty_strided"),
        fallback=_empty_strided,
    )
    if _BUILT
    else _empty_strided
)
"""Return an uninitialized tensor of a shape, strides and a dtype on the current CUDA device."""


def _as_strided(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], ahead: int) -> Tensor:
    return x.as_strided(shape, strides, x.storage_offset() + ahead)


part_of: Callable[[Tensor, tuple[int, ...], tuple[int, ...], int], Tensor] = private(
    "torch._C._dynamo.guards._reinterpret_tensor",
    follows="torch/csrc/dynamo/guards.cpp; torch/_inductor/codegen/wrapper.py",
    without=_WITHOUT.format("Tensor.as_strided"),
    fallback=_as_strided,
)
"""Return the part of a tensor with a shape and strides that begins so many elements after the tensor does."""


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    recipe = F.ScalingType.RowWise if scale_a.dim() == 2 else F.ScalingType.TensorWise
    return F.scaled_mm(
        a,
        b,
        scale_a,
        recipe,
        scale_b,
        recipe,
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )


scaled_mm: Callable[..., Tensor] = private(
    "torch._scaled_mm",
    follows="aten/src/ATen/native/native_functions.yaml; torch/nn/functional.py scaled_mm",
    without=_WITHOUT.format("torch.nn.functional.scaled_mm"),
    fallback=_scaled_mm,
)
"""Multiply FP8 codes with one scale each, or with a scale per row, (M, 1) and (1, N); ``bias``, ``out_dtype`` and
``use_fast_accum`` go by keyword.
"""


def _scaled_mm_by_recipe(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    recipes = [[F.ScalingType(value) for value in recipe] for recipe in (recipe_a, recipe_b)]
    swizzles = [[F.SwizzleType(value) for value in swizzle] for swizzle in (swizzle_a, swizzle_b)]
    return F.scaled_mm(
        a, b, scale_a, recipes[0], scale_b, recipes[1], *swizzles, bias=bias, output_dtype=dtype
    )


scaled_mm_by_recipe: Callable[..., Tensor] = private(
    "torch._scaled_mm_v2",
    follows="aten/src/ATen/native/native_functions.yaml; torch/nn/functional.py scaled_mm",
    without=_WITHOUT.format("torch.nn.functional.scaled_mm"),
    fallback=_scaled_mm_by_recipe,
)
"""Multiply codes with scales of blocks; recipes and swizzles are numbers of ``torch.nn.functional.ScalingType`` and
``SwizzleType``, one per scale of the operand.
"""

entry(
    "torch._ops.OpOverload._op",
    follows="torch/_ops.py",
    without="the operator's object is called, which takes the host longer",
    falls_back=True,
)


def binding_of(operator: Any) -> Callable[..., Any]:
    """Return a callable of an operator that takes less CPU time than its object."""
    known = _bindings.get(operator)
    return getattr(operator, "_op", operator) if known is None else known


def _operators() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    bindings: dict[Any, Callable[..., Any]] = {
        aten.view.dtype: Tensor.view,
        aten.view.default: Tensor.view,
        aten.t.default: Tensor.t,
    }
    for name in ("_scaled_mm", "_scaled_mm_v2"):
        operator, function = getattr(aten, name, None), getattr(torch, name, None)
        if operator is not None and function is not None:
            bindings[operator.default] = function
    return bindings


_bindings = _operators()
