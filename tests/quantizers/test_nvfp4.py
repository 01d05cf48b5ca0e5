"""NVFP4 options: the rotation and its signs, combinations that are not defined, random rounding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from reference.checks import assert_bitwise, normal

import narrowcast as nc
from narrowcast import kernels, reference

from .catalog import assert_same_buffers

BF16 = torch.bfloat16
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
GRID = list(itertools.product([False, True], repeat=2))


def sylvester() -> torch.Tensor:
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rebuilt(quantizer: nc.Quantizer) -> nc.NVFP4Quantizer:
    expression, names = quantizer.__fx_repr__()
    return eval(expression, dict(names))


@pytest.mark.parametrize(("with_rht", "with_signs"), GRID)
def test_the_rotation_depends_on_the_sign_flag_alone(with_rht: bool, with_signs: bool) -> None:
    quantizer = nc.NVFP4Quantizer(with_rht=with_rht, with_random_sign_mask=with_signs)
    expected = sylvester() / 4
    if with_signs:
        expected = torch.diag(torch.tensor(SIGNS).float()) @ expected
    copied: Any = quantizer.copy()
    for each in (quantizer, rebuilt(quantizer), copied):
        assert each.rht_matrix.dtype == BF16
        assert torch.equal(each.rht_matrix.float(), expected)
        assert each.with_random_sign_mask is with_signs
    mask = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
    assert quantizer.rht_matrix_random_sign_mask_t == (mask if with_signs else 0)
    assert torch.equal(quantizer.rht_matrix @ quantizer.rht_matrix.t(), torch.eye(16).bfloat16())


@pytest.mark.parametrize(("with_rht", "with_signs"), GRID)
def test_the_rotation_touches_only_column_wise_data(with_rht: bool, with_signs: bool) -> None:
    x = normal((64, 48), BF16)
    quantizer = nc.NVFP4Quantizer(with_rht=with_rht, with_random_sign_mask=with_signs)
    tensor, plain = quantizer.quantize(x), nc.NVFP4Quantizer().quantize(x)
    assert_same_buffers(tensor, rebuilt(quantizer).quantize(x))
    for name in ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"):
        assert_bitwise(getattr(tensor, name), getattr(plain, name), name)
    assert torch.equal(tensor._columnwise_data, plain._columnwise_data) is not with_rht
    if with_rht:
        rotated = x.float().view(4, 16, 48).transpose(1, 2) @ quantizer.rht_matrix.float()
        assert tensor._amax_columnwise.item() == rotated.bfloat16().abs().max().item()
        other = nc.NVFP4Quantizer(with_rht=True, with_random_sign_mask=not with_signs).quantize(x)
        assert not torch.equal(tensor._columnwise_data, other._columnwise_data)
    values = quantizer.with_usage(rowwise=False).quantize(x).dequantize()
    assert (values - x).norm() < 0.15 * x.norm()


def test_post_rotation_amax_is_what_always_happens() -> None:
    x = normal((32, 32), BF16)
    flagged = nc.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    assert_same_buffers(flagged.quantize(x), nc.NVFP4Quantizer(with_rht=True).quantize(x))


@pytest.mark.parametrize(
    "options",
    [
        ("nvfp4_use_4over6", "with_rht"),
        ("nvfp4_use_4over6", "stochastic_rounding"),
        ("row_scaled_nvfp4", "with_rht"),
        ("row_scaled_nvfp4", "stochastic_rounding"),
        ("row_scaled_nvfp4", "with_2d_quantization"),
    ],
)
def test_undefined_combinations_name_both_options(options: tuple[str, str]) -> None:
    arguments: dict[str, Any] = dict.fromkeys(options, True)
    with pytest.raises(ValueError, match=rf"{options[0]} together with {options[1]}"):
        nc.NVFP4Quantizer(**arguments)


def test_rotated_tiles() -> None:
    """Row-wise those of tiles; column-wise tiles of the rotated matrix, which undoes."""
    x = torch.randn(64, 96).bfloat16()
    both: Any = nc.NVFP4Quantizer(with_rht=True, with_2d_quantization=True).quantize(x)
    tiles: Any = nc.NVFP4Quantizer(with_2d_quantization=True).quantize(x)
    for mine, theirs in zip(both.rowwise_operand(), tiles.rowwise_operand(), strict=True):
        assert torch.equal(mine, theirs)
    scales = both._columnwise_scale_inv[:96, :4].view(6, 16, 4)
    assert (scales == scales[:, :1]).all()  # one for each of a tile's columns
    both.update_usage(rowwise_usage=False)
    error = (both.dequantize().float() - x.float()).square().mean() / x.float().square().mean()
    assert error < 0.02
    with pytest.raises(RuntimeError, match="quantizing again would change"):
        nc.NVFP4Quantizer(with_rht=True, with_2d_quantization=True, columnwise=False).quantize(
            x
        ).update_usage(columnwise_usage=True)


def test_values_outside_the_choices() -> None:
    with pytest.raises(ValueError, match="nvfp4_e4m3_max is 300; use 448 or 256"):
        nc.NVFP4Quantizer(nvfp4_e4m3_max=300)
    with pytest.raises(ValueError, match="nvfp4_4over6_err_mode is 'MAX'; use 'MAE' or 'MSE'"):
        nc.NVFP4Quantizer(nvfp4_4over6_err_mode="MAX")
    with pytest.raises(ValueError, match="kFloat8E4M3.*kFloat4E2M1"):
        nc.NVFP4Quantizer(nc.DType.kFloat8E4M3)


def test_random_rounding_follows_the_default_generator() -> None:
    x, quantizer = normal((64, 64), BF16), nc.NVFP4Quantizer(stochastic_rounding=True)

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return quantizer.quantize(x)._rowwise_data

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    torch.manual_seed(1)
    first, second = quantizer.quantize(x), quantizer.quantize(x)
    assert not torch.equal(first._rowwise_data, second._rowwise_data)
    assert torch.equal(first._rowwise_scale_inv, second._rowwise_scale_inv)
    before = torch.get_rng_state()
    nc.NVFP4Quantizer().quantize(x)
    assert torch.equal(before, torch.get_rng_state()), "rounding to nearest must not touch the generator"


@pytest.mark.gpu
def test_a_quantizer_has_no_device() -> None:
    quantizer = nc.NVFP4Quantizer(with_rht=True)
    x = torch.randint(-8, 9, (64, 64)).to(BF16)  # sums of 16 are exact in any order
    here, there = quantizer.quantize(x), quantizer.quantize(x.cuda())
    assert there.device.type == "cuda" and here._quantizer == there._quantizer
    assert_same_buffers(there.to("cpu"), here)


@pytest.mark.parametrize(
    "options", [{"with_rht": True}, {"stochastic_rounding": True}], ids=["rotated", "random"]
)
def test_tiles_that_no_kernel_makes_are_the_reference_s(options: dict[str, bool]) -> None:
    quantizer = nc.NVFP4Quantizer(with_2d_quantization=True, **options)
    x, seed = normal((32, 48), BF16), torch.tensor([5]) if quantizer.stochastic_rounding else None
    ours, theirs = (quantizer._encode(numerics, x, seed) for numerics in (kernels, reference))
    for a, b in zip(ours, theirs, strict=True):
        assert_bitwise(a, b)


def test_kernels_are_used_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.nvfp4, "supports", lambda **options: True)
    monkeypatch.setattr(kernels.nvfp4, "quantize", lambda x, **options: "a kernel's")
    assert nc.NVFP4Quantizer()._encode(kernels, normal((32, 48), BF16), None) == "a kernel's"
