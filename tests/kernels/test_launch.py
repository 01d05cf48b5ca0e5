"""Launching: keys as fine as Triton's own, few calls on the way, and launches that become nodes of a graph."""

from __future__ import annotations

import functools
import inspect
import os
import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowcast import kernels
from narrowcast.formats import E4M3

from .conftest import HAS_TRITON

if HAS_TRITON:
    from narrowcast.kernels import activation, float8, float8_block, fused_producers, launch, norm
    from narrowcast.upstream.triton import Start

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64, torch.float8_e4m3fn)
WIDE = (2**31 - 16, 2**31 - 1, 2**31, 2**31 + 16, 2**40 + 1, 2**63, -(2**31), -(2**40))
INTS = (0, 1, 2, 3, 15, 16, 17, 48, -1, -16, *WIDE)


def _triton_binder(count: int) -> Callable[..., Any]:
    """What Triton itself specializes ``count`` arguments of a kernel on, for Hopper; without any GPU."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime.jit import KernelParam, create_function_from_signature
    except ImportError as error:
        pytest.skip(f"this Triton has no binder where it is looked for: {error}")
    names = [f"argument{i}" for i in range(count)]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    params = [KernelParam(i, parameter, False, False) for i, parameter in enumerate(parameters)]
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(inspect.Signature(parameters), params, backend)
    return lambda *arguments: str(binder(*arguments)[1])


def _random_argument(generator: random.Random) -> Any:
    kind = generator.randrange(7)
    if kind < 3:
        # bytes 0, 1, ... from an aligned start, so that some views are aligned and some are not
        dtype = generator.choice(DTYPES)
        offset = generator.choice((0, 1, 2, 4, 8, 16, 32))
        return torch.empty(80, dtype=dtype)[offset : offset + generator.choice((1, 16))]
    if kind < 6:
        return generator.choice(INTS)
    return generator.choice((0.0, 1.0, -3.5, float("inf"), True, False, None))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_equal_keys_mean_equal_variants(count: int) -> None:
    """Whatever Triton compiles a variant for differs in the launcher's key."""
    binder, generator = _triton_binder(count), random.Random(count)
    seen: dict[Any, tuple[str, Any]] = {}
    repeated = 0
    for _ in range(4000):
        arguments = tuple(_random_argument(generator) for _ in range(count))
        key, expected = launch.specialization(arguments)[0], binder(*arguments)
        known, first = seen.setdefault(key, (expected, arguments))
        repeated += first is not arguments
        assert known == expected, f"{first} and {arguments} have the key {key}"
    assert repeated > 300  # else nothing was compared


def test_every_size_of_one_kind_shares_a_variant() -> None:
    """Shapes that vary from step to step make no new keys."""
    keys = {launch.specialization((torch.empty(n * 16), n * 16, 0.5))[0] for n in range(1, 50)}
    assert len(keys) == 1
    assert len({launch.specialization((n,))[0] for n in range(2, 2000)}) == 2


def test_descriptors_of_one_dtype_and_tile_share_a_variant() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    def key(dtype: torch.dtype, rows: int, tile: int) -> Any:
        codes = torch.empty(rows, 32, dtype=dtype)
        return launch.specialization((TensorDescriptor(codes, [rows, 32], [32, 1], [tile, 32]),))[0]

    assert key(torch.uint8, 64, 16) == key(torch.uint8, 128, 16)
    assert len({key(torch.uint8, 64, 16), key(torch.int8, 64, 16), key(torch.uint8, 64, 32)}) == 3


def test_unknown_argument_raises() -> None:
    with pytest.raises(TypeError, match="cannot take an argument of <class 'str'>; pass a tensor"):
        launch.specialization(("relu",))


def test_a_variant_takes_addresses() -> None:
    """Which it would else ask every tensor, and the driver, for."""
    x, weight = torch.ones(4), torch.nn.Parameter(torch.ones(4))
    values = launch.specialization((x, weight, x, 7, 0.5, None))[1]
    assert values == [x.data_ptr(), weight.data_ptr(), x.data_ptr(), 7, 0.5, None]


class _Variant:
    """Stands for a compiled kernel and notes how many functions deep it was started."""

    function, packed_metadata = 0, None

    def __init__(self) -> None:
        self.depths: list[int] = []

    def run(self, *_: Any) -> None:
        depth, frame = 0, sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "_called":
            depth, frame = depth + 1, frame.f_back
        self.depths.append(depth)


