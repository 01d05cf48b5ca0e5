"""Delayed scaling on real layers: scales and histories equal the rule, step by step, in every order of use."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from delayed_simulation import (
    KEYS,
    Simulation,
    buffers,
    clean_autocast,
    draw,
    from_one,
    make_layer,
    perturb,
    train_step,
)
from modules import assert_equal
from torch.torch_version import TorchVersion

import narrowcast as nc
from narrowcast.recipe import DelayedScaling, Format

__all__ = ["clean_autocast"]
STEPS = 6


# -- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 4, 1024, 1500])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(
    "margin, fp8_format", [(0, Format.HYBRID), (3, Format.E4M3), (-2, Format.HYBRID)], ids=str
)
def test_scales_and_histories_follow_the_rule(
    length: int, algo: Any, margin: int, fp8_format: Format
) -> None:
    recipe = from_one(margin=margin, fp8_format=fp8_format, amax_history_len=length, amax_compute_algo=algo)
    layer, rule = make_layer(), Simulation(recipe)
    for step in range(STEPS):
        x, dy = draw(step, 10, 24), draw(step, 10, 40, salt=1)
        rule.collect(input=x, grad_output=dy)
        train_step(layer, recipe, x, dy)
        rule.renew()
        rule.assert_equals(layer, f"step {step}")
        perturb(layer, step)


def test_a_step_computes_with_the_scales_of_the_steps_before() -> None:
    recipe = from_one(amax_history_len=2)
    layer, rule = make_layer(bias=False, dtype=torch.float32), Simulation(recipe)

    def rounded(tensor: torch.Tensor, name: str) -> torch.Tensor:
        scale = float(rule.columns[name].scale)
        dtype, largest = (torch.float8_e5m2, 57344) if name == "grad_output" else (torch.float8_e4m3fn, 448)
        if not scale > 0:  # a first step, and a weight always, has the scale of its own amax
            scale = float(torch.tensor(float(largest), dtype=torch.float32) / tensor.abs().max())
        return (tensor * scale).clamp(-largest, largest).to(dtype).float() / scale

    for step in range(STEPS):
        x, dy = draw(step, 10, 24).float().requires_grad_(True), draw(step, 10, 40, salt=1).float()
        layer.weight.grad = None
        y = train_step(layer, recipe, x, dy)
        xq, wq, dyq = (
            rounded(t.detach(), name)
            for t, name in ((x, "input"), (layer.weight, "weight"), (dy, "grad_output"))
        )
        torch.testing.assert_close(y, xq @ wq.t(), rtol=1e-5, atol=1e-5 * float(y.abs().max()))
        for grad, expected in ((x.grad, dyq @ wq), (layer.weight.grad, dyq.t() @ xq)):
            assert grad is not None
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        rule.collect(input=x, grad_output=dy)
        rule.renew()


def test_amax_that_gives_no_scale() -> None:
    """Zero and infinity leave everything alone; a tiny amax gives FLT_MAX."""
    recipe = from_one(amax_history_len=3, amax_compute_algo="most_recent")
    layer, dy = make_layer(), torch.zeros(4, 40)
    scales = []
    for value in (2.0, 0.0, float("inf"), float("nan"), 1e-40, 4.0):
        x = torch.zeros(4, 24)
        x[0, 0] = value
        train_step(layer, recipe, x, dy)
        scales.append(float(layer.scale[0]))
    largest = torch.finfo(torch.float32).max
    assert scales == [224.0, 224.0, 224.0, 224.0, largest, 112.0]
    assert layer.amax_history.isfinite().all()
    assert not layer.scale[2:].any()
    assert not layer.amax_history[:, 2:].any()


def test_functions_for_amax_and_scale() -> None:
    """With functions, every history rolls, also of a tensor that was not used; not in a step without any."""
    seen: list[tuple[torch.Size, str]] = []

    def mean_of_used(history: torch.Tensor) -> torch.Tensor:
        return history.mean(0)

    def half(
        amax: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, recipe: DelayedScaling
    ) -> torch.Tensor:
        seen.append((amax.shape, repr(recipe)))
        return torch.where(amax > 0, 0.5 * fp8_max / amax, scale)

    recipe = from_one(
        amax_history_len=3, amax_compute_algo=mean_of_used, scaling_factor_compute_algo=half, margin=7
    )
    layer, rows, scale = make_layer(), [[0.0] * 4 for _ in range(3)], torch.zeros(4, dtype=torch.float32)
    for step in range(STEPS):
        x = draw(step, 5, 24) if step != 3 else torch.zeros(5, 24)
        train_step(layer, recipe, x, torch.zeros(5, 40))
        if x.any():  # the rule, by hand: mean over rows, then half of fp8_max / amax
            rows[0] = [float(x.abs().max()), 0.0, 0.0, 0.0]
            amax = torch.tensor(rows, dtype=torch.float32).mean(0)
            scale = torch.where(amax > 0, torch.full((4,), 224.0, dtype=torch.float32) / amax, scale)
            rows = [[0.0] * 4, rows[2], rows[0]]
        assert torch.equal(layer.scale, scale), step
        assert torch.equal(layer.amax_history, torch.tensor(rows)), step
    assert set(seen) == {(torch.Size([4]), repr(recipe))}


def test_only_one_function() -> None:
    recipe = from_one(
        amax_history_len=4, scaling_factor_compute_algo=lambda amax, scale, fp8_max, _: fp8_max - amax
    )
    layer = make_layer()
    train_step(layer, recipe, torch.full((2, 24), 8.0), torch.full((2, 40), 16.0))
    assert float(layer.scale[0]) == 440.0
    assert layer.scale[2:].tolist() == [57344.0 - 16.0, 0.0]  # of the second nothing was seen


# -- what leaves the state alone --------------------------------------------------------------------------------------


def test_a_history_of_any_length() -> None:
    recipe = from_one(amax_history_len=1030)
    layer = make_layer(4, 4)
    train_step(layer, recipe, torch.zeros(1, 4), torch.zeros(1, 4))
    for step in range(1040):
        layer.amax.fill_(1040 - step)
        nc.renew_delayed_scaling(layer)
    assert layer.amax_history.shape == (1030, 4)
    assert layer.amax_history[1, 0] == 1029  # the eleven largest have left
    assert layer.scale[0] == torch.tensor(448.0, dtype=torch.float32) / 1030


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("manager", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients_leaves_the_state_alone(manager: Any, larger: bool) -> None:
    recipe = from_one(amax_history_len=4)
    layer = make_layer()
    for step in range(2):
        train_step(layer, recipe, draw(step, 6, 24), draw(step, 6, 40))
    before, x = buffers(layer), draw(4 if larger else 2, 6, 24)
    layer.eval()
    for _ in range(3):
        with manager(), nc.autocast(recipe=recipe):
            layer(x)
        assert_equal(buffers(layer), before)
    layer.train()
    train_step(layer, recipe, draw(2, 6, 24), draw(2, 6, 40))
    assert not torch.equal(layer.amax_history, before[2])


@pytest.mark.parametrize("training", [True, False])
def test_calibration_overwrites_the_slots_and_nothing_else(training: bool) -> None:
    recipe = from_one(amax_history_len=4)
    layer = make_layer().train(training)
    for x in (draw(1, 6, 24), draw(0, 6, 24)):  # the second is smaller: overwritten, not accumulated
        with torch.set_grad_enabled(training), nc.autocast(enabled=False, calibrating=True, recipe=recipe):
            y = layer(x)
        assert torch.equal(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
        collected = torch.tensor([float(x.abs().max()), 0.0, 0.0, 0.0], dtype=torch.float32)
        zeros = [torch.zeros(shape, dtype=torch.float32) for shape in ((4,), (4, 4))]
        assert_equal(buffers(layer), [*zeros, collected])
    nc.renew_delayed_scaling(layer)
    assert layer.scale[0] == torch.tensor(448.0, dtype=torch.float32) / x.abs().max()


def test_calibrating_a_custom_recipe_that_requests_state() -> None:
    recipe, layer = nc.recipe.CustomRecipe(qfactory=lambda role: nc.DelayedScalingRequest()), make_layer()
    with nc.autocast(enabled=False, calibrating=True, recipe=recipe):
        layer(torch.full((2, 24), 7.0))
    assert float(layer.amax[0]) == 7.0


def test_calibrating_needs_delayed_scaling() -> None:
    layer = make_layer()
    with nc.autocast(enabled=False, calibrating=True, recipe=nc.recipe.MXFP8BlockScaling()):
        layer(torch.ones(2, 24))
    assert all(getattr(layer, key) is None for key in KEYS)


# -- compiled ---------------------------------------------------------------------------------------------------------


def states_over_steps(
    compiled: str, recipe: DelayedScaling, more_tokens: int = 0
) -> list[list[torch.Tensor]]:
    layers = [make_layer(24, 24, seed) for seed in range(2)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layers[1](layers[0](x))

    def whole(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=recipe):
            return forward(x)

    def outside(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=recipe):
            return forward_compiled(x)

    def built_inside(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=from_one(amax_history_len=4)):
            return forward(x)

    def compile_(function: Any, **kwargs: Any) -> Any:
        return torch.compile(function, fullgraph=True, backend="aot_eager", **kwargs)

    forward_compiled = compile_(forward)
    run = {
        "eager": whole,
        "inside": compile_(whole),
        "dynamic": compile_(whole, dynamic=True),
        "outside": outside,
        "built_inside": compile_(built_inside),
    }[compiled]
    result = []
    for step in range(STEPS):
        tokens = 8 + more_tokens * step
        y = run(draw(step, tokens, 24))
        y.backward(draw(step, tokens, 24, salt=1))
        for layer in layers:
            nc.renew_delayed_scaling(layer)
        result.append([tensor for layer in layers for tensor in buffers(layer)])
    return result


RECIPES = {
    "history_1": from_one(amax_history_len=1),
    "history_4": from_one(amax_history_len=4),
    "margin": from_one(amax_history_len=4, margin=2, amax_compute_algo="most_recent", fp8_format=Format.E4M3),
    "functions": from_one(
        amax_history_len=4,
        amax_compute_algo=lambda history: history.amax(0),
        scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: torch.where(
            amax > 0, fp8_max / amax, scale
        ),
    ),
}


@pytest.mark.parametrize(
    "compiled, name",
    [("outside", name) for name in RECIPES]
    + [("inside", "margin"), ("inside", "functions"), ("dynamic", "history_4")],
)
def test_compiled_states_equal_eager_ones(name: str, compiled: str) -> None:
    more = 5 if compiled == "dynamic" else 0
    ours, theirs = (states_over_steps(how, RECIPES[name], more) for how in (compiled, "eager"))
    for step in range(STEPS):
        assert_equal(ours[step], theirs[step])


def test_recipe_built_inside_the_compiled_function() -> None:
    recipe = RECIPES["history_4"]
    for ours, theirs in zip(states_over_steps("built_inside", recipe), states_over_steps("eager", recipe)):
        assert_equal(ours, theirs)


def test_a_compiled_function_may_be_the_first_to_use_a_layer() -> None:
    results = []
    for compiled in (True, False):
        layer, recipe = make_layer(), from_one(amax_history_len=2000)

        def step(x: torch.Tensor) -> torch.Tensor:
            with nc.autocast(recipe=recipe):
                return layer(x)

        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        run(torch.ones(4, 24)).sum().backward()
        assert layer.amax_history.shape == (2000, 4)
        results.append(buffers(layer))
    assert_equal(*results)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="fails in PyTorch's trace of a dataclass with such a number",
)
def test_a_number_of_a_recipe_that_differs_between_calls() -> None:
    layer = make_layer()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor, length: int) -> torch.Tensor:
        with nc.autocast(recipe=DelayedScaling(amax_history_len=length)):
            return layer(x)

    for length in (4, 5, 6):
        step(torch.ones(4, 24), length).sum().backward()
        assert layer.amax_history.shape == (length, 4)


# -- checkpoints, copies, moves ---------------------------------------------------------------------------------------


def trained(recipe: nc.recipe.Recipe, steps: int = 3, seed: int = 1) -> nc.Linear:
    layer = make_layer(seed=seed)
    for step in range(steps):
        train_step(layer, recipe, draw(step, 6, 24), draw(step, 6, 40))  # type: ignore[arg-type]
    return layer


STATELESS = {
    "current": nc.recipe.Float8CurrentScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(),
    "block": nc.recipe.Float8BlockScaling(),
    "nvfp4": nc.recipe.NVFP4BlockScaling(),
    "custom": nc.recipe.CustomRecipe(qfactory=lambda role: nc.IdentityQuantizer()),
}


@pytest.mark.parametrize("name", STATELESS)
def test_stateless_recipes_add_nothing_to_the_state_dict(name: str) -> None:
    layer = trained(STATELESS[name])
    assert sorted(layer.state_dict()) == ["bias", "weight"]
    assert sorted(make_layer().state_dict()) == ["bias", "weight"]


def test_state_dict_after_use_is_plain_and_short() -> None:
    layer = trained(from_one(amax_history_len=4))
    state = layer.state_dict()
    assert sorted(state) == sorted(["bias", *KEYS, "weight"])
    assert state["amax_history"].shape == (4, 4)
    assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in state.values())


def through_a_file(state: dict[str, torch.Tensor], how: str, folder: Path) -> dict[str, torch.Tensor]:
    if how == "torch":
        torch.save(state, folder / "layer.pt")
        return torch.load(folder / "layer.pt", weights_only=True)
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    safetensors.save_file(state, folder / "layer.safetensors")
    return safetensors.load_file(folder / "layer.safetensors")


@pytest.mark.parametrize("file", ["safetensors", "torch"])
@pytest.mark.parametrize("length", [1, 4, 1024, 1100])
def test_a_restored_layer_continues_like_the_original(tmp_path: Path, length: int, file: str) -> None:
    """Also in a process that never trained: nothing but the checkpoint may count."""
    recipe = from_one(amax_history_len=length)
    layer = trained(recipe, steps=4)
    saved = through_a_file(layer.state_dict(), file, tmp_path)

    def go_on(module: nc.Linear) -> list[list[torch.Tensor]]:
        xs = [(draw(step, 6, 24), draw(step, 6, 40)) for step in range(4, 8)]
        return [[train_step(module, recipe, x, dy), *buffers(module)] for x, dy in xs]

    expected = go_on(layer)
    restored = make_layer(seed=9)
    restored.load_state_dict(saved)
    for ours, theirs in zip(go_on(restored), expected):
        assert_equal(ours, theirs)


def test_strict_load_both_ways() -> None:
    used, fresh = trained(from_one(amax_history_len=4)), make_layer(seed=3)
    plain = copy.deepcopy(fresh.state_dict())
    fresh.load_state_dict(used.state_dict())
    assert_equal(buffers(fresh), buffers(used))
    addresses = [getattr(used, key).data_ptr() for key in KEYS]
    with pytest.warns(UserWarning, match="no delayed-scaling state for Linear layers; scales start anew"):
        used.load_state_dict(plain)
    assert not any(buffer.any() for buffer in buffers(used))
    assert [getattr(used, key).data_ptr() for key in KEYS] == addresses
    assert sorted(used.state_dict()) == sorted(["bias", *KEYS, "weight"])


@pytest.mark.parametrize("missing", ["scale", "amax", "amax_history"])
def test_a_partial_state_is_refused(missing: str) -> None:
    state = trained(from_one(amax_history_len=4)).state_dict()
    del state[missing]
    with pytest.raises(RuntimeError, match=rf"lacks \['{missing}'\]"):
        make_layer().load_state_dict(state)


def test_loading_other_parts_leaves_the_state() -> None:
    layer = trained(from_one(amax_history_len=4))
    model = torch.nn.Sequential(layer, torch.nn.LayerNorm(40))
    before = buffers(layer)
    model.load_state_dict({"1.weight": torch.ones(40)}, strict=False)
    assert_equal(buffers(layer), before)


@pytest.mark.parametrize("saved, loaded", [(2, 5), (5, 2), (1024, 4), (4, 1024), (1, 4)])
def test_history_length_may_change_at_a_restart(saved: int, loaded: int) -> None:
    """Shrinking keeps the first rows, growing appends zero rows."""
    layer = trained(from_one(amax_history_len=saved), steps=5)
    restored = make_layer()
    restored.load_state_dict(layer.state_dict())
    with nc.autocast(recipe=from_one(amax_history_len=loaded)):
        restored(torch.ones(1, 24))
    nc.renew_delayed_scaling(restored)
    rows = torch.zeros(loaded, 4, dtype=torch.float32)
    rows[: min(saved, loaded)] = layer.amax_history[:loaded]
    rows[0, 0] = 1.0
    rolled = torch.cat([torch.zeros_like(rows[:1]), rows[2:], rows[:1]])[:loaded]
    assert torch.equal(restored.amax_history[:, 0], rolled[:, 0])
    assert restored.scale[0] == torch.div(448.0, rows[:, 0].max())


@pytest.mark.parametrize(
    "key, shape",
    [
        ("scale", (6,)),
        ("amax", (1, 4)),
        ("amax_history", (4, 3)),
        ("amax_history", (12,)),
        ("amax_history", (0, 4)),
    ],
)
def test_wrong_shapes_are_named_and_change_nothing(key: str, shape: tuple[int, ...]) -> None:
    layer = trained(from_one(amax_history_len=4))
    before, state = buffers(layer), layer.state_dict()
    state[key] = torch.full(shape, 5.0)
    with pytest.raises(RuntimeError, match=rf"{key} has shape .*; this layer keeps \("):
        layer.load_state_dict(state)
    assert_equal(buffers(layer), before)


def test_loading_onto_the_meta_device() -> None:
    source = trained(from_one(amax_history_len=4))
    layer = make_layer(device="meta")
    layer.load_state_dict(source.state_dict(), assign=True)
    assert_equal(buffers(layer), buffers(source))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "half_and_back": lambda layer: copy.deepcopy(layer).half().float(),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_have_fp32_state_of_their_own(how: str) -> None:
    recipe = from_one(
        amax_history_len=4, amax_compute_algo=lambda history: history.amax(0)
    )  # does not pickle
    layer = trained(recipe)
    twin, before = COPIES[how](layer), buffers(layer)
    assert_equal(buffers(twin), before)
    assert all(tensor.dtype == torch.float32 for tensor in buffers(twin))
    twin.weight.data.fill_(0.5)
    twin.amax.fill_(896.0)  # its own slot: the original must not see it
    with nc.autocast(recipe=recipe):
        twin(torch.zeros(1, 24, dtype=twin.weight.dtype))
    nc.renew_delayed_scaling(twin)
    assert twin.scale[:2].tolist() == [0.5, 0.5]
    assert float(layer.scale[0]) not in (1.0, 0.5)


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.cpu()])
def test_moved_modules_train_on_with_fp32_state(move: Any) -> None:
    recipe, rule = from_one(amax_history_len=4), Simulation(from_one(amax_history_len=4))
    layer = make_layer()
    for step in range(4):
        if step == 2:
            move(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x, dy = draw(step, 6, 24).bfloat16(), draw(step, 6, 40).bfloat16()
            rule.collect(input=x, grad_output=dy)
            train_step(layer, recipe, x, dy)
            rule.renew()
        rule.assert_equals(layer, f"step {step}")
    assert all(tensor.dtype == torch.float32 for tensor in buffers(layer))


def test_nobody_keeps_a_layer_alive() -> None:
    layers = [trained(from_one(amax_history_len=4)) for _ in range(3)]
    twin = copy.copy(layers[0])  # shares its parts, so the state lives as long as either
    watch = weakref.ref(layers[1])
    layers.clear()
    gc.collect()
    assert watch() is None
    train_step(twin, from_one(amax_history_len=4), torch.ones(1, 24), torch.zeros(1, 40))
    assert twin.scale[0] > 0.0
    watch = weakref.ref(twin)
    del twin
    gc.collect()
    assert watch() is None


def test_modules_may_die_while_autocast_is_traced() -> None:
    layer, mortal = make_layer(), [make_layer()]

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        mortal.clear()
        gc.collect()
        return graph.forward

    def step(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe=from_one(amax_history_len=4)):
            return layer(x)

    mortal += [trained(from_one(amax_history_len=4)) for _ in range(3)]
    assert torch.compile(step, fullgraph=True, backend=backend)(torch.ones(2, 24)).shape == (2, 40)


def test_meta_modules_do_not_disturb() -> None:
    sleeping, recipe = make_layer(device="meta"), from_one(amax_history_len=4)
    with nc.autocast(recipe=recipe):
        assert sleeping(torch.ones(2, 24, device="meta")).is_meta
    layer = trained(recipe)
    assert layer.scale[0] != 1
    assert sleeping.scale.is_meta
