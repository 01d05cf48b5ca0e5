"""The storages and tensors of the formats by name: each is the one implementation with the record of its format.

A class has a body of its own only where a format can make its column-wise data from the row-wise ones without rounding
again: per-tensor FP8, whose codes do not depend on the direction, and the formats with square tiles, where a tile keeps
its scale when it is transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import formats
from .._checks import shown
from ..functional import transpose_codes
from ..upstream.functionalization import FunctionalTensor
from .quantized_tensor import QuantizedTensor
from .storage import QuantizedTensorStorage

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8RowsTensor",
    "Float8RowsTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP4Tensor",
    "MXFP4TensorStorage",
    "MXFP6Tensor",
    "MXFP6TensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
]


class Float8TensorStorage(QuantizedTensorStorage):
    """Per-tensor FP8: ``_data`` uint8 (*lead, K); ``_transpose`` uint8 (K, *lead); ``_scale_inv`` fp32 (1,)."""

    _LAYOUT = formats.FLOAT8

    def _turns(self) -> bool:
        return True

    def _create_columnwise(self) -> None:
        self._transpose = transpose_codes(self._data)  # type: ignore[attr-defined]


class Float8RowsTensorStorage(QuantizedTensorStorage):
    """FP8 rows: data uint8 (*lead, K) and (K, *lead); a scale fp32 for each row, (M,), and for each column, (K,)."""

    _LAYOUT = formats.FLOAT8_ROWS


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """128-block FP8: data uint8 (*lead, K) and (K, *lead); scales fp32, for 1x128 blocks stored scale-row first."""

    _LAYOUT = formats.FLOAT8_BLOCK_1D

    def _turns(self) -> bool:
        return self._quantizer.block_scaling_dim == 2  # type: ignore[attr-defined]

    def _create_columnwise(self) -> None:
        if not self._turns():
            super()._create_columnwise()
        self._transpose_rowwise()


class MXFP8TensorStorage(QuantizedTensorStorage):
    """MXFP8: data uint8 in logical shape for both directions; scales E8M0 bytes, padded to 128 x 4."""

    _LAYOUT = formats.MXFP8

    def _turns(self) -> bool:
        return self._quantizer.with_2d_quantization  # type: ignore[attr-defined]


class MXFP6TensorStorage(QuantizedTensorStorage):
    """MXFP6: four codes in three bytes, (*lead, 3/4 K) and transposed (K, 3/4 M), zero-padded to blocks of 32."""

    _LAYOUT = formats.MXFP6


class MXFP4TensorStorage(QuantizedTensorStorage):
    """MXFP4: two codes per byte, (*lead, K/2) and transposed (K, M/2), zero-padded to blocks of 32."""

    _LAYOUT = formats.MXFP4


class NVFP4TensorStorage(QuantizedTensorStorage):
    """NVFP4: two codes per byte, (*lead, K/2) and transposed (K, M/2), zero-padded to blocks of 16; fp32 amaxes."""

    _LAYOUT = formats.NVFP4

    def _turns(self) -> bool:
        """Return False if each direction chooses its scales, or rounds, for itself."""
        q: Any = self._quantizer
        return q.with_2d_quantization and not (q.with_rht or q.nvfp4_use_4over6 or q.stochastic_rounding)

    def _create_columnwise(self) -> None:
        if not self._quantizer.with_2d_quantization or self._quantizer.with_rht:  # type: ignore[attr-defined]
            super()._create_columnwise()
        self._transpose_rowwise()
        self._amax_columnwise = self._amax_rowwise.clone()  # type: ignore[attr-defined]


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """One format row-wise, another column-wise, with three buffers each; a format's unused buffers have no elements.

    Args:
        rowwise_storage, columnwise_storage: existing halves, whose buffers are shared.
        **described: as for every storage.
    """

    _LAYOUT = formats.HYBRID

    def __init__(
        self,
        *,
        rowwise_storage: QuantizedTensorStorage | None = None,
        columnwise_storage: QuantizedTensorStorage | None = None,
        **described: Any,
    ) -> None:
        super().__init__(**_with_halves(rowwise_storage, columnwise_storage, described))

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop (False) or keep (True, None) a half; unlike other storages it may lose both.

        Raises:
            RuntimeError: a dropped half is requested again.
        """
        if rowwise_usage is False and columnwise_usage is False:
            self.clear()
        else:
            super().update_usage(rowwise_usage, columnwise_usage)
            for columnwise, usage in enumerate((rowwise_usage, columnwise_usage)):
                if usage is False:
                    vars(self).get("_halves", {}).pop(bool(columnwise), None)

    def clear(self) -> None:
        """Drop every buffer."""
        super().clear()
        vars(self).pop("_halves", None)

    def __repr__(self) -> str:
        halves = ", ".join(
            f"{name}={None if half is None else type(half).__name__}"
            for name, half in (
                ("rowwise", self.rowwise_sub_storage),
                ("columnwise", self.columnwise_sub_storage),
            )
        )
        shape = f"shape={tuple(self.size())}, " if any(self.get_usages().values()) else ""
        return f"{type(self).__name__}({shape}dtype={self._dtype}, {halves})"

    @property
    def rowwise_sub_storage(self) -> QuantizedTensorStorage | None:
        """The row-wise half in the class of its own format, around the same buffers; None if it was dropped."""
        return self._sub_storage(False)

    @property
    def columnwise_sub_storage(self) -> QuantizedTensorStorage | None:
        """The column-wise half, likewise."""
        return self._sub_storage(True)

    def _sub_storage(self, columnwise: bool) -> QuantizedTensorStorage | None:
        attributes = self._COLUMNWISE_BUFFERS if columnwise else self._ROWWISE_BUFFERS
        if getattr(self, attributes[0]) is None:
            return None
        quantizer: Any = self._quantizer
        half = quantizer._half(columnwise)
        own = quantizer._own([getattr(self, attribute) for attribute in attributes], columnwise)
        held = vars(self).setdefault("_halves", {})
        known = held.get(columnwise)
        if known is not None and all(
            known_buffer is buffer for known_buffer, buffer in zip(known[1], own, strict=True)
        ):
            return known[0]
        cls = half._tensor_class if isinstance(self, QuantizedTensor) else half._storage_class
        arguments = dict(cls._FLATTEN_TENSOR_BUFFERS)
        named = zip(cls.buffer_attributes(not columnwise, columnwise), own, strict=True)
        made = cls(
            quantizer=half,
            fake_dtype=self._dtype,
            shape=tuple(self.size()),
            **{arguments[attribute]: buffer for attribute, buffer in named},
        )
        if isinstance(self, QuantizedTensor):
            made._is_part, made._begins = self._is_part, self._begins
        held[columnwise] = (made, own)  # the same object as long as the buffers are the same
        return made


