"""What a linear layer reads besides its tensors, grouped by owner: the records that cross the autograd boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..functional.wgrad_store import WeightGradStore
from ..quantizers import OperandHandles
from ..recipe import LinearHandles
from ..tensors import QuantizedTensorStorage, TensorOrQuantized


@dataclass(slots=True)
class DelayedTensors:
    """State of delayed scaling, owned by the module; None for the other recipes."""

    scale_fwd: Tensor | None = None
    amax_fwd: Tensor | None = None
    scale_bwd: Tensor | None = None
    amax_bwd: Tensor | None = None


@dataclass(slots=True)
class LinearNumerics:
    """How to compute, owned by the recipe and by torch.autocast.

    ``save_original_input``: keep the input as it came, and quantize it again for wgrad.
    """

    activation_dtype: torch.dtype
    weight_dtype: torch.dtype
    backward_override: str | None
    emulate: bool
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool
    save_original_input: bool = False


@dataclass(slots=True)
class LinearNeeds:
    """Which gradients of a linear layer or a norm are wanted, captured before the boundary."""

    inp: bool
    weight: bool
    bias: bool

    def any(self) -> bool:
        """Whether there is a backward at all."""
        return self.inp or self.weight or self.bias


@dataclass(slots=True)
class LinearCaching:
    """Weight cache, owned by the module: what it holds, and whether to hand back what is made."""

    workspace: QuantizedTensorStorage | None
    cache_weight: bool


@dataclass(slots=True)
class LinearWgrad:
    """Where the weight gradient goes, owned by the module and its parameter; by default autograd takes it.

    ``main_grad``: accumulate (or ``overwrite``) this instead. ``dummy``: "empty" or "zeros" is returned in place of
    what went there; "" returns None. ``store``: queue it, and the bias gradient, for ``backward_dw``; ``ticket``: of
    that store.
    """

    main_grad: Tensor | None = None
    overwrite: bool = False
    dummy: str = ""
    store: WeightGradStore | None = None
    ticket: Tensor | None = None


@dataclass(slots=True)
class LinearTensors:
    """The operands; bound inside the boundary."""

    weight: Tensor
    inp: TensorOrQuantized
    bias: Tensor | None


@dataclass(slots=True)
class LinearFwdArgs:
    """Everything the forward reads. ``tensors`` is None until :meth:`bind`; no quantizers: high precision."""

    quantizers: LinearHandles | None
    delayed: DelayedTensors
    numerics: LinearNumerics
    needs: LinearNeeds
    caching: LinearCaching
    tensors: LinearTensors | None = None
    wgrad: LinearWgrad = field(default_factory=LinearWgrad)

    def bind(self, weight: Tensor, inp: TensorOrQuantized, bias: Tensor | None) -> LinearFwdArgs:
        """These arguments with their operands; the original is left alone, as a traced forward must."""
        return LinearFwdArgs(
            self.quantizers,
            self.delayed,
            self.numerics,
            self.needs,
            self.caching,
            LinearTensors(weight, inp, bias),
            self.wgrad,
        )


@dataclass(slots=True)
class LinearSaved:
    """What the forward left for the backward, restored."""

    inputmat: TensorOrQuantized | None
    weight: TensorOrQuantized | None


@dataclass(slots=True)
class LinearBwdArgs:
    """Everything the backward reads. ``saved`` and ``grad_output`` are None until :meth:`bind`."""

    grad_quantizers: Any
    delayed: DelayedTensors
    numerics: LinearNumerics
    needs: LinearNeeds
    out_features: int
    in_features: int
    bias_dtype: torch.dtype | None
    wgrad: LinearWgrad = field(default_factory=LinearWgrad)
    input_handles: OperandHandles | None = None
    saved: LinearSaved | None = None
    grad_output: TensorOrQuantized | None = None

    @property
    def backward_override(self) -> str | None:
        """The recipe's override."""
        return self.numerics.backward_override

    def bind(self, saved: LinearSaved, grad_output: TensorOrQuantized) -> LinearBwdArgs:
        """A per-call copy, so that a second backward over the same graph finds the original untouched."""
        return LinearBwdArgs(
            self.grad_quantizers,
            self.delayed,
            self.numerics,
            self.needs,
            self.out_features,
            self.in_features,
            self.bias_dtype,
            self.wgrad,
            self.input_handles,
            saved,
            grad_output,
        )
