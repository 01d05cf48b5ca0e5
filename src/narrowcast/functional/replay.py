"""Replay: from its third run on, an eager stage does to its tensors what its second run has done.

A stage's work (allocations, kernel launches, GEMMs) follows from
its plan and from shapes, strides and dtypes alone. To find that out again takes Python longer than a small layer's
kernels take the GPU. So the second run with equal ones is recorded as a straight function of the tensors, and later
runs call that: the same work in the same order, with the same bits. Nothing is computed in a second way.

A recording is a function of its key, which says all that it depends on; it holds no tensors and is never out of date.
Where more could see or change what is done, the stage itself runs: in traces, under dispatch modes, ``torch.autocast``,
profilers, with recorded gradients, on tensors of other classes. And where its recording would not be all of it: it read
a number off a device, used a tensor that it was not given, or a quantizer of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._environment import read_flag
from .._tracing import PLAIN
from ..upstream.cuda import binding_of, current_device, current_stream, empty_strided, part_of
from ..upstream.functionalization import OperatorMode
from .quantizer_value import QuantizerValue
from .routes import watcher

ENABLED = read_flag("REPLAY", True)
"""Whether anything is recorded or replayed: ``NARROWCAST_REPLAY=0`` has every stage run itself."""

ON_CPU = False
"""Whether stages on a CPU are, if there is no time to gain: for tests."""

LIMIT = 4096
"""So many keys are known at a time; then all are forgotten, for shapes that never come back."""


class Metadata:
    """A stage's result besides tensors. Its key determines it, and it holds none: the recording returns it again."""


_SEEN: Any = object()
# What is known of a key: _SEEN, its recording, or the stage itself where there cannot be one.
_known: dict[tuple[Any, ...], Any] = {}

aten = torch.ops.aten
_ALLOCATIONS = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# What a line may hold as it is, beside tensors, None, bools, ints, and sequences of these.
_CONSTANTS = (
    str,
    float,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    QuantizerValue,
    Metadata,
)


def replay_of(
    stage: Callable[..., Any],
    tensors: list[Tensor | None],
    records: Sequence[Any],
    *values: Any,
    of_state: bool = False,
) -> Callable[..., Any]:
    """Return what to call with the stage's arguments: its recording, a recorder, or ``stage`` itself.

    Args:
        stage: returns tensors, in lists, tuples and named tuples, and :class:`Metadata`. A list among its arguments it
            may empty.
        tensors: what it reads or writes to, the first not None.
        records: their ``depends()`` are hashable values and more tensors that it depends on, or None if these do not
            say it all.
        values: hashable, all else that it depends on.
        of_state: the tensors never have gradients, so that it does not matter whether any are recorded.
    """
    if not (tensors[0].is_cuda or ON_CPU):  # type: ignore[union-attr]
        return stage
    if not (ENABLED and watcher(of_state).replays):
        return stage
    device = tensors[0].get_device()  # type: ignore[union-attr]
    if device >= 0 and device != current_device():
        return stage
    key: list[Any] = [stage, device, *values]
    for record in records:
        depends = record.depends()
        if depends is None:
            return stage
        key.append(depends[0])
        tensors += depends[1]
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) in PLAIN and x.get_device() == device and not x.is_meta:
            key += (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.data_ptr() % 16)
        else:
            return stage
    at = tuple(key)
    known = _known.get(at)
    if known is None:
        if len(_known) >= LIMIT:
            _known.clear()
        _known[at] = _SEEN
        return stage
    if known is _SEEN:
        return partial(_recorded, at, stage, tensors)
    return stage if known is stage else partial(known, tensors)


def _recorded(
    key: tuple[Any, ...], stage: Callable[..., Any], tensors: list[Tensor | None], *given: Any
) -> Any:
    lists = [at for at, argument in enumerate(given) if type(argument) is list]
    recording = Recording(stage, tensors)
    tensors.clear()
    with recording:
        result = stage(*given)
    _known[key] = recording.function_of(result, lists) or stage
    return result


class _NotRecordable(Exception):
    pass


def _outputs(result: Any) -> Sequence[Tensor]:
    outputs = [result] if isinstance(result, Tensor) else [] if result is None else result
    if not isinstance(outputs, (list, tuple)) or not all(isinstance(x, Tensor) for x in outputs):
        raise _NotRecordable
    return outputs


