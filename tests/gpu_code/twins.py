"""Run the code that Inductor writes for a GPU on a CPU: its launches in Triton's interpreter, its tensors on twins.

A model on "cuda" is made of fake tensors, which have no memory. Each storage has a twin on the CPU. A graph is traced
and compiled for the GPU as always. Where its code would be loaded, a call takes its place that runs that code on the
twins. An operator that the graph holds whole runs as it does on a CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import unset_fake_temporarily
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

CODES: list[str] = []
"""What Inductor has written so far, in order."""

_FOLDER = Path(tempfile.mkdtemp())
_WRITTEN_IN_TRITON = [tl, tl.standard, triton_helpers]
_LANGUAGE = [*_WRITTEN_IN_TRITON, tl.core, tl.math, tl.tensor, tl.dtype, tl.constexpr, tl.semantic]


# -- launches --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Kernels that are defined here are interpreted."""
    triton.knobs.runtime.interpret = True
    try:
        yield
    finally:
        triton.knobs.runtime.interpret = False


_interpreted: dict[int, InterpretedFunction] = {}


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """What Triton and Inductor have written in Triton is interpreted; afterwards it is as the compiler needs it."""
    before = [dict(vars(owner)) for owner in _LANGUAGE]
    for module in _WRITTEN_IN_TRITON:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                if (
                    id(value) not in _interpreted
                ):  # its hash reads what it calls, some of which is interpreted by now
                    _interpreted[id(value)] = InterpretedFunction(value.fn)
                setattr(module, name, _interpreted[id(value)])
    try:
        yield
    finally:
        for owner, values in zip(_LANGUAGE, before):
            for name, value in list(vars(owner).items()):
                if name in values and values[name] is not value:
                    setattr(owner, name, values[name])


class _Kernel:
    """A kernel of ours (``user_autotune``), which comes with its grid, or one that Inductor has written."""

    def __init__(self, function: Any, heuristic: str, triton_meta: dict[str, Any]) -> None:
        self.function, self.ours = function, heuristic == "user_autotune"
        self.signature, self.constants = triton_meta["signature"], {}
        for name, value in triton_meta.get("constants", {}).items():
            self.constants[name if isinstance(name, str) else function.arg_names[name[0]]] = value

    def run(self, *values: Any, stream: int) -> None:
        given, grid = list(values), [1, 1, 1]
        if self.ours:
            given, grid = given[:-3], given[-3:]
        arguments: dict[str, Any] = {}
        for name in self.function.arg_names:
            if "constexpr" not in str(self.function.fn.__annotations__.get(name, "")):
                value = given.pop(0)
                arguments[name] = self.constants[name] if self.signature[name] == "constexpr" else value
            elif name in self.constants:
                arguments[name] = self.constants[name]
            elif name.endswith("BLOCK"):
                size = arguments[name.lower().removesuffix("block") + "numel"]
                block = triton.next_power_of_2(max(size, 1))
                if name[0] in "XYZ":
                    block = min(block, 256)
                    grid["XYZ".index(name[0])] = math.ceil(size / block)
                arguments[name] = block
        assert not given, (self.function.arg_names, given)
        if 0 not in grid:
            with _interpreted_language():
                self.function[tuple(grid)](**arguments)


class _Heuristics:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, triton_meta, **__: lambda function: _Kernel(function, name, triton_meta)


class _Kernels:
    """In place of Inductor's ``AsyncCompile``."""

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
        source = source.replace("triton_helpers, triton_heuristics", "triton_helpers")
        source = source.replace("triton_helpers.set_driver_to_gpu()", "")
        path = _FOLDER / f"{name}_{hashlib.sha1(source.encode()).hexdigest()}.py"
        path.write_text(source)  # the interpreter reads a function's lines
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        module: Any = importlib.util.module_from_spec(spec)
        module.triton_heuristics = _Heuristics()
        with _interpreting():
            spec.loader.exec_module(module)
        return getattr(module, name)

    def wait(self, scope: dict[str, Any]) -> None:
        pass


