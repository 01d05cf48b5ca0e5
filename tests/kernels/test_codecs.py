"""The codecs as device functions, on the golden tables and on bit patterns of all kinds."""

from __future__ import annotations

import golden_vectors
import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import kernels
from narrowcast.formats import E2M1, E4M3, E5M2
from narrowcast.reference import codecs as reference

if kernels.AVAILABLE:
    import triton
    import triton.language as tl

    from narrowcast.kernels.codecs import (
        decode_e4m3,
        fp4_magnitude,
        fp4_sign,
        fp8_code,
        fp8_word,
        magnitude_of_four,
        pack_codes,
        pack_fp4,
        reciprocal,
        round_pair_to_bfloat16,
        to_float32,
    )

    @triton.jit
    def fp8_kernel(x_ptr, code_ptr, E5M2: tl.constexpr, N: tl.constexpr):
        index = tl.arange(0, N)
        tl.store(code_ptr + index, fp8_code(tl.load(x_ptr + index), E5M2))

    @triton.jit
    def words_kernel(x_ptr, word_ptr, packed_ptr, E5M2: tl.constexpr, N: tl.constexpr):
        index = tl.arange(0, N)
        x0 = tl.load(x_ptr + 4 * index)
        x1 = tl.load(x_ptr + 4 * index + 1)
        x2 = tl.load(x_ptr + 4 * index + 2)
        x3 = tl.load(x_ptr + 4 * index + 3)
        tl.store(word_ptr + index, fp8_word(x0, x1, x2, x3, E5M2))
        c0 = fp8_code(x0, E5M2)
        c1 = fp8_code(x1, E5M2)
        c2 = fp8_code(x2, E5M2)
        c3 = fp8_code(x3, E5M2)
        tl.store(packed_ptr + index, pack_codes(c0, c1, c2, c3))

    @triton.jit
    def fp4_kernel(x_ptr, word_ptr, one, N: tl.constexpr):
        index = tl.arange(0, N)
        sizes = ()
        signs = ()
        for j in tl.static_range(8):
            x = tl.load(x_ptr + 8 * index + j)
            x = x * one  # as in the kernels, whose products hold no negative NaN; a constant 1 is folded away
            sizes = sizes + (fp4_magnitude(x, 0, False),)  # noqa: RUF005 - Triton has no starred tuples
            signs = signs + (fp4_sign(x),)  # noqa: RUF005
        word = pack_fp4(
            sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],
            signs[0], signs[1], signs[2], signs[3], signs[4], signs[5], signs[6], signs[7],
        )  # fmt: skip
        tl.store(word_ptr + index, word)

    @triton.jit
    def fp4_stochastic_kernel(x_ptr, random_ptr, code_ptr, one, N: tl.constexpr):
        index = tl.arange(0, N)
        x = tl.load(x_ptr + index) * one
        size = fp4_magnitude(x, tl.load(random_ptr + index).to(tl.uint32), True)
        tl.store(code_ptr + index, (size | ((fp4_sign(x) >> 28) & 8)).to(tl.uint8))

    @triton.jit
    def bfloat16_kernel(x_ptr, half_ptr, rounded_ptr, widened_ptr, inverse_ptr, N: tl.constexpr):
        index = tl.arange(0, N)
        first = tl.load(x_ptr + index)
        second = tl.load(x_ptr + N + index)
        a, b = round_pair_to_bfloat16(first, second)
        tl.store(rounded_ptr + index, a)
        tl.store(rounded_ptr + N + index, b)
        tl.store(widened_ptr + index, to_float32(tl.load(half_ptr + index)))
        tl.store(inverse_ptr + index, reciprocal(first))

    @triton.jit
    def four_kernel(x_ptr, largest_ptr, N: tl.constexpr):
        index = tl.arange(0, N)
        x0 = tl.load(x_ptr + index)
        x1 = tl.load(x_ptr + N + index)
        x2 = tl.load(x_ptr + 2 * N + index)
        x3 = tl.load(x_ptr + 3 * N + index)
        tl.store(largest_ptr + index, tl.maximum(magnitude_of_four(x0, x1, x2, x3), 0.0))

    @triton.jit
    def decode_kernel(code_ptr, value_ptr, N: tl.constexpr):
        index = tl.arange(0, N)
        tl.store(value_ptr + index, decode_e4m3(tl.load(code_ptr + index)))


FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
COUNT = 4096


def patterns(count: int = COUNT) -> torch.Tensor:
    """fp32 values of random bits, and specials."""
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
    special = [
        0,
        1,
        0x7F800000,
        0x7F800001,
        0x7FC00000,
        0x7FFFFFFF,
        0x00400000,
        0x00400001,
        0x007FFFFF,
        0x00800000,
    ]
    special = torch.tensor([*special, 0x7F7FFFFF], dtype=torch.int64)
    special = torch.cat([special, special - 2**31]).to(torch.int32)
    bits[: len(special)] = special
    return bits.view(torch.float32)


def padded(values: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(triton.next_power_of_2(len(values)))
    result[: len(values)] = values
    return result


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_fp8(fmt, device: torch.device) -> None:
    golden = golden_vectors.load(f"cast_{fmt.name}")
    for values, expected in (
        (padded(golden["value"]), None),
        (patterns(), None),
        (padded(golden["value"]), golden["code"]),
    ):
        codes = torch.empty(len(values), dtype=torch.uint8, device=device)
        fp8_kernel[(1,)](values.to(device), codes, fmt is E5M2, len(values))
        if expected is None:
            assert_bitwise(codes, reference.encode_float8(values, fmt))
        else:
            assert_bitwise(codes[: len(expected)], expected)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_words_hold_four_codes(fmt, device: torch.device) -> None:
    values = patterns()
    expected = reference.encode_float8(values, fmt).view(torch.int32)
    words = torch.empty(2, COUNT // 4, dtype=torch.int32, device=device)
    words_kernel[(1,)](values.to(device), words[0], words[1], fmt is E5M2, COUNT // 4)
    assert_bitwise(words[0], expected)
    assert_bitwise(words[1], expected)


def test_fp4(device: torch.device) -> None:
    golden = golden_vectors.load("cast_e2m1")
    fine = torch.linspace(-8, 8, COUNT)
    for values in (padded(golden["value"]), patterns(), fine, fine.bfloat16().float()):
        words = torch.empty(len(values) // 8, dtype=torch.int32, device=device)
        fp4_kernel[(1,)](values.to(device), words, 1.0, len(words))
        assert_bitwise(
            words.view(torch.uint8), reference.pack_codes(reference.encode_subbyte_(values.clone(), E2M1), 4)
        )


def test_fp4_stochastic(device: torch.device) -> None:
    for values in (torch.linspace(-8, 8, COUNT), patterns()):
        random = torch.randint(0, 256, (COUNT,), dtype=torch.uint8)
        codes = torch.empty(COUNT, dtype=torch.uint8, device=device)
        fp4_stochastic_kernel[(1,)](values.to(device), random.to(device), codes, 1.0, COUNT)
        assert_bitwise(codes, reference.encode_float4_stochastic_(values.clone(), random.float()))


def test_bfloat16_and_reciprocal(device: torch.device) -> None:
    values = patterns()
    half = COUNT // 2
    rounded = torch.empty(COUNT, device=device)
    widened, inverse = torch.empty(half, device=device), torch.empty(half, device=device)
    halves = values.view(torch.bfloat16)[:half]
    bfloat16_kernel[(1,)](values.to(device), halves.to(device), rounded, widened, inverse, half)
    same_number(rounded, values.bfloat16().float())
    same_number(widened, halves.float())
    same_number(inverse, torch.ones(half) / values[:half])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_largest_of_four(dtype: torch.dtype, device: torch.device) -> None:
    values = patterns().to(dtype)
    largest = torch.empty(COUNT // 4, device=device)
    four_kernel[(1,)](values.to(device), largest, COUNT // 4)
    expected = values.float().abs().nan_to_num(nan=0.0, posinf=float("inf")).view(4, -1).amax(0)
    assert_bitwise(largest, expected)


def test_decode_e4m3(device: torch.device) -> None:
    codes = torch.arange(128, dtype=torch.uint8).clamp(max=0x7E)
    values = torch.empty(128, device=device)
    decode_kernel[(1,)](codes.to(device), values, 128)
    assert_bitwise(values, reference.decode_float8(codes, E4M3))


def same_number(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise, except that any NaN equals any NaN."""
    actual = actual.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_bitwise(actual.nan_to_num(nan=0.5, posinf=1e39), expected.nan_to_num(nan=0.5, posinf=1e39))