class Recording(OperatorMode):
    """Writes down operators and launches as lines of Python, in which the stage's tensors are ``t0, t1, ...``."""

    def __init__(self, stage: Callable[..., Any], tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.stage, self.parameters = stage, [f"t{at}" for at in range(len(tensors))]
        # with the tensors that a line writes, and those that it reads
        self.lines: list[tuple[str, list[str], set[str]]] = []
        self.constants: dict[str, Any] = {}
        self.watchers: Any = None
        self.names = WeakIdKeyDictionary()  # no tensor lives longer for being recorded
        self.count, self.read = 0, set[str]()
        for x, name in zip(tensors, self.parameters):
            if x is not None:
                self.names[x] = name
        self.device = tensors[0].device  # type: ignore[union-attr]
        # a tensor in two places is in the next run two tensors
        self.complete = len(self.names) == len(tensors) - sum(x is None for x in tensors)

    # -- what happens ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _OF_DATA.isdisjoint(func.tags):
            self.refuse()
        elif func in _ALLOCATIONS:
            self._write(self._allocation, result, result=result)
        elif func is aten.as_strided.default:
            self._write(self._part, args[0], result, result=result)
        else:
            self._write(self._call, binding_of(func), args, kwargs or {}, result=result)
        return result

    def launched(self, start: Any, grid: tuple[int, ...], arguments: Sequence[Any], watchers: Any) -> None:
        """A kernel ran.

        Args:
            start: how its compiled variant starts, as ``upstream.triton.start_of`` returns it.
            watchers: what holds the hooks of profilers that want to see launches.
        """
        self.watchers = watchers
        self._write(self._start, start, grid, arguments)

    def interpreted(self, launcher: Any, grid: tuple[int, ...], arguments: Any, constants: Any) -> None:
        """A kernel was interpreted."""
        self._write(self._call, launcher, (grid, arguments, constants), {})

    def written(self, x: Tensor) -> None:
        """An operator of ours wrote to a tensor: that saved ones are out of date is found by its version."""
        self._write(self._call, torch.autograd.graph.increment_version, (x,), {})

    def refuse(self) -> None:
        """Mark the recording as incomplete: more than the key determines the work."""
        self.complete = False

    # -- as Python ---------------------------------------------------------------------------------------------------

    def _write(self, text_of: Callable[..., str], *about: Any, result: Any = None) -> None:
        """Add a line, unless lines are missing already."""
        if not self.complete:
            return
        self.read = set()
        try:
            text = text_of(*about)
            names = [self._name_of_output(x) for x in _outputs(result)]
        except _NotRecordable:
            self.refuse()
            return
        if isinstance(result, Tensor):
            text = f"{names[0]} = {text}"
        elif names:
            text = f"{', '.join(names)}, = {text}"
        self.lines.append((text, names, self.read))

    def _name_of_output(self, x: Tensor) -> str:
        if x not in self.names:  # an operator in place returns what it was given
            self.count += 1
            self.names[x] = f"x{self.count}"
        return self.names[x]  # type: ignore[no-any-return]

    def _call(self, function: Any, args: Any, kwargs: dict[str, Any]) -> str:
        given = [self._expression(arg) for arg in args]
        given += [f"{name}={self._expression(value)}" for name, value in kwargs.items()]
        return f"{self._constant(function)}({', '.join(given)})"

    def _allocation(self, x: Tensor) -> str:
        shape, strides, dtype = tuple(x.shape), tuple(x.stride()), self._constant(x.dtype)
        if x.is_cuda:
            return f"{self._constant(empty_strided)}({shape}, {strides}, {dtype})"
        device = self._constant(x.device)
        return f"{self._constant(torch.empty_strided)}({shape}, {strides}, dtype={dtype}, device={device})"

    def _part(self, x: Tensor, part: Tensor) -> str:
        """Return a part of a tensor, at a place relative to where that begins."""
        ahead = part.storage_offset() - x.storage_offset()
        shape, strides = tuple(part.shape), tuple(part.stride())
        return f"{self._constant(part_of)}({self._expression(x)}, {shape}, {strides}, {ahead})"

    def _start(self, start: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> str:
        run, between, packed, _ = start
        given = [*map(str, grid), "stream", *(self._constant(value) for value in between)]
        texts = [self._expression(value) for value in arguments]
        texts = [
            f"{text}.data_ptr()" if isinstance(value, Tensor) else text
            for text, value in zip(texts, arguments, strict=True)
        ]
        given += [f"({', '.join(texts)},)"] if packed else texts
        return f"{self._constant(run)}({', '.join(given)})"

    def _expression(self, value: Any) -> str:
        if isinstance(value, Tensor):
            name = self.names.get(value)
            if name is None:
                raise _NotRecordable  # from elsewhere
            self.read.add(name)
            return name  # type: ignore[no-any-return]
        if value is None or type(value) in (bool, int):
            return repr(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._call(type(value), value, {})
        if isinstance(value, (list, tuple)):
            items = "".join(f"{self._expression(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, _CONSTANTS):
            return self._constant(value)
        if type(value).__name__ == "TensorDescriptor":  # Triton's, of a tensor that a launch reads by parts
            sizes = [self._expression(list(one)) for one in (value.shape, value.strides, value.block_shape)]
            given = [self._expression(value.base), *sizes, self._constant(value.layout)]
            return f"{self._constant(type(value))}({', '.join(given)})"
        raise _NotRecordable

    def _constant(self, value: Any) -> str:
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def function_of(self, result: Any, lists: Sequence[int]) -> Callable[..., Any] | None:
        """Return a function of the tensors and what the stage is given, or None if lines are missing.

        Tensors go after the last line that reads them. ``lists``: which of the given are lists; they are emptied.
        """
        self.read = set()
        try:
            body = [f"return {self._expression(result)}"]
        except _NotRecordable:
            return None
        if not self.complete:
            return None
        needed = set(self.read)
        for text, written, read in reversed(self.lines):
            gone = sorted(read.union(written) - needed)
            body.append(f"{text}; del {', '.join(gone)}" if gone else text)
            needed |= read
        head = [f"{', '.join(self.parameters)}, = tensors", "tensors.clear()"]
        head += [f"given[{at}].clear()" for at in lists]
        if self.watchers is not None:
            watchers, stage = self._constant(self.watchers), self._constant(self.stage)
            head.insert(0, f"if {watchers}.launch_enter_hook.calls: return {stage}(*given)")
            head.append(f"stream = {self._constant(current_stream)}({self.device.index})")
        source = "\n    ".join(["def replay(tensors, *given):", *head, *reversed(body)])
        namespace = dict(self.constants)
        exec(compile(source, f"<replay of {self.stage.__qualname__}>", "exec"), namespace)
        return namespace["replay"]  # type: ignore[no-any-return]
