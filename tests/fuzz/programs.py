"""Cases that are programs: JSON that a seed draws, that runs alone, that shrinks, and that the corpus keeps.

What a program may raise is decided here: ``Difference`` for results that are not as they should be, our own words for
what we refuse. Everything else fails the case.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _len_torch_dispatch_stack

import narrowcast as nc
from narrowcast.functional import few_rows, replay
from narrowcast.recipe import plan

PACKAGE = str(Path(nc.__file__).resolve().parent)
HERE = str(Path(__file__).resolve().parent)
Program = dict[str, Any]
DEVICE = "cpu"
"""Where histories run, with their models and batches. Other programs run on the CPU."""

# What an error that can be acted on says: what is taken, or what to do.
_REMEDY = re.compile(
    r"\b(use|uses|used|got|write|pass|give|make|call|set|leave|keep|add|drop|cast|move|choose|enter|convert|copy|assign|"
    r"install|run|need|needs|may be|must|takes|take|has|only|expected|instead|in place of|belongs?|cannot|dequantize|"
    r"between|are|is not|multiples?|supported|allowed|wants|switch|without|shard)\b",
    re.IGNORECASE,
)
_OF_CUDA = re.compile(r"CUDA error|Error \[CUDA\]|CUDA out of memory")
_INTERNAL = (AssertionError, KeyError, IndexError, NameError, RecursionError, ZeroDivisionError, MemoryError)


class Invalid(Exception):
    """The program says nothing: parts of it do not fit, as of one that was shrunk too far."""


class Difference(AssertionError):
    """Results that differ, and by which oracle."""


class Slow(BaseException):
    """A case that does not end."""


def is_of_the_device(error: BaseException | None) -> bool:
    """Whether a GPU raised it: PyTorch alone would raise the same afterwards, so that such an error excuses no one."""
    while error is not None:
        if _OF_CUDA.search(str(error)):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


def few_rows_as_many() -> Any:
    """Let the GEMM of few rows, which a forward without gradients takes on a GPU, sum as that of many rows.

    The first run of a reentrant checkpoint is such a forward. What quantizes its result makes more of a rounding.
    """
    return mock.patch.object(few_rows, "_in_one_kernel", return_value=None)


def leave_garbage() -> None:
    """Leave NaN in registers and in freed memory of a GPU, which shows what is read before it is written."""
    if DEVICE != "cpu":
        for size in (1, 16, 192, 1024, 1 << 14):
            _ = [torch.full((size,), float("nan"), device=DEVICE) for _ in range(8)]


def error_of_the_device() -> BaseException | None:
    """Wait for the GPU, and return what it raises: from then on it raises so in all that this process asks of it."""
    try:
        if DEVICE != "cpu":
            torch.cuda.synchronize()
    except RuntimeError as error:
        return error
    return None


def refusal(error: BaseException) -> bool:
    """Whether a statement of ours raised it, in words of ours that help: those of a C++ error may help, too."""
    if isinstance(error, (*_INTERNAL, Difference, Slow)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].lineno not in _raising(str(Path(frames[-1].filename).resolve())):
        return False
    if error.__cause__ is None:
        return bool(_REMEDY.search(str(error)))
    return refusal(error.__cause__) or bool(_REMEDY.search(str(error).replace(str(error.__cause__), "")))


@functools.cache
def _raising(path: str) -> frozenset[int]:
    """The lines of a file of the package that raise."""
    if not path.startswith(PACKAGE) or not Path(path).is_file():
        return frozenset()
    raising = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.Raise)]
    return frozenset(line for node in raising for line in range(node.lineno, (node.end_lineno or 0) + 1))


def attempt(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What the function returns, or what it raises."""
    try:
        return function(), None
    except (Invalid, Difference):
        raise
    except (KeyError, NameError, TypeError, AttributeError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename.startswith(HERE):
            raise  # our own mistake
        return None, _without_frames(error)
    except Exception as error:
        if is_of_the_device(error):
            raise
        return None, _without_frames(error)


def _without_frames(error: BaseException) -> BaseException:
    """Return the error, without what its frames hold: before 2.15 a checkpoint is in force as long as its frame."""
    traceback.clear_frames(error.__traceback__)
    return error


def said(error: BaseException) -> str:
    """Type and first line of an error without what differs between cases; of a compiler's error, what is within."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return f"{type(error).__name__} of {said(inner)}"
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    text = lines[0]
    if isinstance(error, AssertionError) and len(text) > 300:
        text = text[:300]
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"'[^']{0,40}'|\b\w+\([^()]*\)", "*", text) if "is not a valid" in text else text
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    return f"{type(error).__name__}: {text[:200]}"


def signature(error: BaseException) -> str:
    """What two failures of one cause share: the words, and the innermost place in the package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if str(frame.filename).startswith(PACKAGE)
    ]
    where = (
        ""
        if isinstance(error, Difference) or not frames
        else f" at {Path(frames[-1].filename).name}:{frames[-1].name}"
    )
    return said(error) + where


