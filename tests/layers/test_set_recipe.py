"""A layer's own recipe: by constructor, by ``set_recipe`` with patterns and JSON; ``autocast`` wins where entered."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc
from narrowcast.recipe import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, recipes_to_json

CURRENT, MXFP8 = Float8CurrentScaling(), MXFP8BlockScaling()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nc.LayerNormLinear(32, 32, device="cpu")
        self.mlp = nn.Sequential(nc.Linear(32, 64, device="cpu"), nn.GELU(), nc.Linear(64, 32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.attention(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.lm_head = nc.Linear(32, 16, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def output(model: Callable[..., Any], x: Tensor, recipe: Any = None) -> Tensor:
    """Under an autocast, or, without a recipe, under none at all."""
    if recipe is None:
        return model(x)
    with nc.autocast(recipe=recipe):
        return model(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda **own: nc.Linear(32, 48, device="cpu", **own),
        lambda **own: nc.LayerNormLinear(32, 48, device="cpu", **own),
        lambda **own: nc.LayerNormMLP(32, 48, device="cpu", **own),
    ],
    ids=["linear", "layernorm_linear", "layernorm_mlp"],
)
def test_a_layer_runs_under_the_recipe_it_was_made_with(make: Any) -> None:
    own, other, x = make(recipe=CURRENT), make(), torch.randn(16, 32)
    other.load_state_dict(own.state_dict())
    assert own.recipe is CURRENT
    assert torch.equal(own(x), output(other, x, CURRENT))
    assert not torch.equal(own(x), other(x))
    own.recipe = MXFP8
    assert torch.equal(own(x), output(other, x, MXFP8))
    own.recipe = None
    assert torch.equal(own(x), other(x))


def test_a_grouped_layer_runs_under_its_own_recipe() -> None:
    layer, x = nc.GroupedLinear(2, 32, 48, device="cpu", recipe=CURRENT), torch.randn(16, 32)
    own = layer(x, [6, 10])
    layer.recipe = None
    with nc.autocast(recipe=CURRENT):
        assert torch.equal(own, layer(x, [6, 10]))
    assert not torch.equal(own, layer(x, [6, 10]))


def test_operations_run_under_the_recipe_they_were_given() -> None:
    linears = [nc.ops.Linear(32, 48, device="cpu"), nc.ops.GELU(), nc.ops.Linear(48, 32, device="cpu")]
    model, x = nc.ops.Sequential(*linears), torch.randn(16, 32)
    plain, current, mxfp8 = model(x), output(model, x, CURRENT), output(model, x, MXFP8)
    nc.set_recipe(model, CURRENT)
    assert torch.equal(model(x), current)
    assert torch.equal(output(model, x, MXFP8), mxfp8)
    with nc.autocast(enabled=False):
        assert torch.equal(model(x), plain)
    nc.set_recipe(model, None)
    assert torch.equal(model(x), plain)


def test_one_recipe_for_a_model() -> None:
    model, x = Model(), torch.randn(8, 32)
    expected = output(model, x, CURRENT)
    assert nc.set_recipe(model, CURRENT) is model
    assert torch.equal(model(x), expected)
    assert set(nc.get_recipes(model).values()) == {CURRENT}
    assert len(nc.get_recipes(model)) == 3 * 3 + 1


def test_autocast_wins_where_it_is_entered() -> None:
    model, x = Model(), torch.randn(8, 32)
    plain, mxfp8 = model(x), output(model, x, MXFP8)
    nc.set_recipe(model, CURRENT)
    own = model(x)
    assert torch.equal(output(model, x, MXFP8), mxfp8)
    with nc.autocast(enabled=False):
        assert torch.equal(model(x), plain)
        with nc.autocast(recipe=MXFP8):
            assert torch.equal(model(x), mxfp8)
    assert torch.equal(model(x), own)
    assert not torch.equal(own, plain)


def test_autocast_wins_in_compiled_code() -> None:
    layer, x = nc.Linear(32, 48, device="cpu", recipe=CURRENT), torch.randn(16, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for recipe in (None, MXFP8, None):
        assert torch.equal(output(compiled, x, recipe), output(layer, x, recipe))
    with nc.autocast(enabled=False):
        assert torch.equal(compiled(x), layer(x))
    layer.recipe = MXFP8  # the graph is guarded on the layer's recipe
    assert torch.equal(compiled(x), layer(x))


def chosen(model: nn.Module) -> dict[str, str]:
    names = {CURRENT: "current", MXFP8: "mxfp8", None: "none"}
    return {name: names[recipe] for name, recipe in nc.get_recipes(model).items()}


def test_later_patterns_override_earlier() -> None:
    model = nc.set_recipe(Model(), {"": CURRENT, "layers.*.mlp": MXFP8, "layers.2": None, "lm_head": None})
    for name, recipe in chosen(model).items():
        block = name.split(".")[1] if name.startswith("layers") else None
        wanted = "none" if block in (None, "2") else "mxfp8" if "mlp" in name else "current"
        assert recipe == wanted, name


def test_what_patterns_match() -> None:
    everywhere = nc.set_recipe(Model(), {"**.attention": CURRENT})
    assert {name for name, recipe in chosen(everywhere).items() if recipe == "current"} == {
        f"layers.{block}.attention" for block in range(3)
    }
    one = nc.set_recipe(Model(), {"layers.1.mlp.2": CURRENT})
    assert [name for name, recipe in chosen(one).items() if recipe == "current"] == ["layers.1.mlp.2"]
    with pytest.raises(ValueError):
        nc.set_recipe(Model(), {"layers.*.0": CURRENT})  # * is one part of a name, and no name's end
    with pytest.raises(ValueError):
        nc.set_recipe(Model(), {"layer": CURRENT})  # nor is the beginning of a part the part
    with pytest.raises(ValueError):
        nc.set_recipe(Model(), {"layersX1": CURRENT, "layers.1": CURRENT})


def test_a_second_table_leaves_alone_what_it_does_not_name() -> None:
    model = nc.set_recipe(Model(), CURRENT)
    nc.set_recipe(model, {"lm_head": None})
    assert chosen(model) == {name: "none" if name == "lm_head" else "current" for name in chosen(model)}


def test_a_part_of_a_model_and_a_single_layer() -> None:
    model = Model()
    nc.set_recipe(model.layers[1], {"mlp": CURRENT})
    assert [name for name, recipe in chosen(model).items() if recipe == "current"] == [
        "layers.1.mlp.0",
        "layers.1.mlp.2",
    ]
    layer = nc.set_recipe(nc.Linear(8, 8, device="cpu"), CURRENT)
    assert nc.get_recipes(layer) == {"": CURRENT}


def test_through_json() -> None:
    table = {
        "": Float8CurrentScaling(use_power_2_scales=True),
        "layers.*.mlp": NVFP4BlockScaling(disable_rht=True),
        "layers.0": nc.recipe.DelayedScaling(amax_history_len=7, fp8_format=nc.recipe.Format.E4M3),
        "lm_head": None,
    }
    text = recipes_to_json(table)
    first, second = nc.set_recipe(Model(), table), nc.set_recipe(Model(), text)
    assert nc.get_recipes(first) == nc.get_recipes(second)
    assert nc.recipe.recipes_from_json(text) == table
    described = nc.get_recipes(first)
    assert (
        nc.set_recipe(Model(), recipes_to_json(described)) is not None
    )  # what was read back is a table, too


@pytest.mark.parametrize(
    "text, message",
    [
        ("no json", "set_recipe: no recipe is named 'no json'; use one of .*'nvfp4'"),
        ("{no json", "^set_recipe: recipe: the recipes are not JSON"),
        ("[1]", "JSON list"),
        ('{"": {"type": "FP8"}}', "recipe type 'FP8'"),
        ('{"": 3}', "'' is 3"),
        ('{"": {"type": "MXFP8BlockScaling", "colour": 1}}', "no field 'colour'"),
    ],
)
def test_json_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nc.set_recipe(Model(), text)


def test_a_recipe_with_a_function_has_no_json() -> None:
    recipe = nc.recipe.CustomRecipe(qfactory=lambda role: nc.MXFP8Quantizer(nc.DType.kFloat8E4M3))
    with pytest.raises(TypeError, match="no JSON"):
        recipes_to_json({"": recipe})


def test_a_pattern_that_matches_nothing() -> None:
    model = Model()
    with pytest.raises(
        ValueError,
        match=r"^recipe: 'head' matches no low-precision layer of this Model; the nearest: 'lm_head'",
    ):
        nc.set_recipe(model, {"": CURRENT, "head": MXFP8})
    assert set(nc.get_recipes(model).values()) == {None}  # nothing was changed


def test_a_model_without_layers() -> None:
    told = r"this Sequential has no low-precision layer; call narrowcast.convert\(model, recipe\) first"
    with pytest.raises(ValueError, match=told):
        nc.set_recipe(nn.Sequential(nn.Linear(4, 4)), CURRENT)


@pytest.mark.parametrize("recipe", [3, "MXFP8", {"": "MXFP8"}, Float8CurrentScaling])
def test_no_recipe(recipe: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="recipe"):
        nc.set_recipe(Model(), recipe)
    with pytest.raises((TypeError, ValueError), match="recipe"):
        nc.Linear(4, 4, device="cpu", recipe=recipe)


def test_a_compiled_model_under_an_autocast_of_another_history() -> None:
    """The graph reads histories of the length that the autocast's recipe has, from the first call on."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nc.Linear(32, 48, device="cpu"), nc.Linear(48, 32, device="cpu"))
        nc.set_recipe(model, nc.recipe.DelayedScaling(amax_history_len=2))
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for step in range(4):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * (1 + step)
            with nc.autocast(recipe=nc.recipe.DelayedScaling(amax_history_len=5)):
                y = run(x)
            y.square().mean().backward()
            nc.renew_delayed_scaling(model)
            results.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
            results[-1] += [b.clone() for b in model.buffers()]
        assert model[0].amax_history.shape[0] == 5
    for eager, ours in zip(results[:4], results[4:]):
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("own", [True, False])
def test_compiled_layers_renew_by_the_rule_of_the_recipe_in_force(own: bool) -> None:
    """Two recipes give the same graph and renew by different rules: it serves the second with the rule of the first."""
    recent = nc.recipe.DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent")
    largest = nc.recipe.DelayedScaling(amax_history_len=3, margin=1)

    def train(compiles: bool) -> list[tuple[str, float]]:
        torch.manual_seed(0)
        model, seen = nn.Sequential(nc.Linear(7, 5)), []
        if own:
            nc.set_recipe(model, recent)
        run = torch.compile(model, backend="eager") if compiles else model
        for step, magnitude in enumerate((1.0, 8.0, 0.1, 0.1, 0.1)):
            x = magnitude * torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
            recipe = largest if step in (1, 2) else recent
            with contextlib.nullcontext() if own and recipe is recent else nc.autocast(recipe=recipe):
                run(x).square().sum().backward()
            nc.renew_delayed_scaling(model)
            seen.append((model[0].delayed_slots()[0].recipe.amax_compute_algo, float(model[0].scale[0])))
        return seen

    eager = train(compiles=False)
    assert [algorithm for algorithm, _ in eager] == [
        "most_recent",
        "max",
        "max",
        "most_recent",
        "most_recent",
    ]
    for (algorithm, scale), expected in zip(train(compiles=True), eager, strict=True):
        assert (algorithm, scale) == (expected[0], pytest.approx(expected[1], rel=1e-5))


