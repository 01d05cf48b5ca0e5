"""What the operators compute; that they keep their contracts is test_opcheck's business."""

from __future__ import annotations

import pytest
import torch
from recipes import E4M3, E5M2
from torch import Tensor

import narrowcast as nc
from narrowcast import functional
from narrowcast.functional.quantize import overwrite
from narrowcast.quantizers import DelayedFloat8Quantizer

SHAPES = [(32, 64), (1, 16), (7, 5), (3, 5, 40), (0, 32), (130, 1)]
QUANTIZERS = {
    "current": nc.Float8CurrentScalingQuantizer(E4M3),
    "current_e5m2_pow2": nc.Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True),
    "mxfp8": nc.MXFP8Quantizer(E4M3),
    "mxfp8_2d": nc.MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "block_1d": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "block_2d": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
    "nvfp4": nc.NVFP4Quantizer(),
    "nvfp4_2d": nc.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_rht": nc.NVFP4Quantizer(with_rht=True),
    "nvfp4_row_scaled": nc.NVFP4Quantizer(row_scaled_nvfp4=True),
    "identity": nc.IdentityQuantizer(),
}
USAGES = [(True, True), (True, False), (False, True)]


def data(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_dequantize_gives_the_logical_shape(name: str) -> None:
    for shape in SHAPES:
        x = data(shape)
        storage = QUANTIZERS[name].replace(internal=True).quantize(x)
        for columnwise, operand in ((False, storage.rowwise_operand()), (True, storage.columnwise_operand())):
            arguments = (operand, storage._quantizer, columnwise, torch.float32, list(shape))
            out = functional.dequantize(*arguments)
            assert out.shape == x.shape
            if name != "identity" and x.numel():
                tolerance = 0.4 if name.startswith("nvfp4") else 0.14
                assert (out - x.float()).abs().max() <= tolerance * x.float().abs().max()


@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES)
def test_quantize_delayed_raises_its_slot_of_the_amax(rowwise: bool, columnwise: bool) -> None:
    x, scale = data((24, 40)), torch.tensor([1.0, 8.0, 1.0])
    quantizer = DelayedFloat8Quantizer(E4M3, 1, rowwise=rowwise, columnwise=columnwise)
    amax = torch.tensor([5.0, 0.5, 7.0])
    out = functional.quantize(x, quantizer, None, scale, amax)
    assert amax.tolist() == [5.0, x.abs().max().item(), 7.0]
    assert out[-1].item() == 1 / 8
    expected = [x.shape] * rowwise + [x.t().shape] * columnwise
    assert [codes.shape for codes in out[:-1]] == expected
    functional.quantize(x * 0.01, quantizer, None, scale, amax)
    assert amax[1] == x.abs().max(), "a smaller tensor must not lower the amax"


def test_delayed_quantizers_without_state() -> None:
    x, scale, quantizer = data((24, 40)), torch.full((2,), 8.0), DelayedFloat8Quantizer(E4M3, 1)
    collected = functional.quantize(x, quantizer, None, scale, torch.zeros(2))
    silent = functional.quantize(x, quantizer, None, scale)
    assert all(torch.equal(a, b) for a, b in zip(silent, collected, strict=True))
    with pytest.raises(ValueError, match=r"scale is None, but .*slot=1.*pass the layer's fp32 scale vector"):
        functional.quantize(x, quantizer)


def test_overwriting_honours_the_noop_flag() -> None:
    quantizer = QUANTIZERS["current"]
    kept, new = data((16, 32)), data((16, 32))
    out, expected = functional.quantize(kept, quantizer), functional.quantize(new, quantizer)
    before = [t.clone() for t in out]
    overwrite(out, expected, torch.ones(1))
    assert all(torch.equal(a, b) for a, b in zip(out, before, strict=True))
    overwrite(out, expected, torch.zeros(1))
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_draw_seed_follows_the_generator() -> None:
    x = data((4, 4))
    torch.manual_seed(3)
    first, second = functional.draw_seed(x), functional.draw_seed(x)
    torch.manual_seed(3)
    assert torch.equal(first, functional.draw_seed(x)) and not torch.equal(first, second)


def test_stochastic_rounding_is_a_function_of_the_seed() -> None:
    quantizer, x = nc.NVFP4Quantizer(stochastic_rounding=True), data((64, 64))
    one, two = torch.tensor([11]), torch.tensor([12])
    first, again, other = (functional.quantize(x, quantizer, seed) for seed in (one, one, two))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0]) and torch.equal(first[1], other[1])
    with pytest.raises(ValueError, match="seed"):
        functional.quantize(x, quantizer)


def test_ambient_autocast_does_not_reach_the_numerics() -> None:
    x, quantizer = data((64, 64)), nc.NVFP4Quantizer(with_rht=True)
    plain = functional.quantize(x, quantizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = functional.quantize(x, quantizer)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


def test_compiled_forms_see_through_every_operator() -> None:
    """quantize -> dequantize under fullgraph with dynamic shapes equals eager."""
    for name, quantizer in QUANTIZERS.items():

        def roundtrip(x: Tensor, quantizer: nc.Quantizer = quantizer) -> Tensor:
            buffers = functional.quantize(x, quantizer.with_usage(columnwise=False))
            return functional.dequantize(buffers, quantizer, False, torch.float32, x.shape)

        torch._dynamo.reset()
        compiled = torch.compile(roundtrip, fullgraph=True, dynamic=True, backend="aot_eager")
        for shape in ((32, 64), (7, 40)):
            x = data(shape)
            assert torch.equal(compiled(x), roundtrip(x)), name
