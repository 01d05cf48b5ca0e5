"""Grouped tensors: many quantized matrices in one allocation per buffer, as grouped GEMMs read them.

``GroupedTensorStorage`` holds the buffers; ``GroupedTensor`` is the ``torch.Tensor`` over it for parameters of shape
(num_tensors, rows, columns). How the members lie in the buffers is the layout of ``functional.grouped_quantize``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..functional import (
    QuantizerValue,
    draw_seed,
    grouped_dequantize,
    grouped_quantize_weights,
    operand_of,
)
from ..functional.grouped_places import Direction
from ..functional.quantize import overwrite
from ..upstream.tensors import make_wrapper, schema_of, unsafe_view
from .dequantizing import DequantizingTensor, Handler, handles_in, is_all_of, read_only, with_attributes_of
from .sharding import check_not_sharded
from .storage import BufferHolder, QuantizedTensorStorage, resolve_storage_class, shapes_of

aten = torch.ops.aten

_BUFFERS = ("rowwise_data", "scale_inv", "columnwise_data", "columnwise_scale_inv")
_DESCRIPTION = (
    "quantizer",
    "storage_name",
    "group_layout",
    "num_tensors",
    "logical_shape",
    "fake_dtype",
    "first_dims",
    "transposed",
)


def grouped_layout(storage_name: str) -> str:
    """Return the layout of groups whose members have storages of that identifier."""
    return resolve_storage_class(storage_name)._GROUPED


class GroupedTensorStorage(BufferHolder):
    """Buffers of quantized groups, row-wise, column-wise or both.

    Args:
        buffers: the result of an operator of ``functional.grouped_quantize``.
        quantizer: the quantizer of every member.
        storage_name: identifier of a member's storage class; decides the layout of members in the buffers.
        rowwise, columnwise: the directions in ``buffers``.
        num_tensors: number of members.
        logical_shape: (num_tensors, rows, columns) of equal members, else (rows, columns) of all rows together.
        fake_dtype: nominal high-precision dtype.
        first_dims: int32 or int64 (num_tensors,), the rows of every member; None: all are equal.
        transposed: the values of the whole are (num_tensors, columns, rows).
    """

    _FLATTEN_TENSOR_BUFFERS = tuple((name, name) for name in _BUFFERS)
    _ROWWISE_BUFFERS = ("rowwise_data", "scale_inv")

    # how Transformer Engine's users make them: functions of the rooms above, which put them here
    make_grouped_tensor: ClassVar[Callable[..., Any]]
    make_grouped_tensor_with_shapes: ClassVar[Callable[..., Any]]
    make_grouped_tensor_from_rowwise_data: ClassVar[Callable[..., Any]]
    make_tensor_offsets: ClassVar[Callable[..., Any]]

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
        transposed: bool = False,
    ) -> None:
        layout = grouped_layout(storage_name)
        self.transposed = transposed
        self.quantizer, self.storage_name, self.group_layout = quantizer, storage_name, layout
        self.num_tensors = num_tensors
        self.logical_shape, self.fake_dtype, self.first_dims = logical_shape, fake_dtype, first_dims
        self.rowwise_data = self.scale_inv = self.columnwise_data = self.columnwise_scale_inv = None
        # zip ends where an operand is one buffer, without scales
        if rowwise:
            for name, buffer in zip(self._ROWWISE_BUFFERS, operand_of(buffers, layout, False)):
                setattr(self, name, buffer)
        if columnwise:
            for name, buffer in zip(self._COLUMNWISE_BUFFERS, operand_of(buffers, layout, True)):
                setattr(self, name, buffer)

    @property
    def _COLUMNWISE_BUFFERS(self) -> tuple[str, str]:  # type: ignore[override]
        """One scale of every member serves both directions in the layout of per-tensor FP8."""
        return "columnwise_data", "scale_inv" if self.group_layout == "tensor" else "columnwise_scale_inv"

    @property
    def tensor_shapes(self) -> list[tuple[int, int]]:
        """Shape of every member; reads ``first_dims`` on the host where the members differ."""
        columns = self.logical_shape[-1]
        if self.first_dims is None:
            return [(self.logical_shape[-2], columns)] * self.num_tensors
        return [(rows, columns) for rows in self.first_dims.tolist()]

    @property
    def quantized_tensors(self) -> list[QuantizedTensorStorage]:
        """As :meth:`split_into_quantized_tensors`, made again each time."""
        return self.split_into_quantized_tensors()

    def split_into_quantized_tensors(self) -> list[QuantizedTensorStorage]:
        """Return every member by itself; reads the shapes on the host, so not for a CUDA graph."""
        shapes, usages = self.tensor_shapes, self.get_usages()
        sizes, columns = [rows for rows, _ in shapes], self.logical_shape[-1]
        storage_class = resolve_storage_class(self.storage_name)
        members = [
            storage_class(quantizer=self.quantizer, fake_dtype=self.fake_dtype, shape=shape)
            for shape in shapes
        ]
        for columnwise in (False, True):
            if not usages["columnwise" if columnwise else "rowwise"]:
                continue
            operand = self.columnwise_operand() if columnwise else self.rowwise_operand()
            names = storage_class._COLUMNWISE_BUFFERS if columnwise else storage_class._ROWWISE_BUFFERS
            lie = Direction(self.group_layout, self.quantizer, columnwise, columns, self.fake_dtype)
            lie, operand = lie.opened(operand, tuple(self.logical_shape), self.num_tensors)
            for member, buffers in zip(members, lie.groups_of(operand, sizes), strict=True):
                lacking = len(names) - len(buffers)  # of a hybrid whose half has fewer
                empty = [buffers[0].new_empty(0, dtype=torch.uint8) for _ in range(lacking)]
                for name, buffer in zip(names, [*buffers, *empty]):
                    setattr(member, name, buffer)
        return members

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """High-precision values in ``logical_shape``, or transposed; rows beyond the members are zero.

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
        values = values.transpose(1, 2).contiguous() if self.transposed else values
        return values if dtype is None else values.to(dtype)

    def quantize(
        self, tensors: Sequence[Tensor] | Tensor, noop_flag: Tensor | None = None
    ) -> GroupedTensorStorage:
        """Overwrite the buffers with the quantization of equal members, all in one operator.

        Args:
            tensors: the members, or one tensor of the values of the whole.
            noop_flag: fp32, one element; non-zero leaves the buffers as they are, decided on the device.

        Raises:
            NotImplementedError: the members have different shapes.
            ValueError: ``tensors`` have another shape.
        """
        self._check_uniform()
        if isinstance(tensors, Tensor):
            tensors = [tensors.transpose(1, 2) if self.transposed else tensors]
        quantized = quantize_members(list(tensors), self.quantizer)
        if tuple(quantized.logical_shape) != tuple(self.logical_shape):
            raise ValueError(
                f"the members are {tuple(self.logical_shape)}, got {tuple(quantized.logical_shape)}"
            )
        overwrite(self.get_data_tensors(), quantized.get_data_tensors(), noop_flag)
        return self

    def _check_uniform(self) -> None:
        if self.first_dims is not None:
            raise NotImplementedError(
                f"{type(self).__name__} has members of different shapes; split_into_quantized_tensors() gives them one "
                "by one"
            )

    def _matches(self, other: GroupedTensorStorage) -> bool:
        """Return whether the bytes of the other storage mean the same in this one."""
        own, others = self.quantizer._layout(), other.quantizer._layout()  # type: ignore[attr-defined]
        alike = own == others and shapes_of(self) == shapes_of(other) and self.transposed == other.transposed
        return alike and self.first_dims is other.first_dims is None

    def copy(self) -> GroupedTensorStorage:
        """Return the same members in buffers of their own."""
        return self._mapped(torch.clone)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> GroupedTensorStorage:
        buffers = {
            name: None if buffer is None else function(buffer) for name, buffer in _buffers_of(self).items()
        }
        return _around(buffers, _metadata(self))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_tensors={self.num_tensors}, shapes={self.tensor_shapes}, "
            f"logical_shape={tuple(self.logical_shape)}, quantizer={self.quantizer!r}, dtype={self.fake_dtype})"
        )


