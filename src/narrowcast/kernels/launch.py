"""Launching: compiled variants of a kernel found by the launcher's own key, and the device of the tensors respected.

Triton's ``kernel[grid](...)`` inspects every argument at every call to find the compiled variant. The launchers here
know what the variant depends on, so they pass that as a key and a repeated launch goes straight to the compiled
kernel. Where shapes repeat, :meth:`Launcher.bind` decides all of that once: what is left per launch is the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

INTERPRETING: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter; fixed when the kernels are defined, that is at import."""


PLANS_KEPT = 1024
"""Settings of launches that a kernel file remembers, one per shape and set of options."""


class Launcher:
    """Launches one kernel.

    Args:
        kernel: a ``triton.jit`` function whose parameters are the run-time arguments, then the constants.
        num_warps: warps per program.
        options: further compile options, such as ``maxnreg``.
    """

    def __init__(self, kernel: Any, num_warps: int, **options: Any) -> None:
        self.kernel = kernel
        self.num_warps = num_warps
        # A contracted multiply-add would skip one rounding of the formulas.
        self.options = {"enable_fp_fusion": False, **options}
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        key: Hashable,
    ) -> None:
        """Launch on the current stream of the device of the first argument.

        Args:
            grid: programs along x, y, z; none may be zero.
            arguments: run-time arguments, the first of them a tensor or a tuple of tensors.
            constants: values of the kernel's constexpr parameters, in order.
            key: everything beside ``constants`` that Triton specializes on: dtypes and alignments that vary, and
                ``dim_class`` of the sizes.
        """
        first = arguments[0]
        device = (first[0] if isinstance(first, tuple) else first).get_device()
        full_key = (device, key, constants)
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(grid, arguments, constants, full_key)
        else:
            self._launch(grid, arguments, constants, full_key)

    def _launch(self, grid: Any, arguments: Any, constants: Any, key: Hashable) -> None:
        compiled = self._compiled.get(key)
        if compiled is None:
            # The interpreter compiles nothing and returns None again.
            self._compiled[key] = self.kernel[grid](
                *arguments, *constants, num_warps=self.num_warps, **self.options
            )
        else:
            _start(compiled, grid, key[0], arguments, constants)  # type: ignore[index]

    def bind(
        self, device: int, grid: tuple[int, int, int], constants: tuple[Any, ...], key: Hashable
    ) -> Callable[[tuple[Any, ...]], None]:
        """A function that launches with these settings on the arguments it is given; see :meth:`__call__`.

        Args:
            device: index of the arguments' device, -1 for the CPU.
        """
        return _BoundLaunch(self, device, grid, constants, key)


class _BoundLaunch:
    __slots__ = ("compiled", "constants", "device", "full_key", "grid", "key", "launcher")

    def __init__(self, launcher: Launcher, device: int, grid: Any, constants: Any, key: Hashable) -> None:
        self.launcher, self.device, self.grid = launcher, device, grid
        self.constants, self.key = constants, key
        self.full_key = (device, key, constants)
        self.compiled: Any = None

    def __call__(self, arguments: tuple[Any, ...]) -> None:
        if self.compiled is not None and self.device == torch._C._cuda_getDevice():
            _start(self.compiled, self.grid, self.device, arguments, self.constants)
            return
        self.launcher(self.grid, arguments, self.constants, self.key)
        self.compiled = self.launcher._compiled.get(self.full_key)


def _start(compiled: Any, grid: Any, device: int, arguments: Any, constants: Any) -> None:
    """Run a compiled kernel on the current stream; ``compiled[grid]`` without building a function to do it."""
    if triton.knobs.runtime.launch_enter_hook.calls:  # a profiler wants to know
        compiled[grid](*arguments, *constants)
        return
    compiled.run(
        *grid,
        torch._C._cuda_getCurrentRawStream(device),
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
        *arguments,
        *constants,
    )


class Allocation(NamedTuple):
    """A contiguous tensor to be made."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(shape: tuple[int, ...], dtype: torch.dtype) -> Allocation:
        """Of a shape and a dtype."""
        strides, stride = [], 1
        for size in reversed(shape):
            strides.append(stride)
            stride *= max(size, 1)
        return Allocation(shape, tuple(reversed(strides)), dtype)

    def make(self, like: Tensor) -> Tensor:
        """Uninitialised memory on the device of a tensor."""
        if _EMPTY_CUDA is not None and like.is_cuda and like.get_device() == torch._C._cuda_getDevice():
            return _EMPTY_CUDA(self.shape, self.strides, self.dtype)
        return torch.empty(self.shape, dtype=self.dtype, device=like.device)


# What compiled code allocates with: a third of the time of torch.empty, on the current device only.
_EMPTY_CUDA: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def dim_class(n: int) -> int:
    """What Triton specializes an integer argument on: equality to 1, divisibility by 16, 64-bit width."""
    return (n == 1) + 2 * (n % 16 == 0) + 4 * (n >= 2**31)


def is_aligned(x: Tensor) -> bool:
    """Whether the tensor starts on a 16-byte boundary, which Triton specializes pointers on."""
    return x.data_ptr() % 16 == 0


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
        ValueError: ``check_device`` refuses, the dtype is not fp32, bf16 or fp16, or the rank is below ``min_rank``.
    """
    check_device(x)
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float16):
        raise ValueError(f"cannot quantize {x.dtype}; use torch.bfloat16, torch.float16 or torch.float32")
    check_rank(x.dim(), min_rank)


def check_rank(rank: int, min_rank: int) -> None:
    """Refuse a tensor of too few dims for a format.

    Raises:
        ValueError: ``rank`` is below ``min_rank``.
    """
    if rank < min_rank:
        raise ValueError(
            f"cannot quantize a tensor of rank {rank}; this format needs rank {min_rank} or more"
        )
