"""NVFP4: golden files, ragged shapes against the zero-padded tensor, the NumPy oracle, stochastic rounding."""

import math
from typing import Any

import golden_vectors
import pytest
import torch
from torch import Tensor

from narrowcast.formats import E4M3, cdiv, round_up
from narrowcast.reference import codecs, hadamard, nvfp4

from .checks import (
    DTYPES,
    EMPTY_SHAPES,
    RAGGED_SHAPES,
    assert_bitwise,
    assert_fresh,
    awkward_layouts,
    normal,
    pad_to,
)
from .test_philox import scalar_philox

FILES = golden_vectors.names("nvfp4", without=("nvfp4_rht_matrix", "nvfp4_sr_property"))
VARIANTS: dict[str, dict[str, Any]] = {
    "1d": {},
    "2d": {"two_d": True},
    "rht": {"rht": True},
    "rht without signs": {"rht": True, "random_signs": False},
    "row-scaled": {"row_scaled": True},
    "4over6": {"four_over_six": True, "e4m3_max": 256},
    "4over6 2d": {"four_over_six": True, "two_d": True, "error_mode": "MSE"},
    "4over6 row-scaled": {"four_over_six": True, "row_scaled": True},
}
STOCHASTIC: dict[str, dict[str, Any]] = {"1d": {}, "2d": {"two_d": True}, "rht": {"rht": True}}
each_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def both(x: Tensor, **options: Any) -> list[Tensor]:
    return nvfp4.quantize(x, rowwise=True, columnwise=True, **options)


