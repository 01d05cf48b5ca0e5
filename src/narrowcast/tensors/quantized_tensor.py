"""``QuantizedTensor``: a ``torch.Tensor`` that pretends to be high precision over quantized buffers.

It is what users hold: a parameter, an output, an entry of a checkpoint. Operators it does not know are run on its
dequantized value; in-place operators requantize into the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..functional import QuantizerValue
from .dequantizing import DequantizingTensor, Handler, check_not_sharded, read_only
from .storage import QuantizedTensorStorage, flatten_context, resolve_storage_class

aten = torch.ops.aten

_HANDLERS: dict[Any, Handler] = {}


def _handles(*overloads: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for overload in overloads:
            _HANDLERS[overload] = handler
        return handler

    return register


class QuantizedTensor(QuantizedTensorStorage, DequantizingTensor):
    """Base of the tensor wrappers; concrete classes add a storage class for the buffers.

    Args:
        shape: logical shape; None derives it from the buffers.
        stride: that the tensor pretends to have; None for contiguous.
        quantizer, fake_dtype, **buffers: as for the storage.
        requires_grad: as for any tensor.
    """

    def __new__(
        cls,
        *,
        quantizer: QuantizerValue,
        fake_dtype: torch.dtype = torch.float32,
        shape: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
        requires_grad: bool = False,
        **buffers: Tensor | None,
    ) -> QuantizedTensor:
        present = [buffer for buffer in buffers.values() if isinstance(buffer, Tensor)]
        if not present:
            raise ValueError(f"{cls.__name__} needs at least one buffer")
        if shape is None:
            described: dict[str, Any] = {"quantizer": quantizer, "fake_dtype": fake_dtype, **buffers}
            bare = cls._bare_class()(**described)
            shape = tuple(bare.size())
        return torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=stride,
            dtype=fake_dtype,
            device=present[0].device,
            requires_grad=requires_grad,
        )

    def __init__(
        self,
        *,
        quantizer: QuantizerValue,
        fake_dtype: torch.dtype = torch.float32,
        shape: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
        requires_grad: bool = False,
        **buffers: Tensor | None,
    ) -> None:
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
        return self._quantizer.quantize(values)  # type: ignore[attr-defined]

    def _adopt(self, source: QuantizedTensor) -> None:
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, getattr(source, attribute))
        self._quantizer, self._dtype = source._quantizer, source._dtype

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write through the dequantized value: a view of it would take the write and lose it.

        Raises:
            RuntimeError: this tensor needs a gradient, as for a plain leaf.
        """
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"cannot assign into a {type(self).__name__} that requires grad; use torch.no_grad()"
            )
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

    def _like(self, map_buffer: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        buffers = {
            argument: None if getattr(self, attribute) is None else map_buffer(getattr(self, attribute))
            for attribute, argument in self._FLATTEN_TENSOR_BUFFERS
        }
        described: dict[str, Any] = {"quantizer": self._quantizer, "fake_dtype": self._dtype, **buffers}
        return type(self)(shape=tuple(self.shape), **described)

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensor,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """New wrapper around the buffers of ``tensor``, with another shape, nominal dtype or grad flag."""
        arguments = {**tensor.get_metadata(), "requires_grad": requires_grad}
        if shape is not None:
            arguments["shape"] = tuple(shape)
        if dtype is not None:
            arguments["fake_dtype"] = dtype
        return cls(**arguments)

    def to_dtype(self, dtype: torch.dtype) -> QuantizedTensor:
        """Wrapper around the same buffers with another nominal dtype; nothing is requantized."""
        return type(self).make_like(self, dtype=dtype, requires_grad=self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        usages = ", ".join(name for name, there in self.get_usages().items() if there)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self._dtype}, {usages}, {self._quantizer!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_quantized_tensor, (
            type(self),
            self.get_metadata(),
            isinstance(self, torch.nn.Parameter),
        )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        present = [a for a, _ in self._FLATTEN_TENSOR_BUFFERS if getattr(self, a) is not None]
        return present, flatten_context(type(self), self.requires_grad, self._quantizer, self._dtype)


def storage_of(tensor: QuantizedTensor) -> QuantizedTensorStorage:
    """Bare storage that shares the tensor's buffers; traceable, as a method of a tensor would not be."""
    cls = type(tensor)
    buffers = {argument: getattr(tensor, attribute) for attribute, argument in cls._FLATTEN_TENSOR_BUFFERS}
    bare = resolve_storage_class(cls._BARE_NAME)
    return bare(quantizer=tensor._quantizer, fake_dtype=tensor.dtype, shape=None, **buffers)


def rebuild_quantized_tensor(
    cls: type[QuantizedTensor], metadata: dict[str, Any], is_parameter: bool
) -> QuantizedTensor:
    """Inverse of pickling; public by name, because files refer to it.

    Raises:
        ValueError: no class of quantized tensors, or a buffer that is not as the quantizer describes it for this
            shape: kernels would read past its end.
    """
    if not (isinstance(cls, type) and issubclass(cls, QuantizedTensor)):
        raise ValueError(
            f"the file holds a quantized tensor of class {cls!r}; it was not saved by narrowcast"
        )
    tensor = cls(**metadata)
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
    return tensor._like(lambda buffer: buffer)


@_handles(aten.clone.default)
def _clone(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    return tensor._like(lambda buffer: buffer.clone())


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
    if not destination._quantizer.is_quantizable(source):  # type: ignore[attr-defined]
        source = source.to(destination.dtype)
    destination.quantize_(source.to(destination.device).expand(destination.shape))
    return destination


@_handles(aten._to_copy.default)
def _to_copy(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Tensor:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if dtype not in (None, tensor.dtype):
        return func(tensor._plain(dtype), **kwargs)
    return tensor._like(lambda buffer: buffer.to(device, copy=True) if device is not None else buffer.clone())


@_handles(aten.new_zeros.default)
def _new_zeros(func: Any, tensor: QuantizedTensor, size: Any, **kwargs: Any) -> Tensor:
    check_not_sharded(tensor)
    return torch.zeros(size, **{"dtype": tensor.dtype, "device": tensor.device, **kwargs})


@_handles(aten.empty_like.default)
def _empty_like(func: Any, tensor: QuantizedTensor, **kwargs: Any) -> Tensor:
    dtype, device = kwargs.get("dtype") or tensor.dtype, kwargs.get("device") or tensor.device
    return tensor._quantizer.make_empty(tuple(tensor.shape), dtype=dtype, device=device)  # type: ignore[attr-defined]


@_handles(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
def _view(func: Any, tensor: QuantizedTensor, size: Any, **kwargs: Any) -> Tensor:
    if tuple(size) == tuple(tensor.shape):
        return tensor._like(lambda buffer: buffer)
    if len(size) == 1:
        check_not_sharded(tensor)
    values = func(tensor._plain(), size, **kwargs)
    return read_only(values) if func.is_view else values


@_handles(aten.as_strided.default)
def _as_strided(
    func: Any, tensor: QuantizedTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Tensor:
    """FSDP2 makes a parameter of what it has gathered by a view of all of it."""
    if tuple(size) == tuple(tensor.shape) and tuple(stride) == tensor.stride() and not storage_offset:
        return tensor._like(lambda buffer: buffer)
    return read_only(func(tensor._plain(), size, stride, storage_offset))
