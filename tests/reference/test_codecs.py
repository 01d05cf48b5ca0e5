"""Codecs: the golden probes, every bf16 value, random fp32 bit patterns against ml_dtypes, specials, packing."""

import math
import struct
from typing import Any

import golden_vectors
import numpy as np
import pytest
import torch
from torch import Tensor

from narrowcast.formats import E2M1, E4M3, E5M2, ElementFormat
from narrowcast.reference import codecs

from .checks import assert_bitwise, encode_subbyte, floats32

FP8 = [E4M3, E5M2]
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38]


def every_bf16() -> Tensor:
    """All 65536 bit patterns: every exponent, subnormals, infinities and NaNs."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def ml_encode(x: Tensor, dtype_name: str, fmt: ElementFormat) -> Tensor:
    """ml_dtypes' cast after clamping; NaN apart, because its sign is not specified."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    clipped = np.clip(np.nan_to_num(x.numpy(), nan=1.0, posinf=np.inf, neginf=-np.inf), -fmt.max, fmt.max)
    return torch.from_numpy(clipped.astype(getattr(ml_dtypes, dtype_name)).view(np.uint8))


@pytest.mark.parametrize("fmt", FP8, ids=lambda fmt: fmt.name)
class TestFloat8:
    def test_golden(self, fmt: ElementFormat, device: torch.device) -> None:
        golden = golden_vectors.load(f"cast_{fmt.name}")
        assert_bitwise(codecs.encode_float8(golden["value"].to(device), fmt).cpu(), golden["code"])

    def test_decode_table(self, fmt: ElementFormat, device: torch.device) -> None:
        table = golden_vectors.load(f"cast_{fmt.name}")["code_value"]
        decoded = codecs.decode_float8(torch.arange(256, dtype=torch.uint8, device=device), fmt).cpu()
        assert torch.equal(decoded.isnan(), table.isnan())
        assert_bitwise(decoded.nan_to_num(nan=0.0), table.nan_to_num(nan=0.0))

    def test_every_bf16_value_as_ml_dtypes(self, fmt: ElementFormat, device: torch.device) -> None:
        x = every_bf16()
        codes = codecs.encode_float8(x.to(device), fmt).cpu()
        assert torch.equal(codes[~x.isnan()], ml_encode(x, str(fmt.torch_dtype), fmt)[~x.isnan()])
        assert codes[x.isnan()].eq(0x7F).all()

    @floats32()
    def test_random_fp32_as_ml_dtypes(self, fmt: ElementFormat, values: Tensor) -> None:
        codes = codecs.encode_float8(values, fmt)
        number = ~values.isnan()
        assert torch.equal(codes[number], ml_encode(values, str(fmt.torch_dtype), fmt)[number])

    def test_specials(self, fmt: ElementFormat, device: torch.device) -> None:
        codes = codecs.encode_float8(torch.tensor(SPECIAL, device=device), fmt).tolist()
        top = {"e4m3": 0x7E, "e5m2": 0x7B}[fmt.name]
        assert codes == [0x7F, 0x7F, top, top | 0x80, 0x00, 0x80, 0x00, 0x80, top]

    def test_finite_codes_survive_a_round_trip(self, fmt: ElementFormat) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        values = codecs.decode_float8(codes, fmt)
        finite = values.isfinite()
        assert torch.equal(codecs.encode_float8(values[finite], fmt), codes[finite])

    def test_inputs_are_left_alone(self, fmt: ElementFormat) -> None:
        x = torch.tensor([1e9, -2.5, math.nan])
        kept = x.clone()
        codecs.encode_float8(x, fmt)
        codes = torch.arange(256, dtype=torch.uint8)
        codecs.decode_float8(codes, fmt)
        assert_bitwise(x, kept)
        assert torch.equal(codes, torch.arange(256, dtype=torch.uint8))

    def test_the_overwriting_form_agrees(self, fmt: ElementFormat) -> None:
        x = every_bf16()
        assert torch.equal(codecs.encode_float8(x, fmt), codecs.encode_float8_(x.clone(), fmt))

    def test_strided_and_empty_codes_decode(self, fmt: ElementFormat) -> None:
        codes = torch.arange(240, dtype=torch.uint8).view(20, 12)
        expected = codecs.decode_float8(codes, fmt)
        assert torch.equal(codecs.decode_float8(codes.t(), fmt).nan_to_num(), expected.t().nan_to_num())
        assert codecs.decode_float8(codes[:0], fmt).shape == (0, 12)


