"""``Quantizer``: a description of how to quantize a tensor, compared and hashed by value.

A quantizer may be baked into a compiled graph, so it never changes once it was used: ``with_usage`` and ``replace``
return another one. Its fields are the annotated attributes of its class; they must be bool, int, float, str or an enum.
"""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _checks
from .._checks import a_kind, shown
from .._device import HIGH_PRECISION, default_device
from .._sealing import Sealable
from .._tracing import in_eager, refuse_in_one_graph, traced_local, while_tracing
from ..formats import ELEMENT_FORMATS, DType, ElementFormat, Layout
from ..functional import (
    BufferTable,
    GemmOperand,
    NativeOperand,
    QuantizerValue,
    draw_seed,
    quantize,
)
from ..functional.quantize import overwrite
from ..functional.quantizer_value import CLASSES, quantizer_of_text, rules_of_graphs
from ..tensors import QuantizedTensor, QuantizedTensorStorage
from ..tensors.storage import STORAGE_CLASSES, flatten_context, resolve_storage_class, storage_identifier
from ..upstream.compiler import NotInGraph
from .arguments import element_dtype_of, field_value
from .codes import codes_as_matrix
from .straight_through import QuantizeFunction
from .value import (
    FLAGS_OF_ENCODING,
    QUIET_FIELDS,
    SPELLINGS,
    _rebuild_quantizer,
    check_value,
    class_identifier,
)


