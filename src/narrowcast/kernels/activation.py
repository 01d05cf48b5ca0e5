"""Activations and their gradients as device functions, and as elementwise kernels.

Device functions take and give fp32, unrounded, of any shape; ``KIND`` is a name of ``ACTIVATIONS``. They do the
operations of ``reference.activation`` in its order, each rounded once, so results are equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _activations
from .._activations import ACTIVATIONS
from .._device import HIGH_PRECISION
from ..formats import cdiv
from .codecs import EMULATE, at_least, at_most, magnitude, product, reciprocal, round_to_dtype, to_float32
from .launch import TENSOR, Launch, Launcher, check_device, remembered

BLOCK = 1024
AMAX_BLOCK = 2048  # with the amax, where it divides a row: 16 elements of a thread
FLAT_BLOCK = 2048
AMAX_SLOTS = 256  # so many programs raise the amax at once without waiting for each other
_SLOTS = tl.constexpr(AMAX_SLOTS)
_FLT_MAX = tl.constexpr(3.4028234663852886e38)
_MAGIC = tl.constexpr(12583039.0)  # 1.5 * 2**23 + 127
_GELU_LINEAR = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.07135481627159508)  # the same * 0.044715
_GELU_CUBIC_SLOPE = tl.constexpr(0.21406444881478524)  # 3 times that
_QGELU = tl.constexpr(1.702)


@triton.jit
def _reciprocal(x):
    """Return ``codecs.reciprocal`` for 1 <= x <= 2**125, without the branch that other values need."""
    if EMULATE:
        return reciprocal(x)
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
def sigmoid(x):
    """Return ``1 / (1 + 2**t)`` with ``t = -x * log2(e)``."""
    t = x * -1.4426950408889634
    t = at_most(at_least(t, -125.0), 125.0)
    return _reciprocal(exp2(t) + 1.0)


@triton.jit
def exp2(t):
    """Return ``2**t`` of ``t`` in [-125, 125]: a polynomial, scaled by bits of a rounding sum."""
    shifted = t + _MAGIC
    f = t - (shifted - _MAGIC)
    p = product(f, 0.0013269521296024323) + 0.009671291336417198
    p = product(p, f) + 0.0555071085691452
    p = product(p, f) + 0.24022246897220612
    p = product(p, f) + 0.6931470036506653
    p = product(p, f) + 1.0
    # The low byte of the sum's bits is the biased exponent. A NaN stays one in the product, not in its bits.
    power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return product(p, power)


@triton.jit
def _gelu_argument(x, square):
    return x * (product(square, _GELU_CUBIC) + _GELU_LINEAR)


@triton.jit
def _relu(x):
    return tl.where(x <= 0.0, 0.0, x)  # unlike a maximum, of one mind about -0


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent and its derivative, from the sigmoid, and near 0 from a polynomial."""
    size = tl.abs(x)
    s = sigmoid(-(size + size))
    far = 1.0 - (s + s)
    square = x * x
    p = product(square, -0.006096714176237583) + 0.020997179672122
    p = product(p, square) + -0.05385090783238411
    p = product(p, square) + 0.1333276927471161
    p = product(p, square) + -0.333333283662796
    near = x + product(x, square * p)
    value = tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))
    return value, (s * (1.0 - s)) * 4.0


@triton.jit
def _bounded(x, beta):
    """Return ``beta * tanh(x / beta)`` and its derivative."""
    inverse = reciprocal(tl.where(x == x, beta, beta))  # in the layout of x, which Gluon asks of it
    value, slope = _tanh(x * inverse)
    return value * beta, slope


@triton.jit
def _situ(a, beta):
    """Return ``beta * tanh(a / beta) * sigmoid(a)`` and its derivative."""
    value, slope = _bounded(a, beta)
    s = sigmoid(a)
    return value * s, product(slope, s) + product(value, s * (1.0 - s))


