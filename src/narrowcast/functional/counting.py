"""Sizes of a GEMM operator's call, for FLOP counters and receipts."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import ELEMENT_FORMATS, DType
from ..upstream import opaque
from ..upstream.tensors import schema_of
from . import decode_attention as _decode_attention  # noqa: F401  # defines operators that are looked up here
from . import few_rows as _few_rows  # noqa: F401
from . import gemm as _gemm  # noqa: F401
from . import grouped_gemm as _grouped_gemm  # noqa: F401
from .gemm import gemm_directions
from .quantizer_value import quantizer_of_text

_FLOP_COUNTER = "torch.utils.flop_counter"


class GemmCall(NamedTuple):
    """A call of a GEMM on quantized operands. ``kind``: "fprop", "dgrad" or "wgrad"."""

    kind: str
    left: Sequence[Tensor]
    left_quantizer: Any
    right: Sequence[Tensor]
    right_quantizer: Any
    emulate: bool


def gemm_call(func: Any, args: Sequence[Any]) -> GemmCall | None:
    """Return the GEMM that a dispatched call computes; None for a call that does not multiply quantized operands."""
    named = dict(zip((argument.name for argument in schema_of(func).arguments), args))
    if "left_quantizer" not in named:
        return None
    if isinstance(named["left"], Tensor):  # of a few rows, native on every GPU that has the formats
        named |= {"kind": "fprop", "left": [named["left"]], "emulate": False}
    # the batch-invariant GEMM has no native form
    return GemmCall(**{name: named.get(name, True) for name in GemmCall._fields})


def half_of(quantizer: Any, columnwise: bool) -> Any:
    """Return the quantizer of one direction; None for a tensor in high precision."""
    if isinstance(quantizer, str):  # in a graph that was exported
        quantizer = quantizer_of_text(quantizer)
    return None if quantizer is None else quantizer._half(columnwise)


def element_of(quantizer: Any, columnwise: bool) -> DType | None:
    """Return the element format of one direction's codes; None for a tensor in high precision."""
    dtype = getattr(half_of(quantizer, columnwise), "dtype", None)
    return None if dtype is None else DType(dtype)


# -- formulas of FlopCounterMode: they take what the operator takes, and its result as out_val ------------------------


def _gemm_flops(
    kind: str, left: list[Tensor], left_quantizer: Any, *others: Any, out_val: Any = None, **_: Any
) -> int:
    rows, columns = others[4:6]
    return 2 * rows * columns * _contraction(kind, left[0], left_quantizer, rows)


def _few_rows_flops(left: Tensor, *others: Any, **_: Any) -> int:
    return 2 * math.prod(left.shape) * others[5]  # type: ignore[no-any-return]


def _accumulate_flops(
    kind: str, out: Tensor, left: list[Tensor], left_quantizer: Any, *_: Any, **__: Any
) -> int:
    rows, columns = out.shape
    return 2 * rows * columns * _contraction(kind, left[0], left_quantizer, rows)


def _contraction(kind: str, data: Tensor, quantizer: Any, rows: int) -> int:
    """Return the length of the contraction, from the bits of the left operand; with what pads it to whole blocks."""
    columnwise = gemm_directions(kind)[0]
    element = element_of(quantizer, columnwise)
    bits = 8 * data.element_size() if element is None else ELEMENT_FORMATS[element].bits
    return data.numel() * data.element_size() * 8 // (bits * rows) if rows else 0


def _grouped_flops(kind: str, *arguments: Any, **_: Any) -> int:
    rows, out_features, in_features = arguments[11:14]
    return 2 * rows * out_features * in_features


def _grouped_mm_flops(kind: str, left: Tensor, right: list[Tensor], *_: Any, **__: Any) -> int:
    other = right[0].shape[-2] if kind == "fprop" else right[0].shape[-1]
    return 2 * math.prod(left.shape) * other


def _decode_attention_flops(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return 2 * q.shape[0] * q.shape[1] * k.shape[1] * (k.shape[3] + v.shape[3])


_FORMULAS: dict[str, Callable[..., int]] = {
    "decode_attention": _decode_attention_flops,
    "gemm": _gemm_flops,
    "gemm_accumulate_": _accumulate_flops,
    "gemm_batch_invariant": _gemm_flops,
    "gemm_few_rows": _few_rows_flops,
    "grouped_gemm": _grouped_flops,
    "grouped_gemm_batch_invariant": _grouped_flops,
    "grouped_mm": _grouped_mm_flops,
    "grouped_mm_batch_invariant": functools.partial(_grouped_mm_flops, "fprop"),
}


def _register_formulas() -> None:
    counter = sys.modules[_FLOP_COUNTER]
    for name, formula in _FORMULAS.items():
        packet = getattr(torch.ops.narrowcast, name)
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet, get_raw=True)(formula)


class _WhenLoaded(importlib.abc.MetaPathFinder):
    """Registers the formulas when torch's FLOP counter is imported: importing it here would import triton, too.

    The compiler imports it under a memory budget, where no user can register. A counter copies what is registered when
    it is made, so the first call of an operator would be too late.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _FLOP_COUNTER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_register(module: Any) -> None:
            load(module)
            _register_formulas()

        spec.loader.exec_module = load_and_register
        return spec


if opaque.AVAILABLE:
    if _FLOP_COUNTER in sys.modules:
        _register_formulas()
    else:
        sys.meta_path.insert(0, _WhenLoaded())
