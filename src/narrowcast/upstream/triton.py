"""Private names of Triton: launches of compiled kernels, and launches as nodes of PyTorch's graphs.

Triton starts a compiled kernel through ``CudaLauncher``, a Python function around one in C. Its work is to allocate the
memory that a kernel requests; ours request none. :func:`start_of` finds out what that function would hand to the one in
C, by running it with a stand-in for the one in C, and so goes past it on any release that hands its arguments on.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from .private import Entry, entry, private

entry(
    "triton.compiler.CompiledKernel.run",
    follows="triton/compiler/compiler.py CompiledKernel.__getitem__; triton/backends/nvidia/driver.py CudaLauncher",
    without="the kernel is launched through kernel[grid](...), which takes the host longer",
    falls_back=True,
)

HOOKS: Any = private(
    "triton.knobs.runtime",
    follows="triton/knobs.py runtime_knobs",
    without="every launch goes through kernel[grid](...), which takes the host longer",
    fallback=SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=(None,))),
)
"""Holds the hooks of profilers: ``HOOKS.launch_enter_hook.calls`` is empty while none wants to see launches."""

_TRACED = "compile with a tested release, or run this part eager (torch.compiler.disable)"

_KNOWN = frozenset(
    {
        "arg_annotations",
        "global_scratch_align",
        "global_scratch_size",
        "gsan_enabled",
        "kernel_signature",
        "launch",
        "launch_cooperative_grid",
        "launch_pdl",
        "num_ctas",
        "profile_scratch_align",
        "profile_scratch_size",
    }
)
"""Attributes that ``CudaLauncher.__call__`` of Triton 3.6 to 3.9 reads. One that reads another does something new."""


class Start(NamedTuple):
    """A way to start a kernel: ``run(*grid, stream, *between, *arguments)``, or with the arguments in a tuple."""

    run: Callable[..., None]
    between: tuple[Any, ...]
    packed: bool
    kernel: Any

    def __call__(self, grid: tuple[int, int, int], stream: int, arguments: Any) -> None:
        """Start it; what counts microseconds writes this out."""
        if self.packed:
            self.run(*grid, stream, *self.between, tuple(arguments))
        else:
            self.run(*grid, stream, *self.between, *arguments)


def start_of(kernel: Any) -> Start:
    """Return how to start a kernel that ``kernel[grid](...)`` compiled, past Triton's Python where that is sure."""
    try:
        run, between = kernel.run, (kernel.function, kernel.packed_metadata, None, None, None)
    except AttributeError:
        return Start(functools.partial(_through_getitem, kernel), (), False, kernel)
    return _past(run, between, kernel) or Start(run, between, False, kernel)


