"""Groups of rows in a linear layer's stage: their record and the grouped operators that they need.

y_g = x_g w_g^T for every group of rows, all groups in one operator per step. A group is quantized as a linear layer of
its own would quantize it; the splits, how many rows each group has, are a tensor that nothing here reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._tracing import PLAIN
from ..functional import (
    act,
    act_backward,
    are_adjacent,
    grouped_act_backward_quantize,
    grouped_act_quantize,
    grouped_column_sum,
    grouped_dequantize,
    grouped_gemm,
    grouped_gemm_batch_invariant,
    grouped_mm,
    grouped_mm_batch_invariant,
    grouped_quantize,
    grouped_quantize_coded,
    grouped_quantize_weights,
    join_weights,
    operand_of,
    transpose_codes,
)
from ..quantizers import Operand, OperandBuffers, Quantizer
from ..recipe import LinearPlan
from ..tensors import TensorOrQuantized, coded_rows, grouped_layout, is_coded, transposed
from .arguments import LinearBwdArgs


@dataclass(slots=True)
class Groups:
    """The inputs of a grouped linear layer besides those of a linear layer.

    ``count`` (G), ``out_features``, ``in_features``: of every weight. ``split_weights``, ``split_biases``: they are one
    tensor per group, else one for all. ``covered``: the splits are known to sum to the rows, or nothing reads the rest
    of a result. ``out`` (T, N), ``dgrad_out`` (T, K): memory of the caller that results are written to.
    """

    count: int
    out_features: int
    in_features: int
    split_weights: bool
    split_biases: bool
    covered: bool
    out: Tensor | None = None
    dgrad_out: Tensor | None = None


class GatedActivation(NamedTuple):
    """A gated activation between two grouped layers, computed as rows are quantized.

    ``name``, ``parameters``: as of ``act``. ``hidden``: (T, 2F), what the activation was applied to, where the rows are
    the gradient of its result and their own gradient is wanted; None where they are what it is to be applied to.
    """

    name: str
    parameters: list[float]
    hidden: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Return the rows in high precision."""
        if self.hidden is None:
            return act(x, self.name, self.parameters)
        return act_backward(x, self.hidden, self.name, self.parameters)

    def quantize(self, x: Tensor, *how: Any) -> list[Tensor]:
        """Quantize; ``how``: splits, quantizer, layout and state."""
        splits, quantizer, layout, *state = how
        options = splits, self.name, quantizer, layout, self.parameters
        if self.hidden is None:
            return grouped_act_quantize(x, *options, *state)
        return grouped_act_backward_quantize(x, self.hidden, *options, *state)


