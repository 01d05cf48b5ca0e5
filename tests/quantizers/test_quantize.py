"""``quantize``, ``update_quantized`` and their errors; the straight-through gradient."""

from __future__ import annotations

import pytest
import torch
from reference.checks import awkward_layouts, normal

import narrowcast as nc

from .catalog import (
    E4M3,
    E5M2,
    ONE_OF_EACH,
    USAGES,
    VARIANTS,
    assert_same_buffers,
    buffers,
    delayed,
    quantize,
)

BF16 = torch.bfloat16
WITH_DELAYED = {**VARIANTS, "delayed": delayed()}
BLOCK_FORMATS = {name: q for name, q in ONE_OF_EACH.items() if name in ("mxfp8", "block", "nvfp4")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WITH_DELAYED)
def test_nominal_dtype(name: str, dtype: torch.dtype) -> None:
    quantizer, x = WITH_DELAYED[name], normal((48, 80), dtype)
    tensor = quantize(quantizer, x)
    assert tensor.dtype == tensor.dequantize().dtype == dtype
    other = torch.float16 if dtype != torch.float16 else torch.float32
    torch.manual_seed(3)
    assert quantizer.quantize(x, dtype=other).dtype == other
    assert torch.equal(tensor.dequantize(dtype=torch.float32).to(dtype), tensor.dequantize())
    torch.manual_seed(3)
    assert_same_buffers(quantizer(x), tensor)


@pytest.mark.parametrize("name", WITH_DELAYED)
def test_strides_do_not_matter(name: str) -> None:
    x = normal((40, 72), BF16)
    expected = quantize(WITH_DELAYED[name], x)
    for view in awkward_layouts(x).values():
        assert_same_buffers(quantize(WITH_DELAYED[name], view), expected)


@pytest.mark.parametrize("name", WITH_DELAYED)
def test_the_source_is_left_alone_and_shares_no_memory(name: str) -> None:
    x = normal((32, 32), torch.float32)
    before = x.clone()
    tensor = quantize(WITH_DELAYED[name], x)
    assert torch.equal(x, before)
    storage = x.untyped_storage().data_ptr()
    assert all(b.untyped_storage().data_ptr() != storage for b in buffers(tensor).values())


@pytest.mark.parametrize("internal", [False, True], ids=["wrapper", "internal"])
@pytest.mark.parametrize("name", WITH_DELAYED)
def test_quantizing_a_quantized_tensor_quantizes_its_value(name: str, internal: bool) -> None:
    quantizer = nc.MXFP8Quantizer(E4M3)
    tensor = quantize(WITH_DELAYED[name], normal((32, 64), BF16))
    expected = quantizer.quantize(tensor.dequantize())
    assert_same_buffers(quantizer.quantize(tensor), expected)
    wanted = quantizer.replace(internal=internal)
    assert_same_buffers(wanted.multi_quantize([tensor, tensor])[1], expected)


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
@pytest.mark.parametrize("name", VARIANTS)
def test_out_is_updated_in_place(name: str, usage: tuple[bool, bool]) -> None:
    quantizer, x = VARIANTS[name], normal((33, 50), BF16, seed=1)
    out = quantize(quantizer.with_usage(*usage), normal((33, 50), BF16))
    pointers = {key: b.data_ptr() for key, b in buffers(out).items()}
    torch.manual_seed(3)
    assert quantizer.quantize(x, out=out) is out
    assert pointers == {key: b.data_ptr() for key, b in buffers(out).items()}
    torch.manual_seed(3)
    assert_same_buffers(out, quantizer.with_usage(*usage).quantize(x))


@pytest.mark.parametrize("name", WITH_DELAYED)
def test_noop_flag_skips_on_the_device(name: str) -> None:
    quantizer = WITH_DELAYED[name]
    x, y = normal((32, 48), BF16), 3 * normal((32, 48), BF16, seed=1)
    out, expected = quantize(quantizer, x), quantize(quantizer, x)
    quantizer.update_quantized(y, out, noop_flag=torch.ones(1))
    assert_same_buffers(out, expected)
    torch.manual_seed(3)
    quantizer.update_quantized(y, out, noop_flag=torch.zeros(1))
    assert_same_buffers(out, quantize(quantizer, y))


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.bool, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("name", WITH_DELAYED)
def test_a_dtype_that_cannot_be_quantized(name: str, dtype: torch.dtype) -> None:
    quantizer, x = WITH_DELAYED[name], torch.ones(32, 32).to(dtype)
    assert not quantizer.is_quantizable(x)
    assert quantizer.is_quantizable(torch.ones(32, 32)) is (name != "nvfp4 row-scaled")
    out = quantize(quantizer, torch.ones(32, 32))
    for use in (quantizer.quantize, lambda t: quantizer.quantize(t, out=out), lambda t: out.quantize_(t)):
        with pytest.raises(TypeError, match=str(dtype)):
            use(x)


