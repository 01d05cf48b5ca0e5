"""``narrowcast::begin_main_grad_``: what a ``main_grad`` holds from the last step goes once, with a first microbatch.

The forward says that its microbatch is the first. A layer that it calls twice contributes twice, and the contribution
that comes first in the backward, whichever it is, finds the gradient of the last step. So the backward remembers what
it has begun. This also holds in graphs: the operator asks when it runs.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from ..upstream.autograd import graph_task_id
from ._library import define

_REMEMBERED = 8
"""Backwards that may be inside of each other, as those of reentrant checkpoints are."""

NOT_RECOMPUTED = torch.full((), -1, dtype=torch.int64)
"""``recomputed_in`` of a forward that no backward recomputes."""

_begun: OrderedDict[int, set[int]] = OrderedDict()


running_backward = define(
    "running_backward(Tensor(a!) last) -> Tensor",
    lambda last: last.fill_(graph_task_id()).clone(),
    lambda last: torch.empty_like(last),
)
"""Return the number of the backward in which a graph's forward runs, int64 (); -1 if it runs in none.

Args:
    last: gets the number, too: the compiler would move an operator that writes nothing to the backward, which reads it.
"""


def _begin(main_grad: Tensor, weight: Tensor, recomputed_in: Tensor) -> None:
    outer = int(recomputed_in)
    backward = graph_task_id() if outer == -1 else outer
    begun = _begun.setdefault(backward, set())
    while len(_begun) > _REMEMBERED:
        _begun.popitem(last=False)
    if backward == -1 or weight.data_ptr() not in begun:
        begun.add(weight.data_ptr())
        main_grad.zero_()


begin_main_grad_ = define(
    "begin_main_grad_(Tensor(a!) main_grad, Tensor weight, Tensor recomputed_in) -> ()",
    _begin,
    lambda main_grad, weight, recomputed_in: None,
)
"""Set ``main_grad`` to zero, unless the running backward has done so already.

Args:
    weight: whose gradient it is, or another tensor that stays where it is; its memory tells one from another.
    recomputed_in: int64 (), the number of the backward in which the forward is recomputed; -1 if it is not.
"""
