"""CustomRecipe and the factories: what they are asked, what they may answer, and what a layer then computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from modules import assert_equal

import narrowcast as nc
from narrowcast import custom_recipes
from narrowcast.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from narrowcast.roles import QuantizerRole
from narrowcast.state import THREAD, AutocastState

E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2
K, N = 48, 80
LINEAR_ROLES = [QuantizerRole("linear", kind, "fc1") for kind in ("input", "weight", "grad_output")]
LIKE: dict[str, Recipe] = {
    "current_scaling": Float8CurrentScaling(),
    "float8_block_scaling": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
FACTORIES: dict[str, Callable[[QuantizerRole], Any]] = {
    name: getattr(custom_recipes, f"{name}_factory") for name in ("high_precision", "delayed_scaling", *LIKE)
}


@pytest.fixture(autouse=True)
def clean_autocast() -> Iterator[None]:
    THREAD.state = AutocastState()
    yield
    THREAD.state = AutocastState()


def make_layer(**kwargs: Any) -> nc.Linear:
    torch.manual_seed(1)
    kwargs.setdefault("name", "fc1")
    return nc.Linear(K, N, device="cpu", **kwargs)


def make_input(seed: int = 2) -> torch.Tensor:
    return torch.randn(24, K, generator=torch.Generator().manual_seed(seed)).requires_grad_(True)


def results(layer: nc.Linear, recipe: Recipe | None, x: torch.Tensor, run: Any = None) -> list[torch.Tensor]:
    """Output and gradients of one step."""
    torch.manual_seed(7)  # stochastic rounding repeats
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        y = (layer if run is None else run)(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))]


def compiled(function: Any, **kwargs: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **kwargs)


# -- the factories ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIKE)
def test_factories_equal_the_recipes_of_their_name(name: str) -> None:
    for role in LINEAR_ROLES + [QuantizerRole("linear", kind) for kind in ("output", "grad_input")]:
        ours, theirs = FACTORIES[name](role), LIKE[name].make_quantizer(role.tensor_type)
        assert ours.with_usage(True, True) == theirs.with_usage(True, True), role
    layer, x = make_layer(), make_input()
    assert_equal(results(layer, CustomRecipe(qfactory=FACTORIES[name]), x), results(layer, LIKE[name], x))


@pytest.mark.parametrize(
    ("name", "kind", "row", "column", "source"),
    [
        ("mxfp8_fwd_nvfp4_bwd", "input", "MXFP8", "NVFP4", "original"),
        ("mxfp8_fwd_nvfp4_bwd", "weight", "MXFP8", "NVFP4", "rowwise_dequantized"),
        ("mxfp8_fwd_high_precision_bwd", "input", "MXFP8", "Identity", "rowwise_dequantized"),
        ("nvfp4_1d_weight", "weight", "NVFP4", "NVFP4", "rowwise_dequantized"),
        ("nvfp4_row_scaled_fwd_high_precision_bwd", "input", "NVFP4", "Identity", "rowwise_dequantized"),
        ("nvfp4_row_scaled_fwd_mxfp8_bwd", "weight", "NVFP4", "MXFP8", "rowwise_dequantized"),
    ],
)
def test_mixtures_by_direction(name: str, kind: str, row: str, column: str, source: str) -> None:
    """What Transformer Engine's factories of the same names return for a grouped layer."""
    made: Any = getattr(custom_recipes, f"{name}_factory")(QuantizerRole("grouped_linear", kind))
    assert type(made.rowwise_quantizer).__name__ == f"{row}Quantizer"
    assert type(made.columnwise_quantizer).__name__ == f"{column}Quantizer"
    assert made.columnwise_source == source
    for half in (made.rowwise_quantizer, made.columnwise_quantizer):
        if isinstance(half, nc.NVFP4Quantizer):
            assert not half.with_2d_quantization and not half.stochastic_rounding
            assert half.row_scaled_nvfp4 is ("row_scaled" in name and kind == "input")
            assert half.with_rht is (kind == "input" and "row_scaled" not in name)


