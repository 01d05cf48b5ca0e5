"""``MoERouter``: the layer that chooses experts, in fp32, with what balances them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from .._checks import flags, in_range, is_one_of, not_among, positive
from .._keywords import refuse_keywords
from ..layers import refuse_script
from ..layers.parameters import parameter_device, parameter_dtype
from ..moe import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    moe_capacity,
    moe_drop_tokens,
    moe_router_logits,
    moe_update_expert_bias_,
    moe_z_loss,
    router_health,
)
from ..moe.balance import POLICIES
from ..moe.router import SCORE_FUNCTIONS
from ..upstream.modules import keep_values, own_buffers


class Routing(NamedTuple):
    """The result of a ``MoERouter``."""

    probs: Tensor
    """(T, E), the weights in the dtype of the input; 0 for experts not chosen."""
    routing_map: Tensor
    """bool (T, E)."""
    loss: Tensor
    """fp32 scalar: balancing loss plus z-loss; 0 without coefficients. Add it to the model's loss."""


class MoERouter(nn.Module):
    """A router: logits, choice, weights and losses in fp32 for inputs of any dtype, also under ``torch.autocast``.

    ``weight`` (E, K) and, with ``bias``, ``bias`` (E,) are the parameters. With ``bias_update_rate`` the buffer
    ``expert_bias``, fp32 (E,), is saved with the model, and the forwards of training count the tokens of each expert
    until :meth:`update_expert_bias`, which the training loop calls once per step. A recomputed forward counts again.

    Args:
        hidden_size: K.
        num_experts: E.
        topk: experts per token.
        score_function, use_pre_softmax, num_groups, group_topk, scaling_factor: as in
            :func:`fused_topk_with_score_function`.
        bias: add a learned bias to the logits.
        bias_update_rate: DeepSeek-V3's balancing without a loss, 0.001 there; for "sigmoid" and "sqrtsoftplus".
        aux_loss_coeff: weight of the balancing loss over this rank's tokens.
        z_loss_coeff: weight of the z-loss.
        capacity_factor: drop copies beyond this multiple of an even share; None drops none.
        drop_policy, experts_per_group: as in :func:`moe_drop_tokens`.
        device, dtype: of the parameters, as for every layer.

    Raises:
        TypeError: a flag or dtype of another type.
        ValueError: an option out of its range, or ``bias_update_rate`` with "softmax".
    """

    __prepare_scriptable__ = refuse_script
    _watcher: Any = None
    """What asks for the health of a forward, as ``inspect.watch`` sets it."""
    _watched_health: Tensor

    expert_bias: Tensor | None
    tokens_per_expert: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        score_function: str = "softmax",
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        bias: bool = False,
        bias_update_rate: float | None = None,
        aux_loss_coeff: float = 0.0,
        z_loss_coeff: float = 0.0,
        capacity_factor: float | None = None,
        drop_policy: str = "probs",
        experts_per_group: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(hidden_size=hidden_size, num_experts=num_experts, topk=topk)
        flags(bias=bias, use_pre_softmax=use_pre_softmax)
        if not is_one_of(score_function, SCORE_FUNCTIONS):
            raise ValueError(f"score_function is {not_among(score_function, SCORE_FUNCTIONS)}")
        if topk > num_experts:
            raise ValueError(f"topk is {topk}; use 1 to the {num_experts} experts")
        if not is_one_of(drop_policy, POLICIES):
            raise ValueError(f"drop_policy is {not_among(drop_policy, POLICIES)}")
        in_range("aux_loss_coeff", aux_loss_coeff, "use 0 or a positive number")
        in_range("z_loss_coeff", z_loss_coeff, "use 0 or a positive number")
        if bias_update_rate is not None:
            in_range("bias_update_rate", bias_update_rate, "use a positive number or None")
            if score_function == "softmax":
                raise ValueError(
                    f"bias_update_rate is {bias_update_rate} with score_function='softmax'; use 'sigmoid' or "
                    "'sqrtsoftplus', or leave it out"
                )
        if capacity_factor is not None:
            moe_capacity(1, topk, num_experts, capacity_factor, experts_per_group)  # checks
        self.num_experts, self.topk, self.score_function = num_experts, topk, score_function
        self.bias_update_rate, self.capacity_factor = bias_update_rate, capacity_factor
        self.aux_loss_coeff, self.z_loss_coeff = aux_loss_coeff, z_loss_coeff
        self.drop_policy, self.experts_per_group = drop_policy, experts_per_group
        self._choice: dict[str, Any] = {
            "use_pre_softmax": use_pre_softmax,
            "num_groups": num_groups,
            "group_topk": group_topk,
            "scaling_factor": scaling_factor,
            "score_function": score_function,
        }
        place, kind = parameter_device(device), parameter_dtype(None, dtype)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=place, dtype=kind))
        self.bias = nn.Parameter(torch.empty(num_experts, device=place, dtype=kind)) if bias else None
        counted = bias_update_rate is not None
        zeros = torch.zeros(num_experts, device=place, dtype=torch.float32) if counted else None
        self.register_buffer("expert_bias", zeros)
        self.register_buffer("tokens_per_expert", None if zeros is None else zeros.clone(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as ``nn.Linear`` does; biases and counts become zero."""
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        for zero in (self.bias, self.expert_bias, self.tokens_per_expert):
            if zero is not None:
                nn.init.zeros_(zero)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MoERouter:
        """Keep biases and counts in fp32, whatever dtype the model around is cast to: a step of 0.001 is lost there."""
        exact = dict(own_buffers(self))
        super()._apply(fn, recurse)
        keep_values(self, exact)
        return self

    def extra_repr(self) -> str:
        """Return sizes and the score function, as printed by the module."""
        return (
            f"{self.weight.shape[1]}, num_experts={self.num_experts}, topk={self.topk}, {self.score_function}"
        )

    def forward(self, x: Tensor, **unknown: NoReturn) -> Routing:
        """Choose experts for tokens ``x`` (*lead, K); see :class:`Routing`. T is the product of ``lead``."""
        if unknown:
            refuse_keywords(self, unknown)
        logits = moe_router_logits(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        probs, routing_map = fused_topk_with_score_function(
            logits, self.topk, expert_bias=self.expert_bias, **self._choice
        )
        assigned = routing_map.sum(0)
        loss = self._loss(logits, assigned)
        if self.tokens_per_expert is not None and self.training:
            self.tokens_per_expert.add_(assigned)
        if self.capacity_factor is not None:
            shape = self.topk, self.num_experts, self.capacity_factor, self.experts_per_group
            capacity = max(moe_capacity(len(logits), *shape), 1)
            probs, routing_map = moe_drop_tokens(
                probs, routing_map, capacity, self.drop_policy, self.experts_per_group
            )
        if self._watcher is not None and self._watcher.sampling:
            health = router_health(assigned, routing_map, self.expert_bias, logits.detach())
            self._watched_health.copy_(health)
        return Routing(probs.to(x.dtype), routing_map, loss)

    @torch.no_grad()
    def update_expert_bias(self, group: Any = None) -> None:
        """Move the biases against the loads counted since the last call; once per step, after the optimizer or before.

        Args:
            group: a process group whose counts are summed; None: this rank's alone, so that ranks drift apart.

        Raises:
            RuntimeError: the router has no ``bias_update_rate``.
        """
        if self.expert_bias is None or self.tokens_per_expert is None or self.bias_update_rate is None:
            raise RuntimeError("the router counts no tokens; give it a bias_update_rate such as 0.001")
        moe_update_expert_bias_(self.expert_bias, self.tokens_per_expert, self.bias_update_rate, group)
        self.tokens_per_expert.zero_()

    def _loss(self, logits: Tensor, assigned: Tensor) -> Tensor:
        loss = logits.new_zeros(())
        if self.aux_loss_coeff:
            _, scores = fused_compute_score_for_moe_aux_loss(logits, self.topk, self.score_function)
            loss = loss + fused_moe_aux_loss(
                scores, assigned, max(len(logits), 1), self.num_experts, self.topk, self.aux_loss_coeff
            )
        return loss + moe_z_loss(logits, self.z_loss_coeff) if self.z_loss_coeff else loss
