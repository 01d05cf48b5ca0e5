"""Registration of quantizers as compile-time values: which are, once, with and without PyTorch's API."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizers.catalog import E4M3, VARIANTS, delayed

import narrowcast as nc
from narrowcast import dynamo
from narrowcast.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer
from narrowcast.quantizers import DelayedFloat8Quantizer
from narrowcast.upstream import opaque

SOURCES = Path(nc.__file__).parents[1]


class Unregistered(nc.MXFP8Quantizer):
    pass


def test_exported_names() -> None:
    assert set(dynamo.__all__) == {
        "TensorProto",
        "TensorSpec",
        "is_value_opaque_quantizer",
        "register_value_opaque_quantizer",
        "to_tensor_proto",
        "to_tensor_spec",
    }
    assert dynamo.TensorSpec is dynamo.TensorProto and dynamo.to_tensor_spec is dynamo.to_tensor_proto
    assert nc.dynamo is dynamo


@pytest.mark.parametrize("quantizer", [*VARIANTS.values(), DelayedFloat8Quantizer(E4M3, 0)], ids=repr)
def test_registered_quantizers(quantizer: nc.Quantizer) -> None:
    assert is_value_opaque_quantizer(quantizer)
    assert type(quantizer).__dict__["_te_compile_value_opaque"] is True
    assert type(quantizer)._value_fields() is not None


@pytest.mark.parametrize("other", [delayed(), Unregistered(E4M3), 5, None, nc.MXFP8Quantizer], ids=repr)
def test_everything_else_is_not(other: Any) -> None:
    if not isinstance(other, type):
        assert not is_value_opaque_quantizer(other)


def test_the_mark_is_not_inherited() -> None:
    assert Unregistered.__dict__["_te_compile_value_opaque"] is False
    assert Unregistered._value_fields() is None


def test_a_class_of_the_same_name_is_not_taken_for_a_registered_one() -> None:
    namesake = type("MXFP8Quantizer", (nc.MXFP8Quantizer,), {})
    assert not is_value_opaque_quantizer(namesake(E4M3))
    assert namesake(E4M3) != nc.MXFP8Quantizer(E4M3)


@pytest.mark.parametrize(
    "other", [int, torch.Tensor, nc.MXFP8Quantizer(E4M3), None, nc.recipe.Recipe], ids=repr
)
def test_only_quantizer_classes_are_registered(other: Any) -> None:
    with pytest.raises(TypeError, match="is not a Quantizer class"):
        register_value_opaque_quantizer(other)


def test_registering_is_idempotent_and_a_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[type] = []
    monkeypatch.setattr(opaque, "register_value_type", lambda cls, *names: bool([calls.append(cls)]))

    @register_value_opaque_quantizer
    class Twice(nc.MXFP8Quantizer):
        pass

    assert register_value_opaque_quantizer(Twice) is Twice
    assert calls == [Twice]
    assert Twice(E4M3) == Twice(E4M3)


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_a_half_implemented_api_leaves_value_semantics(monkeypatch: pytest.MonkeyPatch, error: type) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error("half implemented")

    monkeypatch.setattr(opaque, "_register", refuse)

    @register_value_opaque_quantizer
    class Refused(nc.MXFP8Quantizer):
        pass

    assert (
        not is_value_opaque_quantizer(Refused(E4M3)) and register_value_opaque_quantizer(Refused) is Refused
    )
    assert Refused(E4M3) == Refused(E4M3) and hash(Refused(E4M3)) == hash(Refused(E4M3))
    expression, names = Refused(E4M3).__fx_repr__()
    assert eval(expression, names) == Refused(E4M3)


def test_other_errors_of_the_api_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(opaque, "_register", broken)
    with pytest.raises(ZeroDivisionError):
        register_value_opaque_quantizer(type("Broken", (nc.MXFP8Quantizer,), {}))


CRIPPLED = {
    "absent": 'sys.modules["torch._library.opaque_object"] = None; del torch._library.opaque_object',
    "registration raises": "refuse(REGISTER, RuntimeError, '')",
    "registration of one class raises": "refuse(REGISTER, TypeError, 'MXFP8Quantizer')",
    "names raise": "refuse('get_opaque_type_name', RuntimeError, '')",
}
"""What a build of PyTorch may lack, before narrowcast is imported."""
WITHOUT_API = """
    import sys, torch
    from torch._library import opaque_object

    def refuse(name, error, refused):
        real = getattr(opaque_object, name)
        def half_implemented(cls, *args, **kwargs):
            if cls.__module__.startswith("narrowcast") and refused in cls.__name__:
                raise error("half implemented")
            return real(cls, *args, **kwargs)
        setattr(opaque_object, name, half_implemented)

    REGISTER = "register_custom_class" if hasattr(opaque_object, "register_custom_class") else "register_opaque_type"
    CRIPPLE
    import narrowcast as nc
    from narrowcast.upstream import opaque
    assert opaque.AVAILABLE == ("one class" in KIND)
    E4M3 = nc.DType.kFloat8E4M3
    x = torch.randn(33, 50).bfloat16().requires_grad_(True)
    for make in (
        lambda: nc.Float8CurrentScalingQuantizer(E4M3),
        lambda: nc.MXFP8Quantizer(E4M3),
        lambda: nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
        lambda: nc.NVFP4Quantizer(with_rht=True),
        lambda: nc.IdentityQuantizer(),
    ):
        quantizer = make()
        assert quantizer == make() and hash(quantizer) == hash(make())
        known = "one class" in KIND and not isinstance(quantizer, nc.MXFP8Quantizer)
        assert nc.dynamo.is_value_opaque_quantizer(quantizer) == known
        expression, names = quantizer.__fx_repr__()
        assert eval(expression, names) == quantizer
        tensor = quantizer(x)
        (grad,) = torch.autograd.grad(tensor.dequantize().sum(), x)
        assert (grad == 1).all()
        assert nc.dynamo.to_tensor_proto(tensor).create_tensor().shape == x.shape
    layer = nc.Linear(50, 16, device="cpu", params_dtype=torch.bfloat16)
    for recipe in (nc.recipe.Float8CurrentScaling(), nc.recipe.DelayedScaling(), nc.recipe.NVFP4BlockScaling()):
        with nc.autocast(recipe=recipe):
            layer(x).sum().backward()
    assert layer.weight.grad.isfinite().all()
    layer.recipe = nc.recipe.MXFP8BlockScaling()
    if "raise" in KIND:  # else PyTorch itself cannot compile
        try:
            y = torch.compile(layer, backend="eager")(x)
        except Exception as error:
            assert "UpstreamError" in str(error) and "without torch.compile" in str(error) and "one class" not in KIND
        else:  # one class alone is unknown: what uses it runs as an island
            assert "one class" in KIND and torch.equal(y, layer(x))
    print("fine")
