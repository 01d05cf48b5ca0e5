"""What GEMMs read, made from what is kept: column-wise buffers from row-wise ones, as the quantizer makes them."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from narrowcast.autograd.gemms import transposed

E4M3 = nc.DType.kFloat8E4M3
QUANTIZERS = {
    "tensor": nc.Float8CurrentScalingQuantizer(E4M3, rowwise=True, columnwise=True),
    "tiles": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
    "mxfp8 tiles": nc.MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4 tiles": nc.NVFP4Quantizer(with_2d_quantization=True),
}


RAGGED = [(name, shape) for name in QUANTIZERS if name != "nvfp4 tiles" for shape in ((300, 513), (5, 640))]
WHOLE = [(name, shape) for name in QUANTIZERS for shape in ((512, 1024), (128, 128), (48, 528))]


@pytest.mark.parametrize(("name", "shape"), WHOLE + RAGGED)
def test_transposed_buffers_are_those_of_the_quantizer(name: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = QUANTIZERS[name].quantize(x)
    made = transposed(whole.rowwise_operand(), shape[1])
    for ours, theirs in zip(made, whole.columnwise_operand(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()  # the GEMM of a GPU reads the scales by their strides