def _through_getitem(kernel: Any, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
    kernel[x, y, z](*arguments, stream=stream)


class _NotAStandIn(Exception):
    pass


def _past(run: Any, between: tuple[Any, ...], kernel: Any) -> Start | None:
    """Return how to enter the function in C, or None unless the Python around it is seen to hand arguments on only."""
    for size in ("global_scratch_size", "profile_scratch_size"):
        if getattr(run, size, 1):  # memory is allocated per launch
            return None
    if getattr(run, "gsan_enabled", False):
        return None
    # grid and stream, then arguments of a kernel: if nothing is done with them, objects without any meaning do
    given, arguments = [object() for _ in range(4)], [object() for _ in range(3)]
    try:
        handed = _handed_on(run, (*given, *between, *arguments))
    except Exception:  # whatever it does with them is more than handing on
        return None
    *middle, last = handed[4:]
    packed = type(last) in (tuple, list)
    if packed:
        tail = list(last)
    else:
        middle, tail = handed[4:-3], handed[-3:]
    its_own = (*between, *vars(run).values())
    passed, expected = (*handed[:4], *tail), (*given, *arguments)
    in_place = len(passed) == len(expected) and all(map(operator.is_, passed, expected))
    if not in_place or not all(any(value is own for own in its_own) for value in middle):
        return None
    return Start(run.launch, tuple(middle), packed, kernel)


def _handed_on(run: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments that a launcher passes to its C function.

    Raises:
        _NotAStandIn: it calls that function another number of times, by keyword, or reads what 3.6 to 3.9 do not read.
    """
    calls: list[list[Any]] = []

    def launch(*handed: Any) -> None:
        calls.append(list(handed))

    class StandIn(type(run)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__.update(vars(run), launch=launch)

        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__") and name not in _KNOWN:
                raise _NotAStandIn(name)
            return super().__getattribute__(name)

    type(run).__call__(StandIn(), *arguments)
    if len(calls) != 1 or len(calls[0]) < 7:
        raise _NotAStandIn
    return calls[0]


entry(
    "triton.backends.nvidia.driver.wrap_handle_tensordesc",
    follows="triton/backends/nvidia/driver.py: `launcher` and `tensordesc_meta` in the closure of its `inner`, and "
    "make_tensordesc_arg, in 3.6",
    without="kernels with tensor descriptors are launched through Triton's Python, which takes the host longer",
    falls_back=True,
)


class Described(NamedTuple):
    """A way to start a kernel with tensor descriptors, each of which is a map and numbers there.

    Args:
        start: takes ``flat``.
        flat: the arguments.
        places: of each argument, where it is or begins.
        maps: by the place of a map, what makes it of a descriptor.
    """

    start: Start
    flat: list[Any]
    places: list[int]
    maps: dict[int, Callable[[Any], Any]]


def past_descriptors(start: Start, arguments: tuple[Any, ...]) -> Described | None:
    """Return how to enter the function in C with these arguments, or None unless Triton is seen to do just that.

    Args:
        arguments: all of the kernel, with descriptors.
    """
    inner: Any = start.run
    if getattr(inner, "__qualname__", "") != "wrap_handle_tensordesc.<locals>.inner" or start.packed:
        return None
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__))
    make = inner.__globals__.get("make_tensordesc_arg")
    if make is None or not {"launcher", "tensordesc_meta"} <= cells.keys():
        return None
    flat: list[Any] = []
    places: list[int] = []
    maps: dict[int, Callable[[Any], Any]] = {}
    metas = iter(cells["tensordesc_meta"].cell_contents or ())
    for argument in arguments:
        places.append(len(flat))
        meta = next(metas, None) if hasattr(argument, "block_shape") else None
        if meta is not None:
            maps[len(flat)] = functools.partial(_map_of, make, meta)
        flat += [argument] if meta is None else make(argument, meta)
    handed: list[Any] = []
    recorder = CellType(lambda *given: handed.extend(given))
    closure = tuple(recorder if name == "launcher" else cell for name, cell in cells.items())
    before = (0, 0, 0, 0, *start.between)
    FunctionType(inner.__code__, inner.__globals__, inner.__name__, None, closure)(*before, *arguments)
    expected = [*before, *flat]
    same = len(handed) == len(expected) and all(
        type(ours) is type(theirs) and (at - len(before) in maps or ours is theirs or ours == theirs)
        for at, (ours, theirs) in enumerate(zip(expected, handed))
    )
    entered = start._replace(run=cells["launcher"].cell_contents)
    return Described(entered, flat, places, maps) if same else None


def _map_of(make: Callable[..., Any], meta: Any, descriptor: Any) -> Any:
    return make(descriptor, meta)[0]


def _of_graphs(name: str) -> Entry:
    """Return a part of ``torch.library.wrap_triton``; imported when a launch is traced."""
    return entry(
        f"torch._higher_order_ops.triton_kernel_wrap.{name}",
        follows="torch/_higher_order_ops/triton_kernel_wrap.py; torch/_library/triton.py wrap_triton",
        without=_TRACED,
    )


_TABLE, _WRITTEN, _LAUNCH, _LAUNCH_WRITING = map(
    _of_graphs,
    (
        "kernel_side_table",
        "get_mutated_tensors",
        "triton_kernel_wrapper_functional",
        "triton_kernel_wrapper_mutation",
    ),
)


_SOURCES = entry(
    "torch._inductor.codegen.wrapper.user_defined_triton_kernel_transitive_closure_source_code",
    follows="torch/_inductor/codegen/wrapper.py; torch/_inductor/codecache.py; autograd_cache.py of AOTAutograd",
    without="graphs compile more slowly",
    falls_back=True,
)


def keep_sources(package: str) -> None:
    """Have PyTorch collect the sources of a package's kernels, with the functions that they call, once for each.

    The keys of its caches hold them for each launch in a graph. Collecting them, from the functions' bytecode, takes
    11 ms for a cast: a tenth of the compilation of twelve layers.
    """
    collect = _SOURCES.take_or(None)
    if collect is None or hasattr(collect, "__wrapped__"):
        return
    collected: dict[Any, str] = {}

    @functools.wraps(collect)
    def sources_of(kernel: Any, *fused: Any, **options: Any) -> str:
        if fused or options or not kernel.fn.__module__.startswith(package):
            return collect(kernel, *fused, **options)  # type: ignore[no-any-return]
        if kernel not in collected:
            collected[kernel] = collect(kernel)
        return collected[kernel]

    setattr(sys.modules[collect.__module__], collect.__name__, sources_of)


def node_of(kernel: Any, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of a kernel and its non-tensor arguments in a graph."""
    table = _TABLE.take()
    return {
        "kernel_idx": table.add_kernel(kernel),
        "constant_args_idx": table.add_constant_args(numbers),
        "tma_descriptor_metadata": {},
    }


def written_by(node: dict[str, Any], tensors: dict[str, Any]) -> list[str]:
    """Return the names of the arguments that a kernel writes to; to find out takes a compilation."""
    return _WRITTEN.take()(**node, kwargs=tensors)  # type: ignore[no-any-return]


def launch_in_graph(
    node: dict[str, Any], tensors: dict[str, Tensor], grid: tuple[int, int, int], written: list[str]
) -> dict[str, Tensor]:
    """Add a launch to the graph that is being traced; return what it makes of the arguments it writes to."""
    return _LAUNCH.take()(**node, kwargs=tensors, grid=[grid], tensors_to_clone=written)  # type: ignore[no-any-return]


def launch_as_written(node: dict[str, Any], tensors: dict[str, Tensor], grid: tuple[int, int, int]) -> None:
    """Add a launch that writes to its arguments to a graph that is not functional."""
    _LAUNCH_WRITING.take()(**node, kwargs=tensors, grid=[grid])
