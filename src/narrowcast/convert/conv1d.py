"""The linear layer of GPT-2 in Transformers, ``Conv1D``: a linear layer whose weight is stored transposed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._determinism import DETERMINISM
from ..autograd import LinearFunction, traced_linear
from ..functional import product
from ..layers import LinearLayer, Stage, checked_input


class Conv1DLayer(LinearLayer):
    """y = x w + b for a weight (in_features, out_features), quantized under the current recipe.

    Quantized are the rows and columns of the transposed weight, as those of any linear layer. Errors of the forward are
    those of :class:`narrowcast.Linear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def _take_over(self, name: str) -> None:
        """Set up the layer around the parameters of the ``Conv1D`` it was."""
        LinearLayer.__init__(self, name, (Stage("", name, "weight", "bias"),), self.weight.device)

    def forward(self, x: Tensor) -> Any:
        """Apply the layer to ``x`` (*lead, in_features)."""
        stored, bias = self.weight, self.bias
        x = checked_input(self, x, "in_features", stored, stored.shape[0])
        recipe, stage, weight = self._recipe_in_force(), self._stages[0], stored.t()
        if recipe is None and not DETERMINISM.batch_invariant:
            return product(x, weight.to(x.dtype), bias.to(x.dtype))
        plan = self._plan(recipe, stage, x.requires_grad, stored)
        args = self._fwd_args(stage, plan, x.dtype, weight, bias, None)
        return (traced_linear if is_dynamo_compiling() else LinearFunction.apply)(weight, x, bias, args)