"""


@pytest.mark.parametrize(
    "crippled",
    [pytest.param(kind, marks=() if kind == "absent" else pytest.mark.requested) for kind in CRIPPLED],
)
def test_everything_runs_eagerly_without_the_api_and_without_a_gpu(crippled: str) -> None:
    """And raises in compiled code: an eager island would be slow in silence."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCES),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    source = textwrap.dedent(WITHOUT_API).replace("CRIPPLE", f"KIND = {crippled!r}\n{CRIPPLED[crippled]}")
    command = [sys.executable, "-c", source]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "fine", result.stderr[-2000:]


@pytest.mark.inductor
@pytest.mark.skipif(not opaque.AVAILABLE, reason="this PyTorch has no quantizers in graphs")
def test_the_compiler_s_cache_tells_versions_and_switches_apart(monkeypatch: Any, tmp_path: Path) -> None:
    """AOTAutograd's key reads a graph's text, and does not know which rules its operators were traced by."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    quantizer, x = nc.MXFP8Quantizer(E4M3, columnwise=False), torch.randn(32, 64)

    def hits() -> int:
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=True):
            torch.compile(lambda x: nc.functional.quantize(x, quantizer)[1] + 1, fullgraph=True)(x)
        found = counters["aot_autograd"]
        assert found["autograd_cache_hit"] + found["autograd_cache_miss"] == 1
        return found["autograd_cache_hit"]

    assert [hits(), hits()] == [0, 1]
    monkeypatch.setenv("NARROWCAST_INLINE", "0")
    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr("narrowcast.functional.quantizer_value.__version__", "9.9")
    assert [hits(), hits()] == [0, 1]
