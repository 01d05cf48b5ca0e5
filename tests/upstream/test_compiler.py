"""What is asked of Dynamo and Inductor without loading them."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from narrowcast.upstream import compiler
from narrowcast.upstream.private import HIDDEN


class Own(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_compiled_container_of_torch_traces_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``module._compiled_call_impl``; PyTorch 2.14 began with it."""
    container, own = nn.Sequential(nn.Linear(2, 2)), Own(nn.Linear(2, 2))
    assert not compiler.traces_own_hooks(container)
    for module in (container, own):
        module.compile(backend="eager")
        assert module._compiled_call_impl is not None
    assert compiler.traces_own_hooks(container) == (TorchVersion(torch.__version__) >= "2.14")
    assert not compiler.traces_own_hooks(own)
    monkeypatch.setattr("narrowcast.upstream.private.HIDDEN", HIDDEN | {compiler._WRAPS_CALLS.name})
    assert not compiler.traces_own_hooks(container)  # Dynamo's own error follows


def test_dynamo_is_loaded_once_something_is_compiled() -> None:
    import torch._dynamo  # noqa: F401

    assert compiler.is_dynamo_loaded() and "torch._dynamo" in sys.modules


def test_gemms_stay_operators_where_it_is_unknown_who_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    assert not compiler.may_choose_gemms()
    with config.patch(max_autotune_gemm=True):
        assert compiler.may_choose_gemms()
    monkeypatch.setattr("narrowcast.upstream.private.HIDDEN", HIDDEN | {compiler._MAX_AUTOTUNE.name})
    assert compiler.may_choose_gemms()


def test_kernels_start_statically_by_default_only() -> None:
    from torch._inductor import config

    name = "static_launch_user_defined_triton_kernels"
    compiler.start_kernels_statically()
    assert config._config[name].default is True
    with config.patch({name: False}):
        compiler.start_kernels_statically()
        assert getattr(config, name) is False  # what a user says wins


def test_workers_that_compile_kernels_are_told_to_start_them_statically(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import async_compile, config
    from torch._inductor.compile_worker.subproc_pool import SubprocPool
    from torch._inductor.runtime.compile_tasks import _worker_compile_triton

    sent: list[Any] = []
    monkeypatch.setattr(SubprocPool, "submit", lambda self, job, *args: sent.append((job, *args)))
    compiler.start_kernels_statically()
    compiler.start_kernels_statically()  # once is enough
    pool = object.__new__(SubprocPool)
    workers = {"use_process_pool": lambda self: True, "process_pool": staticmethod(lambda: pool)}
    for name, value in workers.items():
        monkeypatch.setattr(async_compile.AsyncCompile, name, value)
    monkeypatch.setattr(async_compile.AsyncCompile, "get_worker_pool", lambda self: pool, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    async_compile.AsyncCompile().triton("kernel", "@triton.jit\ndef kernel(): pass  # of no graph")
    job, *_, options = sent[0]
    assert job is _worker_compile_triton and options["static_launch_user_defined_triton_kernels"] is True
    with config.patch(static_launch_user_defined_triton_kernels=False):
        pool.submit(job, {"use_static_triton_launcher": True}, {"other": 1})
    assert sent[1][1:] == (
        {"use_static_triton_launcher": True, "static_launch_user_defined_triton_kernels": False},
        {"other": 1},
    )


def test_a_tensor_keeps_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2)
    compiler.keep_address(x)
    assert x._dynamo_static_input_type == "unguarded"
    monkeypatch.setattr("narrowcast.upstream.private.HIDDEN", HIDDEN | {compiler._KEEP_ADDRESS.name})
    y = torch.zeros(2)
    compiler.keep_address(y)
    assert not hasattr(y, "_dynamo_static_input_type")


def test_recompiling_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the backend: Inductor's takes seconds for each size."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = compiler.compile_up_to(lambda x, size: x * size, 3)
    for size in range(3):
        assert torch.equal(compiled(torch.ones(2), size), torch.full((2,), float(size)))
