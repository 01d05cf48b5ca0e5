"""The golden vectors through the public interface: buffers of ``quantize`` and values of ``dequantize``, both ways."""

from __future__ import annotations

import golden_vectors
import pytest
import torch
from golden_vectors import Golden
from reference.checks import assert_bitwise

import narrowcast as nc

from .catalog import E4M3, E5M2

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
ROWWISE, COLUMNWISE = {"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}
FLOAT8 = golden_vectors.names("fp8_current", "fp8_delayed_e")
BLOCK_SCALED = golden_vectors.names("fp8_block", "mxfp8")
NVFP4 = golden_vectors.names("nvfp4", without=("nvfp4_rht_matrix", "nvfp4_sr_property"))


def float8_quantizer(golden: Golden, device: torch.device) -> nc.Quantizer:
    meta, dtype = golden.meta, FORMATS[golden.meta["format"]]
    if golden.name.startswith("fp8_delayed"):
        return nc.Float8Quantizer(golden["scale"].to(device), torch.zeros(1, device=device), dtype)
    return nc.Float8CurrentScalingQuantizer(
        dtype, force_pow_2_scales=meta["power_2_scale"], amax_epsilon=meta["amax_epsilon"]
    )


def block_quantizer(golden: Golden) -> nc.Quantizer:
    meta, dtype = golden.meta, FORMATS[golden.meta["format"]]
    if golden.name.startswith("mxfp8"):
        return nc.MXFP8Quantizer(dtype, with_2d_quantization=meta["two_d"])
    return nc.Float8BlockQuantizer(
        dtype,
        rowwise=True,
        columnwise=True,
        amax_epsilon=meta["amax_epsilon"],
        force_pow_2_scales=meta["power_2_scale"],
        block_scaling_dim=meta["block_scaling_dim"],
    )


def nvfp4_quantizer(golden: Golden) -> nc.NVFP4Quantizer:
    meta = golden.meta
    return nc.NVFP4Quantizer(
        with_rht=meta["rht"],
        with_2d_quantization=meta["two_d"],
        row_scaled_nvfp4=meta["row_scaled"],
        nvfp4_use_4over6=meta["four_six"] is not None,
        nvfp4_4over6_err_mode=meta["four_six"] or "MAE",
        nvfp4_e4m3_max=meta["e4m3_max"],
    )


@pytest.mark.parametrize("name", FLOAT8)
def test_float8(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    quantizer, x = float8_quantizer(golden, device), golden.input().to(device)
    expected = {"_data": "rowwise_data", "_transpose": "columnwise_data", "_scale_inv": "scale_inv"}
    both = quantizer.quantize(x)
    for usage, absent in (({}, ()), (ROWWISE, ("_transpose",)), (COLUMNWISE, ("_data",))):
        tensor = quantizer.with_usage(**usage).quantize(x)
        for buffer, key in expected.items():
            if buffer in absent:
                assert getattr(tensor, buffer) is None
            else:
                assert_bitwise(getattr(tensor, buffer).cpu(), golden[key], buffer)
        assert_bitwise(tensor.dequantize(dtype=torch.float32).cpu(), golden["dequant"], str(usage))
    if isinstance(quantizer, nc.Float8Quantizer):
        assert_bitwise(quantizer.amax.cpu(), golden["amax"], "amax")
    assert both.dtype == x.dtype and both.shape == x.shape


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_block_scaled(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    quantizer, x = block_quantizer(golden), golden.input().to(device)
    both = quantizer.quantize(x)
    for side, usage in (("rowwise", ROWWISE), ("columnwise", COLUMNWISE)):
        for tensor in (both, quantizer.with_usage(**usage).quantize(x)):
            for part in ("data", "scale_inv"):
                assert_bitwise(
                    getattr(tensor, f"_{side}_{part}").cpu(), golden[f"{side}_{part}"], f"{side} {part}"
                )
        values = quantizer.with_usage(**usage).quantize(x).dequantize(dtype=torch.float32)
        assert_bitwise(values.cpu(), golden[f"dequant_{side}"], f"{side} values")


@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    quantizer, x = nvfp4_quantizer(golden), golden.input().to(device)
    both = quantizer.quantize(x)
    for side, usage in (("rowwise", ROWWISE), ("columnwise", COLUMNWISE)):
        for tensor in (both, quantizer.with_usage(**usage).quantize(x)):
            for buffer, key in (
                (f"_{side}_data", f"{side}_data"),
                (f"_{side}_scale_inv", f"{side}_scale_inv"),
                (f"_amax_{side}", f"amax_{side}"),
            ):
                assert_bitwise(getattr(tensor, buffer).cpu(), golden[key], buffer)
    rowwise = both.dequantize(dtype=torch.float32)
    assert_bitwise(rowwise.cpu(), golden["dequant_rowwise"], "row-wise values")
    columnwise = quantizer.with_usage(**COLUMNWISE).quantize(x).dequantize(dtype=torch.float32).cpu()
    stored = golden["dequant_columnwise"]  # (K, M), and rotated where the format rotates
    if quantizer.with_rht:
        matrix = quantizer.rht_matrix.float()
        stored = (stored.view(stored.shape[0], -1, 16) @ matrix.t()).view_as(stored)
        assert torch.allclose(
            columnwise.reshape(-1, x.shape[-1]), stored.t(), rtol=1e-5, atol=1e-6 * stored.abs().max().item()
        )
    else:
        assert_bitwise(columnwise.reshape(-1, x.shape[-1]), stored.t().contiguous(), "column-wise values")


def test_rht_matrix() -> None:
    golden = golden_vectors.load("nvfp4_rht_matrix")
    assert torch.equal(nc.NVFP4Quantizer(with_rht=True).rht_matrix.float(), golden["matrix"])
    assert nc.NVFP4Quantizer().rht_matrix_random_sign_mask_t == golden.meta["sign_mask"]


def test_stochastic_rounding_stays_between_its_neighbours(device: torch.device) -> None:
    golden = golden_vectors.load("nvfp4_sr_property")
    x = golden.input().to(device)
    quantizer = nc.NVFP4Quantizer(stochastic_rounding=True, columnwise=False)
    draws = 400
    low, high, chance = golden["code_lo"], golden["code_hi"], golden["p_hi"]
    hits = torch.zeros_like(chance)
    for _ in range(draws):
        tensor = quantizer.quantize(x)
        packed = tensor._rowwise_data.cpu()
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        assert ((codes == low) | (codes == high)).all()
        hits += codes == high
    assert_bitwise(tensor._rowwise_scale_inv.cpu(), golden["rowwise_scale_inv"])
    assert_bitwise(tensor._amax_rowwise.cpu(), golden["amax_rowwise"])
    inexact = low != high
    error = (hits / draws - chance).abs()[inexact]
    sampling = 5 * (chance * (1 - chance) / draws).sqrt()[inexact]
    assert (error <= 1 / 256 + sampling + 1 / draws).all()