def test_only_fp8_formats_are_fp8() -> None:
    with pytest.raises(ValueError, match="e2m1 has no one-byte torch dtype"):
        codecs.encode_float8(torch.ones(2), E2M1)
    with pytest.raises(ValueError, match="e2m1 is not an FP8 format"):
        codecs.decode_float8(torch.ones(2, dtype=torch.uint8), E2M1)


class TestFloat4:
    def test_golden(self, device: torch.device) -> None:
        golden = golden_vectors.load("cast_e2m1")
        assert_bitwise(encode_subbyte(golden["value"].to(device), E2M1).cpu(), golden["code"])
        decoded = codecs.decode_subbyte(torch.arange(16, dtype=torch.uint8, device=device), E2M1).cpu()
        assert_bitwise(decoded, golden["code_value"])

    def test_every_bf16_value_as_ml_dtypes(self, device: torch.device) -> None:
        x = every_bf16()
        codes = encode_subbyte(x.to(device), E2M1).cpu()
        assert torch.equal(codes[~x.isnan()], ml_encode(x, "float4_e2m1fn", E2M1)[~x.isnan()])
        assert codes[x.isnan()].eq(7).all()

    @floats32()
    def test_random_fp32_as_ml_dtypes(self, values: Tensor) -> None:
        number = ~values.isnan()
        assert torch.equal(
            encode_subbyte(values, E2M1)[number], ml_encode(values, "float4_e2m1fn", E2M1)[number]
        )

    def test_one_ulp_around_every_tie(self) -> None:
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        below = torch.nextafter(ties, torch.zeros(()))
        above = torch.nextafter(ties, torch.full((), 9.0))
        assert encode_subbyte(ties, E2M1).tolist() == [0, 2, 2, 4, 4, 6, 6]
        assert encode_subbyte(below, E2M1).tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert encode_subbyte(above, E2M1).tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert encode_subbyte(-above, E2M1).tolist() == [9, 10, 11, 12, 13, 14, 15]

    def test_specials(self, device: torch.device) -> None:
        codes = encode_subbyte(torch.tensor(SPECIAL, device=device), E2M1).tolist()
        assert codes == [7, 7, 7, 15, 0, 8, 0, 8, 7]

    def test_inputs_are_left_alone_and_may_be_strided(self) -> None:
        x = every_bf16().view(256, 256)
        kept = x.clone()
        codes = encode_subbyte(x.t(), E2M1)
        assert_bitwise(x, kept)
        assert torch.equal(codes, encode_subbyte(x, E2M1).t())

    def test_the_overwriting_form_agrees(self) -> None:
        x = every_bf16()
        scratch = torch.full((1 << 16,), -1, dtype=torch.int32)
        assert torch.equal(encode_subbyte(x, E2M1), codecs.encode_subbyte_(x.clone(), E2M1, scratch))
        assert (scratch != -1).any()  # computed in, not allocated again

    @pytest.mark.parametrize("shape", [(2,), (3, 8), (2, 3, 16), (0, 4), (4, 0)])
    def test_packing_round_trip(self, shape: tuple[int, ...], device: torch.device) -> None:
        codes = torch.randint(0, 16, shape, dtype=torch.uint8).to(device)
        data = codecs.pack_codes(codes, 4)
        assert data.shape == (*shape[:-1], shape[-1] // 2)
        assert torch.equal(data, codes[..., 0::2] | (codes[..., 1::2] << 4))
        assert torch.equal(codecs.unpack_codes(data, 4), codes)

    def test_packing_strided_codes(self) -> None:
        codes = torch.randint(0, 16, (6, 4), dtype=torch.uint8)
        assert torch.equal(codecs.pack_codes(codes.t(), 4), codecs.pack_codes(codes.t().contiguous(), 4))
        data = codecs.pack_codes(codes, 4)
        assert torch.equal(codecs.unpack_codes(data.t(), 4), codecs.unpack_codes(data.t().contiguous(), 4))

    def test_an_odd_number_of_codes_cannot_be_packed(self) -> None:
        with pytest.raises(
            ValueError, match="cannot pack 3 codes of 4 bits: the last dimension must be a multiple of 2"
        ):
            codecs.pack_codes(torch.zeros(2, 3, dtype=torch.uint8), 4)


def stochastic_oracle(x: np.ndarray, r: int) -> list[int]:
    """The rounding rule one element at a time, each operation rounded to fp32."""
    codes = []
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for value in x:
        a = np.minimum(np.abs(value), np.float32(6))
        step = np.float32(0.5 if a < 2 else 1.0 if a < 4 else 2.0)
        t = np.float32(a + np.float32(np.float32(r / 256) * step))
        step_t = np.float32(0.5 if t < 2 else 1.0 if t < 4 else 2.0)
        q = min(float(np.floor(t / step_t) * step_t), 6.0)
        codes.append(magnitudes.index(q) | (8 if np.signbit(value) else 0))
    return codes


class TestStochasticFloat4:
    def test_follows_the_rule_for_every_random_byte(self) -> None:
        generator = np.random.default_rng(3)
        x = np.concatenate([
            np.array([0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.5, -9e9, 1e-30, 0.4999999, 1.9999999, 5.9999995]),
            generator.uniform(-7, 7, 25),
            np.exp2(generator.uniform(-12, 3, 10)),
        ]).astype(np.float32)  # fmt: skip
        for r in range(256):
            codes = codecs.encode_float4_stochastic_(
                torch.from_numpy(x.copy()), torch.full(x.shape, float(r))
            )
            assert codes.tolist() == stochastic_oracle(x, r), r

    @pytest.mark.parametrize(
        ("value", "low", "share"), [(0.125, 0, 64), (2.75, 4, 192), (5.5, 6, 192), (1.25, 2, 128)]
    )
    def test_shares_are_exact_over_all_bytes(self, value: float, low: int, share: int) -> None:
        codes = codecs.encode_float4_stochastic_(torch.full((256,), value), torch.arange(256.0))
        assert codes.eq(low + 1).sum() == share
        assert codes.eq(low).sum() == 256 - share

    def test_codes_stay_and_nan_saturates(self) -> None:
        values = codecs.decode_subbyte(torch.arange(16, dtype=torch.uint8), E2M1)
        for r in (0.0, 255.0):
            codes = codecs.encode_float4_stochastic_(values.clone(), torch.full((16,), r))
            assert codes.tolist() == list(range(16))
            special = codecs.encode_float4_stochastic_(torch.tensor(SPECIAL[:4]), torch.full((4,), r))
            assert special.tolist() == [7, 7, 7, 15]


class TestE8M0:
    def test_golden(self, device: torch.device) -> None:
        golden = golden_vectors.load("cast_e8m0_ceil")
        assert_bitwise(codecs.encode_e8m0(golden["value"].to(device)).cpu(), golden["code"])
        table = golden["code_value"]
        codes = torch.arange(len(table), dtype=torch.uint8, device=device)
        assert_bitwise(codecs.decode_e8m0(codes).cpu(), table)

    def test_reciprocals_are_exact(self, device: torch.device) -> None:
        codes = torch.arange(255, dtype=torch.uint8, device=device)
        product = codecs.decode_e8m0(codes).double() * codecs.reciprocal_e8m0(codes).double()
        assert product.eq(1.0).all()

    def test_nan(self, device: torch.device) -> None:
        code = torch.full((1,), 255, dtype=torch.uint8, device=device)
        assert codecs.decode_e8m0(code).isnan().all()
        assert codecs.reciprocal_e8m0(code).isnan().all()
        patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32, device=device)
        assert codecs.encode_e8m0(patterns.view(torch.float32)).tolist() == [255, 255, 255]

    @floats32(non_negative=True)
    def test_smallest_power_of_two_not_below(self, values: Tensor) -> None:
        codes = codecs.encode_e8m0(values)
        for value, code in zip(values.tolist(), codes.tolist(), strict=True):
            if math.isnan(value):
                assert code == 255
            elif value > 2.0**127:
                assert code == 254
            else:
                assert value <= 2.0 ** (code - 127)
                assert code == 0 or value > 2.0 ** (code - 128)

    def test_strided_and_empty(self) -> None:
        values = torch.tensor([[1.0, 3.0], [0.0, math.inf], [2.0**-127, 2.0**-126]])
        assert codecs.encode_e8m0(values.t()).tolist() == [[127, 0, 0], [129, 254, 1]]
        assert codecs.encode_e8m0(values[:0]).shape == (0, 2)


def test_negative_nan_is_what_the_test_thinks() -> None:
    bits: Any = struct.unpack("<I", struct.pack("<f", -math.nan))[0]
    assert bits >> 31 == 1
