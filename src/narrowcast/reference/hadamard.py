"""The random Hadamard transform that NVFP4 applies to groups of 16 tokens before column-wise quantization.

``R = diag(d) H / 4`` with ``H[i, j] = (-1)**popcount(i & j)`` is orthogonal, so that it cancels in the weight
gradient's product over tokens. The signs ``d`` are a fixed constant.

The sum of sixteen terms is taken as four rounds of additions and subtractions at distances 8, 4, 2, 1. Fixing
the order makes the result the same on every device and for every library underneath.
"""

import torch
from torch import Tensor

from ..formats import NVFP4_BLOCK, RHT_SIGN_MASK

SIGN_MASK = RHT_SIGN_MASK
_ORTHONORMAL = 0.25


def signs(random_signs: bool, device: torch.device | str) -> Tensor:
    """Return the diagonal ``d``.

    Args:
        random_signs: use the fixed sign pattern; else all signs are plus.
        device: where to build it.

    Numerics:
        fp32, shape [16], entries +-1; bit i of ``SIGN_MASK`` set means minus.
    """
    index = torch.arange(NVFP4_BLOCK, device=device)
    bits = (SIGN_MASK >> index) & 1 if random_signs else torch.zeros_like(index)
    return (1 - 2 * bits).float()


def rht_matrix(random_signs: bool, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the rotation ``R`` for ``y = group @ R``.

    Args:
        random_signs: use the fixed sign pattern; else all signs are plus.
        device: where to build it.
        dtype: dtype of the result; bf16 holds the entries exactly.

    Numerics:
        Shape [16, 16], entries +-0.25.
    """
    identity = torch.diag(signs(random_signs, device)).unsqueeze(0)
    return _butterflies_(identity.mul_(_ORTHONORMAL)).squeeze(0).t().contiguous().to(dtype)


def rotate_rows(
    x: Tensor, random_signs: bool, *, scratch: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Rotate groups of 16 rows.

    Args:
        x: fp32, shape (M, K), M a multiple of 16.
        random_signs: use the fixed sign pattern; else all signs are plus.
        scratch: fp32 of the same shape, contiguous, overwritten; None to allocate it.
        out: fp32 of the same shape, contiguous, receives the result and may be ``x``; None to allocate it.

    Raises:
        RuntimeError: M is not a multiple of 16.

    Numerics:
        fp32, the same shape, every value rounded to bf16 after fp32 additions.
    """
    groups = x.view(x.shape[0] // NVFP4_BLOCK, NVFP4_BLOCK, x.shape[1])
    diagonal = signs(random_signs, x.device).mul_(_ORTHONORMAL).view(NVFP4_BLOCK, 1)
    scaled = torch.mul(groups, diagonal, out=None if out is None else out.view(groups.shape))
    rotated = _butterflies_(scaled, scratch)
    return rotated.copy_(rotated.to(torch.bfloat16)).view(x.shape)


def unrotate_rows(y: Tensor, random_signs: bool) -> Tensor:
    """Undo ``rotate_rows`` up to rounding.

    Args:
        y: fp32, shape (M, K), M a multiple of 16.
        random_signs: the setting of the rotation.

    Raises:
        RuntimeError: M is not a multiple of 16.

    Numerics:
        A new fp32 tensor of the same shape, not rounded to bf16.
    """
    groups = y.view(y.shape[0] // NVFP4_BLOCK, NVFP4_BLOCK, y.shape[1])
    diagonal = signs(random_signs, y.device).view(NVFP4_BLOCK, 1)
    return _butterflies_(groups * _ORTHONORMAL).mul_(diagonal).view(y.shape)


def _butterflies_(groups: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Multiply by ``H`` along the middle dimension of (groups, 16, K), in the memory of ``groups``."""
    source, target = groups, torch.empty_like(groups) if scratch is None else scratch
    n, _, k = groups.shape
    for distance in (8, 4, 2, 1):
        halves = (n, NVFP4_BLOCK // (2 * distance), 2, distance, k)
        pairs, out = source.view(halves), target.view(halves)
        torch.add(pairs[:, :, 0], pairs[:, :, 1], out=out[:, :, 0])
        torch.sub(pairs[:, :, 0], pairs[:, :, 1], out=out[:, :, 1])
        source, target = target, source
    return source
