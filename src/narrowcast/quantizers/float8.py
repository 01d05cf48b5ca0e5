"""Per-tensor FP8 quantizers: with a scale from state (delayed) or from the tensor itself (current)."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._checks import flags, numbers, typed
from ..formats import ELEMENT_FORMATS, DType
from ..functional import Prologue, calibrate_, quantize
from ..tensors import Float8Tensor, Float8TensorStorage, QuantizedTensorStorage
from ..upstream.cuda import part_of
from ..upstream.tensors import count_modes
from .amax_reduction import AmaxReducing
from .arguments import FP8_ELEMENTS, fp8_dtype_of, warn_ignored
from .quantizer import Quantizer

FEW_ROWS = 8
"""Rows up to which a GEMM quantizes them itself: with more, the library's GEMM of codes gains more than a launch."""


class _Float8Base(Quantizer):
    """Base of the per-tensor FP8 quantizers."""

    dtype: DType

    _storage_class = Float8TensorStorage
    _tensor_class = Float8Tensor
    _elements = FP8_ELEMENTS
    _has_one_scale = True

    def supports_only_rowwise_all_gather(self) -> bool:
        return True


class Float8CurrentScalingQuantizer(AmaxReducing, _Float8Base):
    """Per-tensor FP8 with the scale from the tensor's own amax.

    Args:
        fp8_dtype: E4M3 or E5M2, as :class:`DType` or torch dtype.
        device: accepted for compatibility; a quantizer has no device.
        rowwise, columnwise: directions to produce.
        with_amax_reduction: reduce the amax over the process group passed to :meth:`quantize`, before the scale is
            computed. Not for recipes: layers have no group to pass.
        amax_reduction_group: deprecated here; pass the group to :meth:`quantize`.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: lower bound of the amax.
    """

    force_pow_2_scales: bool
    amax_epsilon: float

    _takes_sources = _needs_amax = _shares_amax = _has_prologue = True

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        device: torch.device | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        use_existing_amax: Any = None,
        scale: Any = None,
        amax: Any = None,
    ) -> None:
        if use_existing_amax is not None or scale is not None or amax is not None:
            warn_ignored(use_existing_amax=use_existing_amax, scale=scale, amax=amax)
        flags(with_amax_reduction=with_amax_reduction, force_pow_2_scales=force_pow_2_scales)
        numbers(amax_epsilon=amax_epsilon)
        self._freeze(
            dtype=fp8_dtype_of(fp8_dtype),
            with_amax_reduction=bool(with_amax_reduction),
            force_pow_2_scales=bool(force_pow_2_scales),
            amax_epsilon=float(amax_epsilon),
        )
        if amax_reduction_group is not None:
            self._freeze(amax_reduction_group=amax_reduction_group)
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    __call__ = Quantizer.quantize

    def _encode(
        self, numerics: ModuleType, x: Tensor, seed: Tensor | None, amax: Tensor | None = None
    ) -> list[Tensor]:
        """Encode with the largest of ``amax``, fp32, one or more, instead of the amax of ``x``."""
        if amax is None and self.with_amax_reduction:
            self._check_alone()
        return numerics.float8.quantize_current(
            x,
            ELEMENT_FORMATS[self.dtype],
            power_2=self.force_pow_2_scales,
            epsilon=self.amax_epsilon,
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            amax=amax,
        )

    def _encode_again(self, numerics: ModuleType, x: Tensor, parts: Tensor) -> list[Tensor]:
        # by name: a subclass may encode in its own way, and know nothing of the fourth
        return Float8CurrentScalingQuantizer._encode(self, numerics, x, None, parts)

    def _encode_keeping_amax(self, numerics: ModuleType, x: Tensor) -> list[Tensor]:
        parts = numerics.float8.amax_parts(x)
        return [*self._encode_again(numerics, x, parts), parts]

    def _encode_scaled(
        self, numerics: ModuleType, x: Tensor, scale: Tensor, amax: Tensor | None
    ) -> list[Tensor]:
        return self._encode_again(numerics, x, scale[:1])  # computed outside: the amax of all ranks

    def _prologue(self) -> Prologue | None:
        if not self._has_prologue or self.with_amax_reduction or self.dtype != DType.kFloat8E4M3:
            return None
        return Prologue("current", FEW_ROWS, self.force_pow_2_scales, self.amax_epsilon)

    def _amax_to_share(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> Tensor:
        return numerics.float8.amax(x).expand(2).contiguous()


def _slot_of(state: Tensor, slot: int) -> Tensor:
    """Return one element of a contiguous state, as (1,).

    Eager code takes it as compiled graphs do, which takes the host half as long.
    """
    if type(state) is Tensor and not count_modes():  # a mode would not see it
        return part_of(state, (1,), (1,), slot)
    return state.as_strided((1,), (1,), state.storage_offset() + slot)


class DelayedFloat8Quantizer(_Float8Base):
    """Per-tensor FP8 whose scale and amax live in state tensors, at position ``slot``; the compiled form.

    Not callable: torch 2.11 takes a callable argument of a mutating operator for a function to functionalize.

    Args:
        fp8_dtype: E4M3 or E5M2.
        slot: index into the scale and the amax, both ``(n,)``.
        unseen: what is taken instead of a scale of 0, of a tensor of which nothing was seen yet: a scale; or -m for the
            scale that maps the tensor's own amax to m. 0: a scale of 0 is one.
        rowwise, columnwise: directions to produce.
    """

    slot: int
    unseen: float

    _takes_sources = _has_prologue = True

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype,
        slot: int,
        unseen: float = 0.0,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        self._freeze(dtype=fp8_dtype_of(fp8_dtype), slot=int(slot), unseen=float(unseen))
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    def _encode_scaled(
        self, numerics: ModuleType, x: Tensor, scale: Tensor, amax: Tensor | None
    ) -> list[Tensor]:
        return numerics.float8.quantize(
            x,
            _slot_of(scale, self.slot),
            ELEMENT_FORMATS[self.dtype],
            rowwise=self.rowwise_usage,
            columnwise=self.columnwise_usage,
            amax=None if amax is None else _slot_of(amax, self.slot),
            unseen=self.unseen,
        )

    def _is_delayed(self) -> bool:
        return True

    def _prologue(self) -> Prologue | None:
        if not self._has_prologue or self.dtype != DType.kFloat8E4M3:
            return None
        return Prologue("given", FEW_ROWS, slot=self.slot, unseen=self.unseen)

    def _buffers_of(self, tensor: Tensor) -> list[Tensor]:
        raise RuntimeError(
            "a delayed-scaling slot needs its state; use Float8Quantizer(scale, amax, fp8_dtype)"
        )

    def update_quantized(self, src: Tensor, dst: QuantizedTensorStorage, **options: Any) -> NoReturn:
        """Refuse: the scale is in the layer's state, which may have moved on.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"a tensor of {tuple(dst.size())} that delayed scaling quantized cannot be written in place; use the "
            "operation that returns a new tensor, or call dequantize() first"
        )

    def is_requantization_safe(self) -> bool:
        return False


class Float8Quantizer(_Float8Base):
    """Per-tensor FP8 with live state: quantizes with ``scale`` and max-accumulates into ``amax``.

    It holds tensors, so it has identity semantics and is not a compile-time value.

    Args:
        scale: fp32 (1,), multiplies when encoding.
        amax: fp32 (1,), raised to max|x| by every quantization.
        fp8_dtype: E4M3 or E5M2.
        rowwise, columnwise: directions to produce.

    Raises:
        TypeError: ``scale`` or ``amax`` is not an fp32 tensor.
    """

    # annotated, so that registering this class as a compile-time value is refused
    scale: Tensor
    amax: Tensor

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType | torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        for name, value in (("scale", scale), ("amax", amax)):
            if not isinstance(value, Tensor) or value.dtype is not torch.float32:
                given = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else typed(value)
                raise TypeError(f"{name} is {given}; pass an fp32 tensor of shape (1,)")
        self._freeze(dtype=fp8_dtype_of(fp8_dtype), scale=scale, amax=amax)
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    __call__ = Quantizer.quantize

    @classmethod
    def _not_a_value(cls) -> str:
        return (
            f"{cls.__qualname__} holds live scale and amax tensors and cannot be a compile-time value; in compiled "
            "code use a module under the DelayedScaling recipe, or quantize outside"
        )

    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Tensor | None = None,
        amax_reduction_group: Any = None,
    ) -> QuantizedTensorStorage:
        if noop_flag is None:
            return super().update_quantized(src, dst, amax_reduction_group=amax_reduction_group)
        before = self.amax.clone()
        super().update_quantized(src, dst, noop_flag=noop_flag, amax_reduction_group=amax_reduction_group)
        self.amax.copy_(
            torch.where(noop_flag != 0, before, self.amax)
        )  # a skipped update records no amax either
        return dst

    def _slot_quantizer(self) -> DelayedFloat8Quantizer:
        return DelayedFloat8Quantizer(
            self.dtype, 0, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage
        )

    def _buffers_of(self, tensor: Tensor) -> list[Tensor]:
        return quantize(tensor, self._slot_quantizer(), None, self.scale, self.amax)

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        return self._slot_quantizer()._encode_scaled(numerics, x, self.scale, self.amax)

    def calibrate(self, tensor: Tensor) -> None:
        """Overwrite ``amax`` with max|x|."""
        calibrate_(tensor.detach(), None, self.amax)

    def is_requantization_safe(self) -> bool:
        return False
