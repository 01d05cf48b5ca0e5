"""SGD under Transformer Engine's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._checks import flags, function
from .arguments import check_rate, check_state_dict, checked_parameters


class FusedSGD(torch.optim.SGD):
    """``torch.optim.SGD`` with Transformer Engine's options; use torch's if you need none of them.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as in PyTorch; ``lr`` is required.
        wd_after_momentum: decay the weights by ``lr * weight_decay`` of themselves, past the momentum.
        materialize_master_grads: without effect; it was for Apex's AMP.
        set_grad_none: whether ``zero_grad()`` drops gradients; None means that it does.
    Raises:
        ValueError: no or a negative ``lr``, a negative momentum or decay, nesterov without momentum or with dampening.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        if lr is None:
            raise ValueError("FusedSGD needs a learning rate; pass lr=")
        for name, value in (("lr", lr), ("momentum", momentum), ("dampening", dampening)):
            check_rate(name, value)
        check_rate("weight_decay", weight_decay)
        flags(nesterov=nesterov, wd_after_momentum=wd_after_momentum, set_grad_none=set_grad_none)
        if nesterov and not (momentum and not dampening):
            raise ValueError(
                f"nesterov is {nesterov} with momentum {momentum} and dampening {dampening}; it needs a momentum "
                "above 0 and no dampening"
            )
        params = checked_parameters(params)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.wd_after_momentum = wd_after_momentum
        self.set_grad_none = set_grad_none is not False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load PyTorch's state dict.

        Raises:
            TypeError: ``state_dict`` is none, or has state that is no tensor.
            ValueError: it lacks a part, or is of other groups or shapes.
        """
        check_state_dict(state_dict, self.param_groups)
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or zero them, as ``set_grad_none`` says unless told here."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step; return the result of ``closure``."""
        if closure is not None:
            function("closure", closure, "a function that computes the loss and returns it")
        if not self.wd_after_momentum:
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays):
                # Past the momentum the decay is a multiplication of the weights, and a step of SGD without it.
                with_gradient = [p for p in group["params"] if p.grad is not None]
                if decay and with_gradient:
                    torch._foreach_mul_(with_gradient, 1.0 - group["lr"] * decay)
                group["weight_decay"] = 0.0
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays):
                group["weight_decay"] = decay
        return loss
