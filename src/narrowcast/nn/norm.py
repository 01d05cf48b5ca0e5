"""``LayerNorm`` and ``RMSNorm``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._checks import tensor
from .._keywords import given_input
from ..autograd import normalize
from ..layers.norm import NormParameters
from ..layers.parameters import casts
from ..layers.tensor_parallel import local_part


class _Norm(NormParameters):
    def forward(self, inp: Tensor = None, **unknown: NoReturn) -> Tensor:  # type: ignore[assignment]
        """Normalize ``inp`` (*lead, K), or ``input`` as in torch.nn, over its last dim.

        Returns:
            the same shape, in the dtype of ``inp``, under torch.autocast in that of the autocast.
        """
        if unknown:
            inp = given_input(self, inp, unknown)
        if self._placed and hasattr(inp, "device_mesh"):  # under PyTorch's own style
            return self._on_local(inp)
        tensor("input", inp)
        if casts(inp):
            inp = inp.to(torch.get_autocast_dtype(inp.device.type))
        self.check_input(inp)
        weight, bias = self.weight, self.bias
        if self._placed:
            weight, bias = (None if own is None else local_part(own, True) for own in (weight, bias))
        return normalize(inp, weight, bias, self.settings)  # type: ignore[arg-type]

    def _on_local(self, inp: Any) -> Any:
        from torch.distributed.tensor import DTensor

        described = {"shape": inp.shape, "stride": inp.stride()}
        out = self.forward(inp.to_local())
        return DTensor.from_local(out, inp.device_mesh, inp.placements, run_check=False, **described)


class LayerNorm(_Norm, nn.LayerNorm):
    """y = (x - mean) / sqrt(variance + eps) * gamma + bias over the last dim, with fp32 statistics.

    Args:
        normalized_shape: size K of the last dim.
        eps: added to the variance.
        zero_centered_gamma: the weight holds gamma - 1.
        device: device of the parameters; default: the accelerator, or the CPU without one.
        dtype, params_dtype: dtype of the parameters; default: torch's default dtype.
        hidden_size: the older name of ``normalized_shape``.
        sequence_parallel: set this attribute on the parameters: the input is a row shard, and their gradients cover the
            rows of one process until they are summed. None sets nothing.
    Raises:
        ValueError: no size, two sizes, or more than one dim; in forward another last dim.
        RuntimeError: in forward, the input is on another device.
        TypeError: in forward, the dtype differs outside ``torch.autocast``, unless the parameters are fp32, or is not
            fp32, bf16 or fp16.
    """

    _normalization = "LayerNorm"


class RMSNorm(_Norm, nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * gamma over the last dim, with fp32 statistics; there is no bias.

    Arguments and errors are those of :class:`LayerNorm`.
    """

    _normalization = "RMSNorm"
