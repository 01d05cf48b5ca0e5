"""Plain inputs for operations that take no quantized data."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.parameters import casts
from ...tensors import QuantizedTensor, TensorOrQuantized, storage_of


def plain_input(input_: TensorOrQuantized) -> Tensor:
    """Return a main input in high precision: quantized ones are dequantized, under torch.autocast it is cast to its
    dtype.
    """
    x = plain(input_)
    return x.to(torch.get_autocast_dtype(x.device.type)) if casts(x) else x


def plain(tensor: TensorOrQuantized) -> Tensor:
    """Return a tensor in high precision; the caller of a fuser may give a quantized one."""
    if isinstance(tensor, QuantizedTensor):
        # neither a hybrid's buffers nor padded ones say the shape
        return storage_of(tensor, tuple(tensor.shape)).dequantize()
    assert isinstance(tensor, Tensor), "bare storages go only to operations that ask for quantized data"
    return tensor
