"""Recorder of the GEMM operators that run, with the layer of each call.

An operator does not know its layer. But the weight is quantized from a parameter, fprop and dgrad read that, and the
gradient that dgrad reads is the one that wgrad reads: buffers are followed by where their memory lies, so it makes no
difference whether the calls come from eager code or from a compiled graph.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._table import as_table
from ..functional import GemmCall, element_of, gemm_call, half_of
from ..functional.gemm import gemm_directions
from ..quantizers import (
    DelayedFloat8Quantizer,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowsQuantizer,
    IdentityQuantizer,
    Quantizer,
)
from ..tensors import DequantizingTensor
from ..upstream.aot import runs_compiled
from ..upstream.functionalization import OperatorMode
from ..upstream.modules import own_parameters
from ..upstream.tensors import schema_of
from .show import alike, common_name

_ORDER = {"fprop": 0, "dgrad": 1, "wgrad": 2}
_FORMATS: dict[type[Quantizer], str] = {
    DelayedFloat8Quantizer: "FP8 delayed",
    Float8CurrentScalingQuantizer: "FP8 current",
    Float8RowsQuantizer: "FP8 rowwise",
    Float8BlockQuantizer: "FP8 block",
    IdentityQuantizer: "high precision",
}
"""Formats with how their scales come; the others have the names of their quantizers, such as MXFP8."""
_NATIVE = {f"aten::_scaled_{kind}mm{version}" for kind in ("", "grouped_") for version in ("", "_v2")}


@dataclass(frozen=True)
class RanGemm:
    """GEMMs of one weight that ran in the same way.

    Attributes:
        name: the weight's name in the receipt; names joined by " or " if ambiguous, "" if unknown.
        gemm: "fprop", "dgrad" or "wgrad".
        precision: the elements of both operands and their format, such as "E5M2 x E4M3 (FP8 current)".
        emulated: decoded and multiplied in higher precision.
        compiled: called from a compiled graph.
        calls: number of calls.
    """

    name: str
    gemm: str
    precision: str
    emulated: bool
    compiled: bool
    calls: int


@dataclass(frozen=True)
class RanGemms:
    """The GEMMs that ran while a receipt recorded; ``print`` shows a table.

    Attributes:
        gemms: one for each weight, GEMM and way of running.
        idle: weights under a recipe whose GEMMs did not run.
        inlined: native GEMMs that compiled graphs called directly, on a GPU with static shapes; they have no layer.
            ``NARROWCAST_INLINE=0``, set before compiling, keeps the operators whole and named.
    """

    gemms: tuple[RanGemm, ...]
    idle: tuple[str, ...]
    inlined: int = 0

    def __iter__(self) -> Iterator[RanGemm]:
        return iter(self.gemms)

    def __str__(self) -> str:
        rows = []
        for group in alike(self.gemms):
            one = group[0]
            run = "emulated" if one.emulated else "native"
            code = "compiled" if one.compiled else "eager"
            name = common_name([each.name for each in group]) or "?"
            rows.append((name, one.gemm, one.precision, run, code, str(one.calls)))
        head = ("weight", "GEMM", "precision", "run", "code", "calls")
        lines = as_table(head, rows) if rows else ["no GEMM of narrowcast ran"]
        if self.inlined:
            lines.append(
                f"{self.inlined} native GEMMs that compiled graphs called themselves, of unknown layers; "
                "NARROWCAST_INLINE=0 before compiling names them"
            )
        if self.idle:
            unknown = self.inlined or any(not one.name for one in self.gemms)
            seen = "none was seen by name" if unknown else "none ran"
            names = ", ".join(name or "(the model)" for name in self.idle)
            lines.append(f"under a recipe, but {seen}: {names}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the table, which an interactive session shows."""
        return str(self)


@dataclass(eq=False)
class _Buffers:
    """Tensors that one operator call returned: the weights they were made from, and those they were multiplied with."""

    made_from: list[str] = field(default_factory=list)
    met: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Call:
    gemm: str
    precision: str
    emulated: bool
    compiled: bool
    left: _Buffers
    right: _Buffers

    def names(self) -> list[str]:
        if self.gemm != "wgrad":
            return self.right.made_from
        by_gradient, by_input = self.left.met, self.right.met
        both = [name for name in by_gradient if name in by_input]
        return both or by_gradient or by_input