def test_an_unknown_policy_is_refused_before_anything_is_set() -> None:
    model = Model()
    with pytest.raises((ValueError, TypeError), match="policy"):
        nc.set_recipe(model, CURRENT, policy="fastest")
    assert model.lm_head.recipe is None
    with pytest.raises(ValueError, match="policy is 'fastest'"):  # of layers that no policy chooses for, too
        nc.set_recipe(nc.GroupedLinear(2, 32, 32, device="cpu"), CURRENT, policy="fastest", rows=8)


def test_json_keeps_what_does_not_follow_from_the_settings() -> None:
    """Parameters that are the default's, where the settings would give others."""
    recipe = nc.recipe.Float8CurrentScaling(use_power_2_scales=True, fp8_quant_fwd_inp=nc.recipe.QParams())
    table = {"": recipe}
    assert nc.recipe.recipes_from_json(nc.recipe.recipes_to_json(table)) == table


def test_a_graph_of_a_recomputation_fits_the_next_one_in_another_thread() -> None:
    """A GPU's backward runs in a thread of its own, which an autocast of the forward's thread does not know."""
    torch._dynamo.reset()
    recipe, counter = nc.recipe.DelayedScaling(amax_history_len=2), CompileCounterWithBackend("aot_eager")
    layer = nc.Linear(7, 7, device="cpu")
    call, counts = torch.compile(layer, backend=counter), []
    with ThreadPoolExecutor(1) as backwards:
        for step in range(5):
            x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with nc.autocast(recipe=recipe):
                y = nc.checkpoint(call, x)
            backwards.submit(y.square().sum().backward).result()
            counts.append(counter.frame_count)
    assert counts[1] == counts[-1] <= 3


