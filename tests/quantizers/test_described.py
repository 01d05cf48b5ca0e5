"""Quantizers that are described by the keywords of Transformer Engine's constructors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.quantizers.described import quantizer_of

from .catalog import E4M3, E5M2

BOTH = {"rowwise": True, "columnwise": True}


def described(name: str, quantizer: Any = None, directions: dict[str, bool] = BOTH, **options: Any) -> Any:
    return quantizer_of(name, quantizer, options, directions)


@pytest.mark.parametrize("suffix", ["", "Storage"])
def test_a_class_and_its_element_name_a_quantizer(suffix):
    assert described(f"Float8Tensor{suffix}", fp8_dtype=E5M2) == nc.Float8CurrentScalingQuantizer(E5M2)
    assert described(f"MXFP8Tensor{suffix}", fp8_dtype=E4M3) == nc.MXFP8Quantizer(E4M3)
    assert described(f"NVFP4Tensor{suffix}") == nc.NVFP4Quantizer()
    assert described(f"NVFP4Tensor{suffix}", fp4_dtype=nc.DType.kFloat4E2M1) == nc.NVFP4Quantizer()


@pytest.mark.parametrize("is_2d, dim", [(True, 2), (False, 1)])
def test_blocks_of_one_or_two_dims(is_2d, dim):
    made = described("Float8BlockwiseQTensor", fp8_dtype=E4M3, is_2D_scaled=is_2d)
    wanted = nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)
    assert made == wanted
    assert described("Float8BlockwiseQTensor", wanted, fp8_dtype=E4M3, is_2D_scaled=is_2d) is wanted
    with pytest.raises(
        ValueError, match=f"block_scaling_dim is {3 - dim}, but the quantizer given has {dim}"
    ):
        described("Float8BlockwiseQTensor", wanted, is_2D_scaled=not is_2d)


def test_directions_are_those_that_there_are_buffers_of():
    made = described("MXFP8Tensor", directions={"rowwise": False, "columnwise": True}, fp8_dtype=E4M3)
    assert made.get_usages() == {"rowwise": False, "columnwise": True}


@pytest.mark.parametrize("kept", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("cls", [nc.MXFP8Tensor, nc.MXFP8TensorStorage])
def test_buffers_and_keywords_make_the_tensor_that_they_came_from(cls, kept):
    quantizer = nc.MXFP8Quantizer(E4M3, rowwise=kept != "columnwise", columnwise=kept != "rowwise")
    tensor = quantizer.replace(internal=cls is nc.MXFP8TensorStorage).quantize(torch.randn(32, 64))
    given = {name: value for name, value in tensor.get_metadata().items() if name != "quantizer"}
    made = cls(**{**given, "fp8_dtype": E4M3})
    assert type(made) is cls and made._quantizer.get_usages() == quantizer.get_usages()
    assert torch.equal(made.dequantize(), tensor.dequantize())
    with pytest.raises(TypeError, match="needs quantizer="):
        cls(**given, with_gemm_swizzled_scales=False, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="stored unswizzled here"):
        cls(**given, fp8_dtype=E4M3, with_gemm_swizzled_scales=True)


def test_fields_of_the_quantizer():
    made = described("MXFP8Tensor", fp8_dtype=E4M3, with_2d_quantization=True, dtype=None)
    assert made == nc.MXFP8Quantizer(E4M3, with_2d_quantization=True)


@pytest.mark.parametrize(
    "name", ["Float8Tensor", "MXFP8TensorStorage", "Float8BlockwiseQTensor", "IdentityTensor"]
)
def test_what_does_not_say_how_to_read_the_buffers(name):
    with pytest.raises(TypeError, match=rf"{name} needs quantizer=, which says how to read its buffers"):
        described(name)


def test_a_class_without_a_quantizer_of_its_own_needs_one():
    with pytest.raises(TypeError, match="HybridQuantizedTensor needs quantizer="):
        described("HybridQuantizedTensor", fp8_dtype=E4M3)


def test_what_contradicts_or_is_unknown():
    given = nc.MXFP8Quantizer(E4M3)
    assert described("MXFP8Tensor", given, fp8_dtype=E4M3) is given
    with pytest.raises(
        ValueError, match="MXFP8Tensor: dtype is .*kFloat8E5M2.*, but the quantizer given has .*E4M3"
    ):
        described("MXFP8Tensor", given, fp8_dtype=E5M2)
    for quantizer in (None, given):
        with pytest.raises(TypeError, match=r"MXFP8Tensor got unknown buffers \['one', 'two'\]"):
            described("MXFP8Tensor", quantizer, fp8_dtype=E4M3, two=1, one=2)
