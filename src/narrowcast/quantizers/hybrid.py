"""Hybrid quantizer: one format row-wise, another column-wise."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .._checks import is_one_of, shown
from ..functional import BufferTable, GemmOperand, NativeOperand
from ..functional.quantizer_value import QuantizerValue, quantizer_of_text
from ..tensors import HybridQuantizedTensor, HybridQuantizedTensorStorage, grouped_layout
from .quantizer import Quantizer

_BUFFERS_PER_DIRECTION = 3
_SOURCES = ("original", "rowwise_dequantized")


class HybridQuantizer(Quantizer):
    """Two quantizers, one per direction: the forward GEMM reads the first's data, the backward GEMMs the second's.

    With an unregistered quantizer class it becomes an :class:`EagerHybridQuantizer`, which is not a value.

    Args:
        rowwise_quantizer, columnwise_quantizer: two different objects; their own usages do not matter.
        columnwise_source: the second quantizes the "original" tensor, or the first's result ("rowwise_dequantized").
    Raises:
        ValueError: one object is given twice, the source is unknown, or a quantizer reduces amax.
        TypeError: an argument is not a quantizer, or is a slot of a layer's delayed scaling or a
            :class:`Float8Quantizer`, which hold their own state.
    """

    rowwise_value: str
    columnwise_value: str
    columnwise_source: str

    rowwise_quantizer = None  # derived from its value, as is the other: a quantizer's fields are plain
    columnwise_quantizer = None

    _storage_class = HybridQuantizedTensorStorage
    _tensor_class = HybridQuantizedTensor
    _layout_fields = ("rowwise_value", "columnwise_value")
    _rotates = True

    def __new__(cls, **options: Any) -> HybridQuantizer:
        eager = any(isinstance(half, Quantizer) and not half._value_text() for half in options.values())
        return object.__new__(EagerHybridQuantizer if eager and cls is HybridQuantizer else cls)

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None:
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError(
                "rowwise_quantizer and columnwise_quantizer are one object; give each direction its own"
            )
        self._freeze(columnwise_source=columnwise_source)
        self._keep(_half_of(rowwise_quantizer, False), _half_of(columnwise_quantizer, True))
        super().__init__(rowwise=True, columnwise=True)
        self._check_fields()

    __call__ = Quantizer.quantize

    def _keep(self, rowwise: Quantizer, columnwise: Quantizer) -> None:
        self._freeze(rowwise_value=rowwise._class_and_value(), columnwise_value=columnwise._class_and_value())

    def _check_fields(self) -> None:
        if not is_one_of(self.columnwise_source, _SOURCES):
            raise ValueError(
                f"columnwise_source is {shown(self.columnwise_source)}; use 'original' or 'rowwise_dequantized'"
            )

    def replace(self, **changes: Any) -> Quantizer:
        """Return another quantizer with some fields changed; ``rowwise_quantizer`` and ``columnwise_quantizer`` count
        as such.

        Raises:
            AttributeError, TypeError, ValueError: as for other quantizers, and as the constructor.
        """
        names = ("rowwise_quantizer", "columnwise_quantizer")
        halves = {name: changes.pop(name, getattr(self, name)) for name in names}
        if all(halves[name] is getattr(self, name) for name in names):
            return super().replace(**changes)
        replaced = HybridQuantizer(**halves, columnwise_source=self.columnwise_source)
        kept = {name: getattr(self, name) for name in Quantizer.__annotations__ if name in vars(self)}
        return Quantizer.replace(replaced, **{**kept, **changes})

    def _rebuild_derived_state(self) -> None:
        self._freeze(
            rowwise_quantizer=quantizer_of_text(self.rowwise_value),
            columnwise_quantizer=quantizer_of_text(self.columnwise_value),
        )
        self._half(False)._seal()
        self._half(True)._seal()

    def _half(self, columnwise: bool) -> Quantizer:
        half = self.columnwise_quantizer if columnwise else self.rowwise_quantizer
        assert half is not None
        return half

    def _of_groups(self, columnwise: bool) -> tuple[QuantizerValue, str] | None:
        # both or none: how groups lie must not depend on which directions are asked for
        found = [self._half_of_groups(direction) for direction in (False, True)]
        return None if None in found else found[columnwise]

    def _half_of_groups(self, columnwise: bool) -> tuple[QuantizerValue, str] | None:
        half = self._half(columnwise)
        layout = grouped_layout(half._storage_name)
        if layout == "split":
            return half._of_groups(columnwise)
        return None if layout == "tensor" and not half._is_current() else (half, layout)

    def _keeping(self, dtype: torch.dtype) -> QuantizerValue:
        kept: Any = [self._half(columnwise)._keeping(dtype) for columnwise in (False, True)]
        return self.replace(rowwise_quantizer=kept[0], columnwise_quantizer=kept[1])

    def _reads_decoded_rows(self) -> bool:
        return self.columnwise_source == "rowwise_dequantized"

    def _rotation(self, columnwise: bool) -> int | None:
        return self._half(columnwise)._rotation(columnwise)

    def _spans_rows(self) -> bool:
        return self._half(False)._spans_rows()

    def _is_stochastic(self) -> bool:
        return self._half(False)._is_stochastic() or self._half(True)._is_stochastic()

    def is_requantization_safe(self) -> bool:
        return self._half(False).is_requantization_safe() and self._half(True).is_requantization_safe()

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        super()._check_shape(shape)
        for columnwise in (False, True):
            self._half(columnwise)._check_shape(shape)

    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BufferTable:
        buffers: BufferTable = {}
        for columnwise in self._directions():
            described = list(self._half(columnwise)._describe_buffers(shape, dtype).values())
            described += [((0,), torch.uint8)] * (_BUFFERS_PER_DIRECTION - len(described))
            direction = "columnwise" if columnwise else "rowwise"
            buffers.update({f"_{direction}_{index}": entry for index, entry in enumerate(described)})
        return buffers

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        buffers: list[Tensor] = []
        for columnwise in self._directions():
            source = x
            if columnwise and self._reads_decoded_rows():
                rows = self._encode_half(numerics, x, False, seed)
                source = self._half(False)._decode(numerics, rows, False, x.dtype)[..., : x.shape[-1]]
            encoded = self._encode_half(numerics, source, columnwise, seed)
            missing = _BUFFERS_PER_DIRECTION - len(encoded)
            buffers += [*encoded, *(x.new_empty((0,), dtype=torch.uint8) for _ in range(missing))]
        return buffers

    def _encode_half(
        self, numerics: ModuleType, x: Tensor, columnwise: bool, seed: Tensor | None
    ) -> list[Tensor]:
        half = self._half(columnwise)
        return half._encode(numerics, x, seed if half._is_stochastic() else None)

    def _own(self, buffers: list[Tensor], columnwise: bool) -> list[Tensor]:
        """Return the buffers without the empty ones that fill up to three."""
        return buffers[: len(self._half(columnwise)._describe_buffers((1, 1)))]

    def _decode(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> Tensor:
        return self._half(columnwise)._decode(numerics, self._own(buffers, columnwise), columnwise, dtype)

    def _gemm_operand(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> GemmOperand:
        own = self._own(buffers, columnwise)
        return self._half(columnwise)._gemm_operand(numerics, own, columnwise, dtype)

    def _native_operand(self, buffers: list[Tensor], columnwise: bool) -> NativeOperand | None:
        return self._half(columnwise)._native_operand(self._own(buffers, columnwise), columnwise)


def _half_of(quantizer: Any, columnwise: bool) -> Quantizer:
    """Return a quantizer in the one direction that it makes here.

    Raises:
        TypeError: no quantizer, or a slot of a layer's delayed scaling.
        ValueError: it reduces amax.
    """
    if isinstance(quantizer, Quantizer) and quantizer.with_amax_reduction:
        raise ValueError(
            f"{shown(quantizer)} cannot be half of a hybrid, which has no process group; use with_amax_reduction=False"
        )
    if not isinstance(quantizer, Quantizer) or quantizer._is_delayed():
        raise TypeError(
            f"{shown(quantizer)} cannot be half of a hybrid; use a quantizer, of delayed scaling one that holds its "
            "state: Float8Quantizer(scale, amax, fp8_dtype)"
        )
    return quantizer.with_usage(rowwise=not columnwise, columnwise=columnwise)


class EagerHybridQuantizer(HybridQuantizer):
    """A hybrid of quantizers that are not values. It holds them uncopied, and is not a value either."""

    def _keep(self, rowwise: Quantizer, columnwise: Quantizer) -> None:
        self._freeze(rowwise_quantizer=rowwise, columnwise_quantizer=columnwise)

    def _rebuild_derived_state(self) -> None:
        self._half(False)._seal()
        self._half(True)._seal()

    def _layout(self) -> dict[str, Any]:
        return {
            "storage": self._storage_name,
            "rowwise": self._half(False)._layout(),
            "columnwise": self._half(True)._layout(),
        }

    @classmethod
    def _not_a_value(cls) -> str:
        return (
            "HybridQuantizer is not a compile-time value, since one of its quantizers is none: register its class with "
            "narrowcast.dynamo.register_value_opaque_quantizer"
        )