def test_delayed_scaling_factory_trains_like_the_recipe() -> None:
    custom, plain = CustomRecipe(qfactory=FACTORIES["delayed_scaling"]), DelayedScaling()
    layer, twin = make_layer(), make_layer()
    for seed in range(4):
        x = make_input(seed)
        assert_equal(results(layer, custom, x), results(twin, plain, x))
        nc.renew_delayed_scaling(layer), nc.renew_delayed_scaling(twin)
    for name in ("scale", "amax_history"):
        assert torch.equal(getattr(layer, name), getattr(twin, name))
    assert layer.scale[0] != 1
    assert layer.scale[2] != 1


def test_high_precision_factory_computes_what_no_recipe_computes() -> None:
    layer, x = make_layer(), make_input()
    recipe = CustomRecipe(qfactory=FACTORIES["high_precision"])
    for a, b in zip(results(layer, recipe, x), results(layer, None, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_factories_compile(name: str, dynamic: bool | None) -> None:
    layer, recipe = make_layer(), CustomRecipe(qfactory=FACTORIES[name])
    twin = copy.deepcopy(layer)
    run = compiled(twin, dynamic=dynamic)
    for seed in range(2):
        assert_equal(results(twin, recipe, make_input(seed), run), results(layer, recipe, make_input(seed)))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "delayed_scaling"])
def test_recipe_built_inside_the_compiled_function(name: str) -> None:
    x, outs = make_input(), []
    for compile_ in (compiled, lambda function: function):
        layer = make_layer()

        def step(x: torch.Tensor) -> torch.Tensor:
            with nc.autocast(recipe=CustomRecipe(qfactory=FACTORIES[name])):
                return layer(x)

        run = compile_(step)
        for _ in range(3):
            y = run(x)
        y.square().sum().backward()
        outs.append([y.detach(), *layer.state_dict().values()])
        assert (name == "delayed_scaling") is ("scale" in layer.state_dict())
    assert_equal(*outs)


# -- mixed recipes ----------------------------------------------------------------------------------------------------


def quantized_forward(role: QuantizerRole) -> nc.Quantizer:
    """Gradients stay in high precision: they are multiplied with the quantized operands as they are."""
    if role.tensor_type == "grad_output":
        return nc.IdentityQuantizer()
    return nc.MXFP8Quantizer(E4M3)


