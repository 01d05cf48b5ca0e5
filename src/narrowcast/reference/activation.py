"""Activations and their gradients, from operations that IEEE 754 fixes to the last bit.

Exponentials of libraries differ between devices, so the sigmoid has its own: additions, multiplications, minima, bit
moves and one division in fp32, each rounded once, in the order written. Every activation is built on it. A gated
activation splits the last dimension: the first half is the gate, to which the function applies, the second multiplies.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .._activations import ACTIVATIONS, Activation, checked
from .._device import HIGH_PRECISION
from ..formats import FLT_MAX
from .reduction import round_to_dtype

LOG2_E = 1.4426950408889634
_MAGIC = 1.5 * 2**23 + 127
_EXP2 = (
    0.0013269521296024323,
    0.009671291336417198,
    0.0555071085691452,
    0.24022246897220612,
    0.6931470036506653,
    1.0,
)
_GELU_LINEAR = 1.5957691216057308  # 2 * sqrt(2 / pi)
_GELU_CUBIC = 0.07135481627159508  # the same * 0.044715
_GELU_CUBIC_SLOPE = 0.21406444881478524  # 3 times that
_QGELU = 1.702
_TANH_SWITCH = 0.625
_TANH = (
    -0.006096714176237583,
    0.020997179672122,
    -0.05385090783238411,
    0.1333276927471161,
    -0.333333283662796,
)

Function = Callable[[Tensor], tuple[Tensor, Tensor]]


def sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function.

    Args:
        x: fp32, any shape.

    Numerics:
        ``1 / (1 + 2**t)`` with ``t = clamp(x * -log2(e), -125, 125)``. The sum ``t + (1.5 * 2**23 + 127)`` rounds ``t``
        to an integer ``n`` and holds the bits of ``2**n``; ``2**(t - n)`` is a polynomial of degree 5 in Horner form,
        within 1e-7. The relative error is below ``(0.7 * |x| + 3) * 2**-23`` down to 2**-125, where the result stays;
        NaN gives NaN.
    """
    denominator = exp2((x * -LOG2_E).clamp(-125.0, 125.0)) + 1.0
    return torch.ones_like(denominator) / denominator


def exp2(t: Tensor) -> Tensor:
    """Return ``2**t``, as :func:`sigmoid` computes it.

    Args:
        t: fp32 in [-125, 125], any shape.
    """
    shifted = t + _MAGIC
    f = t - (shifted - _MAGIC)
    p = torch.full_like(f, _EXP2[0])
    for coefficient in _EXP2[1:]:
        p = p * f + coefficient
    return p * (shifted.view(torch.int32) << 23).view(torch.float32)


def tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hyperbolic tangent and its derivative.

    Args:
        x: fp32, any shape.

    Numerics:
        With ``s = sigmoid(-2 * |x|)`` the derivative is ``4 * (s * (1 - s))`` and the value ``1 - 2 * s``, with the
        sign of ``x``. Near 0 that would cancel, so below 0.625 the value is ``x + x * (x**2 * p(x**2))``, ``p`` a
        polynomial of degree 4 in Horner form. The relative error of the value is below ``2.5 * 2**-23``, that of the
        derivative below ``(1.4 * |x| + 6) * 2**-23`` down to 2**-123, where it stays; NaN gives NaN.
    """
    size = x.abs()
    s = sigmoid(-(size + size))
    far = 1.0 - (s + s)
    square = x * x
    p = torch.full_like(square, _TANH[0])
    for coefficient in _TANH[1:]:
        p = p * square + coefficient
    near = x + x * (square * p)
    value = torch.where(size < _TANH_SWITCH, near, torch.where(x < 0.0, -far, far))
    return value, (s * (1.0 - s)) * 4.0


def _bounded(x: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return ``beta * tanh(x / beta)``, which stays within ``beta``, and its derivative."""
    bound = x.new_full((), beta)
    value, slope = tanh(x * (torch.ones_like(bound) / bound))
    return value * bound, slope


