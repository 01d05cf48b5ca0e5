"""NVFP4 kernels: golden files of every option, stochastic rounding, ragged shapes, every kind of input on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import kernels
from narrowcast.reference import nvfp4 as reference

from .checks import DTYPES, SHAPES_2D, compare, grid, make

DIRECTIONS = [(True, True), (True, False), (False, True)]
OPTIONS: dict[str, dict[str, Any]] = {
    "1d": {},
    "2d": {"two_d": True},
    "rht": {"rht": True},
    "rht_plus": {"rht": True, "random_signs": False},
    "row_scaled": {"row_scaled": True},
    "4over6_mae": {"four_over_six": True, "e4m3_max": 256},
    "4over6_mse_2d": {"four_over_six": True, "two_d": True, "error_mode": "MSE"},
    "4over6_row_scaled": {"four_over_six": True, "row_scaled": True},
    "sr": {"seed": 123456789012345},
    "sr_rht": {"seed": 2**62 + 5, "rht": True},
}


def quantize(
    module: Any, x: torch.Tensor, options: dict[str, Any], directions=(True, True)
) -> list[torch.Tensor]:
    seed = options.get("seed")
    given = dict(zip(("rowwise", "columnwise"), directions), **options)
    return module.quantize(
        x, **{**given, "seed": None if seed is None else torch.tensor([seed], device=x.device)}
    )


def check(shape, kind, dtype, device, options, directions=(True, True)) -> None:
    compare(
        functools.partial(quantize, kernels.nvfp4, options=options, directions=directions),
        functools.partial(quantize, reference, options=options, directions=directions),
        make(kind, shape, dtype),
        device,
        f"NVFP4 {options}, {kind}",
    )


@pytest.mark.parametrize(
    "name", golden_vectors.names("nvfp4_", without=("nvfp4_sr_property", "nvfp4_rht_matrix"))
)
def test_golden(name: str, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    options = {key: golden.meta[key] for key in ("two_d", "rht", "row_scaled", "e4m3_max")}
    if golden.meta["four_six"]:
        options |= {"four_over_six": True, "error_mode": golden.meta["four_six"]}
    buffers = quantize(kernels.nvfp4, golden.input().to(device), options)
    keys = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    for key, buffer in zip((*keys, "amax_rowwise", "amax_columnwise"), buffers, strict=True):
        assert_bitwise(buffer, golden[key], key)


def test_stochastic_rounding_has_the_golden_property(device: torch.device) -> None:
    golden = golden_vectors.load("nvfp4_sr_property")
    x = golden.input().to(device)
    draws = 400 if device.type == "cuda" else 6
    low, high = golden["code_lo"], golden["code_hi"]
    ups = torch.zeros(low.shape, dtype=torch.float64)
    for seed in range(draws):
        data, scale, amax = quantize(kernels.nvfp4, x, {"seed": seed}, (True, False))
        codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).cpu()
        assert ((codes == low) | (codes == high)).all()
        assert_bitwise(scale, golden["rowwise_scale_inv"])
        assert_bitwise(amax, golden["amax_rowwise"])
        ups += (codes == high) & (low != high)
    p = torch.where(low == high, 0.0, golden["p_hi"])
    allowed = 1 / 256 + 5 * (p * (1 - p) / draws).sqrt() + 1 / draws
    assert ((ups / draws - p).abs() <= allowed).all()


def test_directions_draw_from_different_streams(device: torch.device) -> None:
    x = make("normal", (64, 64), torch.bfloat16).to(device)
    x = torch.maximum(x, x.t())  # symmetric: both directions quantize the same matrix
    row, _, column, _, _, _ = quantize(kernels.nvfp4, x, {"seed": 3})
    assert (row != column).float().mean() > 0.05
    again = quantize(kernels.nvfp4, x, {"seed": 3})
    assert_bitwise(again[0], row)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_ragged(options: dict[str, Any], device: torch.device) -> None:
    check((3, 50, 7), "special", torch.bfloat16, device, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_in_one_direction(dtype: torch.dtype, device: torch.device) -> None:
    for shape, kind, directions in (((33, 17), "wide", (True, False)), ((1, 130), "tiny", (False, True))):
        check(shape, kind, dtype, device, {}, directions)
    check((0, 8), "normal", dtype, device, {"row_scaled": True})


def test_refuses_options_that_exclude_each_other(device: torch.device) -> None:
    x = torch.ones(16, 16, device=device)
    for options in (
        {"row_scaled": True, "two_d": True},
        {"row_scaled": True, "rht": True},
        {"row_scaled": True, "seed": 1},
        {"four_over_six": True, "rht": True},
        {"four_over_six": True, "seed": 1},
        {"four_over_six": True, "error_mode": "max"},
    ):
        for module in (kernels.nvfp4, reference):
            with pytest.raises(ValueError, match=r"cannot combine|unknown 4-over-6"):
                quantize(module, x, options)


def test_supports_the_options_of_the_reference() -> None:
    assert all(kernels.nvfp4.supports(**options) for options in OPTIONS.values())
    assert not kernels.nvfp4.supports(block=32)
    assert not kernels.nvfp4.supports(two_d=True, rht=True)
    assert not kernels.nvfp4.supports(two_d=True, seed=torch.tensor([1]))


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_shape_and_kind(options: dict[str, Any], device: torch.device) -> None:
    for i, (shape, kind, dtype) in enumerate(grid(SHAPES_2D)):
        check(shape, kind, dtype, device, options, DIRECTIONS[0 if i % 2 else i % 3])


@pytest.mark.gpu
def test_more_than_two_billion_elements(device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    x = torch.empty(2**20 + 144, 2048, dtype=torch.bfloat16, device=device).normal_()
    tail = 2**20 - 128
    x[tail, 0] = 64.0  # the tensor's amax lies in the part that is compared
    actual = quantize(kernels.nvfp4, x, {})
    expected = quantize(reference, x[tail:].cpu(), {})
    assert_bitwise(actual[0][tail:], expected[0])
    assert_bitwise(actual[1][tail:], expected[1])
    assert_bitwise(actual[2][:, tail // 2 :], expected[2])
    assert_bitwise(actual[3][:, tail // 16 :][:, : expected[3].shape[1]], expected[3])


@pytest.mark.parametrize(
    "options, directions",
    [
        ("sr_rht", (True, True)),
        ("2d", (True, False)),
        ("4over6_mae", (False, True)),
        ("row_scaled", (True, True)),
        ("4over6_row_scaled", (False, True)),
    ],
)
def test_groups(options: str, directions: tuple[bool, bool], device: torch.device) -> None:
    """An amax of every group of 128 rows and more; the second has none, and the last rows are in no group."""
    given = {
        **OPTIONS[options],
        "groups": (torch.tensor([[0, 0, 2, 3], [0, 0, 2, 0], [208, 208, 128, 0]], device=device), 3),
    }
    x = torch.randn(512, 40, generator=torch.Generator().manual_seed(0))
    x = (x * torch.tensor([1.0, 3.0, 0.1, 50.0]).repeat_interleave(128)[:, None]).to(device, torch.bfloat16)
    x[208:256] = 0
    made, expected = (quantize(module, x, given, directions) for module in (kernels.nvfp4, reference))
    for one, other in zip(made, expected, strict=True):
        assert_bitwise(one, other)
    alone = quantize(reference, x[:208], OPTIONS[options], directions)
    for one, other in zip(expected, alone, strict=True):
        if one.dim() > 1:
            assert torch.equal(one[: other.shape[0], : other.shape[1]], other)
            continue
        assert torch.equal(one[: len(other)], other)
        if one.shape != x.shape[:1]:  # the second group's
            assert not one[len(other) : 2 * len(other)].any()