@dataclass(slots=True)
class GroupedRows:
    """The rows of an input or gradient in groups, and the operators of a stage on them.

    ``splits`` (G,): how many rows each group has. ``dtype``, ``weight_dtype``: of rows and weights before they are
    quantized. ``bias_scales``: (T,) to multiply each row's bias with, or None. ``activation``: of the rows.
    """

    groups: Groups
    splits: Tensor
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_scales: Tensor | None = None
    activation: GatedActivation | None = None

    def depends(self) -> tuple[tuple[Any, ...], list[Tensor | None]]:
        """Return the values and tensors of the groups that determine what a stage does."""
        groups = self.groups
        sizes = groups.count, groups.out_features, groups.in_features
        key, tensors = (sizes, groups.covered, self.dtype, self.weight_dtype), [self.splits, self.bias_scales]
        if self.activation is None:
            return key, tensors
        name, parameters, hidden = self.activation
        return (*key, name, *parameters), [*tensors, hidden]

    def quantize(
        self, x: TensorOrQuantized, operand: Operand, scale: Tensor | None = None, amax: Tensor | None = None
    ) -> OperandBuffers:
        """Quantize the rows (T, K), each group by itself; of codes, what they decode to."""
        how = self.splits, operand.quantizer, grouped_layout(operand.storage_name)
        if is_coded(x):
            parts = coded_rows(x)
            state = operand.seed(parts[0]), scale, amax
            return by_direction(grouped_quantize_coded(*parts, *how, self.dtype, *state), operand)
        assert isinstance(x, Tensor)
        if self.activation is not None:
            buffers = self.activation.quantize(x, *how, operand.seed(x), scale, amax)
            return by_direction(buffers, operand)
        return by_direction(grouped_quantize(x, *how, operand.seed(x), scale, amax), operand)

    def gemm(
        self,
        kind: str,
        plan: LinearPlan,
        left: list[Tensor],
        left_quantizer: Quantizer,
        right: list[Tensor],
        right_quantizer: Quantizer,
        biases: list[Tensor],
        dtype: torch.dtype,
        rows: int,
    ) -> Tensor:
        """Return the GEMM "fprop" or "dgrad" of quantized operands: (T, N) or (T, K) of ``dtype``."""
        rows_operand, fast = plan.input, plan.fast_fprop
        if kind == "dgrad":
            rows_operand, fast = plan.grad_output, plan.fast_dgrad
        a = left, left_quantizer, grouped_layout(rows_operand.storage_name), self.dtype
        b = right, right_quantizer, grouped_layout(plan.weight.storage_name), self.weight_dtype
        shape = rows, self.groups.out_features, self.groups.in_features
        if plan.batch_invariant and kind == "fprop":
            return grouped_gemm_batch_invariant(
                kind, *a, *b, self.splits, biases, dtype, *shape, plan.batch_invariant
            )
        how = fast, plan.emulate, self.groups.covered
        return grouped_gemm(kind, *a, *b, self.splits, biases, dtype, *shape, *how)

    def gemm_in_high_precision(
        self,
        kind: str,
        left: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        batch_invariant: int = 0,
    ) -> Tensor:
        """Return the GEMM "fprop" or "dgrad" in the dtype of ``left`` (T, K) or (T, N)."""
        dtype = left.dtype
        operands = [w.to(dtype) for w in weights], self.splits, [b.to(dtype) for b in biases]
        if batch_invariant:
            return grouped_mm_batch_invariant(left, *operands, dtype, batch_invariant)
        return grouped_mm(kind, left, *operands, self.groups.covered, dtype)

    def column_sum(self, dy: Tensor) -> Tensor:
        """Return gradients of the biases (G, N) from that of the output (T, N), in fp32."""
        if self.bias_scales is not None:
            dy = dy.float() * self.bias_scales.reshape(-1, 1).float()
        return grouped_column_sum(dy, self.splits)

    def of_wgrad(self, like: Tensor, rows: int) -> list[Tensor]:
        """Return the groups' data for a weight gradient, as ``DeferredWgrad`` holds it."""
        return [self.splits, like.new_empty((rows, 0), dtype=self.dtype)]

    def columnwise_weights(
        self, args: LinearBwdArgs, saved: list[Tensor], grad: Tensor | None
    ) -> list[Tensor]:
        """Return the column-wise weights from buffers that were saved of them, in a graph once ``grad`` is there."""
        columnwise = _transposed(saved, args.shape, grad) if args.transpose_weight else saved
        if len(saved) > 2:  # each by itself, as the parameters have them
            layout, how = grouped_layout(args.plan.weight.storage_name), (*args.shape, self.weight_dtype)
            return join_weights(saved, args.saved_weight[1], layout, True, self.groups.count, *how)
        return columnwise

    def decoded(self, args: LinearBwdArgs, inp: list[Tensor], rows: int) -> Tensor:
        """Return the input (T, K) in high precision from what was saved of it."""
        quantizer, x = args.saved_input[1], inp[0]
        if quantizer is not None:
            layout, shape = grouped_layout(args.plan.input.storage_name), [rows, args.shape[1]]
            x = grouped_dequantize(inp, quantizer, layout, self.splits, args.dtype, shape)
        return x.to(args.dtype)

    def decoded_weights(self, args: LinearBwdArgs, weights: list[Any]) -> list[Tensor]:
        """Return the weights in high precision from what was saved of them."""
        quantizer = args.saved_weight[1]
        if quantizer is None:  # a list of operations saves quantized parameters as bare storages
            return [weight if isinstance(weight, Tensor) else weight.dequantize() for weight in weights]
        layout, shape = grouped_layout(args.plan.weight.storage_name), [self.groups.count, *args.shape]
        return [grouped_dequantize(weights, quantizer, layout, None, self.weight_dtype, shape)]


class Places(NamedTuple):
    """Where weights are in memory: operators read them in place if one follows the other, and gather them if not."""

    weights: list[Tensor]

    def depends(self) -> tuple[tuple[Any, ...], list[Tensor | None]] | None:
        """Return the values that determine how operators read them; None for tensors without memory of their own."""
        count = len(self.weights)
        if not frozenset(PLAIN).issuperset(map(type, self.weights)):
            return None
        return (count, count > 1 and are_adjacent(self.weights)), []


def quantize_weights(
    weights: list[Tensor], operand: Operand, scale: Tensor | None = None, amax: Tensor | None = None
) -> OperandBuffers:
    """Quantize weights, G of (N, K) or one (G, N, K), in traced or eager code, without gradient."""
    layout, seed = grouped_layout(operand.storage_name), operand.seed(weights[0])
    buffers = grouped_quantize_weights(weights, operand.quantizer, layout, seed, scale, amax)
    return by_direction(buffers, operand)


def by_direction(buffers: list[Tensor], operand: Operand) -> OperandBuffers:
    """Return the result of an operator that quantizes groups, by direction."""
    layout = grouped_layout(operand.storage_name)
    return OperandBuffers(
        operand_of(buffers, layout, False) if any(operand.rowwise) else [],
        operand_of(buffers, layout, True) if any(operand.columnwise) else [],
        operand.quantizer,
    )


def biases_of_rows(biases: list[Tensor], splits: Tensor, rows: int) -> Tensor:
    """Return the bias of every row's group, (T, N); zeros for rows of no group."""
    whole = biases[0] if biases[0].dim() == 2 else torch.stack(biases)
    group = torch.searchsorted(splits.cumsum(0), torch.arange(rows, device=splits.device), right=True)
    return F.pad(whole, (0, 0, 0, 1)).index_select(0, group)


def _transposed(rowwise: list[Tensor], shape: tuple[int, int], grad: Tensor | None) -> list[Tensor]:
    """Return column-wise weights (N, K) from row-wise ones; weights scaled in blocks are stacked as one matrix."""
    codes, scale = rowwise
    if scale.dim() == 1:
        return [transpose_codes(codes, grad, True), scale]
    return transposed(rowwise, shape[1], grad)
