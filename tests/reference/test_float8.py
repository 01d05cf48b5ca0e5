"""Per-tensor FP8: golden files in both input dtypes, awkward shapes and strides, specials, aliasing."""

import math

import golden_vectors
import pytest
import torch

from narrowcast.formats import E2M1, E4M3, E5M2, FLT_MAX, ElementFormat
from narrowcast.reference import codecs, float8, scaling

from .checks import DTYPES, EMPTY_SHAPES, RAGGED_SHAPES, assert_bitwise, assert_fresh, awkward_layouts, normal

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
USAGES = [(True, False), (False, True), (True, True)]


def current(
    x: torch.Tensor, fmt: ElementFormat = E4M3, rowwise: bool = True, columnwise: bool = True
) -> list:
    return float8.quantize_current(x, fmt, power_2=False, epsilon=0.0, rowwise=rowwise, columnwise=columnwise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", golden_vectors.names("fp8_current", "fp8_delayed_e"))
def test_golden(name: str, dtype: torch.dtype, device: torch.device) -> None:
    golden = golden_vectors.load(name)
    fmt = FORMATS[golden.meta["format"]]
    x = golden["x"].to(device, dtype)
    if name.startswith("fp8_current"):
        options = {"power_2": golden.meta["power_2_scale"], "epsilon": golden.meta["amax_epsilon"]}
        scale = scaling.scale_from_amax(scaling.amax(x), fmt.max, overflow=FLT_MAX, **options)
        assert_bitwise(scale.cpu(), golden["scale"])
        outputs = float8.quantize_current(x, fmt, rowwise=True, columnwise=True, **options)
    else:
        outputs = float8.quantize(x, golden["scale"].to(device), fmt, rowwise=True, columnwise=True)
    data, transpose, scale_inv = outputs
    assert_bitwise(data.cpu(), golden["rowwise_data"])
    assert_bitwise(transpose.cpu(), golden["columnwise_data"])
    assert_bitwise(scale_inv.cpu(), golden["scale_inv"])
    for values in (
        float8.dequantize(data, scale_inv, fmt, torch.float32),
        float8.dequantize_transpose(transpose, scale_inv, fmt, torch.float32),
    ):
        assert values.is_contiguous()
        assert_bitwise(values.cpu(), golden["dequant"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (1000,), *RAGGED_SHAPES])
def test_shapes_and_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(shape, dtype)
    data, transpose, scale_inv = current(x)
    assert data.shape == shape
    assert transpose.shape == (shape[-1], *shape[:-1])
    assert torch.equal(transpose, data.movedim(-1, 0))
    expected = codecs.encode_float8(x.float() * (torch.tensor(448.0) / x.float().abs().max()), E4M3)
    assert torch.equal(data, expected)
    for layout, y in awkward_layouts(x).items():
        for actual, reference in zip(current(y), (data, transpose, scale_inv), strict=True):
            assert_bitwise(actual, reference, layout)


@pytest.mark.parametrize(("rowwise", "columnwise"), USAGES)
@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1,), (16, 32), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_usages_and_aliasing(
    shape: tuple[int, ...], rowwise: bool, columnwise: bool, dtype: torch.dtype
) -> None:
    x = normal(shape, dtype)
    kept = x.clone()
    outputs = current(x, rowwise=rowwise, columnwise=columnwise)
    everything = current(x)
    expected = everything[:1] * rowwise + everything[1:2] * columnwise + everything[2:]
    assert len(outputs) == len(expected)
    for actual, reference in zip(outputs, expected, strict=True):
        assert_bitwise(actual, reference)
    assert_fresh(outputs, [x])
    assert_bitwise(x, kept)


def test_a_given_scale_is_neither_changed_nor_shared() -> None:
    scale = torch.tensor([2.0])
    outputs = float8.quantize(torch.ones(2, 2), scale, E4M3, rowwise=False, columnwise=False)
    assert [out.tolist() for out in outputs] == [[0.5]]
    assert_fresh(outputs, [scale])
    one = torch.ones(1)
    outputs = float8.quantize(torch.ones(2, 2), one, E4M3, rowwise=True, columnwise=True)
    assert_fresh(outputs, [one])


