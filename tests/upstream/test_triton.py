"""What narrowcast uses of Triton that is not public: there, and what happens where it is not."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
from triton.backends.nvidia import driver

from narrowcast.kernels import launch
from narrowcast.upstream import triton as upstream
from narrowcast.upstream.private import ENTRIES, UpstreamError

GRID = (5, 6, 7)
STREAM = 11
METADATA = (4, 1, 0)
VALUES = (1024, None, 2048, 32, 0.5, "relu")


@pytest.fixture(autouse=True)
def _a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the driver of a GPU: launchers ask it for memory, of which none is wanted."""

    def allocate(*_: Any) -> int:
        raise AssertionError("no kernel here asks for memory")

    active = types.SimpleNamespace(allocate_default_profile_scratch=allocate)
    monkeypatch.setattr(triton.runtime.driver, "_active", active)


class Calls:
    """Stands for the function in C: notes what it is called with, and how many functions deep."""

    def __init__(self) -> None:
        self.handed: list[tuple[Any, ...]] = []
        self.depths: list[int] = []

    def __call__(self, *handed: Any) -> None:
        depth, frame = 0, sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "_called":
            depth, frame = depth + 1, frame.f_back
        self.handed.append(handed)
        self.depths.append(depth)


def _called(function: Callable[[], object]) -> None:
    function()


def _launcher(calls: Calls, kind: type = driver.CudaLauncher, **attributes: Any) -> Any:
    """The installed Triton's launcher of a kernel without memory of its own, around ``calls``."""
    launcher = object.__new__(kind)
    vars(launcher).update(
        num_ctas=1, launch=calls, launch_cooperative_grid=False, launch_pdl=True, gsan_enabled=False,
        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        arg_annotations=["annotation"], kernel_signature=b"signature",
    )  # fmt: skip
    vars(launcher).update(attributes)
    return launcher


def _kernel(run: Any) -> Any:
    return types.SimpleNamespace(run=run, function=7, packed_metadata=METADATA)


def _by_triton(launcher: Any) -> tuple[Any, ...]:
    launcher(*GRID, STREAM, 7, METADATA, None, None, None, *VALUES)
    return launcher.launch.handed.pop()


def test_c_is_handed_what_triton_hands_it() -> None:
    """On every tested release, in its order, and past its Python: S7 was that only 3.6 went past."""
    calls = Calls()
    launcher = _launcher(calls)
    expected = _by_triton(launcher)
    start = upstream.start_of(_kernel(launcher))
    assert start.run is calls
    start(GRID, STREAM, VALUES)
    assert calls.handed == [expected]


def test_as_few_functions_as_on_triton_3_6() -> None:
    """From a kept launch to C: the launch alone."""
    calls = Calls()
    kernel = _kernel(_launcher(calls))

    class Compiled:
        def __getitem__(self, _: Any) -> Callable[..., Any]:
            return lambda *_, **__: kernel

    kept = launch.Launch(
        launch.Launcher(Compiled(), num_warps=4), GRID, [launch.TENSOR, None, launch.TENSOR, 32], ("relu",)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "current_stream", lambda device: STREAM)
        tensors = [torch.empty(16), torch.empty(16)]
        _called(lambda: kept(tensors))
        calls.handed.clear()
        calls.depths.clear()
        _called(lambda: kept(tensors))
    # the lambda and Launch.__call__
    assert calls.depths == [2]
    assert calls.handed[0][:4] == (*GRID, STREAM)


@pytest.mark.parametrize(
    "attributes",
    [{"global_scratch_size": 16}, {"profile_scratch_size": 16}, {"gsan_enabled": True}],
    ids=lambda attributes: next(iter(attributes)),
)
def test_a_kernel_that_wants_more_goes_through_triton(attributes: dict[str, Any]) -> None:
    calls = Calls()
    launcher = _launcher(calls, **attributes)
    start = upstream.start_of(_kernel(launcher))
    assert start.run is launcher and not calls.handed
    assert start.between == (7, METADATA, None, None, None) and not start.packed


class _Reordered(driver.CudaLauncher):
    """Hands the grid on in another order."""

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.launch(stream, x, y, z, *rest)


class _Numbered(driver.CudaLauncher):
    """Hands on what it made for this launch."""

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, object(), *rest)


class _Twice(driver.CudaLauncher):
    """Starts something before the kernel."""

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)
        self.launch(*arguments)


class _Checks(driver.CudaLauncher):
    """Does something new, for which it reads a new attribute."""

    def __call__(self, *arguments: Any) -> None:
        if self.synchronizes:  # type: ignore[attr-defined]
            raise AssertionError
        self.launch(*arguments)


class _ByKeyword(driver.CudaLauncher):
    """Hands the arguments on by keyword."""

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, arguments=rest)


class _More(driver.CudaLauncher):
    """Adds an argument to the kernel's."""

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, *rest[:5], (*rest[5:], None))