class NamedWeight(NamedTuple):
    """The place of a weight: a parameter of a module, by name; its name in the receipt, and how many elements or
    packed codes it has.
    """

    name: str
    module: nn.Module
    parameter: str
    size: int

    def address(self) -> int | None:
        """Return where the weight lies now: sharding puts another tensor there for the forward of the module."""
        weight: Any = own_parameters(self.module).get(self.parameter)
        weight = codes_of(weight)
        return None if weight is None or hasattr(weight, "to_local") else weight.data_ptr()


def codes_of(weight: Any) -> Any:
    """Return the tensor that operators read: the codes of a quantized weight, else the weight."""
    if isinstance(weight, DequantizingTensor):
        held: Any = weight
        return next(buffer for buffer in held.get_data_tensors() if buffer is not None)
    return weight


class Recorder(OperatorMode):
    """Notes every GEMM that is called while it is entered; ``weights``: those that it may belong to."""

    def __init__(self, weights: Sequence[NamedWeight]) -> None:
        super().__init__()
        self._weights: dict[int, list[NamedWeight]] = {}
        for weight in weights:
            self._weights.setdefault(weight.size, []).append(weight)
        self._calls, self._inlined = list[_Call](), 0
        self._seen: dict[int, _Buffers] = {}  # by address, as long as they are there

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return compiled code runs as it does without this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "narrowcast":
            gemm = gemm_call(func, args)
            if gemm is None:
                self._follow(args, out)
            else:
                self._note(gemm)
        elif schema_of(func).name in _NATIVE:  # inside an operator of ours they are not seen
            self._inlined += 1
        return out

    def _note(self, gemm: GemmCall) -> None:
        left, right = (self._buffers_of(operand) for operand in (gemm.left, gemm.right))
        if gemm.kind != "wgrad":
            left.met += [name for name in right.made_from if name not in left.met]
        emulated = gemm.emulate or not gemm.left[0].is_cuda
        self._calls.append(_Call(gemm.kind, _precision(gemm), emulated, runs_compiled(), left, right))

    def _follow(self, args: tuple[Any, ...], out: Any) -> None:
        buffers = _Buffers()
        for tensor in _tensors(args):
            decoded = self._seen.get(_place(tensor))  # a weight that is stored in four bits
            names = self._names_of(tensor) or ([] if decoded is None else decoded.made_from)
            buffers.made_from += [name for name in names if name not in buffers.made_from]
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            self._seen[storage.data_ptr()] = buffers
            # else the next tensor in its memory would be taken for it
            weakref.finalize(storage, self._seen.pop, storage.data_ptr(), None).atexit = False

    def _buffers_of(self, operand: Sequence[Tensor]) -> _Buffers:
        known = [self._seen[_place(x)] for x in operand if _place(x) in self._seen]
        stored = [name for x in operand for name in self._names_of(x)]
        return known[0] if known else _Buffers(made_from=stored)

    def _names_of(self, tensor: Tensor) -> list[str]:
        """Return names of the weights that the memory of a tensor holds now, or the codes of such."""
        candidates = self._weights.get(tensor.numel(), []) if tensor.numel() else []
        if not candidates:
            return []
        address = tensor.data_ptr()
        return [weight.name for weight in candidates if weight.address() == address]

    def result(self, expected: Sequence[str]) -> RanGemms:
        """Return the record; ``expected``: names of weights under a recipe."""
        calls = Counter(
            (" or ".join(call.names()), call.gemm, call.precision, call.emulated, call.compiled)
            for call in self._calls
        )
        names = {name for call in self._calls for name in call.names()}
        position = {name: index for index, name in enumerate(expected)}
        ordered = sorted(
            calls.items(),
            key=lambda item: (position.get(item[0][0], len(position)), item[0][0], _ORDER[item[0][1]]),
        )
        return RanGemms(
            tuple(RanGemm(*way, count) for way, count in ordered),
            tuple(name for name in expected if name not in names),
            self._inlined,
        )


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, and those in lists of them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _precision(gemm: GemmCall) -> str:
    """Return the elements of both operands, and their formats in the words of ``docs/convert.md``."""
    quantizers = gemm.left_quantizer, gemm.right_quantizer
    sides = list(zip(quantizers, gemm_directions(gemm.kind)))
    elements = [element_of(one, side) for one, side in sides]
    codes = " x ".join("high" if one is None else re.sub(r"^kFloat\d+|^k", "", one.name) for one in elements)
    formats = dict.fromkeys(_format(half_of(one, side)) for one, side in sides)
    return f"{codes} ({', '.join(formats)})"


def _format(quantizer: Quantizer | None) -> str:
    if quantizer is None:
        return "high precision"
    return _FORMATS.get(type(quantizer)) or type(quantizer).__name__.removesuffix("Quantizer")
