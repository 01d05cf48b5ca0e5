"""Checkpoints of Transformer Engine: strict loads, whatever their ``_extra_state`` is, none of which is executed."""

from __future__ import annotations

import io
import pickle
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

RECIPE = DelayedScaling(amax_history_len=4)
GROUPS = 2
LAYERS: dict[str, Any] = {
    "linear": (lambda **options: nc.Linear(16, 32, device="cpu", **options), 1),
    "layernorm_mlp": (lambda **options: nc.LayerNormMLP(16, 32, device="cpu", **options), 2),
    "grouped_linear": (lambda **options: nc.GroupedLinear(GROUPS, 16, 32, device="cpu", **options), GROUPS),
}


def run(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, [8, 0]) if isinstance(layer, nc.GroupedLinear) else layer(x)


def theirs(slots: int) -> dict[str, Any]:
    """As Transformer Engine has it of ``slots`` GEMMs: all inputs of a fused layer's stages behind one another."""
    torch.manual_seed(3)
    state: dict[str, Any] = {"extra_fp8_variables": {"num_gemms": slots}}
    for direction, kinds in (("fwd", 3), ("bwd", 2)):
        state[f"scale_{direction}"] = torch.rand(kinds * slots) + 1
        state[f"amax_history_{direction}"] = torch.rand(4, kinds * slots)
        state[f"amax_history_{direction}"][0] = 0
    return state


def apart(layer: nn.Module, weights: bool) -> dict[str, Tensor]:
    """The layer's state dict as versions wrote it that had buffers of each direction."""
    groups, state = layer._groups, dict(layer.state_dict())
    for key in layer._state_names():
        *forward, grad_output, grad_input = state.pop(key).split(groups, -1)
        if weights:
            forward.insert(1, torch.zeros_like(forward[0]))
        state[f"{key}_fwd"], state[f"{key}_bwd"] = (
            torch.cat(forward, -1),
            torch.cat([grad_output, grad_input], -1),
        )
    return state