@pytest.mark.parametrize("kind", [_Reordered, _Numbered, _Twice, _Checks, _ByKeyword, _More])
def test_a_launcher_that_does_anything_else_is_not_gone_past(kind: type) -> None:
    calls = Calls()
    launcher = _launcher(calls, kind, synchronizes=False)
    start = upstream.start_of(_kernel(launcher))
    assert start.run is launcher and not start.packed and not calls.handed


def test_without_the_launcher_a_kernel_is_started_by_its_public_way() -> None:
    started: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, stream: started.append((grid, stream, arguments))

    upstream.start_of(Kernel())(GRID, STREAM, VALUES)
    assert started == [(GRID, STREAM, VALUES)]


def test_contract_launcher() -> None:
    """Fails on a rename of what ``start_of`` reads, which would send every launch the long way."""
    from triton.compiler import CompiledKernel

    assert isinstance(CompiledKernel.run, property), "triton.compiler.CompiledKernel.run"
    source = inspect.getsource(CompiledKernel)
    for name in ("self.function", "self.packed_metadata"):
        assert name in source, f"triton.compiler.CompiledKernel.run: {name}"
    calls = Calls()
    assert upstream.start_of(_kernel(_launcher(calls))).run is calls, "triton.compiler.CompiledKernel.run"


def test_contract_hooks() -> None:
    assert not list(triton.knobs.runtime.launch_enter_hook.calls), "triton.knobs.runtime"
    assert upstream.HOOKS is triton.knobs.runtime


def test_without_hooks_every_launch_goes_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls the hooks that it has by another name."""
    calls, by_triton = Calls(), []
    kernel = _kernel(_launcher(calls))

    class Kernel(types.SimpleNamespace):
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **_: by_triton.append((grid, arguments)) or self

    compiled = Kernel(**vars(kernel))
    lost = types.SimpleNamespace(launch_enter_hook=types.SimpleNamespace(calls=(None,)))
    monkeypatch.setattr(launch, "HOOKS", lost)
    x = torch.empty(16)
    launcher = launch.Launcher(compiled, num_warps=4)
    for _ in range(2):
        launcher(GRID, (x, 32), ("relu",))
    assert by_triton == [(GRID, (x, 32, "relu"))] * 2 and not calls.handed


NAMES = ("kernel_side_table", "get_mutated_tensors", "triton_kernel_wrapper_functional")


@pytest.mark.parametrize("name", NAMES)
def test_contract_wrapped_launches(name: str) -> None:
    import torch._higher_order_ops.triton_kernel_wrap as wrap

    assert hasattr(wrap, name), f"torch._higher_order_ops.triton_kernel_wrap.{name}"
    assert f"torch._higher_order_ops.triton_kernel_wrap.{name}" in ENTRIES


def _trace() -> None:
    node = upstream.node_of(None, {})
    upstream.written_by(node, {})
    upstream.launch_in_graph(node, {}, GRID, [])


@pytest.mark.parametrize("name", NAMES)
def test_without_it_a_traced_launch_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"torch._higher_order_ops.triton_kernel_wrap.{name}"
    monkeypatch.setattr("narrowcast.upstream.private.HIDDEN", {path})
    with pytest.raises(UpstreamError, match=f"{name}.*torch.compiler.disable"):
        _trace()


class Kernel:
    """What Triton makes of a function, of the module ``module``."""

    def __init__(self, module: str) -> None:
        self.fn = types.SimpleNamespace(__module__=module)


@pytest.mark.parametrize("lost", [False, True], ids=["there", "lost"])
def test_the_sources_of_own_kernels_are_collected_once(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.codegen.wrapper as wrapper

    name, calls = "user_defined_triton_kernel_transitive_closure_source_code", []
    path = f"torch._inductor.codegen.wrapper.{name}"
    assert next(iter(inspect.signature(getattr(wrapper, name)).parameters)) == "kernel" and path in ENTRIES

    def collect(kernel: Any, *fused: Any) -> str:
        calls.append(kernel)
        return f"source {len(calls)}"

    collect.__module__, collect.__name__ = wrapper.__name__, name
    monkeypatch.setattr(wrapper, name, collect)
    monkeypatch.setattr("narrowcast.upstream.private.HIDDEN", {path} if lost else set())
    upstream.keep_sources("narrowcast")
    kept_by = getattr(wrapper, name)
    upstream.keep_sources("narrowcast")
    assert getattr(wrapper, name) is kept_by
    own, theirs = Kernel("narrowcast.kernels.norm"), Kernel("a.user")
    for kernel, fused, makes in (
        (own, (), 1),
        (own, (), 0),
        (own, ("epilogue",), 1),
        (theirs, (), 1),
        (theirs, (), 1),
    ):
        before = len(calls)
        kept_by(kernel, *fused)
        assert len(calls) - before == (1 if lost else makes)


def test_a_graph_with_many_launches_collects_sources_once() -> None:
    """What PyTorch's caches look up when they hash a graph is the function that this package has replaced."""
    import torch._functorch._aot_autograd.autograd_cache as autograd_cache
    import torch._inductor.codecache as codecache

    name = "user_defined_triton_kernel_transitive_closure_source_code"
    for module in autograd_cache, codecache:
        assert not hasattr(module, name) and name in inspect.getsource(module)  # imported where it is called