class _Kernel:
    """Stands for a kernel whose every variant is compiled already."""

    def __init__(self, variant: _Variant) -> None:
        self.variant = variant

    def __getitem__(self, _: Any) -> Callable[..., _Variant]:
        return lambda *_, **__: self.variant


def _called(function: Callable[[], object]) -> None:
    function()


X = torch.ones(128, 256, dtype=torch.bfloat16)
BOTH: dict[str, Any] = {"rowwise": True, "columnwise": True}
CURRENT: dict[str, Any] = {"power_2": False, "epsilon": 0.0, **BOTH}
BLOCK: dict[str, Any] = {"block_dim": 1, "power_2": True, "epsilon": 0.0, **BOTH}


def _normalized() -> Any:
    weight = torch.ones(256, dtype=torch.bfloat16)
    options = {"eps": 1e-5, "normalization": "RMSNorm", "zero_centered_gamma": False}
    return fused_producers.normalized(X, None, weight, None, wanted="amax", **options)[0]


# What runs, functions from its entry to the compiled kernel's start, and launches.
PATHS: dict[str, tuple[Callable[[], object], int, int]] = {
    "current": (lambda: float8.quantize_current(X.repeat(4, 1), E4M3, **CURRENT), 4, 2),
    "current, small": (lambda: float8.quantize_current(X, E4M3, **CURRENT), 4, 1),
    "given": (lambda: float8.quantize(X, torch.ones(1), E4M3, **BOTH), 4, 1),
    "block": (lambda: float8_block.quantize(X, E4M3, **BLOCK), 4, 1),
    "norm, current": (lambda: float8.quantize_current(_normalized(), E4M3, **CURRENT), 5, 2),
    "norm, block": (lambda: float8_block.quantize(_normalized(), E4M3, **BLOCK), 5, 2),
    "activation, current": (
        lambda: float8.quantize_current(fused_producers.activation(X, "swiglu"), E4M3, **CURRENT), 5, 2,
    ),
    "activation, given": (
        lambda: float8.quantize(fused_producers.activation(X, "swiglu"), torch.ones(1), E4M3, **BOTH), 4, 1,
    ),
    "gradient, current": (
        lambda: float8.quantize_current(fused_producers.activation_backward(X[:, :128], X, "swiglu"), E4M3, **CURRENT),
        5, 2,
    ),
    "activation, block": (lambda: float8_block.quantize(fused_producers.activation(X, "swiglu"), E4M3, **BLOCK), 4, 1),
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for the GPU")
@pytest.mark.parametrize("name", PATHS)
def test_few_functions_until_the_kernel_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    variant = _Variant()
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    for module in (activation, float8, float8_block, norm):
        for value in vars(module).values():
            if isinstance(value, launch.Launcher):
                monkeypatch.setattr(value, "kernel", _Kernel(variant))
                monkeypatch.setattr(value, "variants", {})
    of_float8 = (float8._cast_launch, float8._amax_launch, float8_block._launch)
    launches = (*of_float8, activation._launch, norm._statistics_launch)
    for remembered in launches:  # and after: theirs are stand-ins
        remembered.__wrapped__.cache_clear()
        request.addfinalizer(remembered.__wrapped__.cache_clear)
    function, most, count = PATHS[name]
    _called(function)  # "compiles"
    assert not variant.depths
    _called(function)
    assert len(variant.depths) == count
    # The path's own lambda is one of the functions.
    assert max(variant.depths) <= most, variant.depths


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for the GPU")
def test_a_kept_launch_starts_the_variant_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once for each set of dtypes and alignments, as without it; what is started then takes addresses."""
    compiled: list[tuple[Any, ...]] = []
    started: list[tuple[Any, ...]] = []

    class Variant(_Variant):
        def run(self, *arguments: Any) -> None:
            started.append(arguments)

    def compile_(*arguments: Any, **_: Any) -> _Variant:
        compiled.append(arguments)
        return Variant()

    class Kernel:
        def __getitem__(self, _: Any) -> Callable[..., _Variant]:
            return compile_

    monkeypatch.setattr(launch, "current_stream", lambda device: 7)
    launcher = launch.Launcher(Kernel(), num_warps=4)
    arguments = [launch.TENSOR, None, launch.TENSOR, 32, 0.5]
    one, other = (launch.Launch(launcher, (size, 1, 1), arguments, ("relu",)) for size in (2, 3))
    x, y = torch.empty(33, dtype=torch.float32), torch.nn.Parameter(torch.empty(64, dtype=torch.bfloat16))
    for kept, tensors, kinds in (
        (one, [x, y], 1),
        (one, [x[4:], y], 1),
        (one, [x[1:], y], 2),
        (one, [x[2:], y], 2),
        (one, [x, y[1:]], 3),
        (one, [x.to(torch.int32), y], 4),
        (other, [x, y], 4),
        (other, [x[1:], y], 4),
    ):
        kept(tensors)  # compiled here, or by an earlier launch
        started.clear()
        kept(tensors)
        assert len(compiled) == kinds
        grid, (stream, _, _, *hooks), values = started[0][:3], started[0][3:9], started[0][9:]
        assert grid == kept.grid and stream == 7 and hooks == [None] * 3
        assert values == (tensors[0].data_ptr(), None, tensors[1].data_ptr(), 32, 0.5, "relu")


def test_memory_is_laid_out_as_by_new_empty() -> None:
    for shape in ((), (5,), (2, 3, 4), (3, 0, 2), (0, 7)):
        size, strides = launch.contiguous(shape)
        made, expected = launch.beside(X)(size, strides, torch.uint8), X.new_empty(shape, dtype=torch.uint8)
        assert strides == expected.stride() == made.stride() and made.shape == expected.shape
        assert made.dtype == torch.uint8 and made.device == X.device


TRACED = """
import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from narrowcast import kernels
from narrowcast.formats import E4M3

# What a kernel writes to is told by compiling it, which takes a GPU; say that it writes to everything.
wrap.get_mutated_tensors = lambda *, kwargs, **_: list(kwargs)

both = dict(rowwise=True, columnwise=True)
current = dict(power_2=False, epsilon=0.0, **both)
block = dict(block_dim=1, power_2=True, epsilon=0.0, **both)
with FakeTensorMode():
    x, scale = torch.empty(128, 256, dtype=torch.bfloat16, device="cuda"), torch.empty(1, device="cuda")
    codes = torch.empty(128, 256, dtype=torch.uint8, device="cuda")
functions = {
    "current": (1, lambda x, scale, codes: kernels.float8.quantize_current(x, E4M3, **current)),
    "given": (1, lambda x, scale, codes: kernels.float8.quantize(x, scale, E4M3, amax=scale, **both)),
    "block": (1, lambda x, scale, codes: kernels.float8_block.quantize(x, E4M3, **block)),
    "activation": (1, lambda x, scale, codes: kernels.float8.quantize(
        kernels.fused_producers.activation(x, "swiglu"), scale, E4M3, **both)),
    "nvfp4": (2, lambda x, scale, codes: kernels.nvfp4.quantize(x, **both)),
    "dequantize": (1, lambda x, scale, codes: kernels.dequantize.float8_transpose(
        codes, scale, E4M3, torch.bfloat16)),
    "first": (1, lambda x, scale, codes: kernels.float8.quantize(
        x, scale, E4M3, amax=scale, unseen=-448.0, **both)),
}
for name, (launches, function) in functions.items():
    nodes = make_fx(dispatch_functionalize(function), tracing_mode="fake")(x, scale, codes).graph.nodes
    launched = [node.kwargs for node in nodes if "triton_kernel_wrapper_functional" in str(node.target)]
    assert len(launched) == launches, (name, launched)
    for node in launched:
        read = [value for value in node["kwargs"].values() if isinstance(value, torch.fx.Node)]
        assert len(read) >= 2 and node["grid"][0][0] > 0, (name, node)
        if name in ("given", "first"):  # the amax of delayed scaling is raised behind the graph's back
            assert "amax_ptr" in node["kwargs"] and "amax_ptr" not in node["tensors_to_clone"]
        if name == "first":  # and so are the words in which its programs find the first scale
            assert "words_ptr" in node["kwargs"] and "words_ptr" not in node["tensors_to_clone"]
for constants in wrap.kernel_side_table.constant_args.values():
    assert not any(isinstance(value, torch.Tensor) for value in constants.values()), constants
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_a_trace_holds_the_launches() -> None:
    """On fake CUDA tensors, without any GPU: grid, constants and outputs need shapes and dtypes alone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _names_within(kernel: Any, names: dict[str, Any], path: str) -> None:
    """Every function and constant that a kernel reaches, by its name; one name must not stand for two of them."""
    globals_ = kernel.fn.__globals__
    for name in kernel.fn.__code__.co_names:
        value = globals_.get(name)
        if value is None or inspect.ismodule(value) or isinstance(value, type):
            continue
        same = names.setdefault(name, value)
        assert same is value or repr(same) == repr(value), f"{path} reaches two different {name}"
        if hasattr(value, "fn") and same is value and (name, "seen") not in names:
            names[(name, "seen")] = True  # type: ignore[index]
            _names_within(value, names, path)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_no_two_helpers_of_one_kernel_share_a_name() -> None:
    """A compiled graph writes a kernel and all it calls into one file."""
    checked = 0
    for module in map(functools.partial(getattr, kernels), kernels.MODULES):
        for value in vars(module).values():
            if isinstance(value, launch.Launcher):
                _names_within(value.kernel, {}, f"{module.__name__}.{value.kernel.fn.__name__}")
                checked += 1
    assert checked > 20


def test_an_aligned_view_of_a_trace_is_told_by_its_offset() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(64, dtype=torch.uint8)
        assert launch.is_aligned(x, 16) and launch.is_aligned(x[8:], 8)
        assert not launch.is_aligned(x[2:], 4)
    assert kernels.AVAILABLE


class _DescribedKernel:
    """Stands for a launcher whose variant takes a pointer, two descriptors and a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.backends.nvidia import driver

        self.handed: list[tuple[Any, ...]] = []
        self.made: list[int] = []
        self.slow = 0
        signature = dict(enumerate(["*fp32", "tensordesc<a>", "tensordesc<b>", "i32", "constexpr"]))
        monkeypatch.setattr(driver, "make_tensordesc_arg", self.map_of)
        inner = driver.wrap_handle_tensordesc(lambda *given: self.handed.append(given), signature, [{}, {}])
        between = ("kernel", *[None] * (driver._BASE_ARGS_FORMAT_LEN - 5))
        self.start = Start(inner, between, False, None)

    def map_of(self, descriptor: Any, meta: Any) -> list[Any]:
        self.made.append(descriptor.base.data_ptr())
        return [("map", descriptor.base.data_ptr()), *descriptor.shape, *descriptor.strides]

    def __call__(self, *given: Any) -> Any:
        self.slow += 1
        return self.start


def test_a_described_launch_replaces_addresses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not hasattr(driver, "_BASE_ARGS_FORMAT_LEN"):
        pytest.skip("this Triton starts kernels with descriptors in another way")
    kernel = _DescribedKernel(monkeypatch)
    monkeypatch.setattr(launch, "current_stream", lambda device: 11)
    monkeypatch.setattr(launch, "current_device", lambda: -1)

    def tensors() -> list[torch.Tensor]:
        return [torch.zeros(4), torch.zeros(64, 32), torch.zeros(16, 32)]

    first = tensors()
    out, left, right = first
    descriptors = [TensorDescriptor(x, [*x.shape], [*x.stride()], [16, 32]) for x in (left, right)]
    made: Any = launch.DescribedLaunch(kernel, (2, 1, 1), (out, *descriptors, 7), (True,), first)  # type: ignore[arg-type]
    assert kernel.slow == 1 and not kernel.handed
    again = tensors()
    for given in (first, again, again):
        assert made(given)
        p, a, b = (x.data_ptr() for x in given)
        flat = (p, ("map", a), 64, 32, 32, 1, ("map", b), 16, 32, 32, 1, 7, True)
        assert kernel.handed[-1] == (2, 1, 1, 11, *kernel.start.between, *flat)
    addresses = [x.data_ptr() for x in (*first[1:], *again[1:])]
    assert [kernel.made.count(address) for address in addresses[2:]] == [1, 1]  # maps are kept
    count = len(kernel.handed)
    shifted = [torch.zeros(9)[1:5], *again[1:]]
    assert not made(shifted) and len(kernel.handed) == count  # not aligned: up to the launcher
    monkeypatch.setattr(launch, "HOOKS", SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=(print,))))
    assert not made(again)


def test_a_described_launch_leaves_other_launchers_alone() -> None:
    x = torch.zeros(4)

    class Interpreted:
        def __call__(self, *given: Any) -> None:
            x.add_(1)

    made = launch.DescribedLaunch(Interpreted(), (1, 1, 1), (x, 3), (), [x])  # type: ignore[arg-type]
    assert x[0] == 1 and not made([x]) and x[0] == 1