@pytest.mark.parametrize("block_dim", [1, 2])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (311,)], ids=str)
def test_blocks_of_128_take_vectors_and_numbers(shape: tuple[int, ...], block_dim: int) -> None:
    """As a matrix of one row; row-wise and column-wise, made, updated, copied, traced and with a gradient."""
    quantizer = nc.Float8BlockQuantizer(
        nc.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=block_dim
    )
    x = torch.randn(shape, requires_grad=True)
    made, matrix = quantizer.quantize(x), quantizer.quantize(x.detach().reshape(1, -1))
    assert made.shape == shape and not quantizer.is_quantizable(x)
    for ours, theirs in zip(made.get_data_tensors(), matrix.get_data_tensors(), strict=True):
        assert torch.equal(ours.reshape(-1), theirs.reshape(-1))
    (grad,) = torch.autograd.grad(made.dequantize().sum(), x)
    assert torch.equal(grad, torch.ones(shape))
    for rowwise in (True, False):
        one = quantizer.with_usage(rowwise, not rowwise)
        alone = one.quantize(x.detach())
        side = "rowwise" if rowwise else "columnwise"
        expected = one.quantize(x.detach().reshape(1, -1)).dequantize()
        assert alone.get_usages()[side] and torch.equal(alone.dequantize(), expected.reshape(shape))
        again = one.make_empty(shape, device="cpu").copy_(x.detach())
        assert_same_buffers(again, alone)
        traced = torch.compile(one.quantize, fullgraph=True, backend="aot_eager")(x.detach())
        assert_same_buffers(traced, alone)
    if block_dim == 2:
        alone = quantizer.with_usage(True, False).quantize(x.detach())
        alone.update_usage(columnwise_usage=True)
        assert_same_buffers(alone, made)


@pytest.mark.parametrize("name", sorted(set(BLOCK_FORMATS) - {"block"}))
@pytest.mark.parametrize("shape", [(), (32,)])
def test_block_formats_need_two_dims(name: str, shape: tuple[int, ...]) -> None:
    quantizer, x = BLOCK_FORMATS[name], torch.ones(shape)
    assert not quantizer.is_quantizable(x)
    with pytest.raises(
        ValueError,
        match=rf"{type(quantizer).__name__} needs at least 2 dims, got shape \({shape[0] if shape else ''}",
    ):
        quantizer.quantize(x)


@pytest.mark.parametrize("name", WITH_DELAYED)
def test_both_directions_off(name: str) -> None:
    quantizer = WITH_DELAYED[name].with_usage(False, False)
    with pytest.raises(ValueError, match=rf"{type(quantizer).__name__} has both directions switched off"):
        quantizer.quantize(torch.ones(32, 32))


@pytest.mark.parametrize("name", WITH_DELAYED)
def test_out_of_another_kind(name: str) -> None:
    quantizer, x = WITH_DELAYED[name], torch.ones(32, 32)
    other = ONE_OF_EACH["current" if isinstance(quantizer, nc.MXFP8Quantizer) else "mxfp8"].quantize(x)
    for out in (other, torch.empty(32, 32)):
        with pytest.raises(
            ValueError, match=rf"out is an? {type(out).__name__}.*{type(quantizer).__name__} writes"
        ):
            quantizer.quantize(x, out=out)  # type: ignore[arg-type]
    narrow = quantizer.quantize(torch.ones(32, 16))
    with pytest.raises(ValueError, match=r"out has shape \(32, 16\), the source has \(32, 32\)"):
        quantizer.quantize(x, out=narrow)


@pytest.mark.parametrize(
    ("writer", "owner", "named"),
    [
        (nc.Float8CurrentScalingQuantizer(E5M2), ONE_OF_EACH["current"], "kFloat8E5M2"),
        (nc.MXFP8Quantizer(E5M2), ONE_OF_EACH["mxfp8"], "kFloat8E5M2"),
        (VARIANTS["block 1d"], ONE_OF_EACH["block"], "block_scaling_dim"),
        (VARIANTS["nvfp4 row-scaled"], ONE_OF_EACH["nvfp4"], "row_scaled_nvfp4"),
        (VARIANTS["nvfp4 rht"], ONE_OF_EACH["nvfp4"], "with_rht"),
        (nc.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256), ONE_OF_EACH["nvfp4"], "256"),
    ],
)
def test_out_that_would_be_misread(writer: nc.Quantizer, owner: nc.Quantizer, named: str) -> None:
    x = normal((32, 32), BF16)
    out = owner.quantize(x)
    before = {key: b.clone() for key, b in buffers(out).items()}
    with pytest.raises(ValueError, match=named):
        writer.quantize(x, out=out)
    assert all(torch.equal(before[key], b) for key, b in buffers(out).items())


