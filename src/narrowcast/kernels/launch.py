"""Launching: one way from a kernel, its grid and its arguments to the running program.

What a launch is made of (grid, constants, which tensors) the kernel files compute from shapes, dtypes and options
alone, so the same function serves in three places: on a GPU a launcher runs the compiled variant for its arguments, in
Triton's interpreter the kernel is interpreted, and where the arguments are fake tensors of a trace the launch becomes
a node of the graph, which Inductor then launches itself.

Triton's ``kernel[grid](...)`` inspects every argument at every call, binds names and formats a key to find the compiled
variant: some 30 us. :func:`specialization` derives from the arguments what that key says about them; a launcher keeps
its compiled variants under it and starts them directly. What runs the most keeps a :class:`Launch`, in which all but
the tensors is settled, per shape and options.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Hashable
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from .._device import HIGH_PRECISION
from .._tracing import PLAIN
from ..formats import ElementFormat
from ..upstream.cuda import current_device, current_stream, empty_strided
from ..upstream.functionalization import (
    FakeTensor,
    FunctionalAPI,
    FunctionalTensor,
    current_mode,
    without_modes,
)
from ..upstream.tensors import count_modes
from ..upstream.triton import (
    HOOKS,
    Start,
    keep_sources,
    launch_as_written,
    launch_in_graph,
    node_of,
    past_descriptors,
    start_of,
    written_by,
)

INTERPRETING: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter; fixed when the kernels are defined, that is at import."""

_address_of, _dtype_of = Tensor.data_ptr, attrgetter("dtype")
_TRACED = (FakeTensor, FunctionalTensor)


