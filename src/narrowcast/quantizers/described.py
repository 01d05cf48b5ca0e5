"""Quantizers of tensors that are put together from buffers, by the keywords of Transformer Engine's constructors."""

from __future__ import annotations

from typing import Any

from .._checks import shown
from .float8 import Float8CurrentScalingQuantizer
from .float8_blockwise import Float8BlockQuantizer
from .mx import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer
from .quantizer import Quantizer

_KINDS: dict[str, type[Quantizer]] = {
    "Float8Tensor": Float8CurrentScalingQuantizer,
    "MXFP8Tensor": MXFP8Quantizer,
    "Float8BlockwiseQTensor": Float8BlockQuantizer,
    "NVFP4Tensor": NVFP4Quantizer,
}
_FIELDS = {"fp8_dtype": "dtype", "fp4_dtype": "dtype", "is_2D_scaled": "block_scaling_dim"}


def quantizer_of(
    name: str, quantizer: Any, options: dict[str, Any], directions: dict[str, bool]
) -> Quantizer:
    """Return the quantizer of a tensor that is described by keywords.

    Args:
        name: of the tensor's or the storage's class.
        quantizer: the one that was given, or None.
        options: ``fp8_dtype``, ``fp4_dtype``, ``is_2D_scaled``, or a field of the quantizer.
        directions: which of the two there are buffers of.
    Raises:
        TypeError: an unknown keyword, or a class whose quantizer must be given.
        ValueError: a keyword that the quantizer contradicts.
    """
    fields = {_FIELDS.get(option, option): value for option, value in options.items() if value is not None}
    if "block_scaling_dim" in fields:
        fields["block_scaling_dim"] = 2 if fields["block_scaling_dim"] else 1
    if quantizer is None:
        kind = _KINDS.get(name.removesuffix("Storage"))
        element = fields.pop("dtype", None)
        if kind is None or (element is None and kind is not NVFP4Quantizer):
            raise TypeError(f"{name} needs quantizer=, which says how to read its buffers")
        described: Any = kind(*([] if element is None else [element]), **directions)
    else:
        described = quantizer
    unknown = sorted(fields.keys() - vars(described).keys())
    if unknown:
        raise TypeError(f"{name} got unknown buffers {unknown}; it has no such buffers or fields")
    if quantizer is None:
        return described.replace(**fields)
    for field, value in fields.items():
        if getattr(described, field) != type(getattr(described, field))(value):
            raise ValueError(
                f"{name}: {field} is {shown(value)}, but the quantizer given has {shown(getattr(described, field))}"
            )
    return described
