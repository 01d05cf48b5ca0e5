"""Quantized storages: plain holders of the buffers a quantizer writes.

A storage is buffers plus the frozen quantizer that made them; everything else (element format, block geometry,
flags) is read off the quantizer, so there is one description and nothing to keep in step. Which buffers there are is
the format's :class:`~narrowcast.formats.Layout`. Storages are what modules and autograd functions pass around; the
``torch.Tensor`` wrappers for users stand on top of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .._checks import a_kind, shown
from .._tracing import can_overwrite, can_remember
from ..formats import Layout
from ..functional import QuantizerValue, dequantize
from ..functional.quantize import overwrite
from .transposing import transposed

STORAGE_CLASSES: dict[str, type[QuantizedTensorStorage]] = {}


def storage_identifier(cls: type) -> str:
    """Return stable name of a storage class: module and qualified name, so equal class names do not collide."""
    return f"{cls.__module__}:{cls.__qualname__}"


def resolve_storage_class(identifier: str) -> type[QuantizedTensorStorage]:
    """Return storage class of an identifier.

    Raises:
        KeyError: there is no such class; the message lists the known identifiers.
    """
    if identifier not in STORAGE_CLASSES:
        known = ", ".join(sorted(STORAGE_CLASSES))
        raise KeyError(f"unknown quantized storage class {shown(identifier)}; known: {known}")
    return STORAGE_CLASSES[identifier]


class BufferHolder:
    """Buffers of a row-wise and a column-wise GEMM operand, each of which may be absent: what all storages share."""

    _FLATTEN_TENSOR_BUFFERS: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(attribute, constructor argument) of every buffer, in the order of flattening."""
    _ROWWISE_BUFFERS: ClassVar[tuple[str, ...]] = ()
    """Attributes that make up the row-wise GEMM operand, data first."""
    _COLUMNWISE_BUFFERS: ClassVar[tuple[str, ...]] = ()
    """Attributes that make up the column-wise GEMM operand, data first."""

    def get_usages(self) -> dict[str, bool]:
        """Return which directions have data: ``{"rowwise": bool, "columnwise": bool}``."""
        return {
            "rowwise": getattr(self, self._ROWWISE_BUFFERS[0]) is not None,
            "columnwise": getattr(self, self._COLUMNWISE_BUFFERS[0]) is not None,
        }

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        """Return all buffers in flatten order, absent ones as None."""
        return tuple([getattr(self, attribute) for attribute, _ in self._FLATTEN_TENSOR_BUFFERS])

    def depends(self: Any) -> tuple[tuple[Any, ...], list[Tensor | None]]:
        """Return all but its quantizer as values and as buffers, each once, for directions may share a scale."""
        buffers = self.get_data_tensors()
        unique = {id(buffer): buffer for buffer in buffers if buffer is not None}
        places = [*unique]
        which = [None if buffer is None else places.index(id(buffer)) for buffer in buffers]
        return (type(self), self._dtype, self.shape, *which), [*unique.values()]

    def rowwise_operand(self) -> list[Tensor]:
        """Return buffers of the row-wise GEMM operand.

        Raises:
            RuntimeError: the storage holds no row-wise data.
        """
        return self._operand(self._ROWWISE_BUFFERS, "row-wise")

    def columnwise_operand(self) -> list[Tensor]:
        """Return buffers of the column-wise GEMM operand.

        Raises:
            RuntimeError: the storage holds no column-wise data.
        """
        return self._operand(self._COLUMNWISE_BUFFERS, "column-wise")

    def _operand(self, attributes: tuple[str, ...], direction: str) -> list[Tensor]:
        buffers = [getattr(self, attribute) for attribute in attributes]
        if buffers[0] is None:
            raise RuntimeError(f"{type(self).__name__} holds no {direction} data and this use needs it")
        return [buffer for buffer in buffers if buffer is not None]

    def clear(self) -> None:
        """Drop every buffer."""
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, None)