def _situ(a: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    value, slope = _bounded(a, beta)
    s = sigmoid(a)
    return value * s, slope * s + value * (s * (1.0 - s))


def _gelu(a: Tensor) -> tuple[Tensor, Tensor]:
    square = (a * a).clamp(max=FLT_MAX)  # so that the slope is no 0 * inf far out
    s = sigmoid(a * (square * _GELU_CUBIC + _GELU_LINEAR))
    return a * s, s + (a * (s * (1.0 - s))) * (square * _GELU_CUBIC_SLOPE + _GELU_LINEAR)


def _swish(a: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    s = sigmoid(a * alpha)
    return a * s, s + (a * (s * (1.0 - s))) * alpha


def _qgelu(a: Tensor) -> tuple[Tensor, Tensor]:
    return _swish(a, _QGELU)


def _silu(a: Tensor) -> tuple[Tensor, Tensor]:
    return _swish(a, 1.0)


def _sigmoid(a: Tensor) -> tuple[Tensor, Tensor]:
    s = sigmoid(a)
    return s, s * (1.0 - s)


def _relu(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.masked_fill(a <= 0.0, 0.0), (~(a <= 0.0)).float()


def _srelu(a: Tensor) -> tuple[Tensor, Tensor]:
    r, _ = _relu(a)
    return r * r, r + r


# those without further numbers: value and derivative
_FUNCTIONS: dict[str, Function] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": _relu,
    "srelu": _srelu,
    "silu": _silu,
    "geglu": _gelu,
    "glu": _sigmoid,
    "qgeglu": _qgelu,
    "reglu": _relu,
    "sreglu": _srelu,
    "swiglu": _silu,
}


def forward(x: Tensor, activation: str, **params: float) -> Tensor:
    """Apply an activation.

    Args:
        x: fp32, bf16 or fp16, shape (*lead, F), or (*lead, 2F) for a gated one.
        activation: a name in ``ACTIVATIONS``.
        params: ``limit``, ``alpha`` and ``glu_linear_offset`` of "clamped_swiglu"; ``beta1`` and ``beta2`` of
            "situ_glu", positive.

    Raises:
        ValueError: as ``checked``.
        TypeError: another dtype.

    Numerics:
        Shape (*lead, F), computed in fp32, rounded once to the dtype of ``x``; ``f(a)``, or ``f(a) * b`` for the
        halves a, b. "clamped_swiglu" is ``(a' * sigmoid(alpha * a')) * (b' + offset)`` with a' = min(a, limit) and
        b' = clamp(b, -limit, limit). "situ_glu" is ``((beta1 * tanh(a / beta1)) * sigmoid(a)) * (beta2 *
        tanh(b / beta2))``. "gelu" is ``x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3))``.
    """
    return round_to_dtype(activated(x, activation, **params), x.dtype)


def activated(x: Tensor, activation: str, **params: float) -> Tensor:
    """Return ``forward`` in fp32, unrounded; arguments and errors are the same."""
    found = checked(activation, x.shape, params)
    values = widened(x, activation)
    if not found.gated:
        return _FUNCTIONS[activation](values)[0]
    a, b = values.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        x1, x2, limits = _clamped(a, b, found, params)
        return _swish(x1, limits["alpha"])[0] * (x2 + limits["glu_linear_offset"])
    if activation == "situ_glu":
        betas = {**found.params, **params}
        return _situ(a, betas["beta1"])[0] * _bounded(b, betas["beta2"])[0]
    return _FUNCTIONS[activation](a)[0] * b


def backward(grad: Tensor, x: Tensor, activation: str, **params: float) -> Tensor:
    """Return the gradient of ``forward`` with respect to ``x``.

    Args:
        grad: fp32, bf16 or fp16, the gradient of the result, of its shape.
        x, activation, params: as given to ``forward``.

    Raises:
        ValueError: as ``checked``, or ``grad`` has another shape.
        TypeError: another dtype.

    Numerics:
        Shape and dtype of ``x``, computed in fp32, rounded once: ``grad * f'(a)``, or for a gated activation
        ``(grad * b) * f'(a)`` beside ``grad * f(a)``. Values beyond the limit have the gradient 0; a value at the limit
        keeps its gradient, as in Transformer Engine. "situ_glu" has ``beta2 * tanh(b / beta2)`` instead of b and its
        derivative as a last factor. ``f'`` is 0 at 0 for "relu".
    """
    check_gradient(grad, x, activation, params)
    return gradient(widened(grad, activation), x, activation, **params)


def check_gradient(grad: Tensor, x: Tensor, activation: str, params: Mapping[str, float]) -> None:
    """Check the gradient of an activation of ``x``.

    Raises:
        ValueError: as ``checked``, or ``grad`` has another shape than the result.
    """
    found = checked(activation, x.shape, params)
    expected = (*x.shape[:-1], x.shape[-1] // 2) if found.gated else tuple(x.shape)
    if tuple(grad.shape) != expected:
        raise ValueError(f"the gradient of {activation} has shape {tuple(grad.shape)}, expected {expected}")


def gradient(g: Tensor, x: Tensor, activation: str, **params: float) -> Tensor:
    """Return ``backward`` of a gradient in fp32 that ``check_gradient`` let pass."""
    found = ACTIVATIONS[activation]
    values = widened(x, activation)
    if not found.gated:
        return round_to_dtype(g * _FUNCTIONS[activation](values)[1], x.dtype)
    a, b = values.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        x1, x2, limits = _clamped(a, b, found, params)
        value, slope = _swish(x1, limits["alpha"])
        # Written out: at the limit the gradient of Tensor.clamp is 1 before PyTorch 2.14, and 0 from then on.
        da = ((g * (x2 + limits["glu_linear_offset"])) * slope).masked_fill(a > limits["limit"], 0.0)
        db = (g * value).masked_fill(b.abs() > limits["limit"], 0.0)
    elif activation == "situ_glu":
        betas = {**found.params, **params}
        value, slope = _situ(a, betas["beta1"])
        linear, linear_slope = _bounded(b, betas["beta2"])
        da, db = (g * linear) * slope, (g * value) * linear_slope
    else:
        value, slope = _FUNCTIONS[activation](a)
        da, db = (g * b) * slope, g * value
    return round_to_dtype(torch.cat((da, db), dim=-1), x.dtype)


def widened(x: Tensor, activation: str) -> Tensor:
    """Return ``x`` in fp32, contiguous.

    Raises:
        TypeError: it is not fp32, bf16 or fp16.
    """
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(
            f"{activation} takes float32, bfloat16 or float16, got {x.dtype}; cast the input first"
        )
    return x.detach().contiguous().float()


def _clamped(
    a: Tensor, b: Tensor, found: Activation, given: Mapping[str, float]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    params = {**found.params, **given}
    return a.clamp(max=params["limit"]), b.clamp(-params["limit"], params["limit"]), params
