"""Grouped tensors from descriptions of their members, as Transformer Engine makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import shown
from .._device import default_device
from ..functional import grouped_quantize
from ..tensors import GroupedTensor, GroupedTensorStorage, grouped_layout, quantize_members
from .identity import IdentityQuantizer
from .quantizer import Quantizer


def make_grouped_tensor(
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None,
    logical_first_dim: int,
    logical_last_dim: int,
    quantizer: Quantizer | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> GroupedTensor | GroupedTensorStorage:
    """Return members that hold zeros, in one allocation per buffer.

    Args:
        num_tensors: how many members.
        first_dims: int32 or int64 (num_tensors,), the rows of each; None: all are equal.
        last_dims: None; members of one grouped tensor have the same columns.
        logical_first_dim, logical_last_dim: rows of all members together, room to spare included, and their columns.
        quantizer: of every member; None keeps high precision.
        device: default: that of ``first_dims``, else the accelerator, or the CPU without one.
        dtype: nominal dtype; default: fp32.
    Returns:
        a ``GroupedTensor`` (num_tensors, rows, columns); bare storage where the members differ, or for a quantizer
        that is ``internal``.
    Raises:
        ValueError: a number that is not positive, rows that equal members cannot share, or ``first_dims`` of another
            shape or dtype.
        NotImplementedError: ``last_dims``.
    """
    if num_tensors < 1:
        raise ValueError(f"num_tensors is {num_tensors}; use a positive number")
    if last_dims is not None:
        raise NotImplementedError(
            "last_dims is given; members of a grouped tensor have the same columns, pass None"
        )
    if quantizer is None:
        quantizer = IdentityQuantizer()
    place = device or (default_device() if first_dims is None else first_dims.device)
    zeros = torch.zeros(logical_first_dim, logical_last_dim, dtype=dtype or torch.float32, device=place)
    if first_dims is None:
        if logical_first_dim % num_tensors:
            raise ValueError(
                f"logical_first_dim is {logical_first_dim}, which {num_tensors} equal members cannot share; pass "
                "first_dims"
            )
        return _wrapped(zeros.view(num_tensors, -1, logical_last_dim), quantizer)
    if first_dims.shape != (num_tensors,) or first_dims.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"first_dims is {first_dims.dtype} {tuple(first_dims.shape)}; use torch.int32 or torch.int64 "
            f"({num_tensors},)"
        )
    first_dims = first_dims.to(place)
    seed = quantizer._seed(zeros)
    return GroupedTensorStorage(
        grouped_quantize(zeros, first_dims, quantizer, grouped_layout(quantizer._storage_name), seed),
        quantizer=quantizer,
        storage_name=quantizer._storage_name,
        rowwise=quantizer.rowwise_usage,
        columnwise=quantizer.columnwise_usage,
        num_tensors=num_tensors,
        logical_shape=(logical_first_dim, logical_last_dim),
        fake_dtype=zeros.dtype,
        first_dims=first_dims,
    )


def make_grouped_tensor_with_shapes(
    num_tensors: int,
    shapes: Sequence[tuple[int, int]],
    quantizer: Quantizer | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> GroupedTensor | GroupedTensorStorage:
    """Make a grouped tensor like :func:`make_grouped_tensor`, for members of these shapes (rows, columns).

    Raises:
        ValueError: another number of shapes than ``num_tensors``, or no matrices.
        NotImplementedError: their columns differ.
    """
    if len(shapes) != num_tensors or any(len(shape) != 2 for shape in shapes):
        raise ValueError(
            f"shapes is {shown(list(shapes))}; give (rows, columns) for each of the {num_tensors} members"
        )
    rows, columns = [shape[0] for shape in shapes], {shape[1] for shape in shapes}
    if len(columns) > 1:
        raise NotImplementedError(
            f"members have {sorted(columns)} columns; those of one grouped tensor are equal"
        )
    place = default_device() if device is None else device
    first_dims = None if len(set(rows)) == 1 else torch.tensor(rows, dtype=torch.int64, device=place)
    return make_grouped_tensor(
        num_tensors, first_dims, None, sum(rows), columns.pop(), quantizer, place, dtype
    )


def make_grouped_tensor_from_rowwise_data(
    *,
    num_tensors: int,
    tensor_shape: tuple[int, int],
    rowwise_data: Tensor,
    dtype: torch.dtype | None = None,
    internal: bool = False,
) -> GroupedTensor | GroupedTensorStorage:
    """Return members in high precision, copied from one tensor of all their values.

    Args:
        num_tensors, tensor_shape: how many members, and the shape of each.
        rowwise_data: fp32, bf16 or fp16, of any shape with as many elements.
        dtype: what to keep them in; default: as they are.
        internal: bare storage.
    Raises:
        ValueError: another number of elements.
    """
    shape = (num_tensors, *tensor_shape)
    if rowwise_data.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"rowwise_data has shape {tuple(rowwise_data.shape)}; the members are {shape} together"
        )
    values = rowwise_data.reshape(shape).to(dtype or rowwise_data.dtype)
    return _wrapped(values, IdentityQuantizer().replace(internal=internal))


def make_tensor_offsets(split_dims: Tensor, common_dim: int) -> Tensor:
    """Return where members begin, in elements: int64 (n + 1,), the sum of all before each, and of all.

    Args:
        split_dims: integers (n,), the sizes of the members in the dim in which they differ.
        common_dim: their size in the other.
    Raises:
        ValueError: ``split_dims`` of another rank or dtype.
    """
    if split_dims.dim() != 1 or split_dims.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"split_dims is {split_dims.dtype} {tuple(split_dims.shape)}; use torch.int32 or torch.int64 (n,)"
        )
    ends = split_dims.to(torch.int64).cumsum(0) * common_dim
    return torch.cat([ends.new_zeros(1), ends])


def _wrapped(members: Tensor, quantizer: Quantizer) -> GroupedTensor | GroupedTensorStorage:
    """Return equal members (G, N, K) as a tensor, or as storage for an internal quantizer."""
    storage = quantize_members([members], quantizer)
    return storage if quantizer.internal else GroupedTensor(storage)
