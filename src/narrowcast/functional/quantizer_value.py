"""``QuantizerValue``: the protocol between operators and the quantizers of the room above.

Operators take quantizers as opaque operands. They never test which quantizer they got; they call these methods on
the real object, inside the operator or its fake, if nothing is traced.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .._checks import shown
from .._environment import switches
from .._version import __version__
from ..upstream import opaque

BufferTable = dict[str, tuple[tuple[int, ...], torch.dtype]]


class GemmOperand(NamedTuple):
    """A decoded GEMM operand: ``values * scale`` is the matrix, the contraction runs along the last dim.

    ``values``: (rows, contraction), exactly representable in its dtype. ``scale``: fp32, one element, or
    (rows, 1), or None for 1.
    """

    values: Tensor
    scale: Tensor | None


class NativeOperand(NamedTuple):
    """A GEMM operand the tensor cores read as it is.

    ``data``: (rows, contraction) in an fp8 dtype, row-major. ``scale``: decoding scales in the layout of
    ``torch.nn.functional.scaled_mm`` for the left operand. ``scaling``: ``"tensor"``, ``"row"`` (fp32, one per
    row), ``"1x128"``, ``"128x128"``, or ``"plain"`` for a matrix in high precision, whose scale is 1.

    ``"1x32"`` (MXFP8) and ``"1x16"`` (NVFP4, two codes per byte) have compact scale codes, uint8 (rows to 128, blocks
    to 4), which the GEMM's caller puts in order; strides are any. ``tensor_scale``: NVFP4's fp32 scale of all, (1,).
    """

    data: Tensor
    scale: Tensor
    scaling: str
    tensor_scale: Tensor | None = None


class Prologue(NamedTuple):
    """How the kernel of a GEMM quantizes its left operand itself, to E4M3.

    ``scaling``: "current", "given" (element ``slot`` of the state's scales, and instead of 0 what ``unseen`` says) or
    "1x128". ``power_2``, ``epsilon``: of scales that the kernel computes. ``rows``: up to which it is the faster way.
    """

    scaling: str
    rows: int
    power_2: bool = False
    epsilon: float = 0.0
    slot: int = 0
    unseen: float = 0.0


class QuantizerValue(opaque.Base):
    """Base of every quantizer: a frozen description that operators take by value."""

    _takes_sources: ClassVar[bool] = False
    """Whether ``_encode`` only passes its input on to the numerics' quantize functions, which also take sources."""

    _rotates: ClassVar[bool] = False
    """Whether :meth:`_rotation` may be another than None."""
    _needs_amax: ClassVar[bool] = False
    """Whether all of the tensor must be seen before any of it can be encoded."""

    _shares_amax: ClassVar[bool] = False
    """Whether it can quantize by an amax that processes have reduced."""

    _takes_groups: ClassVar[bool] = False
    """Whether ``_encode`` takes rows whose groups have an amax each, as the numerics' function of NVFP4 does."""

    _has_prologue: ClassVar[bool] = False
    """Whether the kernel of a GEMM can encode in its place; see :meth:`_prologue`."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        raise TypeError(self._not_a_value())

    @classmethod
    def _not_a_value(cls) -> str:
        """Return the message of the error where compiled code meets a quantizer of this class."""
        if not opaque.AVAILABLE:
            return str(opaque.missing())
        return (
            f"{cls.__qualname__} is not registered as a compile-time value; call "
            f"narrowcast.dynamo.register_value_opaque_quantizer({cls.__qualname__}) after defining it"
        )

    def _value_text(self) -> str:
        """Return the value as text, which :func:`quantizer_of_text` reads, or "" where it has none."""
        return ""

    def _is_ours(self) -> bool:
        """Return whether only code of this package quantizes."""
        parts = [value for value in vars(self).values() if isinstance(value, QuantizerValue)]
        return type(self).__module__.startswith("narrowcast.") and all(part._is_ours() for part in parts)

    @classmethod
    def _of_value(cls, items: tuple[tuple[str, Any], ...]) -> QuantizerValue:
        """Return the quantizer of this class with these field values, made without its constructor."""
        raise NotImplementedError(f"{cls.__qualname__} has no value")

    def _is_current(self) -> bool:
        """Return whether a pass over the tensor finds the scale; an amax kept from an earlier one saves that pass."""
        return self._needs_amax and not self._is_delayed()

    def _rotation(self, columnwise: bool) -> int | None:
        """Return the signs with which data of a direction is rotated along its contraction; None where it is not."""
        return None

    def _spans_rows(self: Any) -> bool:
        """Return whether other rows of a tensor change the row-wise codes of a row."""
        try:
            layout = self._format_layout()
        except NotImplementedError:
            return bool(self._is_current())
        return "s" in layout.joins[0] and not self._is_delayed()

    def _is_delayed(self) -> bool:
        """Return whether it quantizes with a scale from state, by ``_encode_scaled``, and not at all without one."""
        return False

    def _joins(self: Any) -> tuple[bool, tuple[str, str], int]:
        """Return how rows that several processes quantize join: (by a common amax, ``Layout.joins``,
        ``joined_rows``).

        Traced code reads this, since it cannot read the ``Layout`` of a quantizer that is a constant of the graph.
        """
        try:
            layout = self._format_layout()
        except NotImplementedError:
            return False, ("", ""), 1
        shares = "s" in "".join(layout.joins) and not self._is_delayed()
        if shares and not self._shares_amax:
            return False, ("", ""), 1
        return shares, ("", "") if self.optimize_for_gemm else layout.joins, layout.joined_rows

    def _of_groups(self, columnwise: bool) -> tuple[QuantizerValue, str] | None:
        """Return a quantizer of one direction and a layout in which the device finds groups, for a format whose own
        layout is "split"; None if there is none.
        """
        return None

    def _keeping(self, dtype: torch.dtype) -> QuantizerValue:
        """Return the quantizer whose buffers are those that this one makes of ``dtype``, for tensors of any dtype."""
        return self

    def _reads_decoded_rows(self) -> bool:
        """Return whether column-wise data are made of what row-wise ones decode to."""
        return False

    def _directions(self) -> list[bool]:
        """Return directions it produces, in order: False for row-wise, True for column-wise."""
        raise NotImplementedError(f"{type(self).__qualname__} does not tell its directions")

    def _describe_buffers(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BufferTable:
        """Return buffers that quantizing a tensor of ``shape`` and ``dtype`` yields: name -> (shape, dtype), flatten
        order.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not describe its buffers")

    def _encode(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> list[Tensor]:
        """Quantize with the functions of ``numerics`` (``reference`` or ``kernels``); flatten order."""
        if self._is_delayed():
            raise ValueError(
                f"scale is None, but {self} scales with delay; pass the layer's fp32 scale vector, one per slot"
            )
        raise NotImplementedError(f"{type(self).__qualname__} cannot quantize without state")

    def _encode_scaled(
        self, numerics: ModuleType, x: Tensor, scale: Tensor, amax: Tensor | None
    ) -> list[Tensor]:
        """Quantize with a scale from state, max-accumulating into ``amax``; only delayed scaling does."""
        raise NotImplementedError(f"{type(self).__qualname__} takes no scale from outside")

    def _amax_to_share(self, numerics: ModuleType, x: Tensor, seed: Tensor | None) -> Tensor:
        """Return amaxes, row-wise and column-wise, fp32 (2,): ``_encode_scaled`` takes the largest of all processes."""
        raise NotImplementedError(f"{type(self).__qualname__} does not reduce amax over a process group")

    def _decode(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> Tensor:
        """Dequantize the buffers of one direction to the logical orientation with the functions of ``numerics``."""
        raise NotImplementedError(f"{type(self).__qualname__} cannot dequantize")

    def _gemm_operand(
        self, numerics: ModuleType, buffers: list[Tensor], columnwise: bool, dtype: torch.dtype
    ) -> GemmOperand:
        """Decode the buffers of one direction for an emulated GEMM in ``dtype`` (fp32 or bf16)."""
        raise NotImplementedError(f"{type(self).__qualname__} cannot feed a GEMM")

    def _encode_again(self, numerics: ModuleType, x: Tensor, parts: Tensor) -> list[Tensor]:
        """Encode like ``_encode``, given the last output of ``_encode_keeping_amax``; only if ``_needs_amax``."""
        raise NotImplementedError(f"{type(self).__qualname__} needs no amax")

    def _encode_keeping_amax(self, numerics: ModuleType, x: Tensor) -> list[Tensor]:
        """Encode like ``_encode``, with the amax of ``x``, in parts, as the last output; only if ``_needs_amax``."""
        raise NotImplementedError(f"{type(self).__qualname__} needs no amax")

    def _prologue(self) -> Prologue | None:
        """Return how the kernel of a GEMM quantizes its left operand as this quantizer does; None if none can."""
        return None

    def _native_operand(self, buffers: list[Tensor], columnwise: bool) -> NativeOperand | None:
        """Return the operand for the hardware GEMM, or None when this format has none on any supported GPU."""
        return None


opaque.register_base(QuantizerValue)

CLASSES: dict[str, type[QuantizerValue]] = {}
"""Quantizer classes by identifier; a class that is defined again gets another, and the older one keeps its own."""


def quantizer_of_text(text: str, rules: str = "") -> QuantizerValue:
    """Return the quantizer that a text means, as ``_value_text`` wrote it.

    Args:
        rules: :func:`rules_of_graphs` of the process that wrote a graph. It is there to be in the compiler's cache
            keys, which read a graph's text and do not know by which rules an operator becomes kernels.
    Raises:
        RuntimeError: no class of that name was defined in this process.
        TypeError: no text, for a quantizer without.
    """
    if not text:
        raise TypeError(
            "a program is exported with quantizers as values, and this one has none; register its class with "
            "narrowcast.dynamo.register_value_opaque_quantizer"
        )
    return _made_of_text(text)


def rules_of_graphs() -> str:
    """Return what decides, beside operators and their arguments, what a compiled graph runs: files and switches."""
    return f"narrowcast {__version__}, {_digest(_files(), switches())}"


@functools.cache
def _files() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _digest(*[(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files])


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=1024)
def _made_of_text(text: str) -> QuantizerValue:
    identifier, items = ast.literal_eval(text)
    if identifier not in CLASSES:
        raise RuntimeError(
            f"no quantizer class {shown(identifier)} is known here; import the module that defines it first"
        )
    return CLASSES[identifier]._of_value(items)
