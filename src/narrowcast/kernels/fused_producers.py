"""Fused producers: a quantize kernel's source is a tensor, or a function of tensors that is computed on the way in.

A fused producer is not a kernel of its own. The quantize kernels read their tile through ``load_source``, which for a
plain tensor is a load, and for an activation, a norm or the gradient of one loads the operands, computes in fp32 and
rounds to the input's dtype: exactly what the unfused operator would have written to memory and the quantize kernel
read back. A fused result is therefore equal to the unfused one, bit for bit, in every format.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import cdiv
from . import activation as activations
from . import cross_entropy, grouped_padding, reduction
from . import norm as norms
from .activation import activate, activate_backward, activate_gated, activate_gated_backward
from .adam_step import step_elements
from .codecs import decode_fp8, round_to_dtype, to_float32
from .cross_entropy import logit_gradient
from .launch import check_dtype, check_input, check_rank
from .norm import norm_gradient
from .norm_rows import normalize
from .reduction import fold_pairs
from .scaling import scales_of_rows
from .tiles import load_elements

_ABSENT = (None,) * 8
_GROUP_ROWS = tl.constexpr(grouped_padding.BLOCK_ROWS)


@dataclass(slots=True)  # not frozen: that would take longer than all else that a launch does here
class Source:
    """A matrix to quantize that need not exist in memory.

    ``shape``, ``dtype``: of the matrix. ``operands``: contiguous tensors the device code reads, in its order.
    ``constants``: kind, function and three numbers that the kernel is compiled for. ``compute``: writes the matrix, for
    kernels that must see all of it before they can encode; it raises slots of ``activation.amax_slots`` to maxima of
    the matrix on the way, if given some. ``amax_partials``: maxima of parts of it, from an earlier pass over the
    operands. ``out``: buffers to write in place of new ones.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    operands: tuple[Tensor, ...]
    constants: tuple[str, str, float, float, float]
    compute: Callable[[Tensor | None], Tensor]
    amax_partials: Tensor | None = None
    column_sums: ColumnSums | None = None
    out: list[Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Device of the operands."""
        return self.operands[0].device

    @property
    def pointers(self) -> tuple[Tensor | None, ...]:
        """The operands as the kernels take them: eight arguments, the last ones None, which is no argument at all."""
        return self.operands + _ABSENT[len(self.operands) :]

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns with the last dim kept."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def is_tensor(self) -> bool:
        """Whether the matrix is there already."""
        return self.constants[0] == "tensor"

    @property
    def is_activation(self) -> bool:
        """Whether an activation or its gradient is computed on the way in, which takes many registers."""
        return self.constants[0] in ACTIVATIONS

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an output beside the operands."""
        return self.operands[0].new_empty(shape, dtype=dtype)

    def partial_sums(self) -> Tensor | None:
        """Return a kernel's buffer for the sums of 16 rows each, fp32; None if not requested."""
        if self.column_sums is None:
            return None
        M, K = self.matrix
        self.column_sums.partials = self.empty((cdiv(M, reduction.PARTIAL_ROWS), K), torch.float32)
        return self.column_sums.partials

    def within_registers(self) -> Source:
        """Return the source itself, or its matrix where computing a tile with scales takes too many registers: of the
        gradient of a gated activation, which is quantized sooner once it was written to memory.
        """
        return self.materialized() if self.constants[0] == "gated_backward" else self

    def materialized(self) -> Source:
        """Return the source of the matrix written to memory."""
        if self.is_tensor:
            return self
        written = tensor(self.compute(None))
        written.column_sums, written.out = self.column_sums, self.out
        return written

    def with_amax(self) -> Source:
        """Return the source, now with ``amax_partials``: a gated activation's gradient, computed for them, but not
        written.
        """
        kind, name, *numbers = self.constants
        assert kind == "gated_backward"
        x, grad = self.operands
        self.amax_partials = activations.backward_amax(grad, x, name, tuple(numbers))  # type: ignore[arg-type]
        return self

    def materialized_with_amax(self) -> Source:
        """Return the source of the matrix written to memory, with ``amax_partials`` from the same pass.

        Only for activations and their gradients.
        """
        partials = activations.amax_slots(self.operands[0])
        written = tensor(self.compute(partials))
        written.column_sums, written.amax_partials = self.column_sums, partials
        return written


def pairs_tiles(constants: tuple[str, str, float, float, float], columns: int, tile_columns: int) -> bool:
    """Return whether tiles of a source can take both halves of a gated activation's gradient from one read.

    Args:
        constants: of the source.
        columns: of its matrix.
    """
    gradient = constants[0] in ("gated_backward", "groups gated_backward")
    return gradient and columns // 2 % tile_columns == 0


class ColumnSums:
    """Sums over the rows of a source's matrix, as a kernel that reads all of it can leave them behind."""

    def __init__(self) -> None:
        self.partials: Tensor | None = None


ACTIVATIONS = (
    "activation",
    "activation_backward",
    "gated",
    "gated_backward",
    "groups gated",
    "groups gated_backward",
)
_TENSOR = ("tensor", "", 0.0, 0.0, 0.0)


def tensor(x: Tensor, *, column_sums: bool = False) -> Source:
    """Return the source that reads ``x``; with ``column_sums`` a kernel that reads all of it also sums its columns.

    Raises:
        TypeError: another dtype.
        ValueError: a tensor the kernels cannot reach, or rank 0.
    """
    check_input(x, 1)
    x = x.contiguous()
    sums = ColumnSums() if column_sums else None
    return Source(tuple(x.shape), x.dtype, (x,), _TENSOR, lambda _: x, column_sums=sums)


def rounded(x: Tensor, dtype: torch.dtype) -> Source:
    """Return ``x.to(dtype)``, bf16, fp16 or fp32, converted on the way in.

    Raises:
        ValueError: as :func:`tensor`, also of ``dtype``.
    """
    check_input(x, 1)
    check_dtype(dtype)
    if x.dtype == dtype:
        return tensor(x)
    x = x.contiguous()
    constants = ("rounded", str(dtype).removeprefix("torch."), 0.0, 0.0, 0.0)
    return Source(tuple(x.shape), dtype, (x,), constants, lambda _: x.to(dtype))


def activation(x: Tensor, name: str, **parameters: float) -> Source:
    """Return ``activation.forward(x, name, **parameters)``, computed on the way in.

    Raises:
        ValueError: an unknown name or parameter, or an odd last dim of a gated activation.
    """
    record = activations.checked(x, name, parameters)
    numbers, x = activations.numbers(name, parameters), x.contiguous()
    return Source(
        (*x.shape[:-1], x.shape[-1] // 2) if record.gated else tuple(x.shape),
        x.dtype,
        (x,),
        ("gated" if record.gated else "activation", name, *numbers),
        partial(activations.forward, x, name, **parameters),
    )


def activation_backward(
    grad: Tensor, x: Tensor, name: str, *, column_sums: bool = False, **parameters: float
) -> Source:
    """Return ``activation.backward(grad, x, name, **parameters)``, computed on the way in.

    Raises:
        ValueError: as :func:`activation`.
    """
    record = activations.checked(x, name, parameters)
    numbers = activations.numbers(name, parameters)
    x, grad = x.contiguous(), grad.contiguous()
    return Source(
        tuple(x.shape),
        x.dtype,
        (x, grad),
        ("gated_backward" if record.gated else "activation_backward", name, *numbers),
        partial(activations.backward, grad, x, name, **parameters),
        column_sums=ColumnSums() if column_sums else None,
    )


def cross_entropy_gradient(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    grad: Tensor,
    on_target: float,
    everywhere: float,
    *,
    column_sums: bool = False,
) -> Source:
    """Return ``cross_entropy.gradient``, computed on the way in."""
    check_input(logits, 2)
    return Source(
        tuple(logits.shape),
        logits.dtype,
        (logits.contiguous(), target.contiguous(), lse.contiguous(), grad.contiguous()),
        ("cross_entropy", "", on_target, everywhere, 0.0),
        lambda _: cross_entropy.gradient(logits, target, lse, grad, on_target, everywhere),
        column_sums=ColumnSums() if column_sums else None,
    )


def normalized(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    normalization: str,
    zero_centered_gamma: bool,
    wanted: str = "source",
) -> tuple[Source, Tensor | None, Tensor, Tensor | None]:
    """Return ``norm.normalized``, computed on the way in: (source, mean, rstd, sum).

    Args:
        wanted: "source"; or that the pass over all rows that takes the statistics also takes the result's "amax", or
            writes the result, the "matrix".
    """
    norm = partial(
        norms.normalized, x, weight, bias, eps=eps, normalization=normalization,
        zero_centered_gamma=zero_centered_gamma, residual=residual,
    )  # fmt: skip
    if wanted == "matrix":
        y, summed, mean, rstd = norm()
        return tensor(y), mean, rstd, summed
    summed, mean, rstd, *amax_partials = norms.statistics(
        x,
        eps=eps,
        normalization=normalization,
        residual=residual,
        weight=weight,
        bias=bias,
        zero_centered_gamma=zero_centered_gamma,
        amax_partials=wanted == "amax",
    )
    inner, weight = x.contiguous() if summed is None else summed, weight.contiguous()
    source = Source(
        tuple(x.shape),
        x.dtype,
        # An absent vector passes another one: the constants keep the kernel from reading it.
        (inner, weight, rstd, rstd if mean is None else mean, weight if bias is None else bias.contiguous()),
        ("norm", normalization, zero_centered_gamma, bias is not None, 0.0),
        lambda _: norm()[0],
        *amax_partials,
    )
    return source, mean, rstd, summed


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    c1: Tensor,
    c2: Tensor | None,
    *,
    zero_centered_gamma: bool,
    residual_grad: Tensor | None = None,
) -> Source:
    """Return ``norm.backward``, computed on the way in."""
    x, grad, weight = x.contiguous(), grad.contiguous(), weight.contiguous()
    rows = (rstd, rstd if mean is None else mean, c1, c1 if c2 is None else c2)
    return Source(
        tuple(x.shape),
        x.dtype,
        (x, grad, weight, *rows, x if residual_grad is None else residual_grad.contiguous()),
        (
            "norm_backward",
            "RMSNorm" if mean is None else "LayerNorm",
            zero_centered_gamma,
            residual_grad is not None,
            0.0,
        ),
        lambda _: norms.backward(
            grad, x, weight, mean, rstd, c1, c2,
            zero_centered_gamma=zero_centered_gamma, residual_grad=residual_grad,
        ),
    )  # fmt: skip


def materialize(source: Tensor | Source) -> Tensor:
    """Return the matrix as a tensor."""
    return source.compute(None) if isinstance(source, Source) else source


def column_sum(source: Tensor | Source) -> Tensor:
    """Return sums over all but the last dim, fp32 (K,), from what the quantize kernel left where it did."""
    left = source.column_sums if isinstance(source, Source) else None
    if left is not None and left.partials is not None:
        return reduction.column_sum(left.partials)
    x = materialize(source)
    return reduction.column_sum(x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1])))


