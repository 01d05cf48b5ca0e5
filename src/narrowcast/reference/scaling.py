"""The scale rule shared by per-tensor current scaling and FP8 block scaling, and the amax it starts from.

NaN elements never take part in an amax: a NaN in the data must stay one NaN in the result, not a lost tensor. An
infinity does, and what shares its scale is lost with it: the scale is 0 and its reciprocal infinite, so that all of it
decodes to NaN instead of to numbers. A plain ``amax`` propagates NaN, so magnitudes are compared as integers, whose
order is the order of the floats: adding the number of NaN patterns makes infinity the largest integer and wraps every
NaN to a negative one.
"""

import torch
from torch import Tensor

from ..formats import FLT_MAX

_INTEGER_TYPE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_INFINITY_BITS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor.

    Args:
        x: fp32, bf16 or fp16, any shape and strides.

    Raises:
        TypeError: another dtype.

    Numerics:
        fp32, shape [1], exact; NaN elements are ignored, an infinity gives infinity, an empty tensor 0.
    """
    order = ordered_magnitude(x)
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return magnitude_from_order(order.amax().reshape(1), x.dtype)


def ordered_magnitude(x: Tensor) -> Tensor:
    """Return integers in the order of ``|x|``, with every NaN below zero.

    Args:
        x: fp32, bf16 or fp16, any shape.

    Raises:
        TypeError: another dtype.

    Numerics:
        int32 for fp32, int16 otherwise. Take maxima over them, then ``magnitude_from_order``.
    """
    if x.dtype not in _INTEGER_TYPE:
        raise TypeError(f"cannot quantize a tensor of {x.dtype}; use float32, bfloat16 or float16")
    integer = _INTEGER_TYPE[x.dtype]
    top = torch.iinfo(integer).max
    return x.detach().view(integer).bitwise_and(top).add_(top - _INFINITY_BITS[x.dtype])


def magnitude_from_order(order: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 magnitudes behind integers of ``ordered_magnitude``.

    Args:
        order: int32 or int16, any shape.
        dtype: the dtype of the tensor that was ordered.

    Raises:
        KeyError: a dtype that ``ordered_magnitude`` refuses.

    Numerics:
        fp32, exact; the order of a NaN (all elements of a group were NaN) gives 0.
    """
    offset = torch.iinfo(_INTEGER_TYPE[dtype]).max - _INFINITY_BITS[dtype]
    return order.clamp(min=offset).sub_(offset).view(dtype).float()


def scale_from_amax(
    amax: Tensor, fp8_max: float, *, power_2: bool, epsilon: float, overflow: float
) -> Tensor:
    """Return the encoding scale that maps an amax to the largest FP8 value.

    Args:
        amax: fp32 >= 0, any shape.
        fp8_max: the largest value of the element format.
        power_2: round the scale down to a power of two.
        epsilon: lower bound for amax.
        overflow: the scale used where the quotient exceeds fp32 (the largest fp32 value for per-tensor
            scaling, the largest value of the input dtype for block scaling).

    Numerics:
        fp32, same shape: ``RN(fp8_max / max(amax, epsilon))`` by a true division; 1 where amax is 0 or NaN, 0
        where it is infinite.
    """
    if epsilon > 0.0:
        amax = amax.clamp(min=epsilon)
    # A Python number divided by a tensor is a multiplication by the reciprocal in PyTorch, not a division.
    scale = torch.full_like(amax, fp8_max).div_(amax)
    scale.nan_to_num_(nan=1.0, posinf=overflow)
    if power_2:
        scale.view(torch.int32).bitwise_and_(-0x800000)
    return scale.masked_fill_(amax == 0.0, 1.0)


def scale_or_first(scale: Tensor, unseen: float, amax: Tensor) -> Tensor:
    """Return scales of delayed scaling, and instead of 0, the scale of a tensor of which nothing was seen, the first.

    Args:
        scale: fp32, any shape.
        unseen: the first scale; or -m for the scale that maps the tensor's own amax to m.
        amax: fp32 >= 0, same shape.

    Numerics:
        fp32, same shape. For -m it is what ``scale_from_amax`` returns for m instead of an FP8 maximum.
    """
    first = torch.full_like(amax, abs(unseen))
    if unseen < 0.0:
        first = first.div_(amax).nan_to_num_(nan=1.0, posinf=FLT_MAX).masked_fill_(amax == 0.0, 1.0)
    return torch.where(scale == 0.0, first, scale)


def reciprocal(scale: Tensor) -> Tensor:
    """Return ``RN(1 / scale)`` in fp32, subnormal results kept.

    Args:
        scale: fp32, any shape.

    Numerics:
        A true division; the result multiplies when decoding.
    """
    return torch.ones_like(scale).div_(scale)