class Quantizer(Sealable, QuantizerValue):
    """Base of all quantizers.

    Fields may be assigned until the first use: it quantizes, is hashed or compared, or is traced.

    Args:
        rowwise: produce data with scaling groups along the last dim.
        columnwise: produce data with scaling groups along the other dims.
    """

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    _storage_class: ClassVar[type[QuantizedTensorStorage]]
    _storage_name: ClassVar[str] = ""
    _identifier: ClassVar[str]
    """Name of this very class: two classes never share one, whatever they are called."""
    _tensor_class: ClassVar[type[QuantizedTensor]] = None  # type: ignore[assignment]
    _minimum_rank: ClassVar[int] = 1
    _elements: ClassVar[tuple[DType, ...]] = ()
    """What the field ``dtype`` may be; none if there is no such field."""
    _layout_fields: ClassVar[tuple[str, ...]] = ("dtype",)
    """Fields that a tensor's bytes cannot be read without."""
    _has_one_scale = False  # for the whole tensor
    _te_compile_value_opaque: ClassVar[bool] = False
    _registered_fields: ClassVar[tuple[str, ...] | None] = None
    _registered_enums: ClassVar[dict[str, type[enum.Enum]]] = {}
    with_amax_reduction = False  # a field of the formats that can reduce; see ``amax_reduction``

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._identifier = class_identifier(cls)
        CLASSES[cls._identifier] = cls
        cls._te_compile_value_opaque = False  # per class: a subclass registers itself
        # they describe the encoding that they were declared beside; of another nothing is known
        for method, flags in FLAGS_OF_ENCODING.items():
            for flag in flags if method in cls.__dict__ else ():
                if flag not in cls.__dict__:
                    setattr(cls, flag, False)
        for names in SPELLINGS:  # whichever of the two a class defines, both are that
            own = next((name for name in names if name in cls.__dict__), None)
            if own is not None:
                for name in names:
                    setattr(cls, name, cls.__dict__[own])
        if "_storage_class" in cls.__dict__:
            cls._storage_name = storage_identifier(cls._storage_class)
            cls._minimum_rank = cls._storage_class._LAYOUT.minimum_rank

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        _checks.flags(rowwise=rowwise, columnwise=columnwise)
        self._freeze(
            rowwise_usage=bool(rowwise),
            columnwise_usage=bool(columnwise),
            internal=False,
            optimize_for_gemm=False,
        )
        self._rebuild_derived_state()

    def _freeze(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _rebuild_derived_state(self) -> None:
        """Hook: compute attributes that follow from the fields; runs once per quantizer, however it is made.

        The base constructor ends with it, so a class sets its own fields before it calls that constructor.
        """

    # -- value semantics ------------------------------------------------------------------------------------------

    def _how_to_change(self, name: str) -> str:
        return f"use .replace({name}=...), or .with_usage(...), and keep the quantizer it returns"

    def _taken(self, name: str, value: Any) -> Any:
        fields = self._value_fields()
        if fields is not None and name not in (*fields, "amax_reduction_group"):
            raise AttributeError(
                f"{type(self).__qualname__} has no field {shown(name)}; annotate it in the class, before that is "
                "registered"
            )
        return field_value(name, vars(self).get(name), value, self._elements)

    def _assigned(self, name: str) -> None:
        # not in the constructor, which ends with it, nor for derived attributes
        is_field = any(name in base.__dict__.get("__annotations__", {}) for base in type(self).__mro__)
        if is_field and "optimize_for_gemm" in vars(self):
            self._rebuild_derived_state()
            self._check_fields()

    @classmethod
    def _value_fields(cls) -> tuple[str, ...] | None:
        """Return names of the fields that define this class's value; None for identity semantics (not registered)."""
        return cls.__dict__.get("_registered_fields")

    def _value_key(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Return the class name and the field values: the one place where the value is materialized.

        Raises:
            TypeError: the class is not registered, or the quantizer holds a process group or a tensor.
        """
        known = getattr(self, "_key", None)
        if known is not None:  # guards of compiled code compare the quantizers of all weights at every call
            return known
        self._seal()
        fields = self._value_fields()
        if fields is None:
            raise TypeError(f"{type(self).__qualname__} has no value fields: it is not registered as a value")
        check_value(self)
        values = ((name, getattr(self, name)) for name in fields)
        key = (
            type(self).__qualname__,
            tuple((name, v.value if isinstance(v, enum.Enum) else v) for name, v in values),
        )
        if self._has_fixed_value():
            object.__setattr__(self, "_key", key)
        return key

    def _has_fixed_value(self) -> bool:
        """Return whether it is sealed, and may note what follows from its value: traced code may not."""
        return getattr(self, "_sealed", False) and not torch.compiler.is_dynamo_compiling()

    def _value_text(self) -> str:
        """Return the value as text, or "" for identity semantics; traced code and files of programs hold it."""
        text = getattr(self, "_text", None)
        if text is None:
            text = "" if self._value_fields() is None else self._class_and_value()
            if text and self._has_fixed_value():  # a class without a value may be registered later
                object.__setattr__(self, "_text", text)
        return text

    @classmethod
    def _of_value(cls, items: tuple[tuple[str, Any], ...]) -> Quantizer:
        return _rebuild_quantizer(cls, items)

    def _class_and_value(self) -> str:
        """Return class and field values as a literal, for a quantizer made of others."""
        return repr((self._identifier, self._value_key()[1]))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        key = getattr(self, "_key", None)
        if key is None:
            if self._value_fields() is None:
                return NotImplemented
            key = self._value_key()
        return key == (getattr(other, "_key", None) or other._value_key())  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return id(self) if self._value_fields() is None else hash(self._value_key())

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        if self._value_fields() is None:
            return super().__fx_repr__()
        # by identifier: the module that a graph is written to cannot import a class of a script or of a function
        text = f"quantizer_of_text({self._value_text()!r}, {rules_of_graphs()!r})"
        return text, {"quantizer_of_text": quantizer_of_text}

    def __repr__(self) -> str:
        fields = self._value_fields() or tuple(vars(self))
        values = ", ".join(f"{name}={getattr(self, name)!s}" for name in fields if name not in QUIET_FIELDS)
        return f"{type(self).__name__}({values})"

    def replace(self, **changes: Any) -> Quantizer:
        """Return another quantizer with some fields changed.

        Raises:
            AttributeError: a name that is no field of this quantizer.
            TypeError, ValueError: a value that the constructor does not take.
        """
        held = vars(self)
        unknown = [name for name in changes if name not in held]
        if unknown:
            raise AttributeError(
                f"{type(self).__qualname__} has no field {shown(unknown[0])}; fields: {sorted(held)}"
            )
        changes = {
            name: field_value(name, held[name], value, self._elements) for name, value in changes.items()
        }
        replaced = _rebuild_quantizer(type(self), tuple({**held, **changes}.items()))
        if changes:
            replaced._check_fields()
        return replaced

    def _check_fields(self) -> None:
        """Hook: refuse what the format does not define, with a ValueError; constructors and ``replace`` end in it."""
        if self._elements:
            element_dtype_of("dtype", self.dtype, *self._elements)  # type: ignore[attr-defined]

    def copy(self) -> Quantizer:
        """Return an equal, independent quantizer."""
        return self.replace()

    def with_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> Quantizer:
        """Return another quantizer with the given directions; None keeps one as it is."""
        return self.replace(
            rowwise_usage=self.rowwise_usage if rowwise is None else rowwise,
            columnwise_usage=self.columnwise_usage if columnwise is None else columnwise,
        )

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Switch directions on or off, of a quantizer that was not used yet; None keeps one as it is.

        Raises:
            AttributeError: it was; then :meth:`with_usage` makes another.
        """
        if rowwise is not None:
            self.rowwise_usage = bool(rowwise)
        if columnwise is not None:
            self.columnwise_usage = bool(columnwise)

    def _directions(self) -> list[bool]:
        return [False] * self.rowwise_usage + [True] * self.columnwise_usage

    def get_usages(self) -> dict[str, bool]:
        """Return ``{"rowwise": bool, "columnwise": bool}``."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    # -- describing what it makes, and reading it back: from the record of the format -------------------------------

    def _format_layout(self) -> Layout:
        """Return the record of its tensors; formats whose buffers depend on an option choose among theirs."""
        if not self._storage_name:
            raise self._undescribed()
        # by name: the compiler reads the attributes of a class it finds in a global, not of one it read off a quantizer
        return (STORAGE_CLASSES.get(self._storage_name) or resolve_storage_class(self._storage_name))._LAYOUT

    def _undescribed(self) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__qualname__} does not describe its buffers: set _storage_class and _tensor_class"
        )

    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BufferTable:
        described = self._format_layout().describe(shape, self.rowwise_usage, self.columnwise_usage)
        return {
            name: (sizes, getattr(torch, dtype_name) if dtype_name else dtype)
            for name, (sizes, dtype_name) in described.items()
        }

    inner_tensor_specs = _describe_buffers

    def _buffer_table(self, shape: tuple[int, ...], dtype: torch.dtype) -> BufferTable:
        """Return the description for a tensor of ``shape`` and ``dtype``, checked.

        Raises:
            ValueError: a shape or directions that quantizing refuses, too.
            RuntimeError: the description names a buffer that the storage does not declare, or has another order.
        """
        self._check_shape(tuple(shape))
        described = self._describe_buffers(shape, dtype)
        storage_class = self._resolve_storage_cls()
        declared = tuple(attribute for attribute, _ in storage_class._FLATTEN_TENSOR_BUFFERS)
        if tuple(described) != tuple(name for name in declared if name in described):
            raise RuntimeError(
                f"quantizer describes buffers {tuple(described)} but {storage_class.__name__} declares {declared}"
            )
        return described

    def _decode(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> Tensor:
        decode = getattr(numerics.dequantize, self._format_layout().decoders[columnwise])
        return decode(*buffers, dtype=dtype, **self._decode_options(buffers, columnwise))

    def _decode_options(self, buffers: list[Tensor], columnwise: bool) -> dict[str, Any]:
        """Return the decoder's options besides the buffers and the dtype."""
        return {"fmt": self._element_format()}

    def _gemm_operand(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> GemmOperand:
        if self._has_one_scale:  # it waits for the fp32 result
            data, scale_inv = buffers
            codes = codes_as_matrix(data, ELEMENT_FORMATS[self.dtype], columnwise)  # type: ignore[attr-defined]
            return GemmOperand(codes.to(dtype), scale_inv)
        # A code times a power of two is exact in bf16: it has at most four significant bits.
        exact = dtype if self._scales_are_powers() else torch.float32
        decoded = self._decode(numerics, buffers, columnwise, exact)
        matrix = decoded.reshape(-1, decoded.shape[-1])
        return GemmOperand(matrix.t() if columnwise else matrix, None)

    def _scales_are_powers(self) -> bool:
        """Return whether every block scale is a power of two."""
        return True

    def _native_operand(self, buffers: list[Tensor], columnwise: bool) -> NativeOperand | None:
        layout = self._format_layout()
        if not layout.native:
            return None
        data, scale_inv = buffers
        # The GEMM reads block scales outer-dim-major, which is how they are stored: hand over the transposed view.
        scale = scale_inv if layout.scale_group == (0, 0) else scale_inv.t()
        codes = codes_as_matrix(data, ELEMENT_FORMATS[self.dtype], columnwise)  # type: ignore[attr-defined]
        return NativeOperand(codes, scale, layout.native)

    def _resolve_storage_cls(self) -> type[QuantizedTensorStorage]:
        if not self._storage_name or self._tensor_class is None:
            raise self._undescribed()
        return self._storage_class if self.internal else self._tensor_class

    def _storage_scalars(self, dtype: torch.dtype) -> dict[str, Any]:
        if not self._storage_name:
            raise self._undescribed()
        self._seal()  # a tensor is read by it
        return {"quantizer": self, "fake_dtype": dtype}

    def _storage_metadata(self, dtype: torch.dtype) -> tuple[type[QuantizedTensorStorage], dict[str, Any]]:
        return self._resolve_storage_cls(), self._storage_scalars(dtype)

    storage_metadata = _storage_metadata

    def alloc_tensors(
        self,
        shape: tuple[int, ...],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Return uninitialized buffers for a tensor of ``shape`` and ``dtype``: name -> tensor, in flatten order.

        Raises:
            ValueError, RuntimeError: as ``_buffer_table``.
        """
        place = default_device() if device is None else device
        return {
            name: torch.empty(size, dtype=kind, device=place)
            for name, (size, kind) in self._buffer_table(tuple(shape), dtype).items()
        }

    def create_metadata(
        self, shape: tuple[int, ...], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """Return the data-free context that flattening this quantizer's tensors gives."""
        cls, scalars = self._storage_metadata(dtype)
        return flatten_context(cls, requires_grad and not self.internal, **scalars)

    def make_empty(
        self,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """Return an uninitialized quantized tensor of this quantizer's kind.

        Raises:
            ValueError, RuntimeError: as :meth:`alloc_tensors`.
        """
        buffers = self.alloc_tensors(shape, device=device, dtype=dtype)
        if pin_memory:
            buffers = {name: buffer.pin_memory() for name, buffer in buffers.items()}
        return self._assemble(list(buffers.values()), tuple(shape), dtype, requires_grad)

    def _assemble(
        self, buffers: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False
    ) -> Any:
        # by name: the compiler can make instances of a class it finds in a global, not of one it read off a quantizer
        cls = resolve_storage_class(self._result_name())
        arguments = dict(cls._FLATTEN_TENSOR_BUFFERS)
        names = cls.buffer_attributes(self.rowwise_usage, self.columnwise_usage)
        named = {arguments[name]: buffer for name, buffer in zip(names, buffers, strict=True)}
        extra: dict[str, Any] = {} if self.internal else {"requires_grad": requires_grad}
        return cls(shape=shape, **self._storage_scalars(dtype), **named, **extra)

    def _result_name(self) -> str:
        return storage_identifier(self._resolve_storage_cls())

    def get_columnwise_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the column-wise data of a tensor of ``shape``."""
        return self._described(shape, self._storage_class._COLUMNWISE_BUFFERS[0])

    def get_scale_shape(self, shape: tuple[int, ...], columnwise: bool) -> tuple[int, ...]:
        """Return the shape of the scale buffer of one direction."""
        attributes = (
            self._storage_class._COLUMNWISE_BUFFERS if columnwise else self._storage_class._ROWWISE_BUFFERS
        )
        return self._described(shape, attributes[1])

    def _described(self, shape: tuple[int, ...], attribute: str) -> tuple[int, ...]:
        return self.with_usage(rowwise=True, columnwise=True)._describe_buffers(tuple(shape))[attribute][0]

    def _layout(self) -> dict[str, Any]:
        """Return the properties that must agree for the bytes of two tensors to mean the same."""
        return {"storage": self._storage_name, **{name: getattr(self, name) for name in self._layout_fields}}

    # -- quantizing -----------------------------------------------------------------------------------------------

    def quantize(
        self,
        tensor: Tensor,
        *,
        out: QuantizedTensorStorage | None = None,
        dtype: torch.dtype | None = None,
        amax_reduction_group: Any = None,
    ) -> Any:
        """Quantize ``tensor``; the gradient passes straight through.

        Args:
            tensor: (*lead, K), fp32, bf16 or fp16.
            out: update this quantized tensor in place instead of making one.
            dtype: nominal dtype of the result; default: the tensor's, or that of ``out``.
            amax_reduction_group: process group, or its name, that reduces the amax under ``with_amax_reduction``.
        Raises:
            TypeError: another dtype.
            ValueError: too few dims, no direction, another ``out``, or ``with_amax_reduction`` without a group.
            NotImplementedError: a group, and a format that has no amax to reduce.
        """
        traced = not self._te_compile_value_opaque and while_tracing(_refuse_while_tracing)
        if traced and not torch.compiler.is_dynamo_compiling():
            raise NotInGraph(self._not_a_value())  # Dynamo calls it itself, and ends its graph there
        if traced:
            group = amax_reduction_group
            return in_eager(self.quantize, tensor, out=out, dtype=dtype, amax_reduction_group=group)
        self._check_input(tensor)
        if out is not None:
            if dtype not in (None, out.dtype):
                raise ValueError(
                    f"dtype is {dtype} and out has the nominal dtype {out.dtype}; leave dtype out, or give "
                    f"out.to_dtype({dtype})"
                )
            return self.update_quantized(tensor, out, amax_reduction_group=amax_reduction_group)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return QuantizeFunction.apply(tensor, self, dtype or tensor.dtype, amax_reduction_group)
        return self._quantize_detached(tensor, dtype or tensor.dtype, amax_reduction_group)

    def _quantize_detached(self, tensor: Tensor, dtype: torch.dtype, group: Any) -> Any:
        group, source = self._reduction_group(group), tensor if tensor.dim() else tensor.view(1)
        buffers = self._buffers_of(source) if group is None else self._reduced_buffers(source, group)
        return self._assemble(buffers, tuple(tensor.shape), dtype)

    def _reduction_group(self, given: Any) -> Any:
        """Return the process group that reduces the amax, given the call's; None if nothing is reduced.

        Raises:
            NotImplementedError: the format has no amax to reduce.
            ValueError: it needs a group and has none.
        """
        if given is not None:
            raise NotImplementedError(
                f"{type(self).__qualname__} does not reduce amax over a process group; leave amax_reduction_group out"
            )
        return None

    def _without_reduction(self) -> Quantizer:
        """Return the same quantizer for tensors to own: it reduces nothing, and holds no group."""
        return self

    def _reduced_buffers(self, tensor: Tensor, group: Any) -> list[Tensor]:
        raise NotImplementedError(f"{type(self).__qualname__} does not reduce amax over a process group")

    def _buffers_of(self, tensor: Tensor) -> list[Tensor]:
        return quantize(tensor, self, self._seed(tensor))

    def _seed(self, tensor: Tensor) -> Tensor | None:
        return draw_seed(tensor) if self._is_stochastic() else None

    def _half(self, columnwise: bool) -> Quantizer:
        """Return what quantizes in one direction: the quantizer itself, but for a hybrid one."""
        return self

    def _is_stochastic(self) -> bool:
        """Return whether quantizing needs a fresh random seed."""
        return False

    def _is_delayed(self) -> bool:
        """Return whether quantizing needs scale and amax from state."""
        return False

    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Tensor | None = None,
        amax_reduction_group: Any = None,
    ) -> QuantizedTensorStorage:
        """Overwrite ``dst`` with the quantization of ``src``; skipped on device when ``noop_flag`` is non-zero.

        Raises:
            TypeError, ValueError, NotImplementedError: as :meth:`quantize`.
        """
        if not isinstance(dst, self._storage_class):
            raise ValueError(
                f"out is {a_kind(dst)}; {type(self).__qualname__} writes {self._storage_class.__name__}"
            )
        kept = self.with_usage(**dst.get_usages())
        kept._check_input(src)
        if tuple(dst.size()) != tuple(src.shape):
            raise ValueError(f"out has shape {tuple(dst.size())}, the source has {tuple(src.shape)}")
        written, expected = self._layout(), dst._quantizer._layout()  # type: ignore[attr-defined]
        if written != expected:
            raise ValueError(f"out is read with {expected}; {type(self).__qualname__} writes {written}")
        src = src if src.dim() else src.view(1)
        buffers = [buffer for buffer in dst.get_data_tensors() if buffer is not None]
        group = self._reduction_group(amax_reduction_group)
        made = (
            quantize(src.detach(), kept, self._seed(src))
            if group is None
            else kept._reduced_buffers(src.detach(), group)
        )
        overwrite(buffers, made, noop_flag)
        return dst

    def multi_quantize(self, tensors: list[Tensor]) -> list[Any]:
        """Quantize several tensors."""
        return [self.quantize(tensor) for tensor in tensors]

    def calibrate(self, tensor: Tensor) -> None:
        """Record statistics without quantizing; formats without state record nothing."""

    def is_quantizable(self, tensor: Tensor) -> bool:
        """Return whether :meth:`quantize` takes this tensor and any layout of its result can be gathered.

        As in Transformer Engine, a tensor whose scales belong to rows (``row_scaled_nvfp4``) does not count, nor does a
        vector in blocks of 128.
        """
        return self._takes(tensor)

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.dim() >= self._minimum_rank and tensor.dtype in HIGH_PRECISION

    def supports_only_rowwise_all_gather(self) -> bool:
        """Return whether gathered bytes must be row-wise."""
        return False

    def is_requantization_safe(self) -> bool:
        """Return whether quantizing the same tensor again gives the same bytes."""
        return not self._is_stochastic()

    def _element_format(self) -> ElementFormat:
        return ELEMENT_FORMATS[self.dtype]  # type: ignore[attr-defined]

    def _check_input(self, tensor: Tensor) -> None:
        _checks.tensor("tensor", tensor)
        if tensor.dtype not in HIGH_PRECISION:
            raise TypeError(f"cannot quantize a {tensor.dtype} tensor; use float32, bfloat16 or float16")
        self._check_shape(tuple(tensor.shape))

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if not (self.rowwise_usage or self.columnwise_usage):
            raise ValueError(
                f"{type(self).__qualname__} has both directions switched off; ask for at least one"
            )
        if len(shape) < self._minimum_rank:
            raise ValueError(
                f"{type(self).__qualname__} needs at least {self._minimum_rank} dims, got shape {shape}"
            )


def _refuse_while_tracing(context: Any) -> None:
    refuse_in_one_graph(context, traced_local(context, "self")._not_a_value())
