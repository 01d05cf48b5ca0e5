"""Grouped tensors made from descriptions: zeros in the buffers that quantizing would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.quantizers import (
    make_grouped_tensor,
    make_grouped_tensor_from_rowwise_data,
    make_grouped_tensor_with_shapes,
    make_tensor_offsets,
)
from narrowcast.tensors import GroupedTensorStorage, quantize_members

from .catalog import ONE_OF_EACH

one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)


def kinds(tensor: Any) -> list[Any]:
    return [
        None if b is None else (tuple(b.shape), b.dtype, b.device.type) for b in tensor.get_data_tensors()
    ]


@one_of_each
def test_equal_members(name: str) -> None:
    quantizer = ONE_OF_EACH[name]
    made = make_grouped_tensor_with_shapes(3, [(40, 48)] * 3, quantizer, "cpu", torch.bfloat16)
    again = make_grouped_tensor(3, None, None, 120, 48, quantizer, "cpu", torch.bfloat16)
    quantized = quantize_members([torch.zeros(3, 40, 48, dtype=torch.bfloat16)], quantizer)
    for tensor in (made, again):
        assert isinstance(tensor, nc.GroupedTensor) and tensor.shape == (3, 40, 48)
        assert kinds(tensor) == kinds(quantized) and tensor.dtype == torch.bfloat16
        assert not tensor.dequantize().any()
    values = torch.randn(3, 40, 48).bfloat16()
    made.quantize(values)
    assert torch.equal(made.dequantize(), quantize_members([values], quantizer).dequantize())
    assert make_grouped_tensor(1, None, None, 40, 48, quantizer, "cpu").shape == (1, 40, 48)
    bare = make_grouped_tensor(3, None, None, 120, 48, quantizer.replace(internal=True), "cpu")
    assert type(bare) is GroupedTensorStorage and bare.fake_dtype == torch.float32


@one_of_each
def test_members_that_differ(name: str) -> None:
    made = make_grouped_tensor_with_shapes(3, [(20, 48), (0, 48), (33, 48)], ONE_OF_EACH[name], "cpu")
    assert type(made) is GroupedTensorStorage and made.logical_shape == (53, 48)
    assert made.tensor_shapes == [(20, 48), (0, 48), (33, 48)]
    assert not made.dequantize().any()
    dims = torch.tensor([20, 0, 33], dtype=torch.int32)
    roomy = make_grouped_tensor(3, dims, None, 64, 48, ONE_OF_EACH[name], dtype=torch.bfloat16)
    assert roomy.logical_shape == (64, 48) and roomy.tensor_shapes == made.tensor_shapes


def test_in_high_precision() -> None:
    made = make_grouped_tensor(2, None, None, 8, 16, device="cpu")
    assert isinstance(made, nc.GroupedTensor) and not made.dequantize().any()
    values = torch.randn(2 * 4 * 16)
    options: dict[str, Any] = {"num_tensors": 2, "tensor_shape": (4, 16), "rowwise_data": values}
    copied = make_grouped_tensor_from_rowwise_data(**options)
    assert isinstance(copied, nc.GroupedTensor) and torch.equal(copied.dequantize().view(-1), values)
    bare = make_grouped_tensor_from_rowwise_data(**options, dtype=torch.bfloat16, internal=True)
    assert type(bare) is GroupedTensorStorage and torch.equal(bare.dequantize().view(-1), values.bfloat16())
    with pytest.raises(ValueError, match=r"rowwise_data has shape \(128,\); the members are \(3, 4, 16\)"):
        make_grouped_tensor_from_rowwise_data(num_tensors=3, tensor_shape=(4, 16), rowwise_data=values)


def test_offsets() -> None:
    for dtype in (torch.int32, torch.int64):
        offsets = make_tensor_offsets(torch.tensor([3, 0, 5], dtype=dtype), 16)
        assert offsets.dtype == torch.int64 and offsets.tolist() == [0, 48, 48, 128]
    with pytest.raises(ValueError, match=r"split_dims is torch.float32 \(2,\)"):
        make_tensor_offsets(torch.ones(2), 16)


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="num_tensors is 0"):
        make_grouped_tensor(0, None, None, 8, 16)
    with pytest.raises(NotImplementedError, match="last_dims is given"):
        make_grouped_tensor(2, None, torch.tensor([8, 8]), 8, 16)
    with pytest.raises(ValueError, match="which 3 equal members cannot share; pass first_dims"):
        make_grouped_tensor(3, None, None, 8, 16, device="cpu")
    with pytest.raises(ValueError, match=r"first_dims is torch.int64 \(1,\); use .*\(2,\)"):
        make_grouped_tensor(2, torch.tensor([8]), None, 8, 16)
    with pytest.raises(ValueError, match=r"give \(rows, columns\) for each of the 2 members"):
        make_grouped_tensor_with_shapes(2, [(4, 16)])
    with pytest.raises(NotImplementedError, match=r"members have \[8, 16\] columns"):
        make_grouped_tensor_with_shapes(2, [(4, 16), (4, 8)])


def test_a_given_stride() -> None:
    storage = quantize_members([torch.ones(2, 32, 32)], ONE_OF_EACH["mxfp8"])
    assert nc.GroupedTensor(storage).stride() == (1024, 32, 1)
    tensor = nc.GroupedTensor(storage, stride=(1024, 32, 1))
    assert tensor.stride() == (1024, 32, 1)
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    rebuilt = nc.GroupedTensor.__tensor_unflatten__(inner, context, tensor.shape, (1024, 32, 1))
    assert rebuilt.stride() == (1024, 32, 1)
    with pytest.raises(RuntimeError, match="must match dimensionality of strides"):
        nc.GroupedTensor(storage, stride=(1,))
