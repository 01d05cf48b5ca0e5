"""Activations and their gradients as device functions, and as elementwise kernels.

Device functions take and give fp32, unrounded, of any shape; ``KIND`` is a name of ``KINDS``. They do the operations of
``reference.activation`` in its order, each rounded once, so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from .codecs import reciprocal, round_to_dtype, to_float32
from .launch import INTERPRETING, Launcher, check_device, dim_class, is_aligned

BLOCK = 1024
FLAT_BLOCK = 2048
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_MAGIC = tl.constexpr(12583039.0)  # 1.5 * 2**23 + 127
_GELU_LINEAR = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.07135481627159508)  # the same * 0.044715
_GELU_CUBIC_SLOPE = tl.constexpr(0.21406444881478524)  # 3 times that
_QGELU = tl.constexpr(1.702)


@triton.jit
def _reciprocal(x, EMULATE: tl.constexpr):
    """``codecs.reciprocal`` for 1 <= x <= 2**125, without the branch that other values need."""
    if EMULATE:
        return reciprocal(x, EMULATE)
    else:
        return tl.inline_asm_elementwise(
            """{
                .reg .f32 estimate, error;
                rcp.approx.ftz.f32 estimate, $1;
                fma.rn.f32 error, $1, estimate, 0fBF800000;
                neg.f32 error, error;
                fma.rn.f32 $0, estimate, error, estimate;
            }""",
            "=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def sigmoid(x, EMULATE: tl.constexpr):
    """``1 / (1 + 2**t)`` with ``t = -x * log2(e)``; 2**t from a polynomial, scaled by bits of a rounding sum."""
    t = x * -1.4426950408889634
    t = tl.maximum(t, -125.0, propagate_nan=tl.PropagateNan.ALL)
    t = tl.minimum(t, 125.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = t + _MAGIC
    f = t - (shifted - _MAGIC)
    p = f * 0.0013269521296024323 + 0.009671291336417198
    p = p * f + 0.0555071085691452
    p = p * f + 0.24022246897220612
    p = p * f + 0.6931470036506653
    p = p * f + 1.0
    # The low byte of the sum's bits is the biased exponent. A NaN stays one in the product, not in its bits.
    power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return _reciprocal(p * power + 1.0, EMULATE)


@triton.jit
def _gelu_argument(x, square):
    return x * (square * _GELU_CUBIC + _GELU_LINEAR)


@triton.jit
def _relu(x):
    return tl.where(x <= 0.0, 0.0, x)  # unlike a maximum, of one mind about -0


@triton.jit
def activate(a, KIND: tl.constexpr, EMULATE: tl.constexpr):
    """The activation of ``a``; for a gated kind that of its gate."""
    if KIND == "gelu" or KIND == "geglu":
        return a * sigmoid(_gelu_argument(a, a * a), EMULATE)
    elif KIND == "qgelu" or KIND == "qgeglu":
        return a * sigmoid(a * _QGELU, EMULATE)
    elif KIND == "silu" or KIND == "swiglu":
        return a * sigmoid(a, EMULATE)
    elif KIND == "glu":
        return sigmoid(a, EMULATE)
    elif KIND == "relu" or KIND == "reglu":
        return _relu(a)
    else:
        tl.static_assert(KIND == "srelu" or KIND == "sreglu")
        return _relu(a) * _relu(a)


@triton.jit
def _with_slope(a, KIND: tl.constexpr, EMULATE: tl.constexpr):
    """``activate`` and its derivative."""
    if KIND == "gelu" or KIND == "geglu":
        square = tl.minimum(a * a, _FLT_MAX, propagate_nan=tl.PropagateNan.ALL)
        s = sigmoid(_gelu_argument(a, square), EMULATE)
        return a * s, s + (a * (s * (1.0 - s))) * (square * _GELU_CUBIC_SLOPE + _GELU_LINEAR)
    elif KIND == "qgelu" or KIND == "qgeglu":
        s = sigmoid(a * _QGELU, EMULATE)
        return a * s, s + (a * (s * (1.0 - s))) * _QGELU
    elif KIND == "silu" or KIND == "swiglu":
        s = sigmoid(a, EMULATE)
        return a * s, s + a * (s * (1.0 - s))
    elif KIND == "glu":
        s = sigmoid(a, EMULATE)
        return s, s * (1.0 - s)
    elif KIND == "relu" or KIND == "reglu":
        return _relu(a), tl.where(a <= 0.0, 0.0, 1.0)
    else:
        tl.static_assert(KIND == "srelu" or KIND == "sreglu")
        r = _relu(a)
        return r * r, r + r


@triton.jit
def _clamped(a, b, limit):
    a = tl.minimum(a, limit, propagate_nan=tl.PropagateNan.ALL)
    b = tl.maximum(b, -limit, propagate_nan=tl.PropagateNan.ALL)
    return a, tl.minimum(b, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activate_gated(a, b, KIND: tl.constexpr, limit, alpha, offset, EMULATE: tl.constexpr):
    """The activation of the gate ``a`` times ``b``; only "clamped_swiglu" reads the three numbers."""
    if KIND == "clamped_swiglu":
        a, b = _clamped(a, b, limit)
        return (a * sigmoid(a * alpha, EMULATE)) * (b + offset)
    else:
        return activate(a, KIND, EMULATE) * b


@triton.jit
def activate_backward(g, a, KIND: tl.constexpr, EMULATE: tl.constexpr):
    """Gradient with respect to ``a`` of an activation that is not gated; ``g`` is that of its result."""
    _, slope = _with_slope(a, KIND, EMULATE)
    return g * slope


@triton.jit
def activate_gated_backward(g, a, b, KIND: tl.constexpr, limit, alpha, offset, EMULATE: tl.constexpr):
    """Gradients with respect to the gate ``a`` and to ``b``; ``g`` is that of ``activate_gated``."""
    if KIND == "clamped_swiglu":
        x, y = _clamped(a, b, limit)
        s = sigmoid(x * alpha, EMULATE)
        da = (g * (y + offset)) * (s + (x * (s * (1.0 - s))) * alpha)
        return tl.where(a > limit, 0.0, da), tl.where(tl.abs(b) > limit, 0.0, g * (x * s))
    else:
        value, slope = _with_slope(a, KIND, EMULATE)
        return (g * b) * slope, g * value


@triton.jit
def _forward_kernel(
    x_ptr,
    y_ptr,
    F,
    chunks,
    limit,
    alpha,
    offset,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
):
    row = tl.program_id(0) // chunks
    start = (tl.program_id(0) - row * chunks).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    inside = index < tl.minimum(F - start, BLOCK).to(tl.int32)
    output = row.to(tl.int64) * F + start
    if GATED:
        gate = x_ptr + row.to(tl.int64) * F * 2 + start
        a = to_float32(tl.load(gate + index, mask=inside, other=0.0), EMULATE)
        b = to_float32(tl.load(gate + F + index, mask=inside, other=0.0), EMULATE)
        y = activate_gated(a, b, KIND, limit, alpha, offset, EMULATE)
    else:
        y = activate(
            to_float32(tl.load(x_ptr + output + index, mask=inside, other=0.0), EMULATE), KIND, EMULATE
        )
    tl.store(y_ptr + output + index, round_to_dtype(y, y_ptr.dtype.element_ty, EMULATE), mask=inside)


@triton.jit
def _backward_kernel(
    x_ptr,
    grad_ptr,
    dx_ptr,
    F,
    chunks,
    limit,
    alpha,
    offset,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
):
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    row = tl.program_id(0) // chunks
    start = (tl.program_id(0) - row * chunks).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    inside = index < tl.minimum(F - start, BLOCK).to(tl.int32)
    output = row.to(tl.int64) * F + start
    g = to_float32(tl.load(grad_ptr + output + index, mask=inside, other=0.0), EMULATE)
    if GATED:
        gate = row.to(tl.int64) * F * 2 + start
        a = to_float32(tl.load(x_ptr + gate + index, mask=inside, other=0.0), EMULATE)
        b = to_float32(tl.load(x_ptr + gate + F + index, mask=inside, other=0.0), EMULATE)
        da, db = activate_gated_backward(g, a, b, KIND, limit, alpha, offset, EMULATE)
        tl.store(dx_ptr + gate + index, round_to_dtype(da, DTYPE, EMULATE), mask=inside)
        tl.store(dx_ptr + gate + F + index, round_to_dtype(db, DTYPE, EMULATE), mask=inside)
    else:
        a = to_float32(tl.load(x_ptr + output + index, mask=inside, other=0.0), EMULATE)
        da = activate_backward(g, a, KIND, EMULATE)
        tl.store(dx_ptr + output + index, round_to_dtype(da, DTYPE, EMULATE), mask=inside)


_forward = Launcher(_forward_kernel, num_warps=4)
_backward = Launcher(_backward_kernel, num_warps=4)


@dataclass(frozen=True, slots=True)
class Kind:
    """Whether an activation takes two halves, and the numbers it reads with their defaults."""

    gated: bool
    numbers: Mapping[str, float]


KINDS: dict[str, Kind] = {
    **{name: Kind(False, {}) for name in ("gelu", "qgelu", "relu", "srelu", "silu")},
    **{name: Kind(True, {}) for name in ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu")},
    "clamped_swiglu": Kind(True, {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}),
}


def checked(x: Tensor, activation: str, params: Mapping[str, float]) -> Kind:
    """The kind of that name, where it can be applied to ``x``.

    Raises:
        ValueError: an unknown name or parameter, an input the kernels cannot read, or an odd last dim of a gated one.
    """
    if activation not in KINDS:
        raise ValueError(f"unknown activation {activation!r}; use one of {', '.join(KINDS)}")
    kind = KINDS[activation]
    unknown = sorted(params.keys() - kind.numbers.keys())
    if unknown:
        raise ValueError(
            f"{activation} has no parameter {unknown[0]!r}; it takes {', '.join(kind.numbers) or 'none'}"
        )
    _check_readable(x, activation)
    if x.dim() == 0 or (kind.gated and x.shape[-1] % 2):
        raise ValueError(
            f"{activation} needs {'an even' if kind.gated else 'a'} last dim, got shape {tuple(x.shape)}"
        )
    return kind


def _check_readable(x: Tensor, what: str) -> None:
    check_device(x)
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"{what} takes torch.bfloat16, torch.float16 or torch.float32, got {x.dtype}; cast it first"
        )


def numbers(activation: str, params: Mapping[str, float]) -> tuple[float, float, float]:
    """``limit``, ``alpha`` and ``glu_linear_offset`` as the kernels take them: given, the default, or unused zeros."""
    merged = {"limit": 0.0, "alpha": 0.0, "glu_linear_offset": 0.0, **KINDS[activation].numbers, **params}
    return float(merged["limit"]), float(merged["alpha"]), float(merged["glu_linear_offset"])


def _launch(
    launcher: Launcher, tensors: tuple[Tensor, ...], activation: str, gated: bool, given: tuple
) -> None:
    x = tensors[0]
    if x.numel() == 0:
        return
    # Without halves the rows do not matter: all is one long row.
    F = x.shape[-1] // 2 if gated else x.numel()
    rows = x.numel() // (2 * F) if gated else 1
    block = min(BLOCK, max(triton.next_power_of_2(F), 64)) if gated else FLAT_BLOCK
    chunks = cdiv(F, block)
    launcher(
        (rows * chunks, 1, 1),
        (*tensors, F, chunks, *given),
        (activation, gated, block, INTERPRETING),
        (*((t.dtype, is_aligned(t)) for t in tensors), dim_class(F), dim_class(chunks)),
    )


def forward(x: Tensor, activation: str, **params: float) -> Tensor:
    """Apply an activation.

    Args:
        x: (*lead, F), or (*lead, 2F) for a gated one whose gate is the first half; bf16, fp16 or fp32, any strides.
        activation: a name of ``KINDS``.
        params: ``limit``, ``alpha`` and ``glu_linear_offset`` of "clamped_swiglu".

    Returns:
        (*lead, F) in the dtype of ``x``.

    Raises:
        ValueError: as ``checked``.

    Numerics:
        Equal to ``reference.activation.forward``.
    """
    kind = checked(x, activation, params)
    x = x.contiguous()
    width = x.shape[-1] // 2 if kind.gated else x.shape[-1]
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    _launch(_forward, (x, y), activation, kind.gated, numbers(activation, params))
    return y


def backward(grad: Tensor, x: Tensor, activation: str, **params: float) -> Tensor:
    """Gradient of ``forward`` with respect to ``x``.

    Args:
        grad: gradient of the result, of its shape; bf16, fp16 or fp32, any strides.
        x, activation, params: as given to ``forward``.

    Returns:
        Shape and dtype of ``x``; a gated activation has the gate's gradient in the first half.

    Raises:
        ValueError: as ``checked``, or a gradient of another shape or unreadable.

    Numerics:
        Equal to ``reference.activation.backward``.
    """
    kind = checked(x, activation, params)
    _check_readable(grad, f"the gradient of {activation}")
    expected = (*x.shape[:-1], x.shape[-1] // 2) if kind.gated else tuple(x.shape)
    if tuple(grad.shape) != expected:
        raise ValueError(f"the gradient of {activation} has shape {tuple(grad.shape)}, expected {expected}")
    x, grad = x.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    _launch(_backward, (x, grad, dx), activation, kind.gated, numbers(activation, params))
    return dx
