"""The experts of a mixture whose weights are 3-D parameters, as Transformers 5 keeps them, on grouped GEMMs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import LinearFwdArgs, LinearWgrad
from ..autograd.grouped_linear import Groups, grouped_linear
from ..layers import LinearLayer, Stage, checked_input
from ..layers.grouped_layer import plan_for_rows


class ExpertsLayer(LinearLayer):
    """Experts of two linear layers each, on the tokens that a router sent them, as the recipe in force says.

    Read off the module: ``num_experts`` E; ``gate_up_proj``, or ``up_proj`` where ``has_gate`` is False, and
    ``down_proj``, (E, N, K), or (E, K, N) where ``is_transposed``; ``<name>_bias`` (E, N) where ``has_bias``;
    ``_apply_gate`` or ``act_fn`` between the two; ``post_expert_norm`` where ``has_post_expert_norm``.
    """

    _module_type = "grouped_linear"

    down_proj: nn.Parameter

    def _take_over(self, name: str) -> None:
        """Be a layer around the parameters of the experts that this was so far."""
        first = "gate_up_proj" if self.has_gate else "up_proj"
        stages = tuple(
            Stage(f"{weight}_", f"{name}.{weight}".lstrip("."), weight, f"{weight}_bias")
            for weight in (first, "down_proj")
        )
        self._groups = int(self.num_experts)  # type: ignore[arg-type]
        LinearLayer.__init__(self, name, stages, self.down_proj.device)

    def _weight_amax(self, prefix: str) -> Tensor:
        weight: Any = self._weight_of_state(prefix).detach()
        return weight.abs().float().flatten(1).amax(1)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply the experts.

        Args:
            hidden_states: (T, hidden). top_k_index, top_k_weights: (T, k), the experts of each token and their weights.
                A number that is no expert's, as expert parallelism has for those of other ranks, adds nothing.
        Returns:
            (T, hidden), the weighted sum over each token's experts.
        """
        tokens, chosen = top_k_index.shape
        experts = top_k_index.reshape(-1).clamp(max=self._groups)
        order = experts.argsort(stable=True)
        rows_of_each = experts.new_zeros(self._groups + 1).scatter_add(0, experts, torch.ones_like(experts))
        splits = rows_of_each[: self._groups]
        x = hidden_states.reshape(tokens, hidden_states.shape[-1])[order // chosen]
        x = self._grouped(self._stages[0], x, splits)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)  # type: ignore[operator]
        x = self._grouped(self._stages[1], x, splits)
        if self.has_post_expert_norm:
            x = self.post_expert_norm(x)  # type: ignore[operator]
        x = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        # back in the order of the tokens, and their experts summed in it: an index_add_ would add in any
        x = x[order.argsort()].view(tokens, chosen, -1).sum(1)
        return x.to(hidden_states.dtype)

    def _grouped(self, stage: Stage, x: Tensor, splits: Tensor) -> Tensor:
        """One linear layer of every expert; rows beyond the sum of the splits become zero."""
        stored: Any = getattr(self, stage.weight)
        weight = stored.transpose(1, 2) if self.is_transposed else stored
        biases: list[Any] = [getattr(self, stage.bias)] if self.has_bias else []
        x = checked_input(x, weight.shape[2], "in_features", stored)
        plan = self._plan(self._recipe_in_force(), stage, x.requires_grad, stored)
        plan = plan_for_rows(plan, x.shape[0], self._groups)
        needs_bias = torch.is_grad_enabled() and any(bias.requires_grad for bias in biases)
        scales = self._scales(stage.prefix, plan)
        args = LinearFwdArgs(plan, x.dtype, scales, None, LinearWgrad(), needs_bias)
        groups = Groups(self._groups, weight.shape[1], weight.shape[2], False, False, False, [None], [""])
        return grouped_linear(x, splits, [weight], biases, args, groups)
