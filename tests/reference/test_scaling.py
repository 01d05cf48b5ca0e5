"""The amax and the scale rule: specials, dtypes, strides, and true divisions against NumPy."""

import math

import golden_vectors
import numpy as np
import pytest
import torch
from torch import Tensor

from narrowcast.formats import E4M3, E5M2, FLT_MAX, FP16_MAX
from narrowcast.reference import scaling

from .checks import DTYPES, EMPTY_SHAPES, assert_bitwise, awkward_layouts, floats32, normal


def scale(amax: list[float], **options: object) -> list[float]:
    arguments = {"power_2": False, "epsilon": 0.0, "overflow": FLT_MAX, **options}
    return scaling.scale_from_amax(torch.tensor(amax), E4M3.max, **arguments).tolist()  # type: ignore[arg-type]


class TestAmax:
    @pytest.mark.parametrize("name", golden_vectors.names("fp8_current", "fp8_delayed_e"))
    def test_golden(self, name: str, device: torch.device) -> None:
        golden = golden_vectors.load(name)
        assert_bitwise(scaling.amax(golden.input().to(device)).cpu(), golden["amax"])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_nan_is_ignored_and_infinity_is_not(self, dtype: torch.dtype, device: torch.device) -> None:
        x = torch.tensor([1.0, math.nan, -3.0, -math.nan], dtype=dtype, device=device)
        assert scaling.amax(x).tolist() == [3.0]
        assert scaling.amax(torch.cat((x, torch.full_like(x, -math.inf)))).tolist() == [math.inf]
        assert scaling.amax(x[1:2]).tolist() == [0.0]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(1,), (7,), (1000,), (3, 5, 7)])
    def test_every_dtype_shape_and_stride(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x = normal(shape, dtype)
        expected = x.float().abs().max().reshape(1)
        assert_bitwise(scaling.amax(x), expected)
        for layout, y in awkward_layouts(x).items():
            assert_bitwise(scaling.amax(y), expected, layout)

    @pytest.mark.parametrize("shape", [(0,), *EMPTY_SHAPES])
    def test_empty(self, shape: tuple[int, ...]) -> None:
        assert_bitwise(scaling.amax(torch.empty(shape, dtype=torch.bfloat16)), torch.zeros(1))

    def test_subnormal_amax_is_exact(self) -> None:
        for dtype, smallest in (
            (torch.float32, 2.0**-149),
            (torch.bfloat16, 2.0**-133),
            (torch.float16, 2.0**-24),
        ):
            assert scaling.amax(torch.tensor([-smallest], dtype=dtype)).tolist() == [smallest]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
    def test_other_dtypes_are_refused_by_name(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=f"{dtype}; use float32, bfloat16 or float16"):
            scaling.amax(torch.ones(2, dtype=dtype))

    @floats32()
    def test_random_bits(self, values: Tensor) -> None:
        magnitudes = np.abs(values.numpy())
        expected = np.fmax.reduce(magnitudes, initial=np.float32(0))
        assert scaling.amax(values).item() == expected


class TestScaleFromAmax:
    def test_no_scale_for_zero_and_nan_and_none_that_finds_back_from_infinity(self) -> None:
        for power_2 in (False, True):
            assert scale([0.0, math.nan, math.inf], power_2=power_2) == [1.0, 1.0, 0.0]
        assert scaling.reciprocal(torch.zeros(1)).item() == math.inf

    def test_epsilon_is_a_lower_bound_that_nan_escapes(self) -> None:
        assert scale([0.0, 0.25, 2.0, math.nan], epsilon=0.5) == [896.0, 896.0, 224.0, 1.0]

    def test_only_an_infinite_quotient_takes_the_overflow_value(self) -> None:
        tiny = 2.0**-140
        assert scale([tiny]) == [FLT_MAX]
        assert scale([tiny], overflow=FP16_MAX) == [FP16_MAX]
        assert scale([2.0**-20], overflow=FP16_MAX) == [448.0 * 2.0**20]
        assert scale([tiny], power_2=True) == [2.0**127]

    def test_power_2_rounds_down(self) -> None:
        assert scale([447.0, 448.0, 449.0, 1.0], power_2=True) == [1.0, 1.0, 0.5, 256.0]

    @floats32(non_negative=True)
    def test_is_a_true_division(self, values: Tensor) -> None:
        for fmt in (E4M3, E5M2):
            with np.errstate(all="ignore"):
                expected = np.float32(fmt.max) / values.numpy()
            expected = np.where(np.isinf(expected), np.float32(FLT_MAX), expected)
            expected = np.where(values.numpy() == np.inf, np.float32(0), expected)
            expected_scale = torch.where(values > 0, torch.from_numpy(expected), torch.ones(()))
            actual = scaling.scale_from_amax(values, fmt.max, power_2=False, epsilon=0.0, overflow=FLT_MAX)
            assert_bitwise(actual, expected_scale)

    def test_many_quotients_on_the_device(self, device: torch.device) -> None:
        amax = torch.linspace(1.0, 2.0, 4001) * 1.37
        expected = torch.from_numpy(np.float32(448.0) / amax.numpy())
        actual = scaling.scale_from_amax(amax.to(device), 448.0, power_2=False, epsilon=0.0, overflow=FLT_MAX)
        assert_bitwise(actual.cpu(), expected)

    def test_keeps_shape_and_input(self) -> None:
        amax = torch.tensor([[1.0, 0.0], [math.inf, 3.0]])
        kept = amax.clone()
        result = scaling.scale_from_amax(amax, 448.0, power_2=True, epsilon=0.5, overflow=FLT_MAX)
        assert result.shape == (2, 2)
        assert_bitwise(amax, kept)


def test_reciprocal_keeps_subnormals(device: torch.device) -> None:
    scales = torch.tensor([3.0, FLT_MAX, 2.0**127, 1.0])
    expected = torch.from_numpy(np.float32(1.0) / scales.numpy())
    assert expected[1] > 0
    assert_bitwise(scaling.reciprocal(scales.to(device)).cpu(), expected)
