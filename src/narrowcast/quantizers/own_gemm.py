"""Quantizers that multiply by themselves: classes of users with a ``qgemm``, as a custom recipe's factory returns them.

A layer does not know what such a quantizer makes. It keeps the operands as they are, and the GEMM has the two
quantizers quantize them and the left one multiply what they made.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional.gemm import COLUMNWISE
from ..functional.quantizer_value import quantizer_of_text
from .identity import IdentityQuantizer
from .quantizer import Quantizer


class GEMMType(enum.Enum):
    """The GEMM of a linear layer that a ``qgemm`` computes."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class MMParams:
    """Options of the GEMM. ``out_dtype``: of the result; ``use_split_accumulator``: without fast accumulation."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


class OwnGemmQuantizer(IdentityQuantizer):
    """A stand-in for a user's quantizer in the operators: it keeps tensors unchanged.

    The user's class has, beside what every :class:`Quantizer` has::

        quantize(tensor) -> object with data, scale, data_t, scale_t: the matrix and its transpose, contraction last
        qgemm(qx, qw, m_params, out_dtype, sx, sw, bias, out, accumulate, gemm_type, qresult_x, qresult_w) -> qx qw^T

    Args:
        own: the user's quantizer. Where its class is registered as a value, this one is, too, and compiles; else it is
            an :class:`EagerOwnGemmQuantizer`.
    """

    own_value: str
    own = None  # derived from its value: a quantizer's fields are plain
    _multiplies = True

    def __new__(cls, own: Any = None) -> OwnGemmQuantizer:
        eager = isinstance(own, Quantizer) and not own._value_text()
        return object.__new__(EagerOwnGemmQuantizer if eager and cls is OwnGemmQuantizer else cls)

    def __init__(self, own: Quantizer) -> None:
        own._seal()
        self._keep(own)
        IdentityQuantizer.__init__(self)

    def _keep(self, own: Quantizer) -> None:
        self._freeze(own_value=own._class_and_value())

    def _rebuild_derived_state(self) -> None:
        self._freeze(own=quantizer_of_text(self.own_value))

    def _multiply(
        self, kind: str, left: list[Tensor], right: list[Tensor], right_quantizer: Any, bias: Tensor | None,
        dtype: torch.dtype, fast_accumulation: bool,
    ) -> Tensor:  # fmt: skip
        own: Any = self.own
        pairs = [
            (quantizer.quantize(buffers[0].reshape(-1, buffers[0].shape[-1])), columnwise)
            for quantizer, buffers, columnwise in zip(
                (own, right_quantizer.own), (left, right), COLUMNWISE[kind], strict=True
            )
        ]
        (x, sx), (w, sw) = (
            (q.data_t, q.scale_t) if columnwise else (q.data, q.scale) for q, columnwise in pairs
        )
        return own.qgemm(
            x,
            w,
            MMParams(dtype, not fast_accumulation),
            dtype,
            sx,
            sw,
            None if bias is None else bias.to(dtype),
            out=None,
            accumulate=False,
            gemm_type=GEMMType(kind),
            qresult_x=pairs[0][0],
            qresult_w=pairs[1][0],
        )


class EagerOwnGemmQuantizer(OwnGemmQuantizer):
    """For a quantizer that is not a value. It holds it uncopied, and is not a value either."""

    def _keep(self, own: Quantizer) -> None:
        self._freeze(own=own)

    def _rebuild_derived_state(self) -> None:
        pass

    @classmethod
    def _not_a_value(cls) -> str:
        return (
            "a quantizer with a qgemm of its own is not a compile-time value: register its class with "
            "narrowcast.dynamo.register_value_opaque_quantizer"
        )


def with_own_gemm(quantizers: list[Quantizer], name: str) -> list[Quantizer]:
    """Return the quantizers of a layer's operands, those of users that multiply by themselves as the operators take
    them.

    Raises:
        ValueError: some of them do, and some do not.
    """
    own = [callable(getattr(type(quantizer), "qgemm", None)) for quantizer in quantizers]
    if not any(own):
        return quantizers
    if not all(own):
        kinds = ", ".join(type(quantizer).__name__ for quantizer in quantizers)
        raise ValueError(
            f"input, weight and grad_output of {name or 'a layer'} are quantized by {kinds}; a qgemm multiplies what "
            "quantizers with one made: return such for all three, or for none"
        )
    return [OwnGemmQuantizer(quantizer) for quantizer in quantizers]
