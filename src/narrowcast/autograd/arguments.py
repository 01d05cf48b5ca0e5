"""Records that cross a linear layer's autograd boundary besides its tensors, grouped by owner.

Most are named tuples, of which the compiler traces the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional.wgrad_store import WeightGradStore
from ..quantizers import OperandBuffers, Quantizer
from ..recipe import LinearPlan
from .tensor_parallel import TensorParallel


@dataclass(slots=True)
class DelayedScales:
    """State of delayed scaling, owned by the layer; None for other recipes, and amax if nothing is collected.

    A forward saves ``scale`` for its backward: PyTorch raises if a step has written to it in between.
    """

    scale: Tensor | None = None
    amax: Tensor | None = None


class LinearWgrad(NamedTuple):
    """The destination of the weight gradient, owned by the layer and its parameter; by default autograd.

    ``main_grad``: accumulate (or ``overwrite``) this instead. ``dummy``: "empty" or "zeros" is returned instead of
    what went there; "" returns None. Of groups both are lists, with None and "" for a weight without gradient.
    ``store``: queue it, and the bias gradient, for ``backward_dw``; ``ticket``: of that store. ``begins``: the weights
    whose ``main_grad`` a first microbatch begins; ``recomputed_in``: as of ``functional.begin_main_grad_``.
    """

    main_grad: Any = None
    overwrite: bool = False
    dummy: Any = ""
    store: WeightGradStore | None = None
    ticket: Tensor | None = None
    begins: Sequence[Tensor] = ()
    recomputed_in: Any = -1


TO_AUTOGRAD = LinearWgrad()


class LinearFwdArgs(NamedTuple):
    """The inputs of the forward besides weight, input and bias.

    ``plan``: owned by the recipe. ``dtype``: of the activations. ``scales``: owned by the layer. ``workspace``: the
    weight where it is quantized already. ``wgrad``: owned by the parameter. ``needs_bias``: its gradient is requested.
    ``transpose_weight``: the workspace is row-wise alone, in a format that quantizes the same in both directions; the
    backward makes the other direction of it. ``parallel``: how the layer is split over processes; None if it is not.
    ``stored``: the weight in a format of fewer bits, row-wise; each pass decodes and then quantizes it. None otherwise.
    """

    plan: LinearPlan
    dtype: torch.dtype
    scales: DelayedScales
    workspace: OperandBuffers | None
    wgrad: LinearWgrad
    needs_bias: bool
    transpose_weight: bool = False
    parallel: TensorParallel | None = None
    stored: OperandBuffers | None = None

    def depends(self) -> tuple[tuple[Any, ...], list[Tensor | None]] | None:
        """Return the values and tensors that determine the forward; None if more does."""
        if self.stored is not None:
            return None
        kept, state = self.workspace, [self.scales.scale, self.scales.amax]
        split = None if self.parallel is None else self.parallel.depends()
        if kept is None:
            return (self.plan, self.dtype, split), state
        if kept.quantizer is not self.plan.kept_weight.quantizer:
            return None
        shared = [any(x is y for y in kept.rowwise) for x in kept.columnwise]  # a scale of both directions
        columnwise = [x for x, both in zip(kept.columnwise, shared) if not both]
        values = self.plan, self.dtype, split, len(kept.rowwise), *shared
        return values, [*state, *kept.rowwise, *columnwise]


class LinearBwdArgs(NamedTuple):
    """The inputs of the backward besides the gradient and saved tensors; never changed, so that it may run again.

    ``saved_input``, ``saved_weight``: how many of the saved tensors belong to each, and the quantizer that reads them;
    None for a tensor in high precision, with what it takes to quantize it again. ``shape``: (N, K) of the weight.
    ``transpose_weight``, ``parallel``: as of the forward; an input that was gathered is saved as the share that came.
    ``stored``: the quantizer that decodes a weight of fewer bits, if its codes are what was saved.
    """

    plan: LinearPlan
    dtype: torch.dtype
    amax: Tensor | None
    wgrad: LinearWgrad
    needs_bias: bool
    bias_dtype: torch.dtype | None
    weight_dtype: torch.dtype
    shape: tuple[int, int]
    saved_input: tuple[int, Quantizer | None]
    saved_weight: tuple[int, Quantizer | None]
    transpose_weight: bool = False
    parallel: TensorParallel | None = None
    stored: Quantizer | None = None

    def depends(self) -> tuple[tuple[Any, ...], list[Tensor | None]] | None:
        """Return the values and tensors that determine the backward; None if more does."""
        plan, (inputs, inp), (_, weight), wgrad = self.plan, self.saved_input, self.saved_weight, self.wgrad
        if wgrad.store is not None or self.stored is not None:
            return None
        known_weight = (
            weight is None or weight is plan.weight.quantizer or weight is plan.kept_weight.quantizer
        )
        if not (inp is None or inp is plan.input.quantizer) or not known_weight:  # they came quantized
            return None
        saved = inputs, inp is None, weight is None, weight is plan.weight.quantizer, self.transpose_weight
        dtypes = self.dtype, self.bias_dtype, self.weight_dtype
        into, dummy = [wgrad.main_grad], wgrad.dummy
        if isinstance(wgrad.main_grad, list):  # of groups
            into, dummy = wgrad.main_grad, tuple(wgrad.dummy)
        split = None if self.parallel is None else self.parallel.depends()
        values = plan, dtypes, self.shape, saved, self.needs_bias, wgrad.overwrite, dummy, split
        return values, [self.amax, *into]

    @property
    def backward_override(self) -> str | None:
        """The recipe's override."""
        return self.plan.backward_override

    @property
    def fp8(self) -> bool:
        """Whether the layer ran quantized."""
        return self.plan.quantized

    @property
    def grad_output_quantizer(self) -> Quantizer | None:
        """The quantizer of the output's gradient; None in high precision."""
        return self.plan.grad_output.quantizer if self.plan.quantized else None

    @property
    def reduce_and_update_bwd_fp8_tensors(self) -> bool:
        """Whether the backward renews scales: never, the next step does."""
        return False