class QuantizedTensorStorage(BufferHolder):
    """Buffers of one quantized tensor, row-wise, column-wise or both.

    Args:
        quantizer: the quantizer that describes the buffers.
        fake_dtype: nominal high-precision dtype.
        shape: logical shape; None derives it from the buffers where they hold it exactly.
        **buffers: one tensor or None per name in ``_FLATTEN_TENSOR_BUFFERS``.
    Raises:
        TypeError: a buffer name this class does not declare.
    """

    _LAYOUT: ClassVar[Layout] = Layout()
    """Record of the format: the source of the other class attributes."""
    _GROUPED: ClassVar[str] = "split"
    """How groups of such tensors lie in the buffers of grouped operators."""
    _INNER_TENSORS: ClassVar[tuple[tuple[str, str], ...]] = ()
    _NAME: ClassVar[str]
    _IS_TENSOR: ClassVar[bool]
    _BARE_NAME: ClassVar[str]
    """Identifier of the class without the tensor wrapper."""
    _BY_USAGE: ClassVar[dict[tuple[bool, bool], list[str]]]
    """Attributes that exist for (row-wise, column-wise) usage, in flatten order."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        layout = cls.__dict__.get("_LAYOUT")
        if layout is not None:
            cls._FLATTEN_TENSOR_BUFFERS = tuple((b.attribute, b.argument) for b in layout.buffers)
            cls._ROWWISE_BUFFERS, cls._COLUMNWISE_BUFFERS = layout.attributes(False), layout.attributes(True)
        # the name later versions of the upstream project use
        if "_FLATTEN_TENSOR_BUFFERS" not in cls.__dict__ and "_INNER_TENSORS" in cls.__dict__:
            cls._FLATTEN_TENSOR_BUFFERS = cls._INNER_TENSORS
        cls._INNER_TENSORS = cls._FLATTEN_TENSOR_BUFFERS
        # grouped kernels know the formats, but not what a subclass changes about one
        cls._GROUPED = "split" if layout is None else layout.grouped
        cls._BY_USAGE = {
            (rowwise, columnwise): cls._attributes_of(rowwise, columnwise)
            for rowwise in (False, True)
            for columnwise in (False, True)
        }
        cls._NAME, cls._IS_TENSOR = storage_identifier(cls), issubclass(cls, Tensor)
        STORAGE_CLASSES[cls._NAME] = cls
        cls._BARE_NAME = storage_identifier(cls._bare_class())

    def __init__(
        self,
        *,
        quantizer: QuantizerValue | None = None,
        fake_dtype: torch.dtype = torch.float32,
        shape: tuple[int, ...] | None = None,
        **buffers: Any,
    ) -> None:
        if quantizer is None or "dtype" in buffers:
            quantizer, fake_dtype = self._understood(quantizer, fake_dtype, buffers)
        self._quantizer = quantizer
        self._dtype = fake_dtype
        self._shape = shape
        if buffers:
            self._set_buffers(buffers)
        else:  # they are set one by one afterwards
            for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
                setattr(self, attribute, None)

    _quantizer_of: ClassVar[Any] = None
    """Makes the quantizer of tensors that are described by keywords; the rooms above put it here."""

    @classmethod
    def _understood(
        cls, quantizer: QuantizerValue | None, fake_dtype: torch.dtype, described: dict[str, Any]
    ) -> tuple[QuantizerValue, torch.dtype]:
        """Return the quantizer and the nominal dtype, with the keywords of Transformer Engine's constructors taken out.

        Raises:
            TypeError: no quantizer, and nothing says which.
            ValueError: a keyword that the quantizer contradicts.
            NotImplementedError: scales that are swizzled.
        """
        fake_dtype = described.pop("dtype", fake_dtype)
        described.pop("device", None)  # that of the buffers
        if described.pop("with_gemm_swizzled_scales", False):
            raise NotImplementedError(
                f"{cls.__name__}(with_gemm_swizzled_scales=True): scales are stored unswizzled here; pass them so"
            )
        buffers = {argument for _, argument in cls._FLATTEN_TENSOR_BUFFERS}
        options = {name: described.pop(name) for name in sorted(described.keys() - buffers)}
        if quantizer is None and cls._quantizer_of is None:
            raise TypeError(f"{cls.__name__} needs quantizer=, which says how to read its buffers")
        arguments = dict(cls._FLATTEN_TENSOR_BUFFERS)
        directions = {
            "rowwise": described.get(arguments[cls._ROWWISE_BUFFERS[0]]) is not None,
            "columnwise": described.get(arguments[cls._COLUMNWISE_BUFFERS[0]]) is not None,
        }
        return cls._quantizer_of(cls.__name__, quantizer, options, directions), fake_dtype

    def _set_buffers(self, buffers: dict[str, Tensor | None]) -> None:
        remaining = dict(buffers)
        for attribute, argument in self._FLATTEN_TENSOR_BUFFERS:
            setattr(self, attribute, remaining.pop(argument, None))
        if remaining:
            accepted = [argument for _, argument in self._FLATTEN_TENSOR_BUFFERS]
            raise TypeError(
                f"{type(self).__name__} got unknown buffers {sorted(remaining)}; it takes {accepted}"
            )

    # -- what is there --------------------------------------------------------------------------------------------

    @property
    def _description(self) -> tuple[Any, torch.dtype]:
        """(quantizer in the directions that are there, nominal dtype).

        A tuple, since Dynamo shows attributes of a tensor that was made in the graph unless they are callable, and
        quantizers are.
        """
        quantizer: Any = self._quantizer
        present = [name for name, _ in self._FLATTEN_TENSOR_BUFFERS if getattr(self, name) is not None]
        if present != self.buffer_attributes(quantizer.rowwise_usage, quantizer.columnwise_usage):
            quantizer = quantizer.with_usage(**self.get_usages())  # a view of one direction
        return quantizer, self._dtype

    def get_metadata(self) -> dict[str, Any]:
        """Return constructor arguments that rebuild an equal object around the same buffers."""
        buffers = {argument: getattr(self, attribute) for attribute, argument in self._FLATTEN_TENSOR_BUFFERS}
        return {
            **buffers,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
            "shape": tuple(self.size()),
        }

    def size(self) -> torch.Size:
        """Return logical shape."""
        shape = self._shape
        return torch.Size(self._shape_from_buffers() if shape is None else shape)

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return self.size()

    @property
    def dtype(self) -> torch.dtype:
        """Nominal high-precision dtype."""
        return self._dtype

    def _given_shape(self) -> tuple[int, ...] | None:
        """Return the shape if it is known exactly; packed and padded buffers alone do not tell it."""
        return self._shape

    def _shape_from_buffers(self) -> tuple[int, ...]:
        """Return shape that the data tell, packed ones up to their padding.

        Raises:
            RuntimeError: the data of this format do not tell it.
        """
        rowwise = getattr(self, self._ROWWISE_BUFFERS[0])
        columnwise = rowwise is None
        attribute = self._COLUMNWISE_BUFFERS[0] if columnwise else self._ROWWISE_BUFFERS[0]
        sizes = tuple(getattr(self, attribute).shape)
        for buffer in self._LAYOUT.buffers:
            if buffer.attribute == attribute:
                if not buffer.shape:
                    raise RuntimeError(f"the buffers of {a_kind(self)} do not say its shape; give shape=")
                return buffer.logical_shape(sizes)
        # a class that spells its buffers out by itself
        return (*sizes[1:], sizes[0]) if columnwise else sizes

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return next(buffer.device for buffer in self.get_data_tensors() if buffer is not None)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(shape={tuple(self.size())}, dtype={self._dtype}, "
            f"usages={self.get_usages()}, quantizer={self._quantizer!r})"
        )

    # -- changing it ----------------------------------------------------------------------------------------------

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Create (True), drop (False) or keep (None) a direction.

        Raises:
            RuntimeError: the format cannot make the missing direction from the other one, or nothing would be left.
        """
        usages = self.get_usages()
        rowwise = usages["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = usages["columnwise"] if columnwise_usage is None else columnwise_usage
        if not (rowwise or columnwise):
            raise RuntimeError(f"{type(self).__name__} must keep at least one direction")
        if columnwise and not usages["columnwise"]:
            self._create_columnwise()
        if rowwise and not usages["rowwise"]:
            self._create_rowwise()
        kept = set(self._ROWWISE_BUFFERS if rowwise else ()) | set(
            self._COLUMNWISE_BUFFERS if columnwise else ()
        )
        for attribute, _ in self._FLATTEN_TENSOR_BUFFERS:
            if attribute not in kept:
                setattr(self, attribute, None)
        self._quantizer = self._quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)  # type: ignore[attr-defined]

    def _turns(self) -> bool:
        """Return whether column-wise data follow from the row-wise data, so that keeping these is enough."""
        return False

    def _create_columnwise(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__} cannot make column-wise data from row-wise data: quantizing again would change "
            "the values; quantize from high precision with columnwise=True"
        )

    def _transpose_rowwise(self) -> None:
        """Make the column-wise data from the row-wise ones, in a format where that changes no value."""
        columnwise = transposed(self.rowwise_operand(), (self.size() or (1,))[-1])
        for attribute, buffer in zip(self._COLUMNWISE_BUFFERS, columnwise):
            setattr(self, attribute, buffer)

    def _create_rowwise(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__} cannot make row-wise data from column-wise data; quantize from high precision "
            "with rowwise=True"
        )

    def _view_of(self, attributes: tuple[str, ...]) -> QuantizedTensorStorage:
        """Return bare storage that shares only these buffers; traceable, keeps the quantizer as it is."""
        view = self._bare_class()(
            quantizer=self._quantizer, fake_dtype=self._dtype, shape=self._given_shape()
        )
        for attribute in attributes:
            setattr(view, attribute, getattr(self, attribute))
        return view

    def take(self) -> QuantizedTensorStorage:
        """Return bare storage with the buffers, which this one loses; traced code keeps them, too."""
        view = self._view_of(tuple([attribute for attribute, _ in self._FLATTEN_TENSOR_BUFFERS]))
        if can_overwrite():
            self.clear()
        return view

    # -- to and from high precision -------------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """High-precision values in ``dtype`` (default: the nominal dtype); row-wise data is preferred."""
        columnwise = not self.get_usages()["rowwise"]
        operand = self.columnwise_operand() if columnwise else self.rowwise_operand()
        return dequantize(operand, self._quantizer, columnwise, dtype or self._dtype, list(self.size()))

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensorStorage:
        """Overwrite the buffers with the quantization of ``tensor``; skipped on device if ``noop_flag`` is set."""
        self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)  # type: ignore[attr-defined]
        self._mark_written()
        return self

    def copy_from_storage(self, source: QuantizedTensorStorage) -> None:
        """Copy the buffers of an equal storage into this one's.

        Raises:
            ValueError: the two differ in format, in which buffers exist, or in their shapes.
        """
        if not self._matches(source):
            raise ValueError(f"cannot copy {shown(source)} into {shown(self)}: the buffers differ")
        overwrite(self.get_data_tensors(), source.get_data_tensors())
        self._mark_written()

    def _mark_written(self) -> None:
        """Make autograd notice that a backward would read other values than were saved.

        Writes to a plain tensor count by themselves, but not below autograd, where an operator on a tensor subclass
        writes to what the subclass holds.
        """
        if can_remember():
            for buffer in self.get_data_tensors():
                if buffer is not None and not buffer.is_inference():
                    torch.autograd.graph.increment_version(buffer)

    def _matches(self, other: QuantizedTensorStorage) -> bool:
        """Return whether the bytes of the other storage mean the same in this one, buffer by buffer."""
        own, others = self._quantizer._layout(), other._quantizer._layout()  # type: ignore[attr-defined]
        return own == others and shapes_of(self) == shapes_of(other) and self.size() == other.size()

    # -- saving and flattening ------------------------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensorStorage]:
        """Return buffers to save, and an object without buffers that takes them back; this storage stays untouched."""
        emptied = type(self)._bare_class()(
            quantizer=self._quantizer, fake_dtype=self._dtype, shape=self._given_shape()
        )
        return list(self.get_data_tensors()), emptied

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take this storage's buffers from the front of ``tensors`` and return the rest."""
        count = len(self._FLATTEN_TENSOR_BUFFERS)
        for (attribute, _), tensor in zip(self._FLATTEN_TENSOR_BUFFERS, tensors[:count], strict=True):
            setattr(self, attribute, tensor)
        return tensors[count:]

    @classmethod
    def _bare_class(cls) -> type[QuantizedTensorStorage]:
        return cls

    @classmethod
    def buffer_attributes(cls, rowwise: bool, columnwise: bool) -> list[str]:
        """Return attributes that exist for a usage, in flatten order."""
        return cls._BY_USAGE[rowwise, columnwise]

    @classmethod
    def _attributes_of(cls, rowwise: bool, columnwise: bool) -> list[str]:
        kept = (cls._ROWWISE_BUFFERS if rowwise else ()) + (cls._COLUMNWISE_BUFFERS if columnwise else ())
        return [attribute for attribute, _ in cls._FLATTEN_TENSOR_BUFFERS if attribute in kept]

    @classmethod
    def from_buffers(
        cls,
        buffers: list[Tensor],
        rowwise: bool,
        columnwise: bool,
        quantizer: QuantizerValue,
        fake_dtype: torch.dtype,
    ) -> QuantizedTensorStorage:
        """Return a storage around an operator's buffers, in flatten order; traceable, reads no quantizer."""
        storage = cls(quantizer=quantizer, fake_dtype=fake_dtype)
        for attribute, buffer in zip(cls.buffer_attributes(rowwise, columnwise), buffers):
            setattr(storage, attribute, buffer)
        return storage

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """Return the attributes of the present buffers in declared order and the data-free context."""
        present = [a for a, _ in self._FLATTEN_TENSOR_BUFFERS if getattr(self, a) is not None]
        return present, flatten_context(type(self), False, self._quantizer, self._dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensorStorage:
        """Rebuild from ``__tensor_flatten__``'s parts.

        Raises:
            KeyError: a buffer name the class does not declare, or an unknown class.
        """
        cls = resolve_storage_class(context["class"])
        arguments = dict(cls._FLATTEN_TENSOR_BUFFERS)
        buffers = {arguments[name]: tensor for name, tensor in inner_tensors.items()}
        extra: dict[str, Any] = {}
        if context["is_wrapper"]:
            extra = {"requires_grad": context["requires_grad"], "stride": outer_stride}
        shape = None if outer_size is None else tuple(outer_size)
        made: Any = cls(
            shape=shape, quantizer=context["quantizer"], fake_dtype=context["fake_dtype"], **buffers, **extra
        )
        if "part" in context:
            made._is_part, made._begins = context["part"]
        return made


def shapes_of(storage: BufferHolder) -> list[torch.Size | None]:
    """Return shapes of all buffers, absent ones as None."""
    return [None if buffer is None else buffer.shape for buffer in storage.get_data_tensors()]


def flatten_context(
    cls: type[QuantizedTensorStorage], requires_grad: bool, quantizer: QuantizerValue, fake_dtype: torch.dtype
) -> dict[str, Any]:
    """Data-free context of a storage class: everything flattening keeps besides buffers, shape and strides."""
    return {
        "class": cls._NAME,
        "is_wrapper": cls._IS_TENSOR,
        "requires_grad": requires_grad,
        "quantizer": quantizer,
        "fake_dtype": fake_dtype,
    }