@pytest.mark.parametrize("shape", [(0,), *EMPTY_SHAPES])
def test_empty(shape: tuple[int, ...]) -> None:
    data, transpose, scale_inv = current(torch.empty(shape, dtype=torch.bfloat16))
    assert data.shape == shape
    assert transpose.shape == (shape[-1], *shape[:-1])
    assert scale_inv.tolist() == [1.0]
    assert float8.dequantize(data, scale_inv, E4M3, torch.bfloat16).shape == shape
    assert float8.dequantize_transpose(transpose, scale_inv, E4M3, torch.bfloat16).shape == shape


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_one_nan(fmt: ElementFormat, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([[1.0, math.nan, -2.0, -math.nan]], dtype=dtype, device=device)
    data, _, scale_inv = current(x, fmt)
    assert data.flatten().tolist()[1::2] == [0x7F, 0x7F]
    values = float8.dequantize(data, scale_inv, fmt, torch.float32).flatten()
    assert values.isnan().tolist() == [False, True, False, True]
    assert values[2].item() == pytest.approx(-2.0, rel=1e-6)


def test_infinity_poisons_a_tensor_with_its_own_scale() -> None:
    """What was finite has lost its scale and decodes to NaN too: no wrong number comes out."""
    data, transpose, scale_inv = current(torch.tensor([[math.inf, -math.inf, 500.0, 0.0]]))
    assert scale_inv.item() == math.inf
    assert data.tolist() == [[0x7F, 0x7F, 0, 0]]
    assert float8.dequantize(data, scale_inv, E4M3, torch.float32).isnan().all()
    assert float8.dequantize_transpose(transpose, scale_inv, E4M3, torch.float32).isnan().all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_becomes_nan_under_a_given_scale(fmt: ElementFormat, dtype: torch.dtype) -> None:
    """It alone: finite values saturate, and the signs of zeros and of what underflows are those of the product."""
    x = torch.tensor(
        [[math.inf, -math.inf, math.nan, 6e4, -6e4, 0.0, -0.0, 2.0**-24, -(2.0**-24)]], dtype=dtype
    )
    amax = torch.zeros(1)
    data, transpose, scale_inv = float8.quantize(
        x, torch.tensor([2.0]), fmt, rowwise=True, columnwise=True, amax=amax
    )
    largest = {E4M3: 0x7E, E5M2: 0x7B}[fmt]
    assert data.tolist() == [[0x7F, 0x7F, 0x7F, largest, largest | 0x80, 0, 0x80, 0, 0x80]]
    assert torch.equal(transpose, data.t())
    assert scale_inv.item() == 0.5 and amax.item() == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_nominal_dtype_is_rounded_last(dtype: torch.dtype) -> None:
    x = normal((5, 9), torch.float32)
    data, transpose, scale_inv = current(x)
    exact = float8.dequantize(data, scale_inv, E4M3, torch.float32)
    assert_bitwise(float8.dequantize(data, scale_inv, E4M3, dtype), exact.to(dtype))
    assert_bitwise(float8.dequantize_transpose(transpose, scale_inv, E4M3, dtype), exact.to(dtype))


def test_an_input_under_autograd_is_read_only_data() -> None:
    x = normal((4, 8), torch.float32).requires_grad_()
    for output in current(x):
        assert not output.requires_grad


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"torch\.float64; use float32, bfloat16 or float16"):
        current(torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="e2m1 has no one-byte torch dtype"):
        current(torch.ones(2, 2), E2M1)


def test_the_largest_of_given_amaxes_is_that_of_the_tensor() -> None:
    x, amaxes = normal((5, 7), torch.bfloat16), torch.tensor([0.5, 96.0, 2.0])
    given = float8.quantize_current(
        x, E4M3, power_2=True, epsilon=0.0, rowwise=True, columnwise=True, amax=amaxes
    )
    assert given[2].tolist() == [0.25]  # 96 * 4 <= 448
    for ours, theirs in zip(
        given, float8.quantize(x, torch.tensor([4.0]), E4M3, rowwise=True, columnwise=True)
    ):
        assert_bitwise(ours, theirs)
