"""``_decode`` and ``_gemm_operand`` take the numerics they are given: operators choose, kernels and reference agree."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from recipes import E4M3
from reference.checks import assert_bitwise
from torch import Tensor

import narrowcast as nc
from narrowcast import functional, reference

HYBRID = nc.HybridQuantizer(
    rowwise_quantizer=nc.MXFP8Quantizer(E4M3), columnwise_quantizer=nc.Float8CurrentScalingQuantizer(E4M3)
)
QUANTIZERS = {
    "current": nc.Float8CurrentScalingQuantizer(E4M3),
    "mxfp8": nc.MXFP8Quantizer(E4M3),
    "block_1d": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "block_2d": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
    "nvfp4": nc.NVFP4Quantizer(),
    "nvfp4_rht": nc.NVFP4Quantizer(with_rht=True),
    "nvfp4_row_scaled": nc.NVFP4Quantizer(row_scaled_nvfp4=True),
    "hybrid": HYBRID,
}


def counting() -> tuple[SimpleNamespace, list[str]]:
    """The reference's numerics, with a list of the decoders that were called."""
    called: list[str] = []

    def record(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Tensor:
            called.append(name)
            return getattr(reference.dequantize, name)(*args, **options)

        return call

    decoders = SimpleNamespace(**{name: record(name) for name in reference.dequantize.__all__})
    return SimpleNamespace(dequantize=decoders), called


def operands(name: str, shape: tuple[int, ...]) -> list[tuple[bool, list[Tensor], Any]]:
    storage = QUANTIZERS[name].replace(internal=True).quantize(torch.randn(shape).bfloat16())
    rows, columns = storage.rowwise_operand(), storage.columnwise_operand()
    return [(False, rows, storage._quantizer), (True, columns, storage._quantizer)]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_decodes_with_the_numerics_it_is_given(name: str) -> None:
    for columnwise, buffers, quantizer in operands(name, (48, 80)):
        numerics, called = counting()
        quantizer._decode(numerics, buffers, columnwise, torch.bfloat16)
        assert len(called) == 1
        quantizer._gemm_operand(numerics, buffers, columnwise, torch.bfloat16)
        scaled_after = name == "current" or (name == "hybrid" and columnwise)
        assert len(called) == (1 if scaled_after else 2), "codes without scale are a cast, all else a decoder"


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_reference_gives_a_fresh_tensor_of_the_dtype(name: str, dtype: torch.dtype) -> None:
    for shape in ((48, 80), (3, 5, 17), (0, 32)):
        for columnwise, buffers, quantizer in operands(name, shape):
            out = functional.dequantize(buffers, quantizer, columnwise, dtype, list(shape))
            wide = functional.dequantize(buffers, quantizer, columnwise, torch.float32, list(shape))
            assert out.shape == shape and out.dtype == dtype and out.is_contiguous()
            assert_bitwise(out, wide.to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_kernels_and_reference_decode_alike(name: str, device: torch.device) -> None:
    from narrowcast import kernels

    def decoded(
        numerics: ModuleType, quantizer: Any, buffers: list[Tensor], columnwise: bool
    ) -> list[Tensor]:
        operand = quantizer._gemm_operand(numerics, buffers, columnwise, torch.bfloat16)
        return [quantizer._decode(numerics, buffers, columnwise, torch.float16), operand.values]

    for shape in ((48, 80), (3, 5, 17), (130, 260)):
        for columnwise, buffers, quantizer in operands(name, shape):
            there = [buffer.to(device) for buffer in buffers]
            for a, b in zip(
                decoded(kernels, quantizer, there, columnwise),
                decoded(reference, quantizer, buffers, columnwise),
                strict=True,
            ):
                assert_bitwise(a, b, f"{name} {shape} {columnwise}")
