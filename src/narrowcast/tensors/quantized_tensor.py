"""``QuantizedTensor``: a ``torch.Tensor`` that pretends to be high precision over quantized buffers.

It is what users hold: a parameter, an output, an entry of a checkpoint. Operators it does not know are run on its
dequantized value; in-place operators requantize into the same buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._checks import a_kind, shown
from ..functional import QuantizerValue
from ..functional.grouped_places import part_of
from ..upstream.functionalization import FunctionalTensor
from ..upstream.tensors import make_wrapper, unsafe_view
from .dequantizing import (
    DequantizingTensor,
    Handler,
    check_offset,
    handles_in,
    is_all_of,
    read_only,
    with_attributes_of,
)
from .sharding import ShardedRows
from .storage import QuantizedTensorStorage, flatten_context, resolve_storage_class

aten = torch.ops.aten

_HANDLERS: dict[Any, Handler] = {}
_handles = handles_in(_HANDLERS)


class QuantizedTensor(ShardedRows, QuantizedTensorStorage, DequantizingTensor):
    """Base of the tensor wrappers; concrete classes add a storage class for the buffers.

    Args:
        shape: logical shape; None derives it from the buffers.
        stride: nominal stride; None for contiguous.
        quantizer, fake_dtype, **buffers: as for the storage. Transformer Engine's keywords also work: ``dtype`` is
            ``fake_dtype``; ``fp8_dtype``, ``fp4_dtype``, ``is_2D_scaled`` or a field of the quantizer select the
            quantizer if none is given.
        requires_grad: as for any tensor.
        value: instead of all but ``requires_grad``: a tensor of this class, of which a parameter is made, as
            ``nn.Parameter`` does; accelerate calls the class of a parameter so.
    Raises:
        TypeError: ``value`` is another tensor.
        ValueError: there is no buffer.
    """

    def __new__(
        cls,
        value: Tensor | None = None,
        /,
        *,
        quantizer: QuantizerValue | None = None,
        fake_dtype: torch.dtype = torch.float32,
        shape: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
        requires_grad: bool = False,
        **buffers: Any,
    ) -> QuantizedTensor:
        if value is not None:
            return _parameter_of(cls, value, requires_grad)
        if quantizer is None or "dtype" in buffers:
            quantizer, fake_dtype = cls._understood(quantizer, fake_dtype, buffers)
        present = [buffer for buffer in buffers.values() if isinstance(buffer, Tensor)]
        if not present:
            raise ValueError(f"{cls.__name__} needs at least one buffer")
        if shape is None:
            described: dict[str, Any] = {"quantizer": quantizer, "fake_dtype": fake_dtype, **buffers}
            bare = cls._bare_class()(**described)
            shape = tuple(bare.size())
        return make_wrapper(
            cls,
            shape,
            strides=stride,
            dtype=fake_dtype,
            device=present[0].device,
            requires_grad=requires_grad,
        )

    def __init__(
        self,
        value: Tensor | None = None,
        /,
        *,
        quantizer: QuantizerValue | None = None,
        fake_dtype: torch.dtype = torch.float32,
        shape: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
        requires_grad: bool = False,
        **buffers: Any,
    ) -> None:
        if value is not None:
            return
        if quantizer is None or "dtype" in buffers:
            quantizer, fake_dtype = self._understood(quantizer, fake_dtype, buffers)
        self._quantizer = quantizer
        self._dtype = fake_dtype
        self._shape = None  # the tensor itself knows its shape
        self._set_buffers(buffers)

    # torch.Tensor provides these; the storage's versions read buffers instead
    def size(self, *dim: int) -> Any:  # type: ignore[override]
        return Tensor.size(self, *dim)

    shape = Tensor.shape  # type: ignore[assignment]
    dtype = Tensor.dtype  # type: ignore[assignment]
    device = Tensor.device  # type: ignore[assignment]

    dequantize = DequantizingTensor.dequantize  # type: ignore[assignment]

    _HANDLERS: ClassVar[dict[Any, Handler]] = _HANDLERS

    def _plain(self, dtype: torch.dtype | None = None) -> Tensor:
        return QuantizedTensorStorage.dequantize(self, dtype=dtype)

    def _overwrite(self, values: Tensor) -> None:
        self.quantize_(values)

    def _quantized(self, values: Tensor) -> DequantizingTensor:
        made = self._quantizer.quantize(values)  # type: ignore[attr-defined]
        if values.shape == self.shape:
            made._mark_as(self)
        return made

    def _adopt(self, source: QuantizedTensor) -> None:
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, getattr(source, attribute))
        self._quantizer, self._dtype = source._quantizer, source._dtype

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Overwrite the buffers with the quantization of ``tensor``; of a shard every rank must.

        Raises:
            RuntimeError: this is part of another tensor.
        """
        self._check_whole()
        if self._shards is None:
            return QuantizedTensorStorage.quantize_(self, tensor, noop_flag=noop_flag)  # type: ignore[return-value]
        reducing = self._quantizer.replace(with_amax_reduction=True)  # type: ignore[attr-defined]
        reducing.update_quantized(tensor, self, noop_flag=noop_flag, amax_reduction_group=self._shards)
        self._mark_written()
        return self

    def _part(self, dim: int, first: int, count: int) -> QuantizedTensor | None:
        """Return rows or columns of a matrix as a read-only quantized tensor; None if no block ends there."""
        layout, last = self._quantizer._format_layout(), first + count  # type: ignore[attr-defined]
        if self.dim() != 2 or not layout.buffers or not all(buffer.shape for buffer in layout.buffers):
            return None
        buffers: dict[str, Tensor | None] = {}
        for buffer in layout.buffers:
            held: Tensor | None = getattr(self, buffer.attribute)
            buffers[buffer.argument] = held
            if held is None:
                continue
            if isinstance(held, FunctionalTensor):  # a graph passes on plain tensors
                return None
            place = buffer.part(first, count, dim == 1)
            if place is None or (last < self.shape[dim] and buffer.part(last, 0, dim == 1) is None):
                return None
            buffers[buffer.argument] = part_of(held, place)
        shape = (count, self.shape[1]) if dim == 0 else (self.shape[0], count)
        part = self._around(shape, buffers)
        part._is_part = True
        part._begins = self._begins + first * (self.shape[1] if dim == 0 else 1)
        return part

    _is_part: bool = False
    """Whether this is part of another tensor, which would not see what is written here."""
    _begins: int = 0
    """Elements of that tensor before this part, whose wrapper itself begins at 0."""

    def _check_whole(self) -> None:
        """
        Raises:
            RuntimeError: this is part of another tensor.
        """
        if self._is_part:
            raise RuntimeError(
                "this writes through a view of a quantized tensor, whose codes would not see it; write to the tensor "
                "itself (w[0:32] = x, w.copy_(x), w.mul_(x)), or clone() the view to have its own"
            )

    def copy_from_storage(self, source: QuantizedTensorStorage) -> None:
        self._check_whole()
        QuantizedTensorStorage.copy_from_storage(self, source)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write through the dequantized value: a view of it would take the write and lose it.

        Raises:
            RuntimeError: this tensor needs a gradient, as for a plain leaf.
        """
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"cannot assign into {a_kind(self)} that requires grad; use torch.no_grad()")
        plain = self._plain()
        plain[index] = value._plain() if isinstance(value, DequantizingTensor) else value
        self.quantize_(plain)

    def get_metadata(self) -> dict[str, Any]:
        return {**QuantizedTensorStorage.get_metadata(self), "requires_grad": self.requires_grad}

    def _given_shape(self) -> tuple[int, ...]:
        return tuple(self.shape)

    @classmethod
    def _bare_class(cls) -> type[QuantizedTensorStorage]:
        return next(
            base
            for base in cls.__mro__
            if issubclass(base, QuantizedTensorStorage) and not issubclass(base, Tensor)
        )

    def _around(self, shape: tuple[int, ...], buffers: dict[str, Any]) -> QuantizedTensor:
        """Return another tensor of this kind, quantizer and dtype, around these buffers."""
        return type(self)(shape=shape, quantizer=self._quantizer, fake_dtype=self._dtype, **buffers)

    def _like(self, map_buffer: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        buffers = {
            argument: None if getattr(self, attribute) is None else map_buffer(getattr(self, attribute))
            for attribute, argument in self._FLATTEN_TENSOR_BUFFERS
        }
        same = self._around(tuple(self.shape), buffers)
        same._mark_as(self)
        return same

    def _regrouped(self, shape: tuple[int, ...]) -> QuantizedTensor | None:
        """Return the rows under other leading dims, around the same buffers; None if the last dim differs."""
        columns, rows = self.shape[-1], self.numel() // max(self.shape[-1], 1)
        known = math.prod(size for size in shape[:-1] if size >= 0)
        if shape[-1] not in (columns, -1) or not rows or not known:
            return None
        full = (*(rows // known if size < 0 else size for size in shape[:-1]), columns)
        layout = self._quantizer._format_layout()  # type: ignore[attr-defined]
        if math.prod(full) != self.numel() or not all(buffer.shape for buffer in layout.buffers):
            return None
        buffers: dict[str, Tensor | None] = {}
        for buffer in layout.buffers:
            held: Tensor | None = getattr(self, buffer.attribute)
            if isinstance(held, FunctionalTensor):
                return None
            buffers[buffer.argument] = None if held is None else held.view(buffer.sizes(full))
        regrouped = self._around(full, buffers)
        regrouped._is_part, regrouped._begins = self._is_part, self._begins
        return regrouped

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensor,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Return new wrapper around the buffers of ``tensor``, with another shape, nominal dtype or grad flag."""
        arguments = {**tensor.get_metadata(), "requires_grad": requires_grad}
        if shape is not None:
            arguments["shape"] = tuple(shape)
        if dtype is not None:
            arguments["fake_dtype"] = dtype
        wrapper = cls(**arguments)
        wrapper._mark_as(tensor)
        wrapper._is_part, wrapper._begins = tensor._is_part, tensor._begins
        return wrapper

    def to_dtype(self, dtype: torch.dtype) -> QuantizedTensor:
        """Return the wrapper around the same buffers with another nominal dtype; nothing is requantized."""
        return type(self).make_like(self, dtype=dtype, requires_grad=self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        usages = ", ".join(name for name, there in self.get_usages().items() if there)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self._dtype}, {usages}, {self._quantizer!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        arguments = (type(self), self.get_metadata(), isinstance(self, torch.nn.Parameter))
        return rebuild_quantized_tensor, (*arguments, self._begins) if self._begins else arguments

    _flattened: tuple[bool, Any, torch.dtype, _Context] | None = None
    """What the last flattening told besides buffers. Guards of compiled code flatten every weight, twice a call."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        known = self._flattened
        present = [name for name, _ in self._FLATTEN_TENSOR_BUFFERS if getattr(self, name) is not None]
        if self._is_part or self._begins:  # else a graph made for a whole tensor would write to a part
            return present, _Context(self._told(), part=(self._is_part, self._begins))
        if (
            known is None
            or known[0] is not self.requires_grad
            or known[1] is not self._quantizer
            or known[2] is not self._dtype
        ):
            told = _Context(self._told())
            known = self._flattened = told["requires_grad"], self._quantizer, self._dtype, told
        return present, known[3]

    def _told(self) -> dict[str, Any]:
        self._quantizer._value_text()  # type: ignore[attr-defined]  # its value, if it has one, is final from now on
        return flatten_context(type(self), self.requires_grad, self._quantizer, self._dtype)


def _parameter_of(cls: type[QuantizedTensor], value: Any, requires_grad: bool) -> Any:
    """
    Raises:
        TypeError: the value is no tensor of this class.
    """
    if type(value) is not cls:
        raise TypeError(
            f"{cls.__name__} is made of {a_kind(value)}, which has no codes. If accelerate does it, with the decoded "
            "values of a state dict, give cpu_offload or dispatch_model state_dict=narrowcast.weights_map(model)"
        )
    parameter = torch.nn.Parameter(value, requires_grad)
    vars(parameter).pop("_keeps_codes", None)
    return parameter


class _Context(dict[str, Any]):
    """The flattening context of a tensor.

    The compiler guards a deep copy of it. That must keep the quantizer: one without a value equals only itself, and one
    that is the same object is compared without a call.
    """

    def __deepcopy__(self, memo: Any) -> _Context:
        return _Context(self)


def plain_gradient(grad: Tensor) -> Tensor:
    """Return the gradient in high precision; only eager code ever meets a quantized one."""
    return grad.dequantize() if isinstance(grad, QuantizedTensor) else grad


def storage_of(tensor: QuantizedTensor, shape: tuple[int, ...] | None = None) -> QuantizedTensorStorage:
    """Return bare storage that shares the tensor's buffers; traceable, as a method of a tensor would not be.

    Args:
        shape: of the tensor; None: what the buffers tell, padding included.
    """
    cls = type(tensor)
    buffers = {argument: getattr(tensor, attribute) for attribute, argument in cls._FLATTEN_TENSOR_BUFFERS}
    bare = resolve_storage_class(cls._BARE_NAME)
    return bare(quantizer=tensor._quantizer, fake_dtype=tensor.dtype, shape=shape, **buffers)


def rebuild_quantized_tensor(
    cls: type[QuantizedTensor], metadata: dict[str, Any], is_parameter: bool, begins: int = 0
) -> QuantizedTensor:
    """Return the inverse of pickling; public by name, because files refer to it.

    Args:
        cls, metadata: of the tensor.
        is_parameter: make a parameter of it.
        begins: place in the whole tensor of which it was a part; written for later parts only.

    Raises:
        ValueError: no class of quantized tensors, or a buffer that is not as the quantizer describes it for this shape:
            kernels would read past its end.
    """
    if not (isinstance(cls, type) and issubclass(cls, QuantizedTensor)):
        raise ValueError(
            f"the file holds a quantized tensor of class {shown(cls)}; it was not saved by narrowcast"
        )
    tensor = cls(**metadata)
    tensor._begins = begins
    described = tensor._quantizer.with_usage(**tensor.get_usages())._describe_buffers(  # type: ignore[attr-defined]
        tuple(tensor.shape), tensor.dtype
    )
    for attribute, buffer in zip(dict(cls._FLATTEN_TENSOR_BUFFERS), tensor.get_data_tensors(), strict=True):
        found = None if buffer is None else (tuple(buffer.shape), buffer.dtype)
        shape, dtype = described.get(attribute, (None, None))
        expected = None if shape is None else (tuple(shape), dtype)
        if found != expected:
            raise ValueError(
                f"the file's {cls.__name__} of shape {tuple(tensor.shape)} has {attribute} {found} in place of "
                f"{expected}; the file is damaged or was not saved by narrowcast"
            )
    return torch.nn.Parameter(tensor, tensor.requires_grad) if is_parameter else tensor  # type: ignore[return-value]


@_handles(aten.detach.default, aten.alias.default)
def _alias(func: Any, tensor: QuantizedTensor) -> QuantizedTensor:
    same = with_attributes_of(tensor, tensor._like(lambda buffer: buffer))
    if tensor._is_part or tensor._begins:
        same._is_part, same._begins = tensor._is_part, tensor._begins
    return same


@_handles(aten.copy_.default)
def _copy(func: Any, destination: Tensor, source: Tensor, *args: Any) -> Tensor:
    if not isinstance(destination, QuantizedTensor):
        destination.copy_(source._plain() if isinstance(source, QuantizedTensor) else source)
        return destination
    if isinstance(source, QuantizedTensor):
        if destination._matches(source):
            destination.copy_from_storage(source)
            return destination
        source = source._plain()
    if not destination._quantizer._takes(source):  # type: ignore[attr-defined]
        source = source.to(destination.dtype)
    destination.quantize_(source.to(destination.device).expand(destination.shape))
    return destination


@_handles(aten.new_zeros.default)
def _new_zeros(func: Any, tensor: QuantizedTensor, size: Any, **kwargs: Any) -> Tensor:
    if tensor._asked_for_shards():
        return tensor._empty_shard(size)
    return torch.zeros(size, **{"dtype": tensor.dtype, "device": tensor.device, **kwargs})


@_handles(aten.split.Tensor)
def _split(func: Any, tensor: QuantizedTensor, size: int, dim: int = 0) -> Any:
    if dim == 0 and tensor._asked_for_shards():
        return tensor._shards_of(size)
    sizes = (
        [min(size, tensor.shape[dim] - first) for first in range(0, tensor.shape[dim], size)] if size else []
    )
    return _split_into(func, tensor, sizes, dim, size)


@_handles(aten.split_with_sizes.default)
def _split_with_sizes(func: Any, tensor: QuantizedTensor, sizes: Sequence[int], dim: int = 0) -> Any:
    return _split_into(func, tensor, sizes, dim, sizes)


def _split_into(func: Any, tensor: QuantizedTensor, sizes: Sequence[int], dim: int, given: Any) -> Any:
    dim, first = dim % tensor.dim(), 0
    parts: list[Any] = []
    if sum(sizes) == tensor.shape[dim]:
        for count in sizes:
            parts.append(tensor._part(dim, first, count))
            first += count
    if parts and all(part is not None for part in parts):
        return parts
    return [read_only(part, tensor._begins) for part in func(tensor._plain(), given, dim)]


@_handles(aten.slice.Tensor)
def _slice(func: Any, tensor: QuantizedTensor, dim: int = 0, *bounds: Any) -> Tensor:
    dim = dim % tensor.dim()
    first, last, step = [*bounds, *(None, None, 1)[len(bounds) :]]
    first, last, _ = slice(first, last).indices(tensor.shape[dim])
    if tensor._is_shard and (dim, first, last, step) == (0, 0, tensor.shape[0], 1):
        return tensor._like(lambda buffer: buffer)  # FSDP2 crops padding; equal shards have none
    part = tensor._part(dim, first, last - first) if step == 1 and last > first else None
    return read_only(func(tensor._plain(), dim, *bounds), tensor._begins) if part is None else part


@_handles(aten.empty_like.default)
def _empty_like(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Tensor:
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device") or tensor.device
    empty = tensor._quantizer.make_empty(tuple(tensor.shape), dtype=dtype, device=device)  # type: ignore[attr-defined]
    empty._mark_as(tensor)
    return with_attributes_of(tensor, empty, but=("_high_precision_init_val",))


@_handles(aten.zeros_like.default)
def _zeros_like(func: Any, tensor: QuantizedTensor, *, memory_format: Any = None, **kwargs: Any) -> Tensor:
    """Make zeros without reading values, which the meta device lacks."""
    return torch.zeros(tensor.shape, **{"dtype": tensor.dtype, "device": tensor.device, **kwargs})


@_handles(aten.view.default, unsafe_view, aten.reshape.default, aten.expand.default)
def _view(func: Any, tensor: QuantizedTensor, size: Any, **kwargs: Any) -> Tensor:
    if tuple(size) == tuple(tensor.shape):
        return _alias(func, tensor)
    if (
        func is not aten.expand.default
        and len(size) > 1
        and (same := tensor._regrouped(tuple(size))) is not None
    ):
        return same
    if len(size) == 1 and (tensor._is_shard or tensor._asked_for_shards()):
        return type(tensor).make_like(tensor, shape=(tensor.numel(),))  # not read by FSDP2
    values = func(tensor._plain(), size, **kwargs)
    return read_only(values, tensor._begins) if func.is_view else values


@_handles(aten.as_strided.default)
def _as_strided(
    func: Any, tensor: QuantizedTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Tensor:
    """View the tensor whole, or some of its rows: FSDP2 makes a parameter of what it has gathered so.

    Raises:
        RuntimeError: an offset is given, which counts from the start of the tensor that this is a later part of.
    """
    check_offset(tensor._begins, storage_offset)
    if is_all_of(tensor, size, stride, storage_offset):
        return _alias(func, tensor)
    offset, columns = storage_offset or 0, tensor.shape[-1]
    of_rows = tensor.dim() == len(size) == 2 and size[1] == columns and list(stride) == [columns, 1]
    of_rows = of_rows and not offset % columns and offset // columns + size[0] <= tensor.shape[0]
    part = tensor._part(0, offset // columns, size[0]) if of_rows else None
    if part is not None:
        return part
    return read_only(func(tensor._plain(), size, stride, storage_offset), tensor._begins)
