"""Quantizers inside compiled functions: equal to eager bit for bit, one graph per value, errors that name the class."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import pytest
import torch
from quantizers.catalog import (
    E4M3,
    ONE_OF_EACH,
    USAGES,
    VARIANTS,
    assert_same_buffers,
    buffers,
    delayed,
    quantize,
)
from reference.checks import normal
from torch._dynamo.testing import CompileCounterWithBackend
from torch._library import opaque_object
from torch.torch_version import TorchVersion

import narrowcast as nc
from narrowcast.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer
from narrowcast.functional import dequantize as dequantize_operator
from narrowcast.functional import quantize as quantize_operator
from narrowcast.quantizers import Operand

BF16 = torch.bfloat16
METHODS_TRACE = (
    TorchVersion(torch.__version__) >= "2.13"
    or opaque_object.get_member_type(nc.MXFP8Quantizer, "quantize") is not None
)
needs_methods = pytest.mark.skipif(
    not METHODS_TRACE,
    reason="before torch 2.13 methods of a quantizer trace only if they are registered as inlined",
)
each_variant = pytest.mark.parametrize("name", VARIANTS)
some_variants = pytest.mark.parametrize(
    "name", [*ONE_OF_EACH, "block 1d", "nvfp4 stochastic", "nvfp4 row-scaled"]
)
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@each_variant
def test_operators(name: str) -> None:
    """Quantize and decode both directions with nothing but operators."""
    quantizer, stochastic = VARIANTS[name], VARIANTS[name]._is_stochastic()
    cls = quantizer._storage_class
    declared = cls.buffer_attributes(True, True)

    def run(x: torch.Tensor, seed: torch.Tensor) -> list[torch.Tensor]:
        made = quantize_operator(x * 2, quantizer, seed if stochastic else None)
        decoded = []
        for columnwise, wanted in ((False, cls._ROWWISE_BUFFERS), (True, cls._COLUMNWISE_BUFFERS)):
            operand = [made[declared.index(name)] for name in wanted]
            decoded.append(dequantize_operator(operand, quantizer, columnwise, BF16, list(x.shape)))
        return [*made, *decoded]

    seed = torch.tensor([11])
    function = compiled(run, dynamic=True)
    for shape in ((33, 50), (40, 64)):
        x = normal(shape, BF16)
        for a, b in zip(function(x, seed), run(x, seed), strict=True):
            assert a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


@some_variants
def test_operands(name: str) -> None:
    operand = Operand.of(VARIANTS[name])

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        rowwise, columnwise, _ = operand.quantize(x * 2)
        return rowwise + columnwise

    x = normal((3, 11, 50), BF16)
    torch.manual_seed(3)
    expected = run(x)
    torch.manual_seed(3)
    for a, b in zip(compiled(run)(x), expected, strict=True):
        assert torch.equal(a, b)


@needs_methods
@each_variant
def test_quantize_and_dequantize(name: str) -> None:
    """Every usage, as wrapper and as bare storage, in one graph."""
    makers = [
        VARIANTS[name].with_usage(*usage).replace(internal=internal)
        for usage in USAGES.values()
        for internal in (False, True)
    ]

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [quantizer.quantize(x).dequantize() + 1 for quantizer in makers]

    x = normal((33, 50), BF16)
    torch.manual_seed(3)
    expected = run(x)
    torch.manual_seed(3)
    for a, b in zip(compiled(run)(x), expected, strict=True):
        assert a.stride() == b.stride() and torch.equal(a, b)


@needs_methods
@one_of_each
def test_dynamic_shapes_and_usages_chosen_inside(name: str) -> None:
    quantizer = ONE_OF_EACH[name]
    counter = CompileCounterWithBackend("aot_eager")

    def run(x: torch.Tensor) -> torch.Tensor:
        return quantizer.with_usage(columnwise=False).quantize(x).dequantize()

    function = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for rows in (33, 20):
        x = normal((rows, 50), BF16)
        assert torch.equal(function(x), run(x))
    assert counter.frame_count == 1


@needs_methods
@some_variants
def test_a_wrapper_leaves_the_graph_and_enters_another(name: str) -> None:
    quantizer, x = VARIANTS[name], normal((33, 50), BF16)
    torch.manual_seed(3)
    tensor = compiled(lambda x: quantizer.quantize(x * 2))(x)
    expected = quantize(quantizer, x * 2)
    assert type(tensor) is type(expected) and tensor._quantizer == quantizer
    assert tensor.__tensor_flatten__() == expected.__tensor_flatten__()
    assert_same_buffers(tensor, expected)
    assert tuple(tensor.shape) == (33, 50) and tensor.dtype == BF16
    taken = compiled(lambda w, x: (x @ w.t(), w.dequantize() * 2))(tensor, x)
    assert torch.equal(taken[0], x @ expected.dequantize().t())
    assert torch.equal(taken[1], expected.dequantize() * 2)


@needs_methods
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in ONE_OF_EACH), ("mxfp8", BF16), ("nvfp4 stochastic", BF16)],
)
def test_the_gradient_passes_straight_through(name: str, dtype: torch.dtype) -> None:
    quantizer = VARIANTS[name]

    def run(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return quantizer.quantize(x * 2, dtype=BF16).dequantize() * factor

    x, factor = normal((33, 50), dtype).requires_grad_(True), normal((33, 50), BF16, seed=1)
    grads = []
    for function in (compiled(run), run):
        torch.manual_seed(3)
        y = function(x, factor)
        grads.append((y, *torch.autograd.grad(y.float().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert torch.equal(grads[0][1], 2 * factor.to(dtype)) and grads[0][1].dtype == dtype


@needs_methods
def test_a_gradient_for_a_wrapper_that_left_the_graph_is_refused_not_wrong() -> None:
    """The compiler expects the gradient of a wrapper to be a wrapper; dequantize inside the graph instead."""
    x = normal((33, 50), BF16).requires_grad_(True)
    tensor = compiled(lambda x: ONE_OF_EACH["mxfp8"].quantize(x))(x)
    assert tensor.requires_grad
    with pytest.raises(RuntimeError, match="tensor subclass"):
        tensor.dequantize().sum().backward()


def test_equal_quantizers_share_a_graph_and_others_do_not() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def run(x: torch.Tensor, quantizer: nc.Quantizer) -> torch.Tensor:
        return quantize_operator(x, quantizer)[0] + 0

    function, x = torch.compile(run, fullgraph=True, backend=counter), normal((32, 32), BF16)
    one = nc.Float8CurrentScalingQuantizer(E4M3)
    for quantizer in (one, one.copy(), nc.Float8CurrentScalingQuantizer(E4M3)):
        assert torch.equal(function(x, quantizer), run(x, quantizer))
    assert counter.frame_count == 1
    other = nc.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True)
    assert torch.equal(function(x, other), run(x, other))
    assert not torch.equal(run(x, one), run(x, other))
    assert counter.frame_count == 2
    function(x, one)
    assert counter.frame_count == 2


class Plain(nc.Float8CurrentScalingQuantizer):
    """A subclass that did not register."""


@register_value_opaque_quantizer
class Registered(nc.Float8CurrentScalingQuantizer):
    """A subclass that did."""

    halve: bool

    def __init__(self, *args: Any, halve: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._freeze(halve=halve)

    def _encode(self, numerics: Any, x: torch.Tensor, seed: torch.Tensor | None) -> list[torch.Tensor]:
        return super()._encode(numerics, x / 2 if self.halve else x, seed)


def test_the_predicate_traces() -> None:
    asked = [ONE_OF_EACH["current"], Registered(E4M3), Plain(E4M3), delayed()]

    def run(x: torch.Tensor) -> torch.Tensor:
        for power, quantizer in enumerate(asked):
            x = x + 10**power * is_value_opaque_quantizer(quantizer)
        return x

    assert compiled(run)(torch.zeros(1)).item() == run(torch.zeros(1)).item() == 11


def test_a_registered_subclass_compiles_with_its_own_knob() -> None:
    x = normal((32, 32), BF16)
    run = compiled(lambda x, q: dequantize_operator(quantize_operator(x, q), q, False, BF16, [32, 32]))
    for quantizer in (Registered(E4M3, columnwise=False), Registered(E4M3, columnwise=False, halve=True)):
        assert torch.equal(run(x, quantizer), quantizer.quantize(x).dequantize())
    assert not torch.equal(run(x, quantizer), run(x, quantizer.replace(halve=False)))


def namesake(module: str, factor: float) -> type[nc.Quantizer]:
    """A registered class called Namesake of that module, which multiplies before it encodes."""

    class Namesake(nc.Float8CurrentScalingQuantizer):
        def _encode(self, numerics: Any, x: torch.Tensor, seed: torch.Tensor | None) -> list[torch.Tensor]:
            return super()._encode(numerics, x * factor, seed)

    named = type("Namesake", (Namesake,), {"__module__": module, "__qualname__": "Namesake"})
    return register_value_opaque_quantizer(named)


def test_classes_of_one_name_stay_apart_in_a_graph() -> None:
    """From two modules, and one defined twice: nothing takes one for the other."""
    quantizers = [namesake(module, factor)(E4M3) for module, factor in (("one", 1), ("two", 2), ("two", 4))]  # type: ignore[call-arg]
    x = normal((32, 32), BF16)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [quantizer.quantize(x).dequantize() for quantizer in quantizers]

    results = run(x)
    for ours, theirs in zip(compiled(run)(x), results, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])
    assert len({quantizer._value_text() for quantizer in quantizers}) == 3


def test_a_class_defined_again_is_not_swapped_into_a_hybrid() -> None:
    x, other = normal((32, 32), BF16), nc.MXFP8Quantizer(E4M3)
    first = namesake("notebook", 2)(E4M3)  # type: ignore[call-arg]
    hybrid = nc.HybridQuantizer(rowwise_quantizer=first, columnwise_quantizer=other)
    expected = hybrid.quantize(x).dequantize()
    again = namesake("notebook", 8)(E4M3)  # type: ignore[call-arg]
    assert torch.equal(hybrid.replace().quantize(x).dequantize(), expected)
    assert torch.equal(compiled(lambda x: hybrid.quantize(x).dequantize())(x), expected)
    assert nc.HybridQuantizer(rowwise_quantizer=again, columnwise_quantizer=other) != hybrid


@pytest.mark.parametrize("quantizer", [Plain(E4M3), delayed()], ids=["subclass", "delayed"])
def test_an_unregistered_quantizer_is_named(quantizer: nc.Quantizer) -> None:
    name = type(quantizer).__name__
    x = normal((32, 32), BF16)
    fix = (
        "use a module under the DelayedScaling recipe"
        if name == "Float8Quantizer"
        else "register_value_opaque_quantizer"
    )
    with pytest.raises(RuntimeError) as raised:
        compiled(lambda x: quantizer.quantize(x).dequantize())(x)
    assert re.search(f"{name}.*{fix}", str(raised.value).splitlines()[0])
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=name):
        compiled(lambda x: quantize_operator(x, quantizer)[0])(x)


def test_an_unregistered_quantizer_runs_between_graphs() -> None:
    """Without ``fullgraph``: the same bytes, state included; what is around it is compiled."""
    x = normal((32, 32), BF16)
    pairs: list[tuple[Any, Any]] = [(Plain(E4M3), Plain(E4M3)), (delayed(), delayed())]
    for ours, theirs in pairs:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        function = torch.compile(lambda x, q=ours: q.quantize(torch.sin(x)), backend=counter)
        assert_same_buffers(function(x), theirs.quantize(torch.sin(x)))
        assert counter.frame_count == 1
        if isinstance(ours, nc.Float8Quantizer):
            assert torch.equal(ours.amax, theirs.amax) and ours.amax > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.dequantize() + 1,
        lambda t: t + 1,
        lambda t: t[:16] + 1,
        lambda t: t.t().sum(0) + t.flatten()[:32],
        lambda t: (t + 1) @ t,
        lambda t: torch.nn.functional.linear(torch.ones(3, 32, dtype=BF16), t),
    ],
    ids=["dequantized", "added", "sliced", "viewed", "multiplied", "weight"],
)
def test_what_reads_a_tensor_of_an_unregistered_quantizer_runs_between_graphs(backend: str, use: Any) -> None:
    torch._dynamo.reset()
    quantizer, x = Plain(E4M3), normal((32, 32), BF16)
    expected = use(quantizer.quantize(x * 2)) * 3
    made = torch.compile(lambda x: use(quantizer.quantize(x * 2)) * 3, backend=backend)
    given = torch.compile(lambda t: use(t) * 3, backend=backend)
    for _ in range(2):
        assert torch.equal(made(x), expected)
        assert torch.equal(given(quantizer.quantize(x * 2)), expected)
    with pytest.raises(Exception, match="register_value_opaque_quantizer"):
        torch.compile(lambda t: use(t) * 3, backend=backend, fullgraph=True)(quantizer.quantize(x * 2))


def test_an_unregistered_quantizer_that_is_called_runs_between_graphs_or_is_named() -> None:
    """PyTorch 2.15 lets no graph end at the call of an object whose class a registered one is the base of.

    PyTorch 2.12 to 2.14 fail at an assertion of their own (seen on 2.13).
    """
    torch._dynamo.reset()
    quantizer, x = Plain(E4M3), normal((32, 32), BF16)
    message = ""
    try:
        found = torch.compile(lambda x: quantizer(x * 2).float() + 1, backend="aot_eager")(x)
    except Exception as error:
        message = str(error)
    else:
        assert torch.equal(found, quantizer(x * 2).float() + 1)
    fails_by_itself = TorchVersion(torch.__version__) < "2.15" and "cls_source must not be None" in message
    assert not message or fails_by_itself or "register_value_opaque_quantizer(Plain)" in message


def unregistered(kind: str) -> Any:
    """A layer whose recipe makes quantizers that are no values."""
    recipe = nc.recipe.CustomRecipe(qfactory=lambda role: Plain(E4M3))
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cpu", "params_dtype": BF16}
    if kind == "sequential":
        parts = nc.ops.Linear(32, 32, device="cpu", dtype=BF16), nc.ops.GELU(), nc.ops.Quantize()
        layer = nc.ops.Sequential(*parts)
        nc.set_recipe(layer, recipe)
        return layer
    if kind == "grouped_linear":
        layer = nc.GroupedLinear(2, 32, 32, recipe=recipe, **options)
        return functools.partial(layer, m_splits=[8, 24])
    kinds: dict[str, Any] = {
        "linear": nc.Linear,
        "layernorm_linear": nc.LayerNormLinear,
        "layernorm_mlp": nc.LayerNormMLP,
    }
    return kinds[kind](32, 32, recipe=recipe, **options)


@pytest.mark.parametrize(
    ("kind", "grad"),
    [
        ("linear", True),
        ("layernorm_linear", True),
        ("layernorm_mlp", True),
        ("grouped_linear", True),
        ("sequential", True),
        ("sequential", False),
    ],
)
def test_a_layer_with_unregistered_quantizers_is_an_eager_island(kind: str, grad: bool) -> None:
    layer, x = unregistered(kind), normal((32, 32), BF16).requires_grad_(grad)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(layer(torch.cos(x)))

    counter = CompileCounterWithBackend("aot_eager")
    results = []
    with contextlib.nullcontext() if grad else torch.no_grad():
        for function in (model, torch.compile(model, backend=counter)):
            y = function(x)
            results.append([y, *torch.autograd.grad(y.float().sum(), x)] if grad else [y])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counter.frame_count >= 2  # what is in front and behind
    torch._dynamo.reset()
    with pytest.raises(RuntimeError) as raised:
        compiled(model)(x)
    first = str(raised.value).splitlines()[0]
    assert "Plain is not registered" in first and "register_value_opaque_quantizer(Plain)" in first


@one_of_each
def test_parameters_and_optimizer_steps(name: str) -> None:
    """A quantized parameter is read in a graph and written by an optimizer between two calls of it."""
    quantizer = ONE_OF_EACH[name]
    weight = torch.nn.Parameter(quantizer.quantize(normal((33, 50), BF16)))
    x = normal((7, 50), BF16).requires_grad_(True)
    counter = CompileCounterWithBackend("aot_eager")

    def run(x: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()

    function = torch.compile(run, fullgraph=True, backend=counter)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for _ in range(2):
        results = [torch.autograd.grad(f(x).float().square().sum(), (x, weight)) for f in (function, run)]
        for a, b in zip(*results, strict=True):
            assert type(a) is torch.Tensor and torch.equal(a, b)
        before = {key: b.clone() for key, b in buffers(weight).items()}
        weight.grad = results[0][1]
        optimizer.step()
        assert any(not torch.equal(before[key], b) for key, b in buffers(weight).items())
    assert counter.frame_count == 1


@pytest.mark.inductor
@needs_methods
@pytest.mark.parametrize("module", ["__main__", __name__])
def test_classes_of_scripts_and_functions_under_inductor(module: str) -> None:
    """The graph is written to a module that cannot import them, and in which Python mangles names like ``__main__``."""

    @register_value_opaque_quantizer
    class Mine(nc.MXFP8Quantizer):
        __module__ = module

    def run(x: torch.Tensor) -> torch.Tensor:
        return quantizer.quantize(x * 2).dequantize() + 1

    quantizer, x = Mine(E4M3), normal((32, 64), BF16).requires_grad_(True)
    y = torch.compile(run, fullgraph=True)(x)
    assert torch.equal(y, run(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert (grad == 2).all()