@triton.jit
def activate(a, KIND: tl.constexpr):
    """Return the activation of ``a``; for a gated kind that of its gate."""
    if KIND == "gelu" or KIND == "geglu":
        return a * sigmoid(_gelu_argument(a, a * a))
    elif KIND == "qgelu" or KIND == "qgeglu":
        return a * sigmoid(a * _QGELU)
    elif KIND == "silu" or KIND == "swiglu":
        return a * sigmoid(a)
    elif KIND == "glu":
        return sigmoid(a)
    elif KIND == "relu" or KIND == "reglu":
        return _relu(a)
    else:
        tl.static_assert(KIND == "srelu" or KIND == "sreglu")
        return _relu(a) * _relu(a)


@triton.jit
def _with_slope(a, KIND: tl.constexpr):
    """Return ``activate`` and its derivative."""
    if KIND == "gelu" or KIND == "geglu":
        square = at_most(a * a, _FLT_MAX)
        s = sigmoid(_gelu_argument(a, square))
        argument_slope = product(square, _GELU_CUBIC_SLOPE) + _GELU_LINEAR
        return a * s, s + product(a * (s * (1.0 - s)), argument_slope)
    elif KIND == "qgelu" or KIND == "qgeglu":
        s = sigmoid(a * _QGELU)
        return a * s, s + product(a * (s * (1.0 - s)), _QGELU)
    elif KIND == "silu" or KIND == "swiglu":
        s = sigmoid(a)
        return a * s, s + product(a, s * (1.0 - s))
    elif KIND == "glu":
        s = sigmoid(a)
        return s, s * (1.0 - s)
    elif KIND == "relu" or KIND == "reglu":
        return _relu(a), tl.where(a <= 0.0, 0.0, 1.0)
    else:
        tl.static_assert(KIND == "srelu" or KIND == "sreglu")
        r = _relu(a)
        return r * r, r + r


@triton.jit
def _clamped(a, b, limit):
    return at_most(a, limit), at_most(at_least(b, -limit), limit)


@triton.jit
def activate_gated(a, b, KIND: tl.constexpr, P0, P1, P2):
    """Return the activation of the gate ``a`` times ``b``; the three numbers are those of ``numbers``."""
    if KIND == "clamped_swiglu":
        a, b = _clamped(a, b, P0)
        return (a * sigmoid(a * P1)) * (b + P2)
    elif KIND == "situ_glu":
        value, _ = _situ(a, P0)
        linear, _ = _bounded(b, P1)
        return value * linear
    else:
        return activate(a, KIND) * b


@triton.jit
def activate_backward(g, a, KIND: tl.constexpr):
    """Return gradient with respect to ``a`` of an activation that is not gated; ``g`` is that of its result."""
    _, slope = _with_slope(a, KIND)
    return g * slope


@triton.jit
def activate_gated_backward(g, a, b, KIND: tl.constexpr, P0, P1, P2):
    """Return gradients with respect to the gate ``a`` and to ``b``; ``g`` is that of ``activate_gated``."""
    if KIND == "clamped_swiglu":
        x, y = _clamped(a, b, P0)
        s = sigmoid(x * P1)
        da = (g * (y + P2)) * (s + product(x * (s * (1.0 - s)), P1))
        return tl.where(a > P0, 0.0, da), tl.where(tl.abs(b) > P0, 0.0, g * (x * s))
    elif KIND == "situ_glu":
        value, slope = _situ(a, P0)
        linear, linear_slope = _bounded(b, P1)
        return (g * linear) * slope, (g * value) * linear_slope
    else:
        value, slope = _with_slope(a, KIND)
        return (g * b) * slope, g * value


@triton.jit
def in_float32(P0, P1, P2):
    """Return the numbers of a kind; a launch passes floats in single precision, a compiled graph in double."""
    return tl.cast(P0, tl.float32), tl.cast(P1, tl.float32), tl.cast(P2, tl.float32)


@triton.jit
def _raise_amax(amax_ptr, magnitudes, inside):
    """Raise one of ``AMAX_SLOTS`` to the largest magnitude; NaN counts for nothing."""
    slot = amax_ptr + tl.program_id(0) % _SLOTS
    known = tl.load(slot)  # mostly larger already, and then there is nothing to wait for
    largest = tl.maximum(tl.max(tl.where(inside, magnitudes, 0.0), axis=0), 0.0)
    # non-negative floats order like their bits, and nothing is published by it
    bits = largest.to(tl.int32, bitcast=True)
    tl.atomic_max(slot.to(tl.pointer_type(tl.int32)), bits, mask=largest > known, sem="relaxed")


