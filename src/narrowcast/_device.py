"""The default device, what it can multiply natively, and the dtypes that it has for all."""

from __future__ import annotations

import functools

import torch

from ._checks import flags, shown

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that layers and quantizers take, and that what is quantized turns back to."""


def default_device() -> torch.device:
    """Return the current CUDA device when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def checked_device(device: torch.device | str | int) -> torch.device:
    """Return the device of an argument ``device``.

    Raises:
        TypeError: neither a device nor a name.
        ValueError: no device of PyTorch's, or one that this machine or this PyTorch lacks.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        kind = ValueError if isinstance(device, (str, int)) else TypeError
        raise kind(f"device is {shown(device)}; use a torch.device, 'cpu', 'cuda' or 'cuda:0'") from None
    try:
        # PyTorch itself answers, so that a fake or a lazy device counts as it does there
        torch.empty(0, dtype=torch.float32, device=place)
    except (RuntimeError, AssertionError, ImportError):
        raise ValueError(
            f"device is {shown(device)}, which this machine or this PyTorch lacks; use {_present()}"
        ) from None
    return place


def _present() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "'cpu', the only device here"
    last = torch.accelerator.device_count() - 1
    return f"'cpu', or '{accelerator.type}:0'" + (f" to '{accelerator.type}:{last}'" if last else "")


def get_device_compute_capability() -> tuple[int, int]:
    """Return the compute capability of the current CUDA device; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def get_cudnn_version() -> tuple[int, int, int]:
    """Return the version of the cuDNN that PyTorch uses; (0, 0, 0) without one."""
    version = torch.backends.cudnn.version() or 0
    if version >= 90000:  # from 9 on, major * 10000 + minor * 100 + patch
        return version // 10000, version // 100 % 100, version % 100
    return version // 1000, version // 100 % 10, version % 100


NATIVE: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "FP8": ((8, 9), None),
    "128-block FP8": ((9, 0), (10, 0)),
    "MXFP8": ((10, 0), (12, 0)),
    "NVFP4": ((10, 0), None),
}
"""Formats, each with the first compute capability that multiplies it, and the first later one that does not."""


@functools.cache
def _native(what: str) -> tuple[bool, str]:
    capability = get_device_compute_capability()
    if capability == (0, 0):
        return False, f"no CUDA device: {what} runs emulated on the CPU"
    minimum, below = NATIVE[what]
    limit = "" if below is None else f" and below {below[0]}.{below[1]}"
    if capability < minimum or (below is not None and capability >= below):
        return False, (
            f"{what} needs compute capability {minimum[0]}.{minimum[1]} or newer{limit}; this GPU has "
            f"{capability[0]}.{capability[1]} (emulate=True runs it emulated)"
        )
    return True, ""


def is_native(what: str) -> bool:
    """Return whether the current GPU multiplies a format of :data:`NATIVE`."""
    return _native(what)[0]


def _answer(result: tuple[bool, str], return_reason: bool) -> bool | tuple[bool, str]:
    flags(return_reason=return_reason)
    return result if return_reason else result[0]


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether per-tensor FP8 GEMMs run natively here; with ``return_reason`` also why not."""
    return _answer(_native("FP8"), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether 128-block FP8 GEMMs run natively here; with ``return_reason`` also why not."""
    return _answer(_native("128-block FP8"), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether MXFP8 GEMMs run natively here; with ``return_reason`` also why not.

    Native means that the library's GEMM is called; no release has run it on such a GPU.
    """
    return _answer(_native("MXFP8"), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether NVFP4 GEMMs run natively here; with ``return_reason`` also why not.

    Native means that the library's GEMM is called; no release has run it on such a GPU.
    """
    return _answer(_native("NVFP4"), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether bf16 matrix products run here; the CPU always can."""
    capability = get_device_compute_capability()
    if capability == (0, 0) or capability >= (8, 0):
        return _answer((True, ""), return_reason)
    return _answer((False, f"bf16 needs compute capability 8.0; this GPU has {capability}"), return_reason)