def seed_tensor(value: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


def decode(
    outputs: list[Tensor],
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
    unrotate: bool = True,
) -> list[Tensor]:
    e4m3_max = options.get("e4m3_max", 448)
    rows = math.prod(shape[:-1])
    return [
        nvfp4.dequantize_rowwise(outputs[0], outputs[1], outputs[4], e4m3_max, dtype, columns=shape[-1]),
        nvfp4.dequantize_columnwise(
            outputs[2],
            outputs[3],
            outputs[5],
            e4m3_max,
            dtype,
            rows=rows,
            rht=unrotate and options.get("rht", False),
            random_signs=options.get("random_signs", True),
        ),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FILES)
def test_golden(name: str, dtype: torch.dtype, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    options = {key: golden.meta[key] for key in ("rht", "two_d", "row_scaled", "e4m3_max")}
    if golden.meta["four_six"]:
        options |= {"four_over_six": True, "error_mode": golden.meta["four_six"]}
    outputs = both(golden["x"].to(device, dtype), **options)
    rowwise, columnwise = decode(outputs, tuple(golden["x"].shape), options, torch.float32, unrotate=False)
    values = [rowwise, columnwise.t()]
    for index, side in enumerate(("rowwise", "columnwise")):
        assert_bitwise(outputs[2 * index].cpu(), golden[f"{side}_data"])
        codes = codecs.unpack_codes(outputs[2 * index], 4).cpu()
        assert_bitwise(codes, golden[f"{side}_codes"])
        assert_bitwise(outputs[2 * index + 1].cpu(), golden[f"{side}_scale_inv"])
        assert_bitwise(outputs[4 + index].cpu(), golden[f"amax_{side}"])
        assert_bitwise(values[index].cpu(), golden[f"dequant_{side}"])


@each_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", RAGGED_SHAPES)
def test_ragged_equals_zero_padded(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    x = normal(shape, dtype)
    m, k = math.prod(shape[:-1]), shape[-1]
    outputs, padded = both(x, **options), both(pad_to(x, 16), **options)
    assert outputs[0].shape == (*shape[:-1], round_up(k, 16) // 2)
    assert outputs[2].shape == (k, round_up(m, 16) // 2)
    assert torch.equal(outputs[0].view(m, -1), padded[0][:m])
    assert torch.equal(outputs[2], padded[2][:k])
    valid = [(m, cdiv(k, 16)), (k, cdiv(m, 16))]
    for scales, expected, (rows, columns) in zip(
        (outputs[1], outputs[3]), (padded[1], padded[3]), valid, strict=True
    ):
        assert scales.shape == (round_up(rows, 128), round_up(columns, 4))
        assert torch.equal(scales[:rows, :columns], expected[:rows, :columns])
        assert scales.sum() == scales[:rows, :columns].sum(), "the padding is not zero"
    row_scaled = options.get("row_scaled", False)
    assert torch.equal(outputs[4], padded[4][: m if row_scaled else 1])
    assert torch.equal(outputs[5], padded[5][: k if row_scaled else 1])
    padded_shape = (round_up(m, 16), round_up(k, 16))
    rowwise, columnwise = decode(outputs, shape, options, dtype)
    expected_rowwise, expected_columnwise = decode(padded, padded_shape, options, dtype)
    assert rowwise.shape == shape
    assert_bitwise(rowwise.view(m, k), expected_rowwise[:m, :k].contiguous())
    assert_bitwise(columnwise, expected_columnwise[:m, :k].contiguous())
    assert rowwise.is_contiguous()
    assert columnwise.is_contiguous()


@pytest.mark.parametrize("std", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize(
    "options", [v for v in VARIANTS.values() if not v.get("rht")], ids=[n for n in VARIANTS if "rht" not in n]
)
def test_random_data_as_the_oracle(options: dict[str, Any], std: float) -> None:
    x = normal((80, 112), torch.float32, std=std)
    translated = {key: value for key, value in options.items() if key in ("two_d", "row_scaled", "e4m3_max")}
    if options.get("four_over_six"):
        translated["four_six"] = options.get("error_mode", "MAE")
    expected = golden_vectors.oracle().nvfp4(x.numpy(), **translated)
    outputs = both(x, **options)
    for index, side in enumerate(("rowwise", "columnwise")):
        assert_bitwise(outputs[2 * index], torch.from_numpy(expected[f"{side}_data"]))
        assert_bitwise(outputs[2 * index + 1], torch.from_numpy(expected[f"{side}_scale_inv"]))
        assert_bitwise(outputs[4 + index], torch.from_numpy(expected[f"amax_{side}"]))


def test_rht_quantizes_the_rotated_transpose() -> None:
    x = normal((64, 48), torch.bfloat16)
    rotated = hadamard.rotate_rows(x.float(), True).t().to(torch.bfloat16)
    outputs = nvfp4.quantize(x, rowwise=False, columnwise=True, rht=True)
    expected = nvfp4.quantize(rotated, rowwise=True, columnwise=False)
    for actual, reference in zip(outputs, expected, strict=True):
        assert_bitwise(actual, reference)


def test_rht_is_undone_when_decoding() -> None:
    x = normal((64, 48), torch.bfloat16)
    options = {"rht": True}
    rotated_error, plain_error = (
        (decode(both(x, **chosen), (64, 48), chosen, torch.float32)[1] - x.float()).norm() / x.float().norm()
        for chosen in (options, {})
    )
    assert rotated_error < 1.2 * plain_error
    assert plain_error < 0.15


@each_variant
@pytest.mark.parametrize("shape", [(16, 32), (33, 7), (1, 16), (16, 1), (2, 3, 5), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_usages_strides_and_aliasing(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    x = normal(shape, dtype)
    kept = x.clone()
    everything = both(x, **options)
    usages = ((True, False), (False, True), (True, True), (False, False))
    for rowwise, columnwise in usages:
        outputs = nvfp4.quantize(x, rowwise=rowwise, columnwise=columnwise, **options)
        expected = everything[:2] * rowwise + everything[2:4] * columnwise
        expected += everything[4:5] * rowwise + everything[5:] * columnwise
        assert len(outputs) == len(expected)
        for actual, reference in zip(outputs, expected, strict=True):
            assert_bitwise(actual, reference)
        assert_fresh(outputs, [x])
    for layout, y in awkward_layouts(x).items():
        for actual, reference in zip(both(y, **options), everything, strict=True):
            assert_bitwise(actual, reference, layout)
    assert_bitwise(x, kept)


@pytest.mark.parametrize(
    "options", [*VARIANTS.values(), {"seed": seed_tensor(1)}], ids=[*VARIANTS, "stochastic"]
)
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    m, k = math.prod(shape[:-1]), shape[-1]
    outputs = both(torch.empty(shape, dtype=torch.bfloat16), **options)
    assert outputs[0].shape == (*shape[:-1], round_up(k, 16) // 2)
    assert outputs[1].shape == (round_up(m, 128), round_up(cdiv(k, 16), 4))
    assert outputs[2].shape == (k, round_up(m, 16) // 2)
    assert outputs[3].shape == (round_up(k, 128), round_up(cdiv(m, 16), 4))
    row_scaled = options.get("row_scaled", False)
    assert outputs[4].tolist() == [0.0] * (m if row_scaled else 1)
    assert outputs[5].tolist() == [0.0] * (k if row_scaled else 1)
    assert all(not buffer.any() for buffer in outputs)
    rowwise, columnwise = decode(outputs, shape, options, torch.bfloat16)
    assert rowwise.shape == shape
    assert columnwise.shape == (m, k)


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("four_over_six", [False, True])
def test_nan_poisons_its_group_and_does_not_touch_the_amax(
    two_d: bool, four_over_six: bool, device: torch.device
) -> None:
    x = torch.ones(32, 48, device=device)
    x[3, 5], x[4, 6], x[4, 7] = math.nan, -math.nan, 4.0
    options = {"two_d": two_d, "four_over_six": four_over_six}
    outputs = both(x, **options)
    assert outputs[4].tolist() == outputs[5].tolist() == [4.0]
    rowwise, columnwise = decode(outputs, x.shape, options, torch.float32)
    lost = torch.zeros(x.shape, dtype=torch.bool, device=device)
    lost[slice(16) if two_d else slice(3, 5), :16] = True
    assert torch.equal(rowwise.isnan(), lost)
    codes = codecs.unpack_codes(outputs[0], 4)
    assert codes[lost].eq(7).all() and outputs[1][:32, :3].eq(0x7F).sum() == (16 if two_d else 2)
    lost[:] = False
    lost[:16, slice(16) if two_d else slice(5, 7)] = True
    assert torch.equal(columnwise.isnan(), lost)


@pytest.mark.parametrize("seed", [None, 5])
def test_nan_poisons_what_is_rotated_with_it(seed: int | None, device: torch.device) -> None:
    x = torch.ones(32, 16, device=device)
    x[3, 5] = math.nan
    options = {"rht": True, "seed": None if seed is None else torch.tensor([seed], device=device)}
    outputs = both(x, **options)
    rowwise, columnwise = decode(outputs, x.shape, options, torch.float32)
    assert rowwise.isnan().sum() == columnwise.isnan().sum() == 16
    assert rowwise[3].isnan().all() and columnwise[:16, 5].isnan().all()


def test_infinity_leaves_no_number(device: torch.device) -> None:
    x = normal((32, 48), torch.float32).to(device)
    x[3, 5] = -math.inf
    for options in ({}, {"two_d": True}, {"rht": True}, {"four_over_six": True}):
        outputs = both(x, **options)
        for values in decode(outputs, x.shape, options, torch.float32):
            assert not values.isfinite().any(), options


def test_nan_counts_as_no_number_below_one(device: torch.device) -> None:
    x = torch.full((16, 32), 0.25, device=device)
    x[3, 5] = math.nan
    assert [amax.tolist() for amax in both(x)[4:]] == [[0.25], [0.25]]


@pytest.mark.parametrize("two_d", [False, True])
def test_an_infinite_amax_leaves_scales_unscaled(two_d: bool, device: torch.device) -> None:
    x = torch.full((32, 48), 6.0, device=device)
    x[3, 5] = math.inf
    scales = codecs.decode_float8(both(x, two_d=two_d)[1][:32, :3], E4M3)
    assert (scales == 1.0).sum() == scales.numel() - (16 if two_d else 1)


def test_negative_zero_keeps_its_sign() -> None:
    x = torch.ones(16, 16)
    x[0, 0] = -0.0
    assert codecs.unpack_codes(both(x)[0], 4)[0, 0] == 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoded_blocks_without_amax_are_exact(dtype: torch.dtype) -> None:
    x = normal((48, 80), torch.float32)
    outputs = both(x)
    for data, scales, amax, transpose in (
        (*outputs[:2], outputs[4], False),
        (*outputs[2:4], outputs[5], True),
    ):
        blocks = nvfp4.decode_block_scaled(data, scales, dtype)
        assert blocks.dtype == dtype
        assert_bitwise(blocks.float(), nvfp4.decode_block_scaled(data, scales, torch.float32))
        values = blocks.float() * (amax / 2688)
        torch.testing.assert_close(values.t() if transpose else values, x, rtol=0.2, atol=0.35)


class TestStochasticRounding:
    """``nvfp4_sr_property`` says what must hold; the random stream is checked against a scalar generator."""

    DRAWS = 400

    @pytest.mark.parametrize("columnwise", [False, True])
    def test_golden_property(self, columnwise: bool, device: torch.device) -> None:
        golden = golden_vectors.load("nvfp4_sr_property")
        x = golden.input().to(device)
        low, high = golden["code_lo"], golden["code_hi"]
        count = torch.zeros(low.shape)
        for draw in range(self.DRAWS):
            seed = seed_tensor(draw * 7919 + 13, device)
            if columnwise:
                outputs = nvfp4.quantize(x.t(), rowwise=False, columnwise=True, seed=seed)
            else:
                outputs = nvfp4.quantize(x, rowwise=True, columnwise=False, seed=seed)
            codes = codecs.unpack_codes(outputs[0], 4).cpu()
            assert ((codes == low) | (codes == high)).all()
            count += codes == high
            if draw == 0:
                assert_bitwise(outputs[1].cpu(), golden["rowwise_scale_inv"])
                assert_bitwise(outputs[2].cpu(), golden["amax_rowwise"])
        undecided = low != high
        p, n = golden["p_hi"][undecided], self.DRAWS
        frequency = count[undecided].double() / n
        bound = 1 / 256 + 5 * (p * (1 - p) / n).sqrt() + 1 / n
        assert ((frequency - p).abs() <= bound).all()
        # Over all elements the mean may only be low by what 8 bits cut off, half a step on average.
        bias = (frequency - p).mean().item()
        assert -1 / 256 < bias < 1 / 1024

    @pytest.mark.parametrize("options", STOCHASTIC.values(), ids=STOCHASTIC.keys())
    def test_one_seed_one_result(self, options: dict[str, Any]) -> None:
        x = normal((64, 80), torch.bfloat16)
        first, second = (both(x, seed=seed_tensor(42), **options) for _ in range(2))
        for actual, reference in zip(first, second, strict=True):
            assert_bitwise(actual, reference)
        other = both(x, seed=seed_tensor(43), **options)
        assert not torch.equal(other[0], first[0])
        assert not torch.equal(other[2], first[2])
        nearest = both(x, **options)
        for index in (1, 3, 4, 5):
            assert_bitwise(first[index], nearest[index], "scales and amaxes are not random")

    def test_directions_are_independent(self) -> None:
        # One magnitude halfway between codes everywhere: every element is a fair coin in either direction.
        x = torch.full((256, 256), 2.5 / 6)
        x[:, 0] = x[0, :] = 1.0
        x[::16, :] = x[:, ::16] = 1.0
        outputs = both(x, seed=seed_tensor(11))
        inner = torch.ones(256, 256, dtype=torch.bool)
        inner[::16, :] = inner[:, ::16] = False
        row = codecs.unpack_codes(outputs[0], 4)[inner]
        column = codecs.unpack_codes(outputs[2], 4).t()[inner]
        assert row.unique().tolist() == column.unique().tolist() == [4, 5]
        n = inner.sum().item()
        assert (row == 5).float().mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(n))
        assert (row == column).float().mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(n))

    def test_usages_do_not_change_the_stream(self) -> None:
        x = normal((35, 50), torch.bfloat16)
        everything = both(x, seed=seed_tensor(5))
        row = nvfp4.quantize(x, rowwise=True, columnwise=False, seed=seed_tensor(5))
        column = nvfp4.quantize(x, rowwise=False, columnwise=True, seed=seed_tensor(5))
        for actual, reference in zip((*row[:2], *column[:2]), everything[:4], strict=True):
            assert_bitwise(actual, reference)

    def test_ragged_equals_zero_padded_along_the_blocks(self) -> None:
        # Blocks are numbered over whole rows of blocks, which padding the other dimension does not disturb.
        x = normal((35, 50), torch.bfloat16)
        padded = pad_to(x, 16)
        row, column = both(x, seed=seed_tensor(5)), both(padded, seed=seed_tensor(5))
        assert torch.equal(row[0], column[0][:35])
        assert torch.equal(row[2], column[2][:50])

    @pytest.mark.parametrize("seed", [3, -1, 2**40 + 77])
    def test_every_element_uses_its_byte(self, seed: int, device: torch.device) -> None:
        # amax 2688 / 448 * 448: the global scale is 1, block scales are 1, and 2.75 becomes 4 for bytes 64..255.
        x = torch.full((32, 48), 2.75)
        x[0, :] = x[:, 0] = 6.0
        x[16, :] = x[:, 16] = x[:, 32] = 6.0
        x[0, 0] = 2688.0
        outputs = both(x.to(device), seed=seed_tensor(seed, device))
        key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
        rowwise = codecs.unpack_codes(outputs[0], 4).tolist()
        columnwise = codecs.unpack_codes(outputs[2], 4).tolist()
        for stream, codes, source in ((0, rowwise, x), (1, columnwise, x.t())):
            lines, blocks = source.shape[0], source.shape[1] // 16
            for line in range(1, lines):
                for block in range(blocks):
                    words = scalar_philox((line * blocks + block, 0, stream, 0), key)
                    for element in range(16):
                        column = 16 * block + element
                        if source[line, column] != 2.75:
                            continue
                        byte = (words[element // 4] >> (8 * (element % 4))) & 0xFF
                        expected = 5 if 0.75 + byte / 256 >= 1 else 4
                        assert codes[line][column] == expected, (stream, line, column)


class TestRejectedOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"row_scaled": True, "two_d": True}, "row_scaled with two_d"),
            ({"row_scaled": True, "rht": True}, "row_scaled with rht"),
            ({"row_scaled": True, "seed": seed_tensor(0)}, "row_scaled with stochastic rounding"),
            ({"four_over_six": True, "rht": True}, "four_over_six with rht"),
            ({"four_over_six": True, "seed": seed_tensor(0)}, "four_over_six with stochastic rounding"),
        ],
    )
    def test_combinations(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=f"NVFP4 cannot combine {message}; turn one of them off"):
            both(torch.ones(16, 16), **options)

    def test_error_mode(self) -> None:
        with pytest.raises(ValueError, match="unknown 4-over-6 error mode 'L1'; use 'MAE' or 'MSE'"):
            both(torch.ones(16, 16), four_over_six=True, error_mode="L1")

    def test_rank_and_dtype(self) -> None:
        with pytest.raises(ValueError, match="rank 2 or more"):
            both(torch.ones(16))
        with pytest.raises(TypeError, match=r"torch\.float64; use float32, bfloat16 or float16"):
            both(torch.ones(16, 16, dtype=torch.float64))
