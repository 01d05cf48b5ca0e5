"""The quantizers that tests run over, and what they share for comparing quantized tensors."""

from __future__ import annotations

from typing import Any

import torch
from reference.checks import assert_bitwise
from torch import Tensor

import narrowcast as nc
from narrowcast.quantizers import Float8GroupsQuantizer, Float8RowsQuantizer

E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2
E2M3, E3M2 = nc.DType.kFloat6E2M3, nc.DType.kFloat6E3M2

ONE_OF_EACH: dict[str, nc.Quantizer] = {
    "current": nc.Float8CurrentScalingQuantizer(E4M3),
    "mxfp8": nc.MXFP8Quantizer(E4M3),
    "block": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "mxfp6": nc.MXFP6Quantizer(E2M3),
    "mxfp4": nc.MXFP4Quantizer(),
    "nvfp4": nc.NVFP4Quantizer(),
    "identity": nc.IdentityQuantizer(),
}
VARIANTS: dict[str, nc.Quantizer] = {
    **ONE_OF_EACH,
    "current e5m2": nc.Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True, amax_epsilon=0.5),
    "mxfp8 2d": nc.MXFP8Quantizer(E5M2, with_2d_quantization=True),
    "mxfp6 2d": nc.MXFP6Quantizer(E3M2, with_2d_quantization=True),
    "mxfp4 2d": nc.MXFP4Quantizer(with_2d_quantization=True),
    "block 1d": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "block fp32 scales": nc.Float8BlockQuantizer(
        E5M2, rowwise=True, columnwise=True, force_pow_2_scales=False, amax_epsilon=0.25
    ),
    "rows": Float8RowsQuantizer(E4M3, rule="reciprocal"),
    "rows for training": Float8RowsQuantizer(E4M3, rule="training_power_2", amax_epsilon=1e-12),
    "groups": Float8GroupsQuantizer(E4M3, rule="factors", amax_epsilon=1e-10),
    "nvfp4 2d": nc.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 rht": nc.NVFP4Quantizer(with_rht=True),
    "nvfp4 rht without signs": nc.NVFP4Quantizer(with_rht=True, with_random_sign_mask=False),
    "nvfp4 stochastic": nc.NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    "nvfp4 row-scaled": nc.NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4 4over6": nc.NVFP4Quantizer(
        nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE", with_2d_quantization=True
    ),
    "identity fp32": nc.IdentityQuantizer(dtype=torch.float32),
}
USAGES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
SHAPES = [(64, 96), (33, 50), (2, 3, 50), (1, 16), (16, 1)]


def delayed(scale: float = 2.0, **options: Any) -> nc.Float8Quantizer:
    """A delayed-scaling quantizer with state of its own."""
    scales, amax = torch.tensor([scale], dtype=torch.float32), torch.zeros(1, dtype=torch.float32)
    return nc.Float8Quantizer(scales, amax, options.pop("dtype", E4M3), **options)


def quantize(quantizer: nc.Quantizer | None, x: Tensor) -> Any:
    """Quantize with a fixed seed: stochastic rounding repeats."""
    assert quantizer is not None
    torch.manual_seed(3)
    return quantizer.quantize(x)


def buffers(tensor: Any) -> dict[str, Tensor]:
    """The buffers that are there, by name, in flatten order."""
    found = {name: getattr(tensor, name) for name, _ in tensor._FLATTEN_TENSOR_BUFFERS}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


def assert_same_buffers(actual: Any, expected: Any) -> None:
    """The same buffers with the same bytes."""
    ours, theirs = buffers(actual), buffers(expected)
    assert list(ours) == list(theirs)
    for name, buffer in ours.items():
        assert_bitwise(buffer, theirs[name], name)


def assert_own_memory(*tensors: Any) -> None:
    """No buffer shares memory with another."""
    pointers = [b.untyped_storage().data_ptr() for t in tensors for b in buffers(t).values() if b.numel()]
    assert len(pointers) == len(set(pointers)), "two buffers share memory"
