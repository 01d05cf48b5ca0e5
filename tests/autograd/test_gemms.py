"""What GEMMs read, made from what is kept: column-wise buffers from row-wise ones, as the quantizer makes them."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from narrowcast.autograd import DelayedScales, LinearFwdArgs, LinearWgrad
from narrowcast.autograd.gemms import linear_forward
from narrowcast.recipe import linear_plan
from narrowcast.tensors import transposed

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


@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("needs_weight", [True, False])
def test_a_row_wise_input_is_enough_where_the_backward_reads_no_columns(override, needs_weight) -> None:
    """Only the weight gradient in low precision reads a quantized input column-wise."""
    recipe = nc.recipe.MXFP8BlockScaling(backward_override=override)
    plan = linear_plan(recipe, "", True, needs_weight, module_type="linear")
    args = LinearFwdArgs(plan, torch.bfloat16, DelayedScales(), None, LinearWgrad(), False)
    weight, x = torch.randn(64, 32, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16)
    quantizer = nc.MXFP8Quantizer(E4M3).replace(internal=True)
    rowwise, both = quantizer.with_usage(columnwise=False).quantize(x), quantizer.quantize(x)
    expected, saved, _ = linear_forward(weight, both, None, args)
    if needs_weight and override is None:
        assert len(saved.tensors) == 2 and saved.tensors[0] is both.columnwise_operand()[0]
        with pytest.raises(RuntimeError, match="without column-wise data.*columnwise=True"):
            linear_forward(weight, rowwise, None, args)
        return
    out, saved, _ = linear_forward(weight, rowwise, None, args)
    assert torch.equal(out, expected)
    kept = [buffer.data_ptr() for buffer in saved.tensors]
    assert kept == ([buffer.data_ptr() for buffer in rowwise.rowwise_operand()] if needs_weight else [])