@triton.jit
def _activation_forward_kernel(
    x_ptr,
    scale_ptr,
    y_ptr,
    amax_ptr,
    F,
    chunks,
    P0,
    P1,
    P2,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    P0, P1, P2 = in_float32(P0, P1, P2)
    row = tl.program_id(0) // chunks
    start = (tl.program_id(0) - row * chunks).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    inside = index < tl.minimum(F - start, BLOCK).to(tl.int32)
    output = row.to(tl.int64) * F + start
    if SCALED:
        scale = tl.load(scale_ptr + row + tl.arange(0, 1))
        if EMULATE:
            scale = to_float32(scale)
        else:  # which takes elements in pairs
            scale = scale.to(tl.float32)
    if GATED:
        gate = x_ptr + row.to(tl.int64) * F * 2 + start
        a = to_float32(tl.load(gate + index, mask=inside, other=0.0))
        b = to_float32(tl.load(gate + F + index, mask=inside, other=0.0))
        y = activate_gated(a, b, KIND, P0, P1, P2)
    else:
        a = to_float32(tl.load(x_ptr + output + index, mask=inside, other=0.0))
        y = activate(a, KIND)
    if SCALED:
        y = y * scale
    y = round_to_dtype(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr + output + index, y, mask=inside)
    if AMAX:
        _raise_amax(amax_ptr, magnitude(y), inside)


@triton.jit
def _activation_backward_kernel(
    x_ptr,
    grad_ptr,
    dx_ptr,
    amax_ptr,
    F,
    chunks,
    P0,
    P1,
    P2,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    STORE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    P0, P1, P2 = in_float32(P0, P1, P2)
    row = tl.program_id(0) // chunks
    start = (tl.program_id(0) - row * chunks).to(tl.int64) * BLOCK
    index = tl.arange(0, BLOCK)
    inside = index < tl.minimum(F - start, BLOCK).to(tl.int32)
    output = row.to(tl.int64) * F + start
    g = to_float32(tl.load(grad_ptr + output + index, mask=inside, other=0.0))
    if GATED:
        gate = row.to(tl.int64) * F * 2 + start
        a = to_float32(tl.load(x_ptr + gate + index, mask=inside, other=0.0))
        b = to_float32(tl.load(x_ptr + gate + F + index, mask=inside, other=0.0))
        da, db = activate_gated_backward(g, a, b, KIND, P0, P1, P2)
        da, db = round_to_dtype(da, DTYPE), round_to_dtype(db, DTYPE)
        if STORE:
            tl.store(dx_ptr + gate + index, da, mask=inside)
            tl.store(dx_ptr + gate + F + index, db, mask=inside)
        if AMAX:
            larger = tl.maximum(magnitude(da), magnitude(db))
            _raise_amax(amax_ptr, larger, inside)
    else:
        a = to_float32(tl.load(x_ptr + output + index, mask=inside, other=0.0))
        da = round_to_dtype(activate_backward(g, a, KIND), DTYPE)
        if STORE:
            tl.store(dx_ptr + output + index, da, mask=inside)
        if AMAX:
            _raise_amax(amax_ptr, magnitude(da), inside)


_forward = Launcher(_activation_forward_kernel, num_warps=4)
_backward = Launcher(_activation_backward_kernel, num_warps=4)


def checked(x: Tensor, activation: str, params: Mapping[str, float]) -> _activations.Activation:
    """Return the activation of that name, where it can be applied to ``x``.

    Raises:
        ValueError: an unknown name or parameter, an input the kernels cannot read, or an odd last dim of a gated one.
    """
    found = _activations.checked(activation, x.shape, params)
    _check_readable(x, activation)
    return found


def _check_readable(x: Tensor, what: str) -> None:
    check_device(x)
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{what} takes torch.bfloat16, torch.float16 or torch.float32, got {x.dtype}; cast the input first"
        )


def check_gradient(grad: Tensor, x: Tensor, activation: str) -> None:
    """Check the gradient of an activation of ``x``, which ``checked`` let pass.

    Raises:
        ValueError: another shape than that of the result, or a gradient the kernels cannot read.
    """
    _check_readable(grad, f"the gradient of {activation}")
    expected = (*x.shape[:-1], x.shape[-1] // 2) if ACTIVATIONS[activation].gated else tuple(x.shape)
    if tuple(grad.shape) != expected:
        raise ValueError(f"the gradient of {activation} has shape {tuple(grad.shape)}, expected {expected}")


def numbers(activation: str, params: Mapping[str, float]) -> tuple[float, float, float]:
    """Return the numbers of an activation as the kernels take them: in their order, given or default, then unused
    zeros.
    """
    if not ACTIVATIONS[activation].params:
        return 0.0, 0.0, 0.0
    merged = {**ACTIVATIONS[activation].params, **params}
    first, second, third, *_ = (
        *(float(merged[name]) for name in ACTIVATIONS[activation].params),
        0.0,
        0.0,
        0.0,
    )
    return first, second, third


@remembered
def _launch(
    shape: tuple[int, ...],
    activation: str,
    parameters: tuple[float, float, float],
    gradient: bool,
    stores: bool,
    amax: bool,
    scaled: bool = False,
) -> Launch:
    """Return the launch for an input of that shape: its rows, in chunks."""
    gated, elements = ACTIVATIONS[activation].gated, math.prod(shape)
    # Without halves and scales the rows do not matter: all is one long row.
    by_row = gated or scaled
    width = shape[-1] if by_row else elements
    F = width // 2 if gated else width
    at_most = AMAX_BLOCK if amax and F % AMAX_BLOCK == 0 else BLOCK
    block = min(at_most, max(1 << (F - 1).bit_length(), 64)) if by_row else FLAT_BLOCK
    chunks = cdiv(F, block)
    if gradient:
        launcher, tensors, options = _backward, [TENSOR] * 4, (stores, amax)
    else:
        launcher, options = _forward, (scaled, amax)
        tensors = [TENSOR, TENSOR if scaled else None, TENSOR, TENSOR]
    return Launch(
        launcher,
        (elements // width * chunks, 1, 1),
        [*tensors, F, chunks, *parameters],
        (activation, gated, *options, block),
    )


def amax_slots(x: Tensor) -> Tensor:
    """Return where ``forward`` and ``backward`` collect maxima, fp32: zeros on the device of ``x``."""
    return torch.zeros(AMAX_SLOTS, dtype=torch.float32, device=x.device)


def forward(
    x: Tensor, activation: str, amax: Tensor | None = None, scale: Tensor | None = None, **params: float
) -> Tensor:
    """Compute ``reference.activation.forward``; ``x`` of any strides.

    Args:
        amax: from ``amax_slots``; the largest of them is raised to the largest magnitude of the result.
        scale: one number for each row of the result, contiguous, which is multiplied by it before it is rounded.
    """
    kind = checked(x, activation, params)
    x = x.contiguous()
    width = x.shape[-1] // 2 if kind.gated else x.shape[-1]
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if x.numel():
        launch = _launch(
            x, tuple(x.shape), activation, numbers(activation, params), False, True, amax is not None, scale is not None
        )  # fmt: skip
        launch([x, *(() if scale is None else (scale,)), y, x if amax is None else amax])
    return y


def backward(grad: Tensor, x: Tensor, activation: str, amax: Tensor | None = None, **params: float) -> Tensor:
    """Compute ``reference.activation.backward``; the gradient of any strides.

    Args:
        amax: as ``forward`` takes it.
    """
    checked(x, activation, params)
    check_gradient(grad, x, activation)
    x, grad = x.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        launch = _launch(
            x, tuple(x.shape), activation, numbers(activation, params), True, True, amax is not None
        )
        launch([x, grad, dx, x if amax is None else amax])
    return dx


def backward_amax(grad: Tensor, x: Tensor, activation: str, parameters: tuple[float, float, float]) -> Tensor:
    """Return slots of ``amax_slots`` raised to what ``backward`` would raise them to; the gradient itself is not
    written.

    Args:
        grad, x: contiguous.
        parameters: as ``numbers`` gives them.
    """
    slots = amax_slots(x)
    if x.numel():
        _launch(x, tuple(x.shape), activation, parameters, True, False, True)([x, grad, x, slots])
    return slots