def compare(
    ours: Any, theirs: Any, what: str, tolerance: float = 0.0, least: float = 1e-30, room: float = 0.0
) -> None:
    """Check that two tensors are equal in every bit, or within a relative error of the norm.

    Args:
        what: names the oracle, for the signature. least: a norm below it counts as that much. room: a norm of the
            difference that counts as none.
    """
    if ours is None or theirs is None:
        if (ours is None) != (theirs is None):
            raise Difference(f"{what}: one is None, the other is not")
        return
    if tuple(ours.shape) != tuple(theirs.shape):
        raise Difference(f"{what}: shapes differ, {tuple(ours.shape)} and {tuple(theirs.shape)}")
    if ours.dtype != theirs.dtype and not tolerance:
        raise Difference(f"{what}: dtypes differ, {ours.dtype} and {theirs.dtype}")
    a, b = _decoded(ours).double(), _decoded(theirs).double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        raise Difference(f"{what}: finite in other places")
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    if torch.equal(a, b):
        return
    error = (((a - b).norm() - room) / b.norm().clamp_min(least)).item()
    if error > tolerance:
        raise Difference(f"{what}: off by {error:.3g}")


def _decoded(value: Tensor) -> Tensor:
    """Plain values: kernels decode to no fp64."""
    value = value.detach()
    return value.dequantize() if isinstance(value, nc.QuantizedTensor) else value


@contextlib.contextmanager
def settings(on_cpu: bool, large: bool) -> Iterator[None]:
    """Replay on a CPU, and weights of any size treated as large ones: paths that small cases do not take otherwise."""
    kept = replay.ON_CPU, plan.SMALL_WEIGHT
    replay.ON_CPU, plan.SMALL_WEIGHT = on_cpu, 0 if large else plan.SMALL_WEIGHT
    try:
        # a history has many sizes, with gradients and without, under a recipe and outside of it; and hooks that stop a
        # call are registered after the compiler has met the module
        with torch._dynamo.config.patch(recompile_limit=64, skip_nnmodule_hook_guards=False):
            yield
    finally:
        replay.ON_CPU, plan.SMALL_WEIGHT = kept


def is_something_in_force() -> bool:
    """Return whether hooks of saved tensors or modes of operators are in force, as of a checkpoint that did not end."""
    return bool(_top_hooks(True) is not None or _len_torch_dispatch_stack())


_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=generator(seed)) * scale).to(dtype)


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise ``Slow`` when the body takes longer."""

    def ring(*_: Any) -> None:
        raise Slow(f"did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """A smaller program for which ``fails`` still holds: entries of lists left out, values made plain."""
    end = time.monotonic() + seconds
    best, changed = program, True
    while changed and time.monotonic() < end:
        changed = False
        for candidate in _smaller(best):
            if time.monotonic() > end:
                break
            if fails(candidate):
                best, changed = candidate, True
                break
    return best


def _smaller(program: Program) -> Iterator[Program]:
    """Candidates, bold ones first."""
    places = list(_places(program, ()))
    lists = [path for path, value in places if isinstance(value, list) and value]
    for path in sorted(lists, key=lambda path: -len(_at(program, path))):
        size = len(_at(program, path))
        width = size
        while width:
            for begin in range(0, size, width):
                smaller = copy.deepcopy(program)
                del _at(smaller, path)[begin : begin + width]
                yield smaller
            width //= 2
    for path, value in places:
        if not path:
            continue
        for plain in _plainer(path[-1], value):
            smaller = copy.deepcopy(program)
            _at(smaller, path[:-1])[path[-1]] = plain
            yield smaller


def _plainer(name: Any, value: Any) -> list[Any]:
    if value is None or value is False or name in ("seed", "do", "kind", "name"):
        return []
    if value is True:
        return [False]
    if isinstance(value, int):
        return [n for n in dict.fromkeys((0, 1, 16, value // 2)) if abs(n) < abs(value)]
    if isinstance(value, (dict, str)):
        return [None]
    if isinstance(value, float):
        return [n for n in (1.0, 0.0) if n != value][:1]
    return []


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


def _at(program: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        program = program[key]
    return program