def saved(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def as_tensor(value: bytes) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


@pytest.mark.parametrize("form", [as_tensor, io.BytesIO], ids=["tensor", "file"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("name", LAYERS)
def test_state_that_can_be_read_is(name: str, known: bool, form: Any) -> None:
    make, slots = LAYERS[name]
    layer, state = make(recipe=RECIPE if known else None), theirs(slots)
    checkpoint = {**make().state_dict(), "_extra_state": form(saved(state))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.load_state_dict(checkpoint)
    assert "_extra_state" in checkpoint and "_extra_state" not in layer.state_dict()
    stages = ("fc1_", "fc2_") if name == "layernorm_mlp" else ("",)
    for buffer in ("scale", "amax_history"):
        halves = (state[f"{buffer}_{direction}"].chunk(len(stages), -1) for direction in ("fwd", "bwd"))
        for stage, forward, backward in zip(stages, *halves):
            own = [*forward.chunk(3, -1)[::2], backward]  # nothing is kept of weights
            assert torch.equal(getattr(layer, stage + buffer), torch.cat(own, -1))
    layer.recipe = RECIPE
    run(layer, torch.randn(8, 16)).sum().backward()


@pytest.mark.parametrize("weights", [True, False], ids=["slots_of_weights", "without"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("name", LAYERS)
def test_state_of_each_direction_loads_to_the_same(name: str, known: bool, weights: bool) -> None:
    """As version 0.2 wrote it, and 0.1 with slots of weights between those of inputs and outputs."""
    make, _ = LAYERS[name]
    layer, again = make(recipe=RECIPE), make(recipe=RECIPE if known else None)
    for buffer in layer.buffers():
        buffer.copy_(torch.rand(buffer.shape) + 1)
    again.load_state_dict(apart(layer, weights))
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in layer.state_dict().items())


def test_a_direction_alone_leaves_the_other_unseen() -> None:
    layer, again = nc.Linear(16, 32, device="cpu", recipe=RECIPE), nc.Linear(16, 32, device="cpu")
    for buffer in layer.buffers():
        buffer.copy_(torch.rand(buffer.shape) + 1)
    for direction, seen in (("fwd", slice(0, 2)), ("bwd", slice(2, 4))):
        state = {
            key: value for key, value in apart(layer, True).items() if key[-3:] in (direction, "ght", "ias")
        }
        again.load_state_dict(state)
        for name in layer._state_names():
            ours, theirs = again.state_dict()[name], layer.state_dict()[name]
            assert (
                torch.equal(ours[..., seen], theirs[..., seen]) and ours.count_nonzero() == ours.numel() // 2
            )
    del state["amax_bwd"]
    with pytest.raises(RuntimeError, match="lacks.*amax"):
        again.load_state_dict(state)


class Bomb:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('executed')",)


class Recipe:
    """In the place of Transformer Engine's, which is not installed here."""

    __module__ = "transformer_engine.common.recipe"
    __qualname__ = "DelayedScaling"

    def __init__(self) -> None:
        self.margin, self.fp8_format = 0, "HYBRID"


@pytest.fixture
def as_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[names[-1]], "DelayedScaling", Recipe, raising=False)


@pytest.mark.parametrize("name", LAYERS)
def test_what_transformer_engine_pickles_is_read(name: str, as_transformer_engine: None) -> None:
    """Its recipe is not made, its tensors are; what goes back is the same but for weights."""
    make, slots = LAYERS[name]
    state = theirs(slots)
    pickled = pickle.dumps({"recipe": Recipe(), **state})
    assert b"transformer_engine.common.recipe" in pickled
    layer = make(recipe=RECIPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.load_state_dict({**make().state_dict(), "_extra_state": as_tensor(pickled)})
    given = nc.compat.transformer_engine_state_dict(layer)
    assert set(given) == {*make().state_dict(), "_extra_state"}
    back = pickle.loads(given["_extra_state"].numpy().tobytes())
    of_weights = back["scale_fwd"] > 1000
    assert int(of_weights.sum()) == slots
    for key in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"):
        ignored = of_weights if key.endswith("_fwd") else torch.tensor(False)
        assert torch.equal(torch.where(ignored, state[key], back[key]), state[key])
    again = make(recipe=RECIPE)
    again.load_state_dict(given)
    assert torch.equal(run(layer, torch.ones(8, 16)), run(again, torch.ones(8, 16)))


def test_other_modules_have_no_extra_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nc.LayerNorm(8, device="cpu"), nc.Linear(8, 8, device="cpu"))
    with pytest.raises(TypeError, match="model is 'x', of type str"):
        nc.compat.transformer_engine_state_dict("x")  # type: ignore[arg-type]
    given = nc.compat.transformer_engine_state_dict(model)
    assert [key for key in given if "_extra" in key] == ["1._extra_state", "2._extra_state"]
    assert all(given[key].numel() == 0 for key in given if "_extra" in key)


class Storage:
    """Pickles as the storage of a tensor does, which is a file within the file."""

    def __init__(self, file: bytes) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (self.file,)


UNREADABLE = {
    "code in a pickle": as_tensor(pickle.dumps(Bomb())),
    "code in a file": as_tensor(saved({"scale_fwd": Bomb()})),
    "code in a tensor of a pickle": as_tensor(pickle.dumps({"scale_fwd": Storage(saved({"": Bomb()}))})),
    "damaged": as_tensor(b"PK" + bytes(100)),
    "something else": "text",
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_safely_is_ignored_with_one_line(value: Any) -> None:
    model = nn.Sequential(nc.Linear(16, 16, device="cpu"), nc.LayerNormLinear(16, 16, device="cpu"))
    checkpoint = {**model.state_dict(), "0._extra_state": value, "1._extra_state": value}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        model.load_state_dict(checkpoint)
    (line,) = {str(warning.message) for warning in seen}
    assert len(seen) == 1 and "in a form that cannot be read safely; it is ignored" in line


@pytest.mark.parametrize(
    "value", [None, torch.empty(0, dtype=torch.uint8), io.BytesIO()], ids=["None", "a tensor", "a file"]
)
def test_empty_state_is_nothing(value: Any) -> None:
    model = nn.Sequential(
        nc.LayerNorm(16, device="cpu"), nc.RMSNorm(16, device="cpu"), nc.GroupedLinear(2, 16, 16, device="cpu"),
        nc.ops.Sequential(nc.ops.Linear(16, 16, device="cpu"), nc.ops.Quantize()),
    )  # fmt: skip
    extra = {f"{at}._extra_state": value for at in ("0", "1", "2", "3.0.basic_ops.0", "3.1")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict({**model.state_dict(), **extra})


def test_sizes_that_differ_are_left() -> None:
    layer = nc.Linear(16, 32, device="cpu")
    layer.load_state_dict({**layer.state_dict(), "_extra_state": as_tensor(saved(theirs(2)))})
    assert layer.scale is None


def test_a_layer_with_another_recipe_has_no_use_for_it() -> None:
    layer = nc.Linear(16, 32, device="cpu", recipe=MXFP8BlockScaling())
    layer.load_state_dict({**layer.state_dict(), "_extra_state": as_tensor(saved(theirs(1)))})
    assert layer.scale is None


def test_another_kind_of_recipe_is_said_once() -> None:
    model = nn.Sequential(nc.Linear(16, 16, device="cpu"), nc.Linear(16, 16, device="cpu"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for recipe in (MXFP8BlockScaling(), Float8CurrentScaling(), Float8CurrentScaling()):
            with nc.autocast(recipe=recipe):
                model(torch.randn(4, 16))
    ours = [str(warning.message) for warning in seen if "recipe" in str(warning.message)]
    assert len(ours) == 1 and "from MXFP8BlockScaling to Float8CurrentScaling" in ours[0]
    model[0].recipe = MXFP8BlockScaling()  # asked for in so many words
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0](torch.randn(4, 16))