def test_high_precision_gradient() -> None:
    layer, x = make_layer(bias=False), make_input()
    recipe = CustomRecipe(qfactory=quantized_forward)
    y, dx, dw = results(layer, recipe, x)
    quantizer = nc.MXFP8Quantizer(E4M3, rowwise=True, columnwise=True)
    with torch.no_grad():
        xq, wq = quantizer.quantize(x.detach()), quantizer.quantize(layer.weight.detach())
        dy = 2 * y
        expected = (
            xq.dequantize() @ wq.dequantize().t(),
            dy @ columnwise_value(wq),
            dy.t() @ columnwise_value(xq),
        )
    for a, b in zip((y, dx, dw), expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
    assert not torch.equal(dx, results(layer, MXFP8BlockScaling(), x)[1])
    assert_equal(results(layer, recipe, x, compiled(layer)), [y, dx, dw])


def columnwise_value(tensor: Any) -> torch.Tensor:
    """What the column-wise buffers of a quantized tensor hold."""
    storage = tensor._view_of(tensor._COLUMNWISE_BUFFERS)
    return storage.dequantize(dtype=torch.float32)


def mixed_by_name(role: QuantizerRole) -> nc.Quantizer:
    return FACTORIES["high_precision"](role) if role.name == "fc1" else FACTORIES["mxfp8"](role)


def test_layers_by_name() -> None:
    recipe, x = CustomRecipe(qfactory=mixed_by_name), make_input()
    first, second = make_layer(name="fc1"), make_layer(name="fc2")
    assert_equal(
        results(first, recipe, x), results(first, CustomRecipe(qfactory=FACTORIES["high_precision"]), x)
    )
    assert_equal(results(second, recipe, x), results(second, MXFP8BlockScaling(), x))
    assert_equal(results(second, recipe, x, compiled(second)), results(second, recipe, x))


def test_requests_of_one_layer_must_be_equal() -> None:
    """Both directions are one state, with one history."""
    requests = {
        "input": DelayedScalingRequest(amax_history_len=2),
        "weight": DelayedScalingRequest(amax_history_len=2),
        "grad_output": DelayedScalingRequest(amax_history_len=3, margin=2),
    }
    recipe = CustomRecipe(qfactory=lambda role: requests[role.tensor_type])
    layer = make_layer(bias=False)
    with (
        pytest.raises(
            ValueError, match="one layer must be equal, got .*_len=2.* forward and .*_len=3.* backward"
        ),
        nc.autocast(recipe=recipe),
    ):
        layer(make_input())
    requests["grad_output"] = requests["input"]
    with nc.autocast(recipe=recipe):
        y = layer(make_input())
    y.backward(torch.full_like(y, 7.0))
    nc.renew_delayed_scaling(layer)
    assert layer.scale[2] == 57344 / 7 and layer.amax_history.shape == (2, 4)


def test_only_the_gradient_is_delayed() -> None:
    def factory(role: QuantizerRole) -> Any:
        return (
            DelayedScalingRequest()
            if role.tensor_type == "grad_output"
            else nc.Float8CurrentScalingQuantizer(E4M3)
        )

    recipe, layer, x = CustomRecipe(qfactory=factory), make_layer(), make_input()
    first = results(layer, recipe, x)
    assert_equal(first[:1], results(layer, Float8CurrentScaling(), x)[:1])
    assert layer.amax.count_nonzero() == 1 and layer.amax[2] > 0
    calibrated = make_layer()
    with nc.autocast(enabled=False, calibrating=True, recipe=recipe):
        calibrated(x)
    assert calibrated.amax is None  # an input without a scale of its own has no amax to collect


# -- what the factory is asked, and when ------------------------------------------------------------------------------


def recording(seen: list[QuantizerRole], *names: str) -> CustomRecipe:
    def factory(role: QuantizerRole) -> Any:
        if role.name in names:  # it is asked for every module alive, also those of other tests
            seen.append(role)
        return custom_recipes.mxfp8_factory(role)

    return CustomRecipe(qfactory=factory)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_roles_are_asked_for_once_per_name(how: str) -> None:
    seen: list[QuantizerRole] = []
    names = (f"{how}.0", f"{how}.1")
    recipe = recording(seen, *names)
    layers = [make_layer(name=name) for name in (*names, names[0])]
    runs = [compiled(layer) if how == "compiled" else layer for layer in layers]
    for _ in range(3):
        for layer, run in zip(layers, runs):
            results(layer, recipe, make_input(), run)
    kinds = ("input", "weight", "grad_output")
    expected = [QuantizerRole("linear", kind, name) for name in names for kind in kinds]
    assert seen == expected


def test_a_new_recipe_asks_anew() -> None:
    seen: list[QuantizerRole] = []
    layer = make_layer(name="asked twice")
    for _ in range(2):
        results(layer, recording(seen, "asked twice"), make_input())
    assert len(seen) == 6


def test_modules_without_a_name() -> None:
    roles: list[QuantizerRole] = []

    def factory(role: QuantizerRole) -> nc.Quantizer:
        roles.append(role)
        return nc.MXFP8Quantizer(E4M3)

    results(make_layer(name=None), CustomRecipe(qfactory=factory), make_input())
    assert QuantizerRole("linear", "weight", "") in roles


@pytest.mark.parametrize("how", ["eager", "compiled_outside", "compiled_inside"])
def test_nested_recipes_keep_their_own_quantizers(how: str) -> None:
    """One module under R0, nested R1, nested R2: each output, and its gradient, is that of its recipe alone."""
    factories = [FACTORIES["mxfp8"], FACTORIES["current_scaling"], mixed_dimensions]
    recipes, layer, x = [CustomRecipe(qfactory=factory) for factory in factories], make_layer(), make_input()
    alone = [results(layer, recipe, x) for recipe in recipes]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert not torch.equal(alone[a][0], alone[b][0])
        assert not torch.equal(alone[a][1], alone[b][1])

    def nested(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
        with nc.autocast(recipe=recipes[0]):
            ys = [module(x)]
            with nc.autocast(recipe=recipes[1]):
                ys.append(module(x))
                with nc.autocast(recipe=recipes[2]):
                    ys.append(module(x))
                again = module(x)
            return [*ys, again, module(x)]

    module = compiled(layer) if how == "compiled_outside" else layer
    run = compiled(nested) if how == "compiled_inside" else nested
    ys = run(module, x)
    for y, which in zip(ys, (0, 1, 2, 1, 0), strict=True):
        gradients = torch.autograd.grad(y.square().sum(), (x, *layer.parameters()), retain_graph=True)
        assert_equal([y.detach(), *gradients], alone[which])


def mixed_dimensions(role: QuantizerRole) -> nc.Quantizer:
    return nc.MXFP8Quantizer(E5M2, with_2d_quantization=role.tensor_type == "weight")


def test_factory_identity_is_part_of_the_value() -> None:
    def twin(role: QuantizerRole) -> nc.Quantizer:
        return custom_recipes.mxfp8_factory(role)

    recipe = CustomRecipe(qfactory=custom_recipes.mxfp8_factory)
    assert recipe == CustomRecipe(qfactory=custom_recipes.mxfp8_factory)
    assert recipe != CustomRecipe(qfactory=twin)
    assert recipe != CustomRecipe(qfactory=custom_recipes.nvfp4_factory)


def test_two_recipes_do_not_share_graphs_or_quantizers() -> None:
    layer, x = make_layer(), make_input()
    run = compiled(layer)
    first, second = CustomRecipe(qfactory=FACTORIES["mxfp8"]), CustomRecipe(qfactory=mixed_dimensions)
    for recipe in (first, second, first, second):
        assert_equal(results(layer, recipe, x, run), results(layer, recipe, x))
    assert not torch.equal(results(layer, first, x)[0], results(layer, second, x)[0])


# -- wrong answers ----------------------------------------------------------------------------------------------------


class WithItsOwnGemm(nc.MXFP8Quantizer):
    def qgemm(self, *operands: Any, **options: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize("kind", ["input", "weight", "grad_output"])
@pytest.mark.parametrize(
    "wrong, error",
    [
        (None, ValueError),
        (nc.MXFP8Quantizer, TypeError),
        ("mxfp8", TypeError),
        (WithItsOwnGemm(nc.DType.kFloat8E4M3), TypeError),
    ],
)
def test_wrong_answers_name_the_role(kind: str, wrong: Any, error: type[Exception]) -> None:
    recipe = CustomRecipe(qfactory=lambda role: wrong if role.tensor_type == kind else nc.IdentityQuantizer())
    layer, x = make_layer(), make_input()
    with pytest.raises(
        error, match=f"qfactory returned .* for QuantizerRole.*tensor_type='{kind}', name='fc1'"
    ):
        results(layer, recipe, x)
    assert THREAD.state.recipe is None


@pytest.mark.parametrize("factory", [lambda: 3, lambda role, name: None])
def test_a_factory_is_called_with_a_role(factory: Any) -> None:
    with pytest.raises(
        TypeError, match="^qfactory is .* cannot be called with one argument .* a QuantizerRole$"
    ):
        CustomRecipe(qfactory=factory)
    assert CustomRecipe(qfactory=iter).qfactory is iter  # has no signature


def test_differing_requests_are_refused() -> None:
    requests = {"input": DelayedScalingRequest(margin=1), "weight": DelayedScalingRequest(margin=2)}
    recipe = CustomRecipe(qfactory=lambda role: requests.get(role.tensor_type, nc.IdentityQuantizer()))
    with pytest.raises(
        ValueError, match="requests of one module and direction must be equal.*margin=1.*margin=2"
    ):
        results(make_layer(), recipe, make_input())


@pytest.mark.parametrize("fields", [{"amax_history_len": 0}, {"amax_compute_algo": "mean"}, {"margin": 0.5}])
def test_requests_are_checked_like_recipes(fields: dict[str, Any]) -> None:
    recipe = CustomRecipe(qfactory=lambda role: DelayedScalingRequest(**fields))
    with pytest.raises(ValueError, match=next(iter(fields))):
        results(make_layer(), recipe, make_input())


def test_a_factory_need_not_know_other_models() -> None:
    bystander = make_layer(name="someone else's")

    def strict(role: QuantizerRole) -> nc.Quantizer:
        return {"fc1": nc.MXFP8Quantizer(E4M3)}[role.name]

    recipe, layer = CustomRecipe(qfactory=strict), make_layer()
    for _ in range(2):
        results(layer, recipe, make_input())
    with pytest.raises(KeyError):
        results(bystander, recipe, make_input())
