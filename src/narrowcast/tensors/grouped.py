"""Grouped tensors: many quantized matrices in one allocation per buffer, as grouped GEMMs read them.

``GroupedTensorStorage`` holds the buffers; ``GroupedTensor`` is the ``torch.Tensor`` over it for parameters of shape
(num_tensors, rows, columns). How the members lie in the buffers is the layout of ``functional.grouped_quantize``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..functional import (
    QuantizerValue,
    draw_seed,
    grouped_dequantize,
    grouped_quantize_weights,
    operand_of,
)
from ..functional.grouped_quantize import group_operands
from .storage import QuantizedTensorStorage, resolve_storage_class

aten = torch.ops.aten

_BUFFERS = ("rowwise_data", "scale_inv", "columnwise_data", "columnwise_scale_inv")


def grouped_layout(storage_name: str) -> str:
    """Layout of groups whose members have storages of that identifier."""
    return resolve_storage_class(storage_name)._GROUPED


class GroupedTensorStorage:
    """Buffers of quantized groups, row-wise, column-wise or both.

    Args:
        buffers: what an operator of ``functional.grouped_quantize`` returned.
        quantizer: the quantizer of every member.
        storage_name: identifier of a single member's storage class; decides how the members lie in the buffers.
        rowwise, columnwise: the directions in ``buffers``.
        num_tensors: how many members.
        logical_shape: (num_tensors, rows, columns) of equal members, (rows, columns) of all rows together otherwise.
        fake_dtype: nominal high-precision dtype.
        first_dims: int32 or int64 (num_tensors,), the rows of every member; None: all are equal.
    """

    rowwise_data: Tensor | None
    scale_inv: Tensor | None
    columnwise_data: Tensor | None
    columnwise_scale_inv: Tensor | None

    def __init__(
        self,
        buffers: list[Tensor],
        *,
        quantizer: QuantizerValue,
        storage_name: str,
        rowwise: bool,
        columnwise: bool,
        num_tensors: int,
        logical_shape: tuple[int, ...],
        fake_dtype: torch.dtype,
        first_dims: Tensor | None = None,
    ) -> None:
        layout = grouped_layout(storage_name)
        self.quantizer, self.storage_name, self.group_layout = quantizer, storage_name, layout
        self.num_tensors = num_tensors
        self.logical_shape, self.fake_dtype, self.first_dims = logical_shape, fake_dtype, first_dims
        self.rowwise_data = self.scale_inv = self.columnwise_data = self.columnwise_scale_inv = None
        if rowwise:
            operand = operand_of(buffers, layout, False)
            self.rowwise_data = operand[0]
            self.scale_inv = operand[1] if len(operand) > 1 else None
        if columnwise:
            operand = operand_of(buffers, layout, True)
            self.columnwise_data = operand[0]
            if layout == "tensor":
                self.scale_inv = operand[1]
            elif len(operand) > 1:
                self.columnwise_scale_inv = operand[1]

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        """Row-wise data and scales, column-wise data and scales; absent ones as None."""
        return self.rowwise_data, self.scale_inv, self.columnwise_data, self.columnwise_scale_inv

    def get_usages(self) -> dict[str, bool]:
        """Which directions have data: ``{"rowwise": bool, "columnwise": bool}``."""
        return {"rowwise": self.rowwise_data is not None, "columnwise": self.columnwise_data is not None}

    def rowwise_operand(self) -> list[Tensor]:
        """Buffers of the row-wise GEMM operand.

        Raises:
            RuntimeError: there is no row-wise data.
        """
        return self._operand(self.rowwise_data, self.scale_inv, "row-wise")

    def columnwise_operand(self) -> list[Tensor]:
        """Buffers of the column-wise GEMM operand.

        Raises:
            RuntimeError: there is no column-wise data.
        """
        scale = self.scale_inv if self.group_layout == "tensor" else self.columnwise_scale_inv
        return self._operand(self.columnwise_data, scale, "column-wise")

    def _operand(self, data: Tensor | None, scale: Tensor | None, direction: str) -> list[Tensor]:
        if data is None:
            raise RuntimeError(f"{type(self).__name__} holds no {direction} data and this use needs it")
        return [data] if scale is None else [data, scale]

    @property
    def tensor_shapes(self) -> list[tuple[int, int]]:
        """Shape of every member; reads ``first_dims`` on the host where the members differ."""
        columns = self.logical_shape[-1]
        if self.first_dims is None:
            return [(self.logical_shape[-2], columns)] * self.num_tensors
        return [(rows, columns) for rows in self.first_dims.tolist()]

    def split_into_quantized_tensors(self) -> list[QuantizedTensorStorage]:
        """Every member by itself; reads the shapes on the host, so not for a CUDA graph."""
        shapes = self.tensor_shapes
        usages = self.get_usages()
        parts: list[list[list[Tensor]]] = []
        for columnwise, there in ((False, usages["rowwise"]), (True, usages["columnwise"])):
            if there:
                operand = self.columnwise_operand() if columnwise else self.rowwise_operand()
                sizes, columns = [rows for rows, _ in shapes], self.logical_shape[-1]
                parts.append(
                    group_operands(
                        operand,
                        self.group_layout,
                        self.quantizer,
                        columnwise,
                        sizes,
                        columns,
                        self.fake_dtype,
                    )
                )
        storage_class = resolve_storage_class(self.storage_name)
        members = []
        for shape, *operands in zip(shapes, *parts, strict=True):
            names: list[str] = []
            if usages["rowwise"]:
                names += storage_class._ROWWISE_BUFFERS
            if usages["columnwise"]:
                names += storage_class._COLUMNWISE_BUFFERS
            member = storage_class(quantizer=self.quantizer, fake_dtype=self.fake_dtype, shape=shape)
            for name, buffer in zip(names, [buffer for operand in operands for buffer in operand]):
                setattr(member, name, buffer)
            members.append(member)
        return members

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """High-precision values in ``logical_shape``; rows beyond the members are zero.

        Raises:
            RuntimeError: there is no row-wise data.
        """
        values = grouped_dequantize(
            self.rowwise_operand(),
            self.quantizer,
            self.group_layout,
            self.first_dims,
            self.fake_dtype,
            list(self.logical_shape),
        )
        return values if dtype is None else values.to(dtype)

    def quantize(
        self, tensors: Sequence[Tensor] | Tensor, noop_flag: Tensor | None = None
    ) -> GroupedTensorStorage:
        """Overwrite the buffers with the quantization of equal members, all in one operator.

        Args:
            tensors: the members, or one tensor (num_tensors, rows, columns).
            noop_flag: fp32, one element; non-zero leaves the buffers as they are, decided on the device.

        Raises:
            NotImplementedError: the members have different shapes.
        """
        self._check_uniform()
        made = quantize_members(
            list(tensors) if not isinstance(tensors, Tensor) else [tensors], self.quantizer
        )
        for mine, theirs in zip(self.get_data_tensors(), made.get_data_tensors(), strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs if noop_flag is None else torch.where(noop_flag != 0, mine, theirs))
        return self

    def _check_uniform(self) -> None:
        if self.first_dims is not None:
            raise NotImplementedError(
                f"{type(self).__name__} has members of different shapes; split_into_quantized_tensors() gives them one "
                "by one"
            )

    def copy(self) -> GroupedTensorStorage:
        """The same members in buffers of their own."""
        return self._mapped(torch.clone)

    def clear(self) -> None:
        """Drop every buffer."""
        for name in _BUFFERS:
            setattr(self, name, None)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> GroupedTensorStorage:
        storage = GroupedTensorStorage([], **self._metadata())
        _take_buffers(storage, {name: getattr(self, name) for name in _BUFFERS}, function)
        return storage

    def _metadata(self) -> dict[str, Any]:
        """Constructor arguments of a storage without buffers."""
        return {
            "quantizer": self.quantizer,
            "storage_name": self.storage_name,
            "rowwise": False,
            "columnwise": False,
            "num_tensors": self.num_tensors,
            "logical_shape": tuple(self.logical_shape),
            "fake_dtype": self.fake_dtype,
            "first_dims": self.first_dims,
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_tensors={self.num_tensors}, shapes={self.tensor_shapes}, "
            f"logical_shape={tuple(self.logical_shape)}, quantizer={self.quantizer!r}, dtype={self.fake_dtype})"
        )


def quantize_members(
    tensors: list[Tensor], quantizer: QuantizerValue, seed: Tensor | None = None
) -> GroupedTensorStorage:
    """Quantize equal matrices (N, K), or one tensor (G, N, K) of them, in one operator.

    Raises:
        ValueError: shapes or dtypes that differ, or no matrices.
    """
    first = tensors[0]
    if any(tensor.shape != first.shape or tensor.dtype != first.dtype for tensor in tensors):
        raise ValueError(
            f"members are {[(tuple(t.shape), t.dtype) for t in tensors]}; give matrices of one shape and dtype"
        )
    if first.dim() != (3 if len(tensors) == 1 and first.dim() != 2 else 2):
        raise ValueError(
            f"members have shape {tuple(first.shape)}; give matrices, or one (groups, rows, columns)"
        )
    described: Any = quantizer
    layout = grouped_layout(described._storage_name)
    if seed is None and described._is_stochastic():
        seed = draw_seed(first)
    shape = tuple(first.shape) if first.dim() == 3 else (len(tensors), *first.shape)
    return GroupedTensorStorage(
        grouped_quantize_weights([tensor.detach() for tensor in tensors], quantizer, layout, seed),
        quantizer=quantizer,
        storage_name=described._storage_name,
        rowwise=described.rowwise_usage,
        columnwise=described.columnwise_usage,
        num_tensors=shape[0],
        logical_shape=shape,
        fake_dtype=first.dtype,
    )


def _take_buffers(
    storage: GroupedTensorStorage, buffers: dict[str, Tensor | None], function: Callable[[Tensor], Tensor]
) -> None:
    for name, buffer in buffers.items():
        setattr(storage, name, None if buffer is None else function(buffer))


class GroupedTensor(GroupedTensorStorage, torch.Tensor):
    """Tensor of shape (num_tensors, rows, columns) over quantized members of equal shape.

    Operations run on the dequantized members; in-place ones requantize into the same buffers. Shapes cannot be changed.

    Args:
        storage: what it shares its buffers with.
        requires_grad: as of any tensor.

    Raises:
        NotImplementedError: the members have different shapes.
    """

    _high_precision_init_val: Tensor | None = None

    @staticmethod
    def __new__(cls, storage: GroupedTensorStorage, requires_grad: bool = False) -> GroupedTensor:
        storage._check_uniform()
        device = next(buffer.device for buffer in storage.get_data_tensors() if buffer is not None)
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, storage.logical_shape, dtype=storage.fake_dtype, device=device, requires_grad=requires_grad
        )

    def __init__(self, storage: GroupedTensorStorage, requires_grad: bool = False) -> None:
        GroupedTensorStorage.__init__(self, [], **storage._metadata())
        _take_buffers(self, {name: getattr(storage, name) for name in _BUFFERS}, lambda buffer: buffer)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """High-precision values; the gradient passes through unchanged."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype or self.fake_dtype)
        return GroupedTensorStorage.dequantize(self, dtype=dtype)

    def get_high_precision_init_val(self) -> Tensor | None:
        """CPU copy of the value this parameter was made from, if ``quantized_model_init`` kept one."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Drop that copy."""
        self._high_precision_init_val = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return GroupedTensorStorage.__repr__(self)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """(names of the present buffers, data-free context)."""
        present = [name for name in _BUFFERS if getattr(self, name) is not None]
        return present, {**self._metadata(), "requires_grad": self.requires_grad}

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> GroupedTensor:
        """Rebuild from ``__tensor_flatten__``'s parts."""
        described = dict(context)
        requires_grad = described.pop("requires_grad")
        storage = GroupedTensorStorage([], **described)
        _take_buffers(storage, dict(inner_tensors), lambda buffer: buffer)
        return GroupedTensor(storage, requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return GroupedTensor(args[0])
        if func is aten.clone.default:
            return GroupedTensor(args[0].copy())
        if func in (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default):
            return _reshaped(func, *args)
        if func in _SHAPE_CHANGING:
            raise RuntimeError(f"{func} cannot change the shape of a GroupedTensor; call dequantize() first")
        if func._schema.is_mutable:
            return _run_in_place(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(GroupedTensor, GroupedTensorStorage.dequantize, (args, kwargs))
        return func(*args, **kwargs)


_SHAPE_CHANGING = (
    aten.slice.Tensor,
    aten.select.int,
    aten.cat.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.split.Tensor,
    aten.unbind.int,
)


def _reshaped(func: Any, tensor: GroupedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    if list(size) == [-1] and tensor.rowwise_data is not None:
        return tensor.rowwise_data.reshape(-1)
    if all(new in (-1, old) for new, old in zip(size, tensor.shape)) and len(size) == tensor.dim():
        return GroupedTensor(tensor)
    raise RuntimeError(
        f"{func} cannot change the shape {tuple(tensor.shape)} of a GroupedTensor to {tuple(size)}; call dequantize() "
        "first, or use view(-1) for the row-wise codes"
    )


def _run_in_place(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Dequantize, run, and requantize every argument the schema writes to; keywords are paired by name."""
    names = [argument.name for argument in func._schema.arguments]
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    given = {**dict(zip(names, args)), **kwargs}
    plain = {
        name: pytree.tree_map_only(GroupedTensor, GroupedTensorStorage.dequantize, value)
        for name, value in given.items()
    }
    result = func(*(plain[name] for name in names[: len(args)]), **{name: plain[name] for name in kwargs})
    originals: dict[int, Any] = {}
    for name in written & given.keys():
        for target, source in zip(
            pytree.tree_leaves(given[name]), pytree.tree_leaves(plain[name]), strict=True
        ):
            originals[id(source)] = target
            if isinstance(target, GroupedTensor):
                target.quantize(source)
    return pytree.tree_map_only(Tensor, lambda returned: originals.get(id(returned), returned), result)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: GroupedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return GroupedTensorStorage.dequantize(tensor, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output.to(ctx.dtype), None


def grouped_storage_of(tensor: GroupedTensor) -> GroupedTensorStorage:
    """Bare storage that shares the tensor's buffers; traceable, as a method of a tensor would not be."""
    storage = GroupedTensorStorage(
        [],
        quantizer=tensor.quantizer,
        storage_name=tensor.storage_name,
        rowwise=False,
        columnwise=False,
        num_tensors=tensor.num_tensors,
        logical_shape=tensor.logical_shape,
        fake_dtype=tensor.fake_dtype,
    )
    storage.rowwise_data, storage.scale_inv = tensor.rowwise_data, tensor.scale_inv
    storage.columnwise_data, storage.columnwise_scale_inv = (
        tensor.columnwise_data,
        tensor.columnwise_scale_inv,
    )
    return storage