def source_of(x: Tensor | Source, min_rank: int) -> Source:
    """Return the source itself, or the one that reads a tensor.

    Raises:
        TypeError: another dtype.
        ValueError: a tensor the kernels cannot reach, or a rank below ``min_rank``.
    """
    if isinstance(x, Source):
        check_rank(len(x.shape), min_rank)
        return x
    if min_rank > 1:
        check_rank(x.dim(), min_rank)
    return tensor(x)


@triton.jit
def load_four_rows(
    operands,
    m,
    k,
    K,
    rows_left,
    columns_left,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOURCE: tl.constexpr,
    FUNCTION: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    PAIRED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return a tile as four tensors [ROWS / 4, COLUMNS], tensor ``j`` holding rows ``4 * i + j``; and four of its pair.

    ``PAIRED``: the second four are the same columns of the matrix's other half; else they repeat the first.
    """
    row = tl.arange(0, ROWS // 4) * 4
    column = tl.arange(0, COLUMNS)
    # Rows in groups, by what they are rows of; else the source itself.
    PLAIN_KIND: tl.constexpr = "tensor" if SOURCE == "groups tensor" else SOURCE
    CODED_KIND: tl.constexpr = "coded" if SOURCE == "groups coded" else PLAIN_KIND
    GATED_KIND: tl.constexpr = "gated" if SOURCE == "groups gated" else CODED_KIND
    KIND: tl.constexpr = "gated_backward" if SOURCE == "groups gated_backward" else GATED_KIND
    GROUPS: tl.constexpr = KIND != SOURCE
    if GROUPS:
        # A tile lies in one block of a group, and reads as one of a tensor that ends with its rows.
        TABLE: tl.constexpr = (
            2 if KIND == "coded" or KIND == "gated_backward" else 1
        )  # behind the other operands
        block = operands[TABLE] + m // _GROUP_ROWS * 2
        before = m % _GROUP_ROWS
        rows_left = tl.load(block + 1) - before
        m = tl.load(block) + before
    INSIDE: tl.constexpr = EVEN and not GROUPS
    first = ()
    second = ()
    for j in tl.static_range(4):
        if PAIRED:
            x, y = load_pair(
                operands, m + j, k, row, column, K // 2, rows_left - j, columns_left, FUNCTION, P0, P1, P2, INSIDE,
            )  # fmt: skip
        else:
            x = load_source(
                operands, m + j, k, row, column, K, rows_left - j, columns_left, KIND, FUNCTION, P0, P1, P2, INSIDE,
            )  # fmt: skip
            y = x
        first = first + (x,)
        second = second + (y,)
    return first, second


@triton.jit
def load_source(
    operands,
    m,
    k,
    row,
    column,
    K,
    rows_left,
    columns_left,
    SOURCE: tl.constexpr,
    FUNCTION: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return rows ``m + row``, columns ``k + column`` of the matrix [.., K], in its dtype; zero outside it.

    Args:
        operands: tuple of pointers, in the order the source's constructor fixes.
        row, column: offsets, one-dimensional.
        rows_left, columns_left: how many rows from ``m`` and columns from ``k`` are inside.
    """
    DTYPE: tl.constexpr = operands[0].dtype.element_ty
    # Vectors are loaded along rows in one dimension, along columns in two: so that no thread waits for another's.
    across = tl.broadcast_to(column[None, :], (row.shape[0], column.shape[0]))
    inside = (row < rows_left)[:, None] & (across < columns_left)
    offsets = row[:, None] * K + across
    if SOURCE == "tensor" or SOURCE == "rounded":
        return convert(load_elements(operands[0] + (m * K + k) + offsets, inside, EVEN), FUNCTION)
    elif SOURCE == "coded":
        scale = scales_of_rows(operands[1], m + row, k, K, row < rows_left, P1, column.shape[0])
        code = tl.load(operands[0] + (m * K + k) + offsets, mask=inside, other=0)
        return convert(decode_fp8(code, P0) * scale, FUNCTION)
    elif SOURCE == "activation" or SOURCE == "activation_backward":
        a = to_float32(load_elements(operands[0] + (m * K + k) + offsets, inside, EVEN))
        if SOURCE == "activation":
            return round_to_dtype(activate(a, FUNCTION), DTYPE)
        else:  # Triton 3.6 goes on after a return that is not the last of its branch
            g = to_float32(load_elements(operands[1] + (m * K + k) + offsets, inside, EVEN))
            return round_to_dtype(activate_backward(g, a, FUNCTION), DTYPE)
    elif SOURCE == "gated":
        wide = m * (2 * K) + k
        offsets = row[:, None] * (2 * K) + across
        a = to_float32(load_elements(operands[0] + wide + offsets, inside, EVEN))
        b = to_float32(load_elements(operands[0] + (wide + K) + offsets, inside, EVEN))
        return round_to_dtype(activate_gated(a, b, FUNCTION, P0, P1, P2), DTYPE)
    elif SOURCE == "gated_backward":
        # The general way, for widths that no tile divides: each element finds its own half.
        F = K // 2
        second = k + across >= F
        source = k + across - tl.where(second, F, 0)
        gate = operands[0] + m * K + (row[:, None] * K + source)
        a = to_float32(tl.load(gate, mask=inside, other=0.0))
        b = to_float32(tl.load(gate + F, mask=inside, other=0.0))
        gradient = operands[1] + m * F + (row[:, None] * F + source)
        g = to_float32(tl.load(gradient, mask=inside, other=0.0))
        da, db = activate_gated_backward(g, a, b, FUNCTION, P0, P1, P2)
        return round_to_dtype(tl.where(second, db, da), DTYPE)
    elif SOURCE == "norm":
        x = to_float32(load_elements(operands[0] + (m * K + k) + offsets, inside, EVEN))
        gamma = _load_gamma(operands[1] + k, across, columns_left, P0, EVEN)
        beta = gamma
        if P1:
            beta = to_float32(load_elements(operands[4] + k + across, across < columns_left, EVEN))
        rstd = load_elements(operands[2] + m + row, row < rows_left, EVEN)[:, None]
        mean = load_elements(operands[3] + m + row, row < rows_left, EVEN)[:, None]
        y = normalize(x, mean, rstd, gamma, beta, FUNCTION == "LayerNorm", P1)
        y = y if EVEN else tl.where(inside, y, 0.0)  # norm(0) is not 0
        return round_to_dtype(y, DTYPE)
    elif SOURCE == "adam":
        return step_elements(operands, (m * K + k) + offsets, inside, P0, P1, EVEN)
    elif SOURCE == "cross_entropy":
        x = to_float32(load_elements(operands[0] + (m * K + k) + offsets, inside, EVEN))
        dx = _logit_gradient(operands, x, m + row, k + across, row < rows_left, P0, P1, EVEN)
        return round_to_dtype(dx if EVEN else tl.where(inside, dx, 0.0), DTYPE)
    else:
        tl.static_assert(SOURCE == "norm_backward")
        x = to_float32(load_elements(operands[0] + (m * K + k) + offsets, inside, EVEN))
        g = to_float32(load_elements(operands[1] + (m * K + k) + offsets, inside, EVEN))
        gamma = _load_gamma(operands[2] + k, across, columns_left, P0, EVEN)
        rstd = load_elements(operands[3] + m + row, row < rows_left, EVEN)[:, None]
        mean = load_elements(operands[4] + m + row, row < rows_left, EVEN)[:, None]
        c1 = load_elements(operands[5] + m + row, row < rows_left, EVEN)[:, None]
        c2 = load_elements(operands[6] + m + row, row < rows_left, EVEN)[:, None]
        dx = norm_gradient(g, x, mean, rstd, gamma, c1, c2, FUNCTION == "LayerNorm")
        if P1:
            dx += to_float32(load_elements(operands[7] + (m * K + k) + offsets, inside, EVEN))
        return round_to_dtype(dx if EVEN else tl.where(inside, dx, 0.0), DTYPE)


@triton.jit
def _logit_gradient(
    operands, x, row, column, inside, ON_TARGET: tl.constexpr, EVERYWHERE: tl.constexpr, EVEN: tl.constexpr
):
    target = load_elements(operands[1] + row, inside, EVEN)[:, None]
    lse = load_elements(operands[2] + row, inside, EVEN)[:, None]
    grad = load_elements(operands[3] + row, inside, EVEN)[:, None]
    return logit_gradient(x, column == target, lse, grad, ON_TARGET, EVERYWHERE)


@triton.jit
def convert(x, NAME: tl.constexpr):
    """Return bf16, fp16 or fp32 ``x`` in the dtype of that name; as it is for none."""
    if NAME == "":
        return x
    elif NAME == "bfloat16":
        return round_to_dtype(to_float32(x), tl.bfloat16)
    elif NAME == "float16":
        return round_to_dtype(to_float32(x), tl.float16)
    else:
        tl.static_assert(NAME == "float32")
        return round_to_dtype(to_float32(x), tl.float32)


@triton.jit
def load_pair(
    operands,
    m,
    k,
    row,
    column,
    F,
    rows_left,
    columns_left,
    FUNCTION: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return both halves of a gated activation's gradient, columns ``k + column`` and ``F + k + column``, from one
    read.
    """
    DTYPE: tl.constexpr = operands[0].dtype.element_ty
    inside = (row < rows_left)[:, None] & (column < columns_left)[None, :]
    wide = m * (2 * F) + k
    offsets = row[:, None] * (2 * F) + column[None, :]
    a = to_float32(load_elements(operands[0] + wide + offsets, inside, EVEN))
    b = to_float32(load_elements(operands[0] + (wide + F) + offsets, inside, EVEN))
    g = to_float32(
        load_elements(operands[1] + (m * F + k) + (row[:, None] * F + column[None, :]), inside, EVEN)
    )
    da, db = activate_gated_backward(g, a, b, FUNCTION, P0, P1, P2)
    return round_to_dtype(da, DTYPE), round_to_dtype(db, DTYPE)


@triton.jit
def _load_gamma(pointer, column, columns_left, CENTERED: tl.constexpr, EVEN: tl.constexpr):
    gamma = to_float32(load_elements(pointer + column, column < columns_left, EVEN))
    if CENTERED:
        gamma = gamma + 1.0
    return gamma


@triton.jit
def store_column_sums(pointer, xs, K, rows_left, columns_left):
    """Store the sums of 16 of the tile's rows each, fp32, as rows of ``pointer`` [.., K]."""
    low = to_float32(xs[0]) + to_float32(xs[1])
    high = to_float32(xs[2]) + to_float32(xs[3])
    sums = fold_pairs(fold_pairs(low + high))
    part = tl.arange(0, sums.shape[0])[:, None]
    column = tl.arange(0, sums.shape[1])[None, :]
    tl.store(pointer + part * K + column, sums, mask=(part * 16 < rows_left) & (column < columns_left))
