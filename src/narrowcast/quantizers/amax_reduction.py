"""Quantizers whose scale comes from an amax of the whole tensor, which ranks that hold parts of it can share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from ..functional import amax_to_share, quantize
from ..functional.collectives import group_name, largest_of
from .quantizer import Quantizer
from .value import _rebuild_quantizer


class AmaxReducing(Quantizer):
    """Base of the formats that can reduce their amax over a process group.

    The group comes with each call to ``quantize``: it is no part of a value, and no tensor's quantizer holds it. A
    quantizer that reduces does not quantize from the tensor alone: as under delayed scaling, the operator is given what
    was found outside.
    """

    with_amax_reduction: bool

    def _reduction_group(self, given: Any) -> Any:
        if not self.with_amax_reduction and given is not None:
            raise ValueError(
                f"{type(self).__qualname__} got amax_reduction_group and has with_amax_reduction=False; use "
                "quantizer.replace(with_amax_reduction=True), or leave the group out"
            )
        if not self.with_amax_reduction:
            return None
        if not self._shares_amax:
            raise ValueError(
                f"{type(self).__qualname__} has with_amax_reduction=True and an _encode of its own, which takes no "
                "amax from outside; use with_amax_reduction=False, or define _encode_scaled and set _shares_amax = True"
            )
        group = getattr(self, "amax_reduction_group", None) if given is None else given
        if group is None:
            raise ValueError(
                f"{type(self).__qualname__} has with_amax_reduction=True and got no process group; pass "
                "amax_reduction_group to quantize, torch.distributed.group.WORLD for all ranks"
            )
        return group

    def _is_delayed(self) -> bool:
        return self.with_amax_reduction

    def _check_alone(self) -> None:
        """Refuse to quantize from the tensor alone.

        Raises:
            ValueError: the amax is to be reduced.
        """
        if self.with_amax_reduction:
            raise ValueError(
                f"{shown(self)} reduces its amax over a process group; call its quantize with amax_reduction_group, "
                "or use with_amax_reduction=False"
            )

    def _reduced_buffers(self, tensor: Tensor, group: Any) -> list[Tensor]:
        name, seed = group_name(group, "amax_reduction_group"), self._seed(tensor)
        reduced = largest_of(amax_to_share(tensor, self, seed), name)
        return quantize(tensor, self, None, reduced, seed)

    def _storage_scalars(self, dtype: torch.dtype) -> dict[str, Any]:
        own = self._without_reduction()
        own._seal()  # a tensor is read by it
        return {"quantizer": own, "fake_dtype": dtype}

    def _without_reduction(self) -> Quantizer:
        # not in a graph: what holds a group is no value
        if getattr(self, "amax_reduction_group", None) is not None:
            kept = {name: value for name, value in vars(self).items() if name != "amax_reduction_group"}
            return _rebuild_quantizer(type(self), tuple({**kept, "with_amax_reduction": False}.items()))
        return self.replace(with_amax_reduction=False) if self.with_amax_reduction else self
