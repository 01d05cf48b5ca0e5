"""Kernels in Gluon: what changes in its language costs speed and a warning, never another result or an error."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from reference.checks import assert_bitwise

pytest.importorskip("triton.experimental.gluon.language", reason="needs Gluon")

import triton
from triton.runtime.errors import InterpreterError

from narrowcast import kernels, reference
from narrowcast.formats import E4M3
from narrowcast.kernels import float8_block, grouped_gemm, launch
from narrowcast.upstream.private import ENTRIES

CPU = torch.device("cpu")
BLOCKS: dict[str, Any] = {
    "block_dim": 1, "power_2": True, "epsilon": 0.0, "rowwise": True, "columnwise": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The interpreter stands for a GPU, of which ``for_hopper`` is told that it is Hopper."""
    monkeypatch.setattr(launch, "LOST", {})
    monkeypatch.setattr(launch, "_is_hopper", lambda device: True)
    launch.for_hopper.cache_clear()
    float8_block._launch.__wrapped__.cache_clear()
    yield
    launch.for_hopper.cache_clear()
    float8_block._launch.__wrapped__.cache_clear()


def _importing(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    def import_module(name: str) -> Any:
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setattr(launch, "importlib", types.SimpleNamespace(import_module=import_module))


def test_contract_reinterpret() -> None:
    from triton.experimental.gluon import language as gl

    from narrowcast.upstream import gluon

    name = "triton.experimental.gluon.language.shared_memory_descriptor._reinterpret"
    assert name in ENTRIES
    memory = gl.shared_memory_descriptor
    assert hasattr(memory, "_reinterpret" if gluon._PRIVATE.value else "reinterpret"), name


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_hopper_alone_has_them(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launch, "INTERPRETING", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (launch.for_hopper("gated_hopper", CPU) is not None) == (capability == (9, 0))
    assert not launch.LOST


def test_hopper_has_both() -> None:
    for name in ("gated_hopper", "grouped_hopper"):
        assert launch.for_hopper(name, CPU).__name__ == f"narrowcast.kernels.{name}"


def test_without_the_language_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    _importing(monkeypatch, ImportError("no gluon"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch.for_hopper("gated_hopper", CPU) is None
    assert launch.LOST == {"gated_hopper": "ImportError: no gluon"}


def test_a_language_that_changed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    _importing(monkeypatch, AttributeError("gl has no jit"))
    with pytest.warns(
        RuntimeWarning, match=r"cannot use narrowcast's gated_hopper.*gl has no jit.*same bits"
    ):
        assert launch.for_hopper("gated_hopper", CPU) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch.for_hopper("gated_hopper", CPU) is None
    assert launch.LOST == {"gated_hopper": "AttributeError: gl has no jit"}


class _Uncompilable:
    """A kernel that this Triton does not compile."""

    def __init__(self, module: str) -> None:
        self.fn = types.SimpleNamespace(__module__=f"narrowcast.kernels.{module}")

    def warmup(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("at 12:3: no such layout\n(more)")

    def __getitem__(self, _: Any) -> Any:
        raise AssertionError("launched")


def test_an_activation_that_is_not_compiled_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launch.GluonLauncher(_Uncompilable("gated_hopper"), num_warps=4)
    kept = launch.Launch(launcher, (1, 1, 1), [launch.TENSOR] * 6, ())
    module = types.ModuleType("gated_hopper")
    module.launch = lambda *_: kept  # type: ignore[attr-defined]
    _importing(monkeypatch, module)
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def quantized(numerics: Any) -> list[torch.Tensor]:
        return numerics.float8_block.quantize(
            numerics.fused_producers.activation(x, "swiglu"), E4M3, **BLOCKS
        )

    with pytest.warns(RuntimeWarning, match="NotImplementedError: at 12:3: no such layout"):
        results = quantized(kernels)
    for got, expected in zip(results, quantized(reference), strict=True):
        assert_bitwise(got, expected, "after the fallback")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized(kernels)


def test_a_grouped_product_that_is_not_compiled_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launch.GluonLauncher(_Uncompilable("grouped_hopper"), num_warps=4)
    multiply = lambda out, *_, **__: launcher((1, 1, 1), (out,), ())  # noqa: E731
    module = types.SimpleNamespace(takes=lambda *_: True, multiply=multiply)
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn) for shape in ((40, 32), (2, 48, 32))
    )
    splits, scales = torch.tensor([24, 16]), torch.tensor([0.5, 2.0])
    given = (left, scales, right, scales, splits, None)
    options: dict[str, Any] = {
        "left_block": 0, "right_block": 0, "alignment": 1, "dtype": torch.bfloat16, "rows": 40, "columns": 48,
    }  # fmt: skip
    _importing(monkeypatch, ImportError())
    try:
        expected = grouped_gemm.rows(*given, **options)
    except InterpreterError as error:  # beside the newest NumPy
        pytest.skip(f"the interpreter of Triton {triton.__version__} multiplies nothing here: {error}")
    launch.LOST.clear()
    launch.for_hopper.cache_clear()
    _importing(monkeypatch, module)
    with pytest.warns(RuntimeWarning, match="grouped_hopper"):
        got = grouped_gemm.rows(*given, **options)
    assert_bitwise(got, expected, "after the fallback")