# -- tensors ---------------------------------------------------------------------------------------------------------

_twins: dict[int, tuple[Any, int]] = {}  # by storage: the twin's, and how far ahead it begins
_kept: list[Tensor] = []  # so that no storage takes the place of another


def give_twin(fake: Tensor, real: Tensor) -> Tensor:
    """Have the code read and write ``real``, a tensor on the CPU, in place of ``fake``, which is returned."""
    with unset_fake_temporarily():
        _kept.append(fake)
        ahead = real.storage_offset() - fake.storage_offset()
        _twins[fake.untyped_storage()._cdata] = real.untyped_storage(), ahead
    return fake


def twin_of(fake: Tensor) -> Tensor:
    storage, ahead = _twins[fake.untyped_storage()._cdata]
    with unset_fake_temporarily():
        empty = torch.empty(0, dtype=fake.dtype)
        return empty.set_(storage, ahead + fake.storage_offset(), fake.shape, fake.stride())


def exact_product(left: Tensor, right: Tensor, scale: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``left @ right``, whatever the order of sums, scaled once in fp32: for both sides of a comparison."""
    out = (left.double() @ right.double()).float()
    if scale is not None:
        out.mul_(scale)
    return (out if bias is None else out.add_(bias.to(dtype))).to(dtype)


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: Any = None,
    *,
    out: Tensor,
    **_: Any,
) -> Tensor:
    return out.copy_(exact_product(a, b, scale_a * scale_b, bias, out_dtype or out.dtype))


_ON_CPU = {
    r"async_compile = AsyncCompile\(\)": "async_compile = KERNELS",
    r"(?m)^empty_strided_cuda = .*": "empty_strided_cuda = empty_strided_cpu",
    r"(?m)^from torch\._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = lambda device: 0",
    r"torch\.cuda\._DeviceGuard\(0\)": "NOTHING",
    r"torch\.cuda\.set_device\(0\)": "pass",
    r"device\(type='cuda', index=0\)": "device(type='cpu')",
    r"extern_kernels\._scaled_mm": "SCALED_MM",
}


def _constants(graph: Any) -> dict[str, Any]:
    """What Inductor hands to the module that it loads."""
    names = ("constants", "torchbind_constants", "opaque_value_type_classes")
    return {key: value for name in names for key, value in getattr(graph, name, {}).items()}


def _loaded(code: str, constants: dict[str, Any]) -> Any:
    for pattern, replacement in _ON_CPU.items():
        code = re.sub(pattern, replacement, code)
    path = _FOLDER / f"graph_{len(CODES)}.py"
    path.write_text(code)
    scope = {"KERNELS": _Kernels(), "NOTHING": contextlib.nullcontext(), "SCALED_MM": _scaled_mm}
    scope |= {"__file__": str(path), "__name__": path.stem, **constants}
    with unset_fake_temporarily():
        exec(compile(code, str(path), "exec"), scope)
    return scope["call"]


def _compile_to_module(graph: Any) -> Any:
    code: Any = graph.codegen()[0]
    CODES.append(getattr(code, "value", code))
    run = _loaded(CODES[-1], _constants(graph))

    def call(args: list[Any]) -> tuple[Any, ...]:
        with unset_fake_temporarily(), torch.no_grad():
            given = [twin_of(arg) if isinstance(arg, Tensor) else arg for arg in args]
            args.clear()
            results = run(given)
        return tuple(_faked(x) if isinstance(x, Tensor) else x for x in results)

    return types.SimpleNamespace(call=call, __file__=__file__, recursively_apply_fns=None)


def _faked(real: Tensor) -> Tensor:
    fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
    return give_twin(fake, real)


def run_graphs_on_twins() -> None:
    """From now on, in place of loading what was compiled."""
    for name in ("_compile_to_module", "compile_to_module"):
        if hasattr(GraphLowering, name):
            setattr(GraphLowering, name, _compile_to_module)
