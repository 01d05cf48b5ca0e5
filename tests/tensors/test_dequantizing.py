"""What a quantized tensor is as a torch tensor: conversions, copies, attributes, arguments by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantizers.catalog import ONE_OF_EACH, assert_own_memory, assert_same_buffers, buffers, quantize
from reference.checks import normal
from torch import Tensor, nn

from narrowcast.tensors.dequantizing import DequantizedView, is_all_of, plain, with_attributes_of

BF16 = torch.bfloat16
SHAPE = (32, 64)
one_of_each = pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if name != "identity"])


def made(name: str = "mxfp8", seed: int = 0) -> Any:
    return quantize(ONE_OF_EACH[name], normal(SHAPE, BF16, seed))


@one_of_each
def test_to_keeps_codes_on_a_device_and_makes_plain_values_of_a_dtype(name):
    tensor = made(name)
    values = tensor.dequantize()
    for moved in (
        tensor.to("cpu", copy=True),
        tensor.to(device="cpu", copy=True),
        tensor.cpu(),
        tensor.to("cpu"),
    ):
        assert_same_buffers(moved, tensor)
    for result, dtype in (
        (tensor.to(BF16), BF16),
        (tensor.to(torch.float32), torch.float32),
        (tensor.to(dtype=torch.float16), torch.float16),
        (tensor.to("cpu", torch.float32), torch.float32),
        (tensor.to(torch.zeros(1)), torch.float32),
        (tensor.to(tensor=torch.zeros(1, dtype=torch.float16)), torch.float16),
        (tensor.float(), torch.float32),
        (tensor.half(), torch.float16),
        (tensor.bfloat16(), BF16),
    ):
        assert type(result) is Tensor and result.dtype == dtype
        assert torch.equal(result, tensor.dequantize(dtype=dtype))
    assert torch.equal(plain(tensor), values) and plain(values) is values


@one_of_each
def test_a_gradient_passes_through_in_the_nominal_dtype(name):
    leaf = made(name).requires_grad_()
    grad = normal(SHAPE, torch.float32, seed=1)
    leaf.dequantize(dtype=torch.float32).backward(grad)
    assert leaf.grad is not None and torch.equal(leaf.grad, grad.to(BF16))
    with torch.no_grad():
        assert not leaf.dequantize().requires_grad
    assert not made(name).dequantize().requires_grad


@one_of_each
def test_copies_and_data(name):
    tensor, other = made(name), made(name, seed=1)
    assert_same_buffers(tensor.clone(), tensor)
    assert_own_memory(tensor, tensor.clone())
    assert tensor.share_memory_() is tensor
    assert all(buffer.is_shared() for buffer in buffers(tensor).values())
    tensor.data = other
    assert_same_buffers(tensor, other)
    codes = dict(buffers(tensor))
    tensor.data = tensor.dequantize(dtype=torch.float32)  # its own values: its own codes
    assert tensor.dtype == torch.float32
    assert all(torch.equal(buffer, codes[key]) for key, buffer in buffers(tensor).items())
    tensor.data = normal((16, 32), BF16)
    assert_same_buffers(tensor, quantize(ONE_OF_EACH[name], normal((16, 32), BF16)))


@one_of_each
def test_the_address_is_that_of_the_codes(name):
    """By it other code tells parameters apart: FSDP2 of accelerate finds those of an optimizer so."""
    tensor, other = made(name), made(name)
    codes = [one for key, one in buffers(tensor).items() if "scale" not in key and "amax" not in key]
    assert tensor.data_ptr() in [one.data_ptr() for one in codes] and tensor.data_ptr() != other.data_ptr()
    assert nn.Parameter(tensor).data_ptr() == tensor.detach().data_ptr() == tensor.data_ptr()


def test_a_view_with_a_gradient_is_no_array():
    view = nn.Parameter(quantize(ONE_OF_EACH["mxfp8"], normal(SHAPE, torch.float32, 0)))[:, :3]
    assert isinstance(view, DequantizedView) and view.requires_grad
    with pytest.raises(RuntimeError, match="requires grad"):
        view.numpy()
    assert view.numpy(force=True).shape == view.detach().numpy().shape == (32, 3)


def test_the_kept_initial_value_is_dropped_on_request():
    tensor, value = made(), torch.ones(1)
    assert tensor.get_high_precision_init_val() is None
    tensor._high_precision_init_val = value
    assert tensor.get_high_precision_init_val() is value
    tensor.clear_high_precision_init_val()
    assert tensor.get_high_precision_init_val() is None


@pytest.mark.parametrize(
    "size, stride, offset, whole",
    [
        ((4, 6), (6, 1), 0, True),
        ((4, 6), (6, 1), None, True),
        ((4, 6), (6, 1), 1, False),
        ((6, 4), (6, 1), 0, False),
        ((4, 6), (1, 6), 0, False),
        ((6, 4), (4, 1), 0, False),
    ],
)
def test_whether_as_strided_asks_for_all(size, stride, offset, whole):
    assert is_all_of(torch.empty(4, 6), list(size), list(stride), offset) is whole


def test_attributes_of_a_parameter_go_to_what_is_made_of_it():
    source, result = nn.Parameter(made()), made(seed=1)
    source.marker, source.left = "kept", "out"
    returned: Any = with_attributes_of(source, result, ("left",))
    assert returned is result and result.marker == "kept" and not hasattr(result, "left")
    assert result._of_parameter and not hasattr(result, "_is_param")
    again = with_attributes_of(result, made())  # of what was made of a parameter, too
    assert again.marker == "kept" and again._of_parameter
    tensor, other = made(), made(seed=1)
    tensor.marker = "its own"
    assert not hasattr(with_attributes_of(tensor, other), "marker") and not other._of_parameter


@one_of_each
def test_operators_that_write_return_what_they_were_given(name):
    tensor, out = made(name), torch.empty(SHAPE, dtype=BF16)
    values = tensor.dequantize()
    assert tensor.mul_(2.0) is tensor
    assert_same_buffers(tensor, quantize(ONE_OF_EACH[name], 2 * values))
    values = tensor.dequantize()
    assert torch.add(tensor, 1.0, out=out) is out and torch.equal(out, values + 1.0)
    assert_same_buffers(tensor, quantize(ONE_OF_EACH[name], values))


def test_rows_under_other_leading_dims_keep_their_codes():
    tensor: Any = quantize(ONE_OF_EACH["mxfp8"], normal((2, 16, 64), BF16))
    for view in (tensor.view(-1, 64), tensor.view(32, -1), tensor.view(4, -1, 64)):
        assert type(view) is type(tensor) and torch.equal(
            view.dequantize().flatten(), tensor.dequantize().flatten()
        )
        assert view._rowwise_data.data_ptr() == tensor._rowwise_data.data_ptr()
    assert tuple(tensor.view(-1, 64).shape) == (32, 64) and tuple(tensor.view(4, -1, 64).shape) == (4, 8, 64)
    assert type(tensor.view(16, 128)) is not type(tensor)
    assert tuple(tensor.view(-1, 128).shape) == (16, 128)


def test_the_first_rows_by_strides_keep_their_codes():
    tensor = made("current")
    rows = tensor.as_strided((16, 64), (64, 1))
    assert type(rows) is type(tensor) and torch.equal(rows.dequantize(), tensor.dequantize()[:16])