def test_none_on_a_plain_layer_is_what_that_is() -> None:
    model = nn.Sequential(OrderedDict(body=nc.Linear(16, 16), norm=nn.LayerNorm(16), head=nn.Linear(16, 8)))
    nc.set_recipe(model, {"": MXFP8, "head": None, "norm": None})
    assert nc.get_recipes(model) == {"body": MXFP8}
    with pytest.raises(ValueError, match=r"'hed' matches no low-precision layer .* the nearest: 'head'"):
        nc.set_recipe(model, {"": MXFP8, "hed": None})
    with pytest.raises(ValueError, match=r"it matches 'head' \(Linear\), which is none"):
        nc.set_recipe(model, {"head": MXFP8})


def test_a_printed_recipe_shows_what_differs_from_its_defaults() -> None:
    """Its 14 fields, most at their defaults, filled a screen per layer in get_recipes."""
    recipe = nc.recipe
    for one, printed in (
        (recipe.Float8CurrentScaling(), "Float8CurrentScaling()"),
        (recipe.NVFP4BlockScaling(disable_rht=True), "NVFP4BlockScaling(disable_rht=True)"),
        (
            recipe.DelayedScaling(margin=1, fp8_format=recipe.Format.E4M3),
            "DelayedScaling(margin=1, fp8_format=Format.E4M3)",
        ),
    ):
        assert repr(one) == printed
        assert eval(printed, vars(recipe)) == one
    given = recipe.Float8CurrentScaling(fp8_quant_fwd_inp=recipe.QParams(power_2_scale=True))
    assert "fp8_quant_fwd_inp=QParams(power_2_scale=True" in repr(given)
    model = nn.Sequential(nc.Linear(16, 16, recipe="current"))
    assert str(nc.get_recipes(model)) == "{'0': Float8CurrentScaling()}"


@pytest.mark.parametrize(
    ("layer", "shown"),
    [
        (nc.Linear(16, 16, recipe="current"), "bias=True, recipe=current)"),
        (nc.LayerNormLinear(16, 16, recipe=nc.recipe.DelayedScaling(margin=1)), "recipe=delayed(margin=1))"),
        (nc.LayerNormMLP(16, 32, recipe="mxfp8"), "recipe=mxfp8"),
        (nc.GroupedLinear(2, 16, 16, recipe="block"), "bias=True, recipe=block)"),
        (nc.Linear(16, 16), "bias=True)"),
        (nc.convert(nn.Linear(16, 16), "nvfp4"), "bias=True, recipe=nvfp4)"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_a_printed_layer_names_its_recipe(layer: nn.Module, shown: str) -> None:
    assert shown in repr(layer)


def test_no_table_has_no_json() -> None:
    with pytest.raises(TypeError, match="^recipes is 'x', of type str; pass a table"):
        nc.recipe.recipes_to_json("x")  # type: ignore[arg-type]
