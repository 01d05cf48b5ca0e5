"""Recipes and quantizers are set up before their first use; afterwards, and in graphs, nothing changes unnoticed."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantizers.catalog import E4M3, assert_same_buffers

import narrowcast as nc
from narrowcast.functional import quantize as quantize_operator
from narrowcast.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def compiled(function: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


def make_layer(recipe: Recipe | None = None) -> nc.Linear:
    return nc.Linear(32, 32, device="cpu", params_dtype=torch.bfloat16, recipe=recipe)


def under(recipe: Recipe, layer: nc.Linear) -> torch.Tensor:
    with nc.autocast(recipe=recipe):
        return layer(X)


# -- before the first use ----------------------------------------------------------------------------------------------


def test_a_recipe_is_set_up_by_assignment() -> None:
    recipe = Float8CurrentScaling()
    recipe.use_power_2_scales = True
    recipe.fp8_gemm_fprop = MMParams(True)
    recipe.backward_override = "dequantized"
    expected = Float8CurrentScaling(
        use_power_2_scales=True, fp8_gemm_fprop=MMParams(True), backward_override="dequantized"
    )
    assert recipe == expected and hash(recipe) == hash(expected)
    assert recipe.fp8_quant_fwd_inp == QParams(power_2_scale=True)  # what follows from a field follows it
    with pytest.raises(ValueError, match="backward_override is 'none'"):
        Float8CurrentScaling().backward_override = "none"  # type: ignore[assignment]
    kept = MXFP8BlockScaling()
    with pytest.raises(ValueError):
        kept.backward_override = "none"  # type: ignore[assignment]
    assert kept == MXFP8BlockScaling()
    with pytest.raises(AttributeError, match="MXFP8BlockScaling has no field 'fp8_gemm_fprop'"):
        kept.fp8_gemm_fprop = MMParams(True)  # it would be no part of the value
    with pytest.raises(AttributeError, match="DelayedScaling has no field 'marign'; did you mean margin[?]$"):
        DelayedScaling().marign = 2  # type: ignore[attr-defined]


def test_operands_of_nvfp4() -> None:
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_fwd_weight = QParams()
    assert recipe != NVFP4BlockScaling()
    assert recipe.make_quantizer("weight") == nc.NVFP4Quantizer()
    same = NVFP4BlockScaling(disable_2d_quantization=True)
    assert recipe.make_quantizer("weight") == same.make_quantizer("weight")
    recipe = NVFP4BlockScaling()
    recipe.fp4_quant_fwd_inp = (
        QParams()
    )  # rotated gradients would meet inputs that are not, unless more is assigned
    with pytest.raises(ValueError, match="it cancels in wgrad"):
        hash(recipe)
    plain = NVFP4BlockScaling(disable_rht=True)
    assert plain.make_quantizer("input") == nc.NVFP4Quantizer()


def test_a_quantizer_is_set_up_by_assignment() -> None:
    quantizer = nc.MXFP8Quantizer(E4M3)
    quantizer.set_usage(columnwise=False)
    quantizer.internal = True
    expected = nc.MXFP8Quantizer(E4M3).with_usage(columnwise=False).replace(internal=True)
    assert quantizer == expected and hash(quantizer) == hash(expected)
    assert_same_buffers(quantizer.quantize(X), expected.quantize(X))
    with pytest.raises(AttributeError, match="no field 'cache'"):
        nc.MXFP8Quantizer(E4M3).cache = 1  # type: ignore[attr-defined]
    rotated = nc.NVFP4Quantizer(with_rht=True)
    with pytest.raises(ValueError, match="nvfp4_use_4over6 together with with_rht"):
        rotated.nvfp4_use_4over6 = True
    assert rotated == nc.NVFP4Quantizer(with_rht=True)


def test_a_class_of_your_own_may_keep_what_it_likes() -> None:
    class Own(nc.MXFP8Quantizer):
        def __init__(self) -> None:
            super().__init__(E4M3)
            self.seen: list[int] = []

    assert Own().seen == [] and Own().copy().seen == []  # type: ignore[attr-defined]


# -- from then on ------------------------------------------------------------------------------------------------------

RECIPE_USES: dict[str, Callable[[Recipe], Any]] = {
    "hashed": hash,
    "entered": lambda recipe: nc.autocast(recipe=recipe),
    "given to a layer": make_layer,
    "given to a model": lambda recipe: nc.set_recipe(make_layer(), recipe),
}
KINDS = (Float8CurrentScaling, DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling, Float8BlockScaling)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", RECIPE_USES)
def test_a_used_recipe_names_replace(use: str, kind: type[Recipe]) -> None:
    recipe: Any = kind()
    recipe.emulate = True
    RECIPE_USES[use](recipe)
    with pytest.raises(
        AttributeError, match=r"has been used.*dataclasses\.replace\(recipe, emulate=\.\.\.\)"
    ):
        recipe.emulate = False
    assert recipe.emulate
    changed = dataclasses.replace(recipe, emulate=False)
    assert changed == kind(emulate=False)  # type: ignore[call-arg]


def test_a_copy_of_a_used_recipe_has_no_plans() -> None:
    recipe, layer = Float8CurrentScaling(), make_layer()
    exact = under(Float8CurrentScaling(use_power_2_scales=True), layer)
    first = under(recipe, layer)
    for copied in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        copied.use_power_2_scales = True
        assert torch.equal(under(copied, layer), exact)
    assert torch.equal(under(recipe, layer), first) and not torch.equal(first, exact)


QUANTIZER_USES: dict[str, Callable[[nc.Quantizer], Any]] = {
    "hashed": hash,
    "compared": lambda quantizer: quantizer == nc.MXFP8Quantizer(E4M3),
    "quantizes": lambda quantizer: quantizer.quantize(X),
    "describes": lambda quantizer: quantizer.make_empty((32, 32), device="cpu"),
    "from a factory": lambda quantizer: make_layer(CustomRecipe(qfactory=lambda role: quantizer))(X),
}


@pytest.mark.parametrize("use", QUANTIZER_USES)
def test_a_used_quantizer_names_with_usage(use: str) -> None:
    quantizer = nc.MXFP8Quantizer(E4M3)
    QUANTIZER_USES[use](quantizer)
    with pytest.raises(AttributeError, match=r"has been used.*replace.*with_usage"):
        quantizer.set_usage(rowwise=False)
    copied = quantizer.copy()
    copied.set_usage(rowwise=False)
    assert copied == quantizer.with_usage(rowwise=False)


def test_halves_of_a_hybrid_cannot_be_changed() -> None:
    halves = nc.MXFP8Quantizer(E4M3), nc.NVFP4Quantizer()
    hybrid = nc.HybridQuantizer(rowwise_quantizer=halves[0], columnwise_quantizer=halves[1])
    with pytest.raises(AttributeError, match="has been used"):
        hybrid.rowwise_quantizer.internal = True


# -- in graphs ---------------------------------------------------------------------------------------------------------


def operand(quantizer: nc.Quantizer) -> Callable[..., Any]:
    return lambda x: quantize_operator(x, quantizer)[0] + 0


def attribute(quantizer: nc.Quantizer) -> Callable[..., Any]:
    return lambda x: x + 1 if quantizer.rowwise_usage else x - 1


@pytest.mark.parametrize("read", [operand, attribute])
def test_what_a_graph_has_read_cannot_be_changed(read: Callable[..., Any]) -> None:
    """Else the graph would go on with what it had read: no silent miscompile."""
    quantizer = nc.MXFP8Quantizer(E4M3)
    compiled(read(quantizer))(X)
    with pytest.raises(AttributeError, match="has been used"):
        quantizer.rowwise_usage = False


def test_what_a_graph_ran_under_cannot_be_changed() -> None:
    recipe, layer = Float8CurrentScaling(), make_layer()

    def run(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=recipe):
            return layer(x)

    assert torch.equal(compiled(run)(X), run(X))
    with pytest.raises(AttributeError, match="has been used"):
        recipe.backward_override = "dequantized"


def test_a_field_that_a_graph_only_read_is_guarded() -> None:
    recipe = Float8CurrentScaling()
    function = compiled(lambda x: x + 1 if recipe.fp8_format is Format.HYBRID else x - 1)
    assert torch.equal(function(X), X + 1)
    recipe.fp8_format = Format.E4M3
    assert torch.equal(function(X), X - 1)


def test_nothing_is_set_in_a_graph() -> None:
    quantizer, recipe, layer = nc.MXFP8Quantizer(E4M3), Float8CurrentScaling(), make_layer()

    def quantizes(x: torch.Tensor) -> Any:
        quantizer.set_usage(rowwise=not quantizer.rowwise_usage)
        return quantize_operator(x, quantizer)[0] + 0

    def runs(x: torch.Tensor) -> torch.Tensor:
        recipe.backward_override = "dequantized"
        with nc.autocast(recipe=recipe):
            return layer(x)

    for function in (quantizes, runs):
        with pytest.raises(RuntimeError, match="immutable|Observed exception|unregistered member"):
            compiled(function)(X)
    assert quantizer.rowwise_usage and recipe.backward_override is None


def test_a_factory_may_set_up_what_it_returns() -> None:
    def qfactory(role: nc.QuantizerRole) -> nc.Quantizer:
        quantizer = nc.Float8CurrentScalingQuantizer(E4M3)
        quantizer.force_pow_2_scales = True
        quantizer.set_usage(columnwise=role.tensor_type != "output")
        return quantizer

    recipe, layer = CustomRecipe(qfactory=qfactory), make_layer()
    expected = under(Float8CurrentScaling(use_power_2_scales=True), layer)
    with nc.autocast(recipe=recipe):
        assert torch.equal(compiled(layer)(X), expected)