def join_members(members: list[Any], dtype: torch.dtype) -> GroupedTensorStorage:
    """Return equal matrices (N, K) that were quantized one by one, row-wise alone, as one storage of their bytes."""
    first, (rows, columns) = members[0], members[0].shape
    quantizer = first._quantizer.with_usage(rowwise=True, columnwise=False)
    lie = Direction(grouped_layout(first._BARE_NAME), quantizer, False, columns, dtype)
    return GroupedTensorStorage(
        lie.joined([member.rowwise_operand() for member in members], rows),
        quantizer=quantizer,
        storage_name=first._BARE_NAME,
        rowwise=True,
        columnwise=False,
        num_tensors=len(members),
        logical_shape=(len(members), rows, columns),
        fake_dtype=dtype,
    )


def quantize_members(tensors: list[Tensor], quantizer: QuantizerValue) -> GroupedTensorStorage:
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
    seed = draw_seed(first) if described._is_stochastic() else None
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


def _metadata(storage: GroupedTensorStorage) -> dict[str, Any]:
    """Return constructor arguments of a storage without buffers."""
    return {
        "quantizer": storage.quantizer,
        "storage_name": storage.storage_name,
        "rowwise": False,
        "columnwise": False,
        "num_tensors": storage.num_tensors,
        "logical_shape": tuple(storage.logical_shape),
        "fake_dtype": storage.fake_dtype,
        "first_dims": storage.first_dims,
        "transposed": storage.transposed,
    }


