"""An H200 that is not there: PyTorch, Inductor and Triton find it, and compile for it, in a process for this alone."""

from __future__ import annotations

import types
from typing import Any

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget

PROPERTIES = types.SimpleNamespace(
    type="cuda",
    index=0,
    name="NVIDIA H200",
    major=9,
    minor=0,
    cc=90,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=140 << 30,
    gcnArchName="",
    L2_cache_size=50 << 20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)


class Driver:
    """Triton's."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"multiprocessor_count": 132, "max_shared_mem": 232448}
    )

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        return lambda *_, **__: [0.0, 0.0, 0.0]


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _answer(owner: Any, **values: Any) -> None:
    """Set those of the attributes that this release has."""
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)


def pretend() -> None:
    """Have everything find the GPU; that matrices are padded and attention fused is left out, which tries kernels."""
    properties = staticmethod(lambda *_: PROPERTIES)
    _answer(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_properties=lambda *_: PROPERTIES,
        get_device_capability=lambda *_: (9, 0),
        get_rng_state=lambda *_: torch.empty(0, dtype=torch.uint8),
        set_rng_state=_nothing,
        synchronize=_nothing,
        _lazy_init=_nothing,
    )
    _answer(torch.accelerator, is_available=lambda: False)
    _answer(torch._C, _cuda_getCurrentRawStream=lambda device: 0)
    _answer(CudaInterface.Worker, get_device_properties=properties)
    _answer(
        CudaInterface,
        get_device_properties=properties,
        get_compute_capability=staticmethod(lambda *_: 90),
        is_available=staticmethod(lambda: True),
        device_count=staticmethod(lambda: 1),
        current_device=staticmethod(lambda: 0),
    )
    _answer(fake_tensor, init_gpu_context=_nothing)
    for module in (joint_graph, fuse_attention, pad_mm, misc_patterns):
        _answer(module, _sfdp_init=_nothing, _pad_mm_init=_nothing, _misc_patterns_init=_nothing)
    triton.runtime.driver.set_active(Driver())
