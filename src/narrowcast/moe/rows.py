"""The autograd functions of the permutations, and the two maps that they are driven by.

A *row map* is int32 (T, C): where each token's copies lie, -1 for none. *Positions* are its inverse, int32 (R,):
``token * C + column`` of every row, -1 for rows that no token has. With both, forward and backward only read by index;
nothing is added up by atomics, so results do not change from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._tracing import once_differentiable
from ..functional import moe_collect, moe_collect_backward, moe_positions, moe_spread
from ..tensors import plain_gradient
from .quantized import is_quantized, move_rows


def row_map_of_mask(mask: Tensor) -> Tensor:
    """Return row map (T, E) of a routing map (T, E): the rows of expert 0, then those of expert 1, in the order of
    tokens.
    """
    chosen = mask.t().bool()
    rows = chosen.reshape(-1).cumsum(0, dtype=torch.int32).view(chosen.shape) - 1
    return torch.where(chosen, rows, -1).t().contiguous()


def row_map_of_indices(indices: Tensor) -> Tensor:
    """Return row map (T, topk) of the experts (T, topk) that each token goes to; -1 goes nowhere."""
    flat = indices.reshape(-1)
    last = torch.iinfo(torch.int32).max
    order = torch.where(flat < 0, last, flat).argsort(stable=True)
    # The inverse of an order is the order of its numbers. Scattered into, it would be one kernel less, but Inductor
    # (PyTorch 2.13) fuses what reads a scattered tensor with kernels that run before the scattering.
    return torch.where(flat < 0, -1, order.argsort()).to(torch.int32).view(indices.shape)


def kept(row_map: Tensor, rows: int) -> Tensor:
    """Return the row map without what lies beyond so many rows."""
    return torch.where(row_map < rows, row_map, -1)


class Permute(torch.autograd.Function):
    """Rows of tokens, copied to where the row map says."""

    @staticmethod
    def forward(ctx: Any, inp: Any, row_map: Tensor, positions: Tensor) -> Any:
        ctx.save_for_backward(row_map)
        columns = row_map.shape[1]
        if is_quantized(inp):
            return move_rows(inp, positions.shape[0], lambda x: moe_spread(x, positions, columns))
        return moe_spread(inp, positions, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_map,) = ctx.saved_tensors
        return moe_collect(plain_gradient(grad), row_map, None), None, None


class PermuteProbs(torch.autograd.Function):
    """One number per token and column of the map, to where the row map says."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, row_map: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(row_map)
        return read(probs.reshape(-1), positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_map,) = ctx.saved_tensors
        return read(grad, row_map), None, None


class Unpermute(torch.autograd.Function):
    """The sum of every token's rows, weighted where there are weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, row_map: Tensor) -> Tensor:
        ctx.rows = rows.shape[0]
        if weights is None:
            ctx.save_for_backward(row_map)
            return moe_collect(rows, row_map, None)
        ctx.save_for_backward(row_map, rows, weights)
        return moe_collect(rows, row_map, weights.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        row_map, *weighted = ctx.saved_tensors  # once: a checkpoint hands out no tensor twice
        grad, positions = plain_gradient(grad), moe_positions(row_map, ctx.rows)
        if not weighted:
            return moe_spread(grad, positions, row_map.shape[1]), None, None
        rows, weights = weighted
        drows, sums = moe_collect_backward(grad, rows, positions, weights.float())
        return drows, read(sums, row_map).to(weights.dtype), None


class Reorder(torch.autograd.Function):
    """Rows in another order; ``source`` says where each row comes from, ``target`` where each goes."""

    @staticmethod
    def forward(ctx: Any, inp: Any, source: Tensor, target: Tensor) -> Any:
        ctx.save_for_backward(target)
        if is_quantized(inp):
            return move_rows(inp, source.shape[0], lambda x: moe_spread(x, source, 1))
        return moe_spread(inp, source, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (target,) = ctx.saved_tensors
        return moe_spread(plain_gradient(grad), target, 1), None, None


def read(values: Tensor, index: Tensor) -> Tensor:
    """Return elements of a vector by number, zero for -1."""
    return F.pad(values, (0, 1))[index]  # the last one is zero