def test_out_may_differ_in_how_scales_and_roundings_were_chosen() -> None:
    x = normal((32, 32), BF16)
    for writer, owner in (
        (nc.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True), ONE_OF_EACH["current"]),
        (delayed(4.0), ONE_OF_EACH["current"]),
        (ONE_OF_EACH["current"], delayed(4.0)),
        (nc.NVFP4Quantizer(stochastic_rounding=True), ONE_OF_EACH["nvfp4"]),
        (nc.NVFP4Quantizer(nvfp4_use_4over6=True), ONE_OF_EACH["nvfp4"]),
    ):
        out = owner.quantize(torch.zeros_like(x))
        torch.manual_seed(3)
        writer.quantize(x, out=out)
        assert_same_buffers(out, quantize(writer, x))
        assert torch.equal(out.dequantize(), quantize(writer, x).dequantize())


def test_out_without_buffers() -> None:
    quantizer = ONE_OF_EACH["mxfp8"]
    out = quantizer.quantize(torch.ones(32, 32))
    out.clear()
    with pytest.raises(ValueError, match="both directions switched off"):
        quantizer.quantize(torch.ones(32, 32), out=out)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", WITH_DELAYED)
def test_the_gradient_passes_straight_through(name: str, dtype: torch.dtype) -> None:
    x, weight = normal((33, 50), dtype).requires_grad_(True), normal((33, 50), dtype, seed=1)
    tensor = quantize(WITH_DELAYED[name], x)
    assert tensor.requires_grad and tensor.shape == x.shape
    assert torch.equal(tensor.detach().dequantize(), quantize(WITH_DELAYED[name], x.detach()).dequantize())
    (grad,) = torch.autograd.grad((tensor.dequantize() * weight).sum(), x)
    assert torch.equal(grad, weight) and grad.dtype == dtype and type(grad) is torch.Tensor


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_gradient_has_the_dtype_of_the_source(name: str) -> None:
    x = normal((32, 32), torch.float32).requires_grad_(True)
    tensor = ONE_OF_EACH[name].quantize(x, dtype=BF16)
    (grad,) = torch.autograd.grad(tensor.dequantize().sum(), x)
    assert grad.dtype == torch.float32 and torch.equal(grad, torch.ones(32, 32))


def test_a_quantized_gradient_is_dequantized() -> None:
    x = normal((32, 32), BF16).requires_grad_(True)
    tensor, grad = ONE_OF_EACH["mxfp8"].quantize(x), ONE_OF_EACH["current"].quantize(normal((32, 32), BF16))
    (result,) = torch.autograd.grad(tensor, x, grad)
    assert type(result) is torch.Tensor and torch.equal(result, grad.dequantize())


def test_no_gradient_under_no_grad_or_for_bare_storages() -> None:
    x = normal((32, 32), BF16).requires_grad_(True)
    with torch.no_grad():
        assert not ONE_OF_EACH["mxfp8"].quantize(x).requires_grad
    internal = ONE_OF_EACH["mxfp8"].replace(internal=True).quantize(x)
    assert not isinstance(internal, torch.Tensor)
    assert not internal.dequantize().requires_grad


@pytest.mark.parametrize("name", VARIANTS)
def test_calling_quantizes(name: str) -> None:
    quantizer, x = VARIANTS[name], normal((32, 48), torch.float32)
    torch.manual_seed(3)
    assert_same_buffers(quantizer(x), quantize(quantizer, x))


def test_what_is_safe_to_repeat_and_to_gather() -> None:
    unsafe = {"nvfp4 stochastic", "delayed"}
    for name, quantizer in WITH_DELAYED.items():
        assert quantizer.is_requantization_safe() == (name not in unsafe)
        per_tensor = name == "delayed" or name.startswith("current")
        assert quantizer.supports_only_rowwise_all_gather() == per_tensor


def test_out_keeps_its_nominal_dtype() -> None:
    quantizer, x = ONE_OF_EACH["mxfp8"], normal((32, 48), torch.float32)
    out = quantizer.quantize(x, dtype=torch.bfloat16)
    assert quantizer.quantize(x, out=out, dtype=torch.bfloat16) is out
    with pytest.raises(
        ValueError, match=r"dtype is torch.float16 and out has .* torch.bfloat16; leave dtype out"
    ):
        quantizer.quantize(x, out=out, dtype=torch.float16)