def _buffers_of(storage: GroupedTensorStorage) -> dict[str, Tensor | None]:
    return {name: getattr(storage, name) for name in _BUFFERS}


def _around(buffers: dict[str, Tensor | None], metadata: dict[str, Any]) -> GroupedTensorStorage:
    storage = GroupedTensorStorage([], **metadata)
    for name, buffer in buffers.items():
        setattr(storage, name, buffer)
    return storage


class GroupedTensor(GroupedTensorStorage, DequantizingTensor):
    """Tensor of shape (num_tensors, rows, columns) over quantized members of equal shape, or transposed.

    Operations run on the dequantized members; in-place ones requantize into the same buffers. Shapes are fixed.

    Args:
        storage: the storage whose buffers it shares.
        requires_grad: as for any tensor.
        stride: one number per dim; None: contiguous.

    Raises:
        NotImplementedError: the members have different shapes.
    """

    @staticmethod
    def __new__(
        cls, storage: GroupedTensorStorage, requires_grad: bool = False, stride: Sequence[int] | None = None
    ) -> GroupedTensor:
        storage._check_uniform()
        device = next(buffer.device for buffer in storage.get_data_tensors() if buffer is not None)
        groups, rows, columns = storage.logical_shape
        return make_wrapper(
            cls,
            (groups, columns, rows) if storage.transposed else (groups, rows, columns),
            strides=stride,
            dtype=storage.fake_dtype,
            device=device,
            requires_grad=requires_grad,
        )

    def __init__(
        self, storage: GroupedTensorStorage, requires_grad: bool = False, stride: Sequence[int] | None = None
    ) -> None:
        GroupedTensorStorage.__init__(self, [], **_metadata(storage))
        for name, buffer in _buffers_of(storage).items():
            setattr(self, name, buffer)

    dequantize = DequantizingTensor.dequantize  # type: ignore[assignment]

    def _plain(self, dtype: torch.dtype | None = None) -> Tensor:
        return GroupedTensorStorage.dequantize(self, dtype=dtype)

    def _overwrite(self, values: Tensor) -> None:
        self.quantize(values)

    def _quantized(self, values: Tensor) -> GroupedTensor:
        return grouped_tensor_of(values, self.quantizer, self.transposed)

    def _like(self, map_buffer: Callable[[Tensor], Tensor]) -> GroupedTensor:
        return GroupedTensor(self._mapped(map_buffer))

    def _adopt(self, source: GroupedTensor) -> None:
        for name in (*_BUFFERS, *_DESCRIPTION):
            setattr(self, name, getattr(source, name))

    def to_dtype(self, dtype: torch.dtype) -> GroupedTensor:
        """Return the wrapper around the same buffers with another nominal dtype; nothing is requantized."""
        storage = self._mapped(lambda buffer: buffer)
        storage.quantizer, storage.fake_dtype = storage.quantizer._keeping(self.fake_dtype), dtype
        return GroupedTensor(storage, self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return GroupedTensorStorage.__repr__(self)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Return names of the present buffers and the data-free context."""
        present = [name for name in _BUFFERS if getattr(self, name) is not None]
        return present, {**_metadata(self), "requires_grad": self.requires_grad}

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> GroupedTensor:
        """Rebuild from ``__tensor_flatten__``'s parts."""
        described = dict(context)
        requires_grad = described.pop("requires_grad")
        return GroupedTensor(_around(dict(inner_tensors), described), requires_grad, outer_stride)

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = _metadata(self), _buffers_of(self), self.requires_grad, isinstance(self, torch.nn.Parameter)
        return rebuild_grouped_tensor, parts

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if func in cls._HANDLERS or _works_on_values(func):
            return super()._run(func, args, kwargs)
        raise _changes_shape(func, args[0] if args else None)

    _HANDLERS: ClassVar[dict[Any, Handler]] = {}


_ON_VALUES = frozenset(
    {
        "allclose",
        "is_same_size",
        "_local_scalar_dense",
        "bmm",
        "baddbmm",
        "dist",
        "bernoulli",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
    }
)
_TAGS_ON_VALUES = {torch.Tag.pointwise, torch.Tag.reduction}


def _works_on_values(func: Any) -> bool:
    """Return whether the operator makes something new of the values, or writes to the tensor without changing its
    shape.
    """
    if schema_of(func).is_mutable:
        return torch.Tag.inplace_view not in func.tags
    name = func.overloadpacket.__name__
    by_name = name in _ON_VALUES or name.startswith("_foreach_") or name.endswith("_like")
    return by_name or not _TAGS_ON_VALUES.isdisjoint(func.tags)


def _changes_shape(func: Any, tensor: Any) -> RuntimeError:
    check_not_sharded(tensor)
    return RuntimeError(
        f"{func} changes the shape of a GroupedTensor, or is not known to keep it; call dequantize() first"
    )


def grouped_tensor_of(values: Tensor, quantizer: QuantizerValue, transposed: bool = False) -> GroupedTensor:
    """Return values (G, N, K), or ``transposed`` ones (G, K, N), as quantized matrices (N, K)."""
    storage = quantize_members([values.transpose(1, 2) if transposed else values], quantizer)
    storage.transposed = transposed
    return GroupedTensor(storage)


_handles = handles_in(GroupedTensor._HANDLERS)


@_handles(aten.transpose.int)
def _transpose(func: Any, tensor: GroupedTensor, first: int, second: int) -> GroupedTensor:
    """Return the same members with the values of the whole the other way round."""
    if {first % 3, second % 3} != {1, 2}:
        raise _changes_shape(func, tensor)
    storage = grouped_storage_of(tensor)
    storage.transposed = not storage.transposed
    return GroupedTensor(storage)


@_handles(aten.detach.default, aten.alias.default)
def _alias(func: Any, tensor: GroupedTensor) -> GroupedTensor:
    return with_attributes_of(tensor, GroupedTensor(tensor))


@_handles(aten.copy_.default)
def _copy(func: Any, destination: Tensor, source: Tensor, *args: Any) -> Tensor:
    if not isinstance(destination, GroupedTensor):
        destination.copy_(source._plain() if isinstance(source, GroupedTensor) else source)
    elif isinstance(source, GroupedTensor) and destination._matches(source):
        overwrite(destination.get_data_tensors(), source.get_data_tensors())
    else:
        values = source._plain() if isinstance(source, DequantizingTensor) else source
        values = values.to(destination.device, destination.fake_dtype)
        destination.quantize(values.expand(destination.shape))
    return destination


@_handles(aten.empty_like.default)
def _empty_like(func: Any, tensor: GroupedTensor, **kwargs: Any) -> GroupedTensor:
    empty = tensor._like(lambda buffer: torch.empty_like(buffer, device=kwargs.get("device")))
    empty = empty.to_dtype(kwargs.get("dtype") or tensor.dtype)
    return with_attributes_of(tensor, empty, but=("_high_precision_init_val",))


@_handles(aten.view.default, unsafe_view, aten.expand.default, aten.reshape.default)
def _reshaped(func: Any, tensor: GroupedTensor, size: Sequence[int], **kwargs: Any) -> Tensor:
    if list(size) == [-1] and isinstance(tensor, torch.nn.Parameter):  # as parameters_to_vector does
        return read_only(tensor._plain().view(-1))
    if list(size) == [-1] and tensor.rowwise_data is not None:
        return tensor.rowwise_data.reshape(-1)
    if all(new in (-1, old) for new, old in zip(size, tensor.shape)) and len(size) == tensor.dim():
        return GroupedTensor(tensor)
    check_not_sharded(tensor)
    raise RuntimeError(
        f"{func} cannot change the shape {tuple(tensor.shape)} of a GroupedTensor to {tuple(size)}; call dequantize() "
        "first, or use view(-1): the values of a parameter, the row-wise codes of another tensor"
    )


@_handles(aten.as_strided.default)
def _as_strided(
    func: Any, tensor: GroupedTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> GroupedTensor:
    """View the whole tensor: FSDP2 makes a parameter of what it has gathered so."""
    if is_all_of(tensor, size, stride, storage_offset):
        return GroupedTensor(tensor)
    raise _changes_shape(func, tensor)


def rebuild_grouped_tensor(
    metadata: dict[str, Any], buffers: dict[str, Tensor | None], requires_grad: bool, is_parameter: bool
) -> GroupedTensor:
    """Return the inverse of pickling; public by name, because files refer to it."""
    tensor = GroupedTensor(_around(buffers, metadata), requires_grad)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor  # type: ignore[return-value]


def grouped_storage_of(tensor: GroupedTensor) -> GroupedTensorStorage:
    """Return bare storage that shares the tensor's buffers; traceable, as a method of a tensor would not be."""
    return _around(_buffers_of(tensor), _metadata(tensor))