class IdentityTensorStorage(QuantizedTensorStorage):
    """High precision: one buffer ``_hp_data`` in logical shape serves both directions."""

    _LAYOUT = formats.IDENTITY


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """Tensor over :class:`Float8TensorStorage`."""


class Float8RowsTensor(Float8RowsTensorStorage, QuantizedTensor):
    """Tensor over :class:`Float8RowsTensorStorage`."""


class Float8BlockwiseQTensor(Float8BlockwiseQTensorStorage, QuantizedTensor):
    """Tensor over :class:`Float8BlockwiseQTensorStorage`."""


class MXFP8Tensor(MXFP8TensorStorage, QuantizedTensor):
    """Tensor over :class:`MXFP8TensorStorage`."""


class MXFP6Tensor(MXFP6TensorStorage, QuantizedTensor):
    """Tensor over :class:`MXFP6TensorStorage`."""


class MXFP4Tensor(MXFP4TensorStorage, QuantizedTensor):
    """Tensor over :class:`MXFP4TensorStorage`."""


class NVFP4Tensor(NVFP4TensorStorage, QuantizedTensor):
    """Tensor over :class:`NVFP4TensorStorage`."""


class HybridQuantizedTensor(HybridQuantizedTensorStorage, QuantizedTensor):
    """Tensor over :class:`HybridQuantizedTensorStorage`."""

    def __new__(
        cls, *, rowwise_storage: Any = None, columnwise_storage: Any = None, **described: Any
    ) -> HybridQuantizedTensor:
        described = _with_halves(rowwise_storage, columnwise_storage, described)
        return QuantizedTensor.__new__(cls, **described)  # type: ignore[return-value]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return HybridQuantizedTensorStorage.__repr__(self)

    def _part(self, dim: int, first: int, count: int) -> QuantizedTensor | None:
        return self._of_halves(lambda half: half._part(dim, first, count))

    def _regrouped(self, shape: tuple[int, ...]) -> QuantizedTensor | None:
        return self._of_halves(lambda half: half._regrouped(shape))

    def _of_halves(self, made_of: Callable[[Any], QuantizedTensor | None]) -> QuantizedTensor | None:
        """Return the hybrid of what a function makes of each half; None if it makes nothing of one."""
        if any(isinstance(buffer, FunctionalTensor) for buffer in self.get_data_tensors()):
            return None  # a graph passes on plain tensors
        made: list[Any] = []
        for half in (self.rowwise_sub_storage, self.columnwise_sub_storage):
            made.append(None if half is None else made_of(half))
            if half is not None and made[-1] is None:
                return None
        hybrid = type(self)(rowwise_storage=made[0], columnwise_storage=made[1], quantizer=self._quantizer)
        first = made[0] if made[1] is None else made[1]
        hybrid._is_part, hybrid._begins = first._is_part, first._begins
        return hybrid

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Return what both halves give, and per half the number of these tensors and what it keeps."""
        given: list[Tensor] = []
        kept: list[tuple[int, Any]] = []
        for half in (self.rowwise_sub_storage, self.columnwise_sub_storage):
            tensors, metadata = (), None
            if isinstance(half, QuantizedTensor):
                tensors, metadata = half.fsdp_pre_all_gather(
                    mesh, orig_size, contiguous_orig_stride, module, mp_policy
                )
            given += tensors
            kept.append((len(tensors), metadata))
        return tuple(given), tuple(kept)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """Return the hybrid of the gathered halves and the memory of it that FSDP2 frees."""
        (rows, of_rows), (_, of_columns) = metadata
        parts, whole, memory = (all_gather_outputs[:rows], all_gather_outputs[rows:]), [], []
        halves = (self.rowwise_sub_storage, self.columnwise_sub_storage)
        first = (None, None) if out is None else (out.rowwise_sub_storage, out.columnwise_sub_storage)
        for half, part, kept, earlier in zip(halves, parts, (of_rows, of_columns), first):
            if not isinstance(half, QuantizedTensor):
                whole.append(None)
                continue
            gathered, own = half.fsdp_post_all_gather(part, kept, param_dtype, out=earlier)
            whole.append(gathered)
            memory += own
        if out is not None:
            return out, ()
        made = type(self)(rowwise_storage=whole[0], columnwise_storage=whole[1], quantizer=self._quantizer)
        return made, tuple(memory)


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """Tensor over :class:`IdentityTensorStorage`."""


def _with_halves(rowwise: Any, columnwise: Any, described: dict[str, Any]) -> dict[str, Any]:
    """Return a hybrid's constructor arguments, with those that its halves say.

    Raises:
        TypeError: no quantizer with two halves.
    """
    halves = {"rowwise": rowwise, "columnwise": columnwise}
    there = [half for half in halves.values() if half is not None]
    if not there:
        return described
    quantizer: Any = described.get("quantizer")
    if not hasattr(quantizer, "_half"):
        raise TypeError(
            f"a hybrid of two storages got quantizer={shown(quantizer)}; pass the HybridQuantizer whose halves made "
            "them"
        )
    described = {"fake_dtype": there[0]._dtype, "shape": tuple(there[0].size()), **described}
    described["quantizer"] = quantizer.with_usage(**{side: half is not None for side, half in halves.items()})
    for side, half in halves.items():
        if half is None:
            continue
        held = half.columnwise_operand() if side == "columnwise" else half.rowwise_operand()
        slots = [buffer.argument for buffer in formats.HYBRID.buffers if buffer.direction == side]
        held += [held[0].new_empty((0,), dtype=torch.uint8)] * (len(slots) - len(held))
        described.update(zip(slots, held, strict=True))
    return described
