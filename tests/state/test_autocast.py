"""autocast: which recipe is in force, and that everything is put back."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delayed_simulation import clean_autocast, make_layer

import narrowcast as nc
from narrowcast import state
from narrowcast._checks import typed
from narrowcast.state import THREAD

__all__ = ["clean_autocast"]
CURRENT, MXFP8 = nc.recipe.Float8CurrentScaling(), nc.recipe.MXFP8BlockScaling()
DELAYED = nc.recipe.DelayedScaling(amax_history_len=4)


def snapshot() -> tuple[Any, ...]:
    state = THREAD.state
    return (*state.get(), state.init_recipe, state.init_preserve, *state.entered)


class Stop(Exception):
    pass


def test_outside_nothing_is_in_force() -> None:
    assert not state.is_fp8_enabled()
    assert not state.is_fp8_calibration()
    assert not state.with_fp8_parameters()
    assert state.get_fp8_group() is None
    assert state.get_fp8_recipe() == nc.get_default_recipe()


def test_inside_the_recipe_is_in_force() -> None:
    with nc.autocast(recipe=CURRENT) as entered:
        assert entered is None
        assert state.is_fp8_enabled()
        assert not state.is_fp8_calibration()
        assert state.get_fp8_recipe() is CURRENT
    assert not state.is_fp8_enabled()


def test_nested_contexts_restore_each_other() -> None:
    seen = []
    with nc.autocast(recipe=CURRENT):
        with nc.autocast(recipe=MXFP8):
            seen.append(THREAD.state.recipe)
            with nc.autocast(enabled=False):
                seen.append(THREAD.state.recipe)
                with nc.autocast(recipe=DELAYED):
                    seen.append(THREAD.state.recipe)
                seen.append(THREAD.state.recipe)
            seen.append(THREAD.state.recipe)
        seen.append(THREAD.state.recipe)
    assert seen == [MXFP8, None, DELAYED, None, MXFP8, CURRENT]
    assert not any(snapshot())


def test_one_instance_again_and_again_but_not_inside_itself() -> None:
    context = nc.autocast(recipe=CURRENT)
    for _ in range(3):
        with context:
            assert THREAD.state.recipe is CURRENT
        assert THREAD.state.recipe is None
    with context:
        with pytest.raises(RuntimeError, match="active already; make a new one to nest"), context:
            pass
        assert THREAD.state.recipe is CURRENT  # the refused entry changed nothing
    assert THREAD.state.recipe is None
    with context, nc.autocast(recipe=MXFP8), pytest.raises(RuntimeError, match="active already"):
        context.__enter__()


def test_decorator() -> None:
    @nc.autocast(recipe=CURRENT)
    def depth(n: int) -> list[Any]:
        """Documented."""
        return [THREAD.state.recipe, THREAD.state.depth, *(depth(n - 1) if n else [])]

    assert depth.__name__ == "depth"
    assert depth.__doc__ == "Documented."
    for _ in range(2):
        assert depth(2) == [CURRENT, 1, CURRENT, 2, CURRENT, 3]
    assert not any(snapshot())
    calibrated = nc.autocast(enabled=False, calibrating=True, recipe=DELAYED)(
        lambda: (THREAD.state.recipe, THREAD.state.calibrating)
    )
    assert calibrated() == (None, DELAYED)
    disabled = nc.autocast(enabled=False, recipe=CURRENT)(
        lambda: (THREAD.state.recipe, THREAD.state.calibrating)
    )
    assert disabled() == (None, None)


@pytest.mark.parametrize("decorated", [False, True])
def test_exceptions_restore_everything(decorated: bool) -> None:
    def fail() -> None:
        with nc.autocast(enabled=False, calibrating=True, recipe=DELAYED):
            raise Stop

    def fail_inside() -> None:
        with nc.autocast(recipe=MXFP8):
            fail()

    with nc.autocast(recipe=CURRENT):
        before = snapshot()
        with pytest.raises(Stop):
            (nc.autocast(recipe=MXFP8)(fail) if decorated else fail_inside)()
        assert snapshot() == before
    assert not any(snapshot())
    context = nc.autocast(recipe=CURRENT)
    with pytest.raises(Stop), context:
        raise Stop
    with context:  # and the instance may be used again
        pass


def test_disabled_runs_in_high_precision() -> None:
    layer, x = make_layer(), torch.randn(3, 24)
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    with nc.autocast(recipe=CURRENT):
        assert not torch.equal(layer(x), exact)
        with nc.autocast(enabled=False, recipe=CURRENT):
            assert torch.equal(layer(x), exact)
        with nc.autocast(False):
            assert torch.equal(layer(x), exact)


def test_default_recipe() -> None:
    with nc.autocast():
        assert THREAD.state.recipe == nc.get_default_recipe()
    if not torch.cuda.is_available():
        assert nc.get_default_recipe() == nc.recipe.DelayedScaling()


@pytest.mark.parametrize(
    "mxfp8, capability, expected",
    [
        (True, (10, 0), nc.recipe.MXFP8BlockScaling),
        (False, (12, 0), nc.recipe.Float8CurrentScaling),
        (False, (9, 0), nc.recipe.DelayedScaling),
        (False, (0, 0), nc.recipe.DelayedScaling),
    ],
)
def test_default_recipe_by_hardware(
    monkeypatch: pytest.MonkeyPatch, mxfp8: bool, capability: tuple[int, int], expected: type
) -> None:
    module = sys.modules["narrowcast.state.autocast"]  # the name leads to the class
    monkeypatch.setattr(module, "is_mxfp8_available", lambda: mxfp8)
    monkeypatch.setattr(module, "get_device_compute_capability", lambda: capability)
    assert nc.get_default_recipe() == expected()


def test_calibrating() -> None:
    with nc.autocast(enabled=False, calibrating=True, recipe=DELAYED):
        assert state.is_fp8_calibration()
        assert not state.is_fp8_enabled()
        with nc.autocast(recipe=CURRENT):
            assert not state.is_fp8_calibration()
    with nc.autocast(enabled=True, calibrating=True, recipe=DELAYED):  # enabled collects anyway
        assert not state.is_fp8_calibration()
        assert state.is_fp8_enabled()


@pytest.mark.parametrize("wrong", [b"current", 8, object()])
@pytest.mark.parametrize("enabled", [True, False])
def test_recipe_of_another_type(wrong: Any, enabled: bool) -> None:
    name = re.escape(typed(wrong))
    with pytest.raises(TypeError, match=f"recipe is {name}; pass one of narrowcast.recipe's recipes"):
        nc.autocast(enabled=enabled, recipe=wrong)
    with pytest.raises(TypeError, match=f"recipe is {name}"):
        nc.quantized_model_init(recipe=wrong)


def test_the_class_of_a_recipe_is_to_be_called() -> None:
    with pytest.raises(TypeError, match=r"recipe is the class DelayedScaling; call it: DelayedScaling\(\)"):
        nc.autocast(recipe=nc.recipe.DelayedScaling)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="or a name such as 'current'; convert and set_recipe take tables$"):
        nc.autocast(recipe={"": "current"})  # type: ignore[arg-type]


def test_a_text_in_place_of_a_flag_is_no_recipe() -> None:
    with pytest.raises(TypeError, match="enabled is 'yes'"):
        nc.autocast(enabled="yes")  # type: ignore[arg-type]


def test_group_is_the_innermost_one() -> None:
    groups: list[Any] = [SimpleNamespace(group_name=name) for name in "ab"]
    with nc.autocast(recipe=CURRENT, amax_reduction_group=groups[0]):
        with nc.autocast(recipe=CURRENT, amax_reduction_group=groups[1]):
            assert state.get_fp8_group() is groups[1]
        with nc.autocast(recipe=CURRENT):
            assert state.get_fp8_group() is None
        assert state.get_fp8_group() is groups[0]


def test_old_names_warn_and_work() -> None:
    with pytest.warns(DeprecationWarning, match="fp8_autocast is now called autocast") as caught:
        context = nc.fp8_autocast(enabled=True, calibrating=False, fp8_recipe=CURRENT, fp8_group=None)
    assert caught[0].filename == __file__
    layer = make_layer()  # an autocast says so where there is none
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with context:
            assert THREAD.state.recipe is CURRENT and layer is not None
        assert context(lambda: THREAD.state.recipe)() is CURRENT
    with pytest.warns(
        DeprecationWarning, match="fp8_model_init is now called quantized_model_init"
    ) as caught:
        initialising = nc.fp8_model_init(enabled=True, recipe=CURRENT, preserve_high_precision_init_val=True)
    assert caught[0].filename == __file__
    with initialising:
        assert (THREAD.state.init_recipe, THREAD.state.init_preserve) == (CURRENT, True)
    assert not any(snapshot())


@pytest.mark.filterwarnings("error:fp8_autocast is now:DeprecationWarning")
def test_old_name_compiles_without_a_warning() -> None:
    layer, x = make_layer(), torch.randn(3, 24)

    def step(x: torch.Tensor) -> torch.Tensor:
        with nc.fp8_autocast(fp8_recipe=CURRENT):
            return layer(x)

    with nc.autocast(recipe=CURRENT):
        expected = layer(x)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x), expected)


def nested_step(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    context, ys = nc.autocast(recipe=CURRENT), [layer(x)]
    with context:
        ys.append(layer(x))
        with nc.autocast(recipe=MXFP8):
            ys.append(layer(x))
        with nc.autocast(enabled=False):
            ys.append(layer(x))
        ys.append(layer(x))
    with context:
        ys.append(layer(x))
    return ys


def test_compiled_contexts_nest_re_enter_and_restore() -> None:
    layer, x = make_layer(), torch.randn(3, 24)
    ours = torch.compile(nested_step, fullgraph=True, backend="aot_eager")(layer, x)
    for a, b in zip(ours, nested_step(layer, x), strict=True):
        assert torch.equal(a, b)
    assert not any(snapshot())
    outside, current, mxfp8 = ours[0], ours[1], ours[2]
    assert not torch.equal(outside, current)
    assert not torch.equal(current, mxfp8)
    assert torch.equal(ours[3], outside)
    assert torch.equal(ours[4], current)
    assert torch.equal(ours[5], current)


@pytest.mark.parametrize("recipe", [None, DELAYED, CURRENT], ids=lambda recipe: type(recipe).__name__)
def test_compiled_decorator_and_default(recipe: Any) -> None:
    x, outs = torch.randn(3, 24), []
    for compiled in (True, False):
        layer = make_layer()

        @nc.autocast(recipe=recipe)
        def decorated(x: torch.Tensor) -> torch.Tensor:
            return layer(x)

        def plain(x: torch.Tensor) -> torch.Tensor:
            with nc.autocast(recipe=recipe):
                return layer(x)

        for step in (decorated, plain):
            run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
            outs.append(run(x))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert not any(snapshot())


def test_entering_without_gradients_in_the_middle_of_nothing() -> None:
    with torch.no_grad(), nc.autocast(recipe=DELAYED):
        assert state.get_fp8_recipe() is DELAYED
    with torch.inference_mode(), nc.autocast(recipe=DELAYED):
        assert state.get_fp8_recipe() is DELAYED
    assert not any(snapshot())


def test_state_can_be_taken_and_put_back() -> None:
    outside = nc.state.get_autocast_state()
    with nc.autocast(recipe=CURRENT):
        inside = nc.state.get_autocast_state()
    assert inside[0] is CURRENT and outside[0] is None
    nc.state.set_autocast_state(inside)
    try:
        assert nc.state.is_fp8_enabled() and nc.state.get_fp8_recipe() is CURRENT
    finally:
        nc.state.set_autocast_state(outside)
    assert not nc.state.is_fp8_enabled()


@pytest.mark.parametrize("owned", [True, False])
def test_an_autocast_of_another_kind_tells_what_to_do(owned: bool) -> None:
    layer = nc.Linear(32, 32, device="cpu", recipe="current" if owned else None)
    with nc.autocast(recipe="current"):
        layer(torch.ones(3, 32))
    told = r"numbers change with it; an autocast's recipe .*: leave it out, or give it recipe=$"
    with (
        nc.autocast(recipe="block"),
        pytest.warns(UserWarning, match=told if owned else "numbers change with it$"),
    ):
        layer(torch.ones(3, 32))


def test_a_change_of_recipes_names_the_first_layer_once() -> None:
    class Own(nc.Linear):
        """A kind of layer that no other test has."""

    model = torch.nn.ModuleDict({name: Own(32, 32, device="cpu", name=name) for name in ("up", "down")})
    for recipe in ("current", "block"):
        with warnings.catch_warnings(record=True) as told, nc.autocast(recipe=recipe):
            warnings.simplefilter("default")
            for layer in model.values():
                layer(torch.ones(3, 32))
    (warning,) = told
    assert str(warning.message).startswith(
        "the recipe of 'up' changed from Float8CurrentScaling to Float8BlockScaling "
    )


@pytest.mark.parametrize("compiles", [False, True])
def test_an_autocast_that_reaches_no_layer_warns_once(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever layers there are elsewhere, and whatever ran before it."""
    plain, x = torch.nn.Linear(24, 16), torch.randn(7, 24)
    ours: Any = nc.Linear(24, 16, device="cpu", recipe="current")
    listed: Any = nc.ops.Sequential(nc.ops.Linear(24, 16, device="cpu"))
    if compiles:
        ours, listed, plain = (torch.compile(one, backend="eager") for one in (ours, listed, plain))

    def told(run: Callable[..., Any]) -> list[str]:
        monkeypatch.setattr(nc.autocast, "told", False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                with nc.autocast(recipe="current"):
                    run(x)
        return [str(one.message) for one in caught]

    def inside(x: torch.Tensor) -> None:
        with nc.autocast(recipe="current"):
            ours(x)
        with nc.autocast(enabled=False):
            plain(x)

    for run in (ours, inside, listed):
        assert told(run) == []
    (message,) = told(plain)
    assert message.endswith("call narrowcast.convert(model, recipe) first")
    assert len(told(lambda x: copy.deepcopy(listed))) == 1
    with pytest.raises(ZeroDivisionError):
        told(lambda x: 1 / 0)


def test_a_compiled_autocast_around_a_graph_break() -> None:
    """Eager code enters it then, and the compiler traces parts of that by themselves."""
    layer, x = nc.Linear(24, 24, device="cpu"), torch.randn(7, 24)

    def run(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe="current"):
            y = layer(x)
            torch._dynamo.graph_break()
            return layer(y)

    compiled = torch.compile(run, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(x), run(x)) and not nc.state.is_fp8_enabled()


def test_a_wrong_variable_is_not_taken_for_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_EMULATE", "maybe")
    with pytest.raises(ValueError, match="environment variable NARROWCAST_EMULATE is 'maybe'; use 1 or 0"):
        nc.autocast(recipe="current")