class Launcher:
    """A kernel with its compile options; calling it launches the kernel.

    Args:
        kernel: a ``triton.jit`` function whose parameters are the run-time arguments, then the constants.
        num_warps: warps per program.
        undeclared: parameters it writes to that a graph must not know of; see :mod:`..functional.quantize`.
        options: further compile options, such as ``maxnreg``.
    """

    def __init__(
        self, kernel: Any, num_warps: int, *, undeclared: tuple[str, ...] = (), **options: Any
    ) -> None:
        self.kernel = kernel
        self.num_warps = num_warps
        # A contracted multiply-add would skip one rounding of the formulas.
        self.options = {"enable_fp_fusion": False, **options}
        # One entry per device, constants and specialization: how to start what Triton compiled for exactly these, None
        # in the interpreter. Never stale, for neither a kernel's source nor its options change.
        self.variants: dict[Hashable, Start | None] = {}
        self.undeclared = undeclared
        # Parameters that a traced launch writes to, by constants and kinds of arguments; to tell takes a compilation.
        self.written: dict[Hashable, list[str]] = {}
        self.traced: Any = None  # made when it is first traced

    def __call__(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> Start | None:
        """Launch on the current stream of the device of the first argument; return how to start what was compiled.

        Args:
            grid: programs along x, y, z; none may be zero.
            arguments: run-time arguments, tensors, ints, floats and None; the first is a tensor.
            constants: values of the kernel's constexpr parameters, in order.

        Raises:
            TypeError: an argument of another kind.
        """
        first = arguments[0]
        if type(first) is not Tensor and isinstance(first, _TRACED):
            self._emit(grid, arguments, constants)
            return None
        if count_modes() and hasattr(mode := current_mode(), "launched"):
            return self._record(mode, grid, arguments, constants)
        device = first.get_device()
        if device >= 0 and device != current_device():
            with torch.cuda.device(device):
                return self(grid, arguments, constants)
        kinds, values = specialization(arguments)
        key = (device, constants, kinds)
        start = self.variants.get(key)
        if start is None:  # or interpreted: the interpreter compiles nothing and returns None again
            compiled = self._compile_and_launch(grid, arguments, constants)
            start = self.variants[key] = None if compiled is None else start_of(compiled)
        elif HOOKS.launch_enter_hook.calls:  # a profiler wants to know
            start.kernel[grid](*arguments, *constants)
        else:
            start(grid, current_stream(device), (*values, *constants))
        return start

    def _compile_and_launch(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> Any:
        return self.kernel[grid](*arguments, *constants, num_warps=self.num_warps, **self.options)

    def _record(
        self, mode: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> Start | None:
        """Launch unseen by the dispatch modes in force, and tell the one that records what was launched."""
        with without_modes():
            start = self(grid, arguments, constants)
        if start is None:
            mode.interpreted(self, grid, arguments, constants)
        else:
            mode.launched(start, grid, (*arguments, *constants), HOOKS)
        return start

    def _emit(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> None:
        """Make the launch a node of the graph that is being traced.

        It is what ``torch.library.wrap_triton`` does, but for one thing: writes to ``undeclared`` arguments stay
        unknown to the graph, as the operators' schemas do not declare them either.
        Inductor compiles the kernel with ``num_warps`` and ``num_stages`` and takes none of the other options; the
        kernels themselves keep apart what must not be contracted (``codecs.product``).
        """
        given = dict(zip(self.kernel.arg_names, (*arguments, *constants), strict=True))
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in given.items() if name not in tensors}
        node = node_of(self._traced(), numbers)
        if not any(isinstance(x, FunctionalTensor) for x in tensors.values()):
            launch_as_written(node, tensors, grid)
            return
        functional = FunctionalAPI()
        key = (constants, *(x.dtype if isinstance(x, Tensor) else type(x) for x in arguments))
        if key not in self.written:
            self.written[key] = written_by(node, functional.unwrap_tensors(tensors))
        kept = self.written[key]
        written = [name for name in kept if name not in self.undeclared]
        read = {name: x if name in kept else _in_memory(x) for name, x in tensors.items()}
        results = launch_in_graph(node, read, grid, written)
        for name in written:
            functional.replace(tensors[name], functional.unwrap_tensors(results[name]))
            functional.mark_mutation_hidden_from_autograd(tensors[name])
            functional.commit_update(tensors[name])
            functional.sync(tensors[name])

    def _traced(self) -> Any:
        """Return the kernel with the compile options that Inductor takes."""
        if self.traced is None:
            keep_sources(__name__.partition(".")[0])
            options = {name: value for name, value in self.options.items() if name == "num_stages"}
            config = triton.Config({}, num_warps=self.num_warps, **options)
            self.traced = triton.autotune(configs=[config], key=[])(self.kernel)
        return self.traced


class NotCompiledError(RuntimeError):
    """This Triton cannot compile a kernel that is for one kind of GPU; the general one gives the same bits."""


class GluonLauncher(Launcher):
    """A kernel in Triton's Gluon, an experimental language that changes between releases.

    Raises:
        NotCompiledError: when called, if Triton cannot compile it; :func:`for_hopper` returns None from then on.
    """

    def _compile_and_launch(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> Any:
        try:  # first without the launch, whose errors are not the language's
            self.kernel.warmup(*arguments, *constants, grid=grid, num_warps=self.num_warps, **self.options)
        except Exception as error:
            _lose(self.kernel.fn.__module__.rpartition(".")[2], error)
            raise NotCompiledError(f"Triton {triton.__version__} does not compile {self.kernel}") from error
        return super()._compile_and_launch(grid, arguments, constants)


T = TypeVar("T")


def remembered(build: Callable[..., T]) -> Callable[..., T]:
    """Keep what a function makes of shapes, dtypes and options, which must depend on nothing else: launches.

    The result takes the launch's first tensor, then the function's arguments. In a trace nothing is kept: its sizes may
    be symbols.
    """
    kept = functools.lru_cache(maxsize=1024)(build)

    @functools.wraps(kept)
    def launch_of(first: Tensor, *key: Any) -> T:
        return kept(*key) if type(first) in PLAIN else build(*key)

    return launch_of


TENSOR = object()
"""In the arguments of a :class:`Launch`: the place of a tensor."""


class Launch:
    """A launch that lacks its tensors alone; a function of shapes and options, for their kernel files to remember.

    Args:
        launcher, grid, constants: as a launcher takes them.
        arguments: run-time arguments, the first a tensor, with ``TENSOR`` in the place of each.
    """

    __slots__ = ("arguments", "constants", "grid", "launcher", "others", "places", "started", "take")

    def __init__(
        self, launcher: Launcher, grid: tuple[int, int, int], arguments: list[Any], constants: tuple[Any, ...]
    ) -> None:
        self.launcher, self.grid, self.arguments, self.constants = launcher, grid, arguments, constants
        given = (*arguments, *constants)
        self.places = [at for at, argument in enumerate(given) if argument is TENSOR]
        others = [at for at, argument in enumerate(given) if argument is not TENSOR]
        self.others = tuple(given[at] for at in others)
        # out of addresses and others what the kernel takes, in its order
        order = {at: position for position, at in enumerate((*self.places, *others))}
        self.take = itemgetter(*(order[at] for at in range(len(given))))
        # How to start the launcher's variants, under what is not settled: device, dtypes and alignment of the tensors.
        self.started: dict[Hashable, Start] = {}

    def __call__(self, tensors: list[Tensor]) -> None:
        """Launch on the current stream of the device of the first tensor; ``tensors`` in the order of the arguments."""
        first, key = tensors[0], None
        if type(first) in PLAIN:
            device, addresses = first.get_device(), [*map(_address_of, tensors)]
            if device < 0 or device == current_device():
                key = (device, *map(_dtype_of, tensors))
                if reduce(or_, addresses) % 16:  # most often all of them are aligned
                    key += tuple([address % 16 == 0 for address in addresses])
                start = self.started.get(key)
                if start is not None and not (HOOKS.launch_enter_hook.calls or count_modes()):
                    run, between, packed, _ = start
                    values = self.take((*addresses, *self.others))
                    if packed:
                        run(*self.grid, current_stream(device), *between, values)
                    else:
                        run(*self.grid, current_stream(device), *between, *values)
                    return
        arguments = self.arguments.copy()
        for at, tensor in zip(self.places, tensors, strict=True):
            arguments[at] = tensor
        start = self.launcher(self.grid, tuple(arguments), self.constants)
        if key is not None and start is not None:
            self.started[key] = start


class DescribedLaunch:
    """A launch of a kernel with tensor descriptors that lacks addresses alone, for equal shapes on one device.

    Making it launches the kernel once.

    Args:
        launcher, grid, arguments, constants: as a launcher takes them.
        tensors: those in ``arguments``, also in descriptors.
    """

    __slots__ = ("flat", "grid", "maps", "pointers", "start")

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        tensors: list[Tensor],
    ) -> None:
        start = launcher(grid, arguments, constants)
        _, values = specialization(arguments)
        described = None if start is None else past_descriptors(start, (*values, *constants))
        self.grid, self.start = grid, None
        if described is None or not all(is_aligned(x, 16) for x in tensors):
            return
        self.start, self.flat = described.start, described.flat
        numbers = {id(x): number for number, x in enumerate(tensors)}
        # where addresses and maps are, of which tensor; descriptors, and maps by address
        self.pointers, self.maps = [], []
        for place, argument in zip(described.places, arguments):
            if isinstance(argument, Tensor):
                self.pointers.append((place, numbers[id(argument)]))
            elif place in described.maps:
                number, alike = numbers[id(argument.base)], copy.copy(argument)
                alike.base = None  # the tensor may be freed
                self.maps.append((place, number, alike, described.maps[place], {}))

    def __call__(self, tensors: list[Tensor]) -> bool:
        """Launch on the current stream of the current device; return False, and do nothing, if the launcher must."""
        start, addresses = self.start, [*map(_address_of, tensors)]
        if (
            start is None
            or reduce(or_, addresses) % 16
            or tensors[0].get_device() != current_device()
            or HOOKS.launch_enter_hook.calls
            or count_modes()
        ):
            return False
        flat = self.flat.copy()
        for place, number in self.pointers:
            flat[place] = addresses[number]
        for place, number, descriptor, make, made in self.maps:
            address = addresses[number]
            known = made.get(address)
            if known is None:
                if len(made) >= MOST_MAPS:
                    made.clear()
                known = made[address] = make(dataclasses.replace(descriptor, base=tensors[number]))
            flat[place] = known
        start.run(*self.grid, current_stream(tensors[0].get_device()), *start.between, *flat)
        return True


MOST_MAPS = 256
"""The most tensor maps of one descriptor that are kept at once."""


def beside(like: Tensor) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return an allocator of uninitialized tensors of a shape, its contiguous strides and a dtype on ``like``'s device.

    That is how compiled graphs allocate, which takes the host half as long as ``new_empty``.
    """
    here = type(like) in PLAIN and like.is_cuda and like.get_device() == current_device()
    if here and not count_modes():  # which would not see it
        return empty_strided
    return lambda shape, strides, dtype: like.new_empty(shape, dtype=dtype)


def contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a shape and the strides of a contiguous tensor of it, in plain tuples, for :func:`beside`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(shape), tuple(reversed(strides))


def _in_memory(x: Tensor) -> Tensor:
    """Return the same tensor of a graph, as what its other readers read, too.

    For each argument of a launch that it has not computed yet, Inductor would write a tensor of its own, with the same
    numbers. What ``as_strided`` takes it computes once and keeps.
    """
    plain = x.is_floating_point() and x.is_contiguous() and x.storage_offset() == 0
    return x.as_strided(x.shape, x.stride(), 0) if plain else x


def specialization(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the properties that Triton compiles a kernel's variant for, and those that a compiled one takes.

    Args:
        arguments: run-time arguments of a kernel: tensors, descriptors of tensors, ints, floats, bools and None.

    Returns:
        Kinds, of which equal ones mean an equal variant: the arguments' types; of a tensor its dtype and whether it
        starts on a 16-byte boundary; of an int whether 16 divides it, and its value where that is 0, 1, negative or
        wider than 32 bits. A kernel's opt-outs (``do_not_specialize``) are not applied: one variant is then found under
        several of these. Then the arguments with addresses for tensors, of which Triton would ask the driver.

    Raises:
        TypeError: an argument of another kind.
    """
    types = tuple(map(type, arguments))
    tensors, ints, descriptors = _places(types)
    kinds: list[Any] = [types]
    values, bits = list(arguments), 0
    for at in tensors:
        tensor = values[at]
        kinds.append(tensor.dtype)
        values[at] = address = tensor.data_ptr()
        bits |= address
    if bits % 16:  # most often all of them are aligned
        kinds += [values[at] % 16 == 0 for at in tensors]
    for at in ints:
        value = values[at]
        # Numbers that no value has: 2 and 3 stand for 32-bit integers that 16 divides or does not.
        kinds.append(value if value < 2 or value >= 2**31 else 2 + (value % 16 == 0))
    kinds += [(values[at].base.dtype, *values[at].block_shape) for at in descriptors]
    return tuple(kinds), values


@functools.lru_cache(maxsize=1024)
def _places(types: tuple[type, ...]) -> tuple[list[int], list[int], list[int]]:
    """Return where arguments of these types are tensors, where they are ints, and where descriptors of tensors."""
    tensors = [at for at, kind in enumerate(types) if issubclass(kind, Tensor)]
    ints = [at for at, kind in enumerate(types) if kind is int]
    descriptors = [at for at, kind in enumerate(types) if kind.__name__ == "TensorDescriptor"]
    for kind in types:
        if not issubclass(kind, (Tensor, int, float, type(None))) and kind.__name__ != "TensorDescriptor":
            raise TypeError(
                f"a kernel cannot take an argument of {kind}; pass a tensor, int, float, bool or None"
            )
    return tensors, ints, descriptors


LOST: dict[str, str] = {}
"""Modules of kernels for one kind of GPU that this Triton cannot load or compile, with the reason."""


def _lose(name: str, error: Exception) -> None:
    """Use the general kernels instead of a module's, and say so once."""
    reason = str(error).strip().partition("\n")[0]
    LOST[name] = f"{type(error).__name__}: {reason}"
    for_hopper.cache_clear()
    warnings.warn(
        f"Triton {triton.__version__} cannot use narrowcast's {name} kernels ({LOST[name]}); the general kernels "
        "compute the same bits more slowly. Install a Triton that `narrowcast doctor` names as tested",
        RuntimeWarning,
        stacklevel=3,
    )


def _is_hopper(device: torch.device) -> bool:
    return not INTERPRETING and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def for_hopper(name: str, device: torch.device) -> Any:
    """Return the module of Gluon kernels for this kind of GPU; None elsewhere, or if this Triton cannot use it."""
    if name in LOST or not _is_hopper(device):
        return None
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ImportError as error:  # a Triton without the language
        LOST[name] = f"{type(error).__name__}: {error}"
    except Exception as error:  # one whose language has changed
        _lose(name, error)
    return None


def is_traced(x: Tensor) -> bool:
    """Return whether a tensor stands for one of a graph that is being traced."""
    return isinstance(x, _TRACED)


def is_aligned(x: Tensor, size: int) -> bool:
    """Return whether a tensor starts on a boundary of ``size`` bytes; in a trace, whether it does where its storage
    does.
    """
    if is_traced(x):
        return x.storage_offset() * x.element_size() % size == 0
    return x.data_ptr() % size == 0


def check_device(x: Tensor) -> None:
    """Refuse tensors that no kernel can reach.

    Raises:
        ValueError: the tensor is not on a CUDA device and the interpreter is off.
    """
    if not (x.is_cuda or INTERPRETING):
        raise ValueError(
            f"Triton kernels take CUDA tensors, got one on {x.device}; use narrowcast.reference there, "
            "or set TRITON_INTERPRET=1 before the first import to interpret the kernels"
        )


def check_input(x: Tensor, min_rank: int) -> None:
    """Refuse what no quantize kernel can read.

    Raises:
        TypeError: the dtype is not fp32, bf16 or fp16.
        ValueError: ``check_device`` refuses, or the rank is below ``min_rank``.
    """
    if not (x.is_cuda or INTERPRETING) or x.dtype not in HIGH_PRECISION or x.dim() < min_rank:
        check_device(x)
        check_dtype(x.dtype)
        check_rank(x.dim(), min_rank)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype that no kernel quantizes.

    Raises:
        TypeError: it is not fp32, bf16 or fp16.
    """
    if dtype not in HIGH_PRECISION:
        raise TypeError(f"cannot quantize {dtype}; use torch.bfloat16, torch.float16 or torch.float32")


def check_rank(rank: int, min_rank: int) -> None:
    """Refuse a tensor of too few dims for a format.

    Raises:
        ValueError: ``rank`` is below ``min_rank``.
    """
    if rank < min_rank:
        raise ValueError(
            f"cannot quantize a tensor of rank {rank}; this format needs rank {min_rank} or more"
        )


def check_codes(data: Tensor, dtype: torch.dtype, min_rank: int, fmt: ElementFormat | None = None) -> Tensor:
    """Refuse what no dequantize kernel can read or write; the codes, contiguous.

    Args:
        data: codes.
        dtype: of the values.
        min_rank: that the codes must have.
        fmt: of the codes, where it is FP8.

    Raises:
        ValueError: ``check_device`` refuses, another dtype than bf16, fp16 or fp32, another format, or too low a rank.
    """
    check_device(data)
    if dtype not in HIGH_PRECISION:
        raise ValueError(f"cannot dequantize to {dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    if fmt is not None and fmt.name not in ("e4m3", "e5m2"):
        raise ValueError(f"{fmt.name} is not an FP8 format; use E4M3 or E5M2")
    if data.dim() < min_rank:
        raise ValueError(
            f"cannot dequantize data of shape {tuple(data.shape)}; this format needs rank {min_rank} or more"
        )
    return data.contiguous()
