"""Statistics of quantization, sampled: right, and without a trace in the training's numbers."""

from __future__ import annotations

import contextlib
import copy
import csv
import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.models import Llama4TextExperts
from recipes import DEVICE, MORE_FORMATS, QUANTIZED
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.functional import OBSERVED, observe, observe_groups
from narrowcast.inspect import Record
from narrowcast.inspect.picture import draw, figure

RECIPES = {**QUANTIZED, **MORE_FORMATS}


def stack(recipe: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nc.LayerNormLinear(64, 96, device=DEVICE),
        nc.Linear(96, 64, device=DEVICE),
        nc.LayerNormMLP(64, 128, device=DEVICE),
    )
    nc.set_recipe(model, recipe)
    return model


def step(run: Any, model: Any, seed: int) -> list[Tensor]:
    """Output and gradients of one step."""
    torch.manual_seed(seed)
    out = run(torch.randn(32, 64).to(DEVICE))
    out.square().mean().backward()
    result = [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    model.zero_grad()
    return result


@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in RECIPES), ("delayed", True), ("rowwise_with_gw_hp", True)],
)
def test_numbers_do_not_change(name: str, compiled: bool) -> None:
    plain, model = stack(RECIPES[name]), stack(RECIPES[name])
    watch = nc.watch(model, every=2)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for count in range(3):
        ours, theirs = step(run, model, count), step(plain, plain, count)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
        assert bool(watch.step()) == (count % 2 == 0)
    seen = {(one.layer, one.operand) for one in watch.latest()}
    assert seen == {
        *(("0", operand) for operand in ("input", "weight", "grad_output")),
        *(("1", operand) for operand in ("input", "weight", "grad_output")),
        *(("2", operand) for operand in ("fc1_input", "fc1_weight", "fc2_weight", "fc2_grad_output")),
    }
    assert {one.step for one in watch.records} == {0, 2}
    for one in watch.latest():
        assert one.amax > 0 and 0 <= one.underflow < 0.5 and 0 <= one.saturation < 0.05 and 8 < one.sqnr < 60
    assert set(model.state_dict()) == set(plain.state_dict())
    watch.close()
    assert set(dict(model.named_buffers())) == set(dict(plain.named_buffers()))
    assert torch.equal(step(model, model, 9)[0], step(plain, plain, 9)[0])


class Grouped(nn.Module):
    """A linear and a grouped layer, called with splits on the host or on the device."""

    def __init__(self, recipe: Any, single: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nc.Linear(64, 48, device=DEVICE)
        self.grouped = nc.GroupedLinear(3, 48, 96, single_grouped_parameter=single, device=DEVICE)
        nc.set_recipe(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        if self.grouped.single_grouped_weight:
            return self.grouped(self.linear(x), m_splits=torch.tensor([9, 0, 23], device=x.device))
        return self.grouped(self.linear(x), [9, 0, 23])


@pytest.mark.parametrize(
    ("name", "compiled", "single"),
    [*((name, False, index % 2 == 0) for index, name in enumerate(RECIPES)), ("delayed", True, False)],
)
def test_numbers_of_grouped_layers_do_not_change(name: str, compiled: bool, single: bool) -> None:
    torch._dynamo.reset()
    plain, model = Grouped(RECIPES[name], single), Grouped(RECIPES[name], single)
    watch = nc.watch(model, only="grouped", every=2)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for count in range(3):
        ours, theirs = step(run, model, count), step(plain, plain, count)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
        assert bool(watch.step()) == (count % 2 == 0)
    assert {one.operand for one in watch.latest()} == {"input", "weight", "grad_output"}
    for one in watch.latest():
        assert one.amax > 0 and 0 <= one.underflow < 0.5 and 0 <= one.saturation < 0.05 and 8 < one.sqnr < 60
    watch.close()
    assert set(dict(model.named_buffers())) == set(dict(plain.named_buffers()))


@pytest.mark.parametrize("how", ["twice", "fifo", "lifo", "retained", "written in place"])
@pytest.mark.parametrize(("name", "compiled"), [("current", False), ("delayed", False), ("delayed", True)])
def test_numbers_of_several_forwards_do_not_change(name: str, compiled: bool, how: str) -> None:
    """A record is that of the last of them."""
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nc.Linear(64, 64, device=DEVICE), nn.ReLU(inplace=how == "written in place"))
        nc.set_recipe(model, QUANTIZED[name])
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        watch = nc.watch(model) if watched else None
        inputs = [torch.randn(32, 64).to(DEVICE).requires_grad_() for _ in range(2)]
        losses = [(run(run(x)) if how == "twice" else run(x)).square().sum() for x in inputs]
        for loss in reversed(losses) if how == "lifo" else losses:
            if how == "retained":
                loss.backward(retain_graph=True)
            loss.backward()
        if watch is not None:
            assert {one.operand for one in watch.step()} == {"input", "weight", "grad_output"}
        results.append([*(x.grad for x in inputs), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


def operations(recipe: Any) -> Any:
    torch.manual_seed(0)
    ops, place = nc.ops, {"device": DEVICE}
    first, second = ops.Linear(64, 96, **place), ops.Linear(96, 48, bias=False, **place)
    model = ops.Sequential(
        ops.LayerNorm(64, **place), first, ops.GELU(), second, ops.GELU(), ops.Linear(48, 64, **place)
    )
    nc.set_recipe(model, recipe)
    return model


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in RECIPES), ("delayed", True)])
def test_numbers_of_operations_do_not_change(name: str, compiled: bool) -> None:
    """Which hand each other quantized tensors, but for those that are sampled."""
    torch._dynamo.reset()
    plain, model = operations(RECIPES[name]), operations(RECIPES[name])
    watch = nc.watch(model, every=2)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    for count in range(3):
        ours, theirs = step(run, model, count), step(plain, plain, count)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
        assert bool(watch.step()) == (count % 2 == 0)
    seen = {(one.layer.split(".")[0], one.operand) for one in watch.latest()}
    assert {(layer, operand) for layer in "135" for operand in ("input", "weight")} <= seen
    assert ("3", "grad_output") in seen
    for one in watch.latest():
        assert one.amax > 0 and 0 <= one.underflow < 0.5 and 0 <= one.saturation < 0.05 and 8 < one.sqnr < 60
    watch.close()
    assert set(dict(model.named_buffers())) == set(dict(plain.named_buffers()))
    assert torch.equal(step(model, model, 9)[0], step(plain, plain, 9)[0])


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_what_an_operation_quantizes_does_not_change(name: str, forward: bool) -> None:
    """As the linear operation beside requests it, not with a scale of its own and then once more."""
    ops, models = nc.ops, []
    for _ in range(2):
        torch.manual_seed(0)
        linear, bias = ops.Linear(64, 64, bias=False, device=DEVICE), ops.Bias(64, device=DEVICE)
        rounds = ops.Quantize(forward, not forward, device=DEVICE)
        models.append(ops.Sequential(*((bias, rounds, linear) if forward else (linear, rounds, bias))))
        nc.set_recipe(models[-1], RECIPES[name])
    plain, model = models
    watch = nc.watch(model, every=1)
    for count in range(3):
        assert all(map(torch.equal, step(model, model, count), step(plain, plain, count)))
        assert {one.operand for one in watch.step()} == {"input", "weight", "grad_output"}
        for one in models:
            nc.renew_delayed_scaling(one)


def test_groups_are_observed_as_they_are_quantized() -> None:
    quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3, columnwise=False)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    x[:8] *= 1000  # of all rows together it would take the range
    into, splits = torch.zeros(len(OBSERVED)), torch.tensor([8, 0, 27])
    assert torch.equal(observe_groups(x, splits, quantizer, None, into, x), x)
    found, parts = (
        dict(zip(OBSERVED, into.tolist())),
        [observed(part, quantizer) for part in (x[:8], x[8:35])],
    )
    for key in OBSERVED:
        values = [part[key] for part in parts]
        assert found[key] == pytest.approx(max(values) if key == "amax" else sum(values), rel=1e-6)


def test_experts_inside_a_converted_module_are_seen() -> None:
    torch.manual_seed(0)
    plain = nc.convert(Llama4TextExperts(), nc.recipe.Float8CurrentScaling())
    model, x = copy.deepcopy(plain), torch.randn(4 * 7, 32)
    results = []
    with nc.watch(model) as watch:
        for one in (model, plain):
            y = one(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), list(one.parameters()))])
        new = watch.step()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert {one.operand for one in new} == {
        "gate_up_proj_input",
        "down_proj_grad_output",
        "gate_up_proj",
        "down_proj",
    }
    assert next(one.amax for one in new if one.operand == "gate_up_proj_input") == x.abs().max()
    assert "_watcher" not in vars(model)


def test_leaving_a_watch_detaches_it() -> None:
    model = nn.Sequential(nc.Linear(32, 32, device="cpu", recipe=nc.recipe.Float8CurrentScaling()))
    before = set(model[0].__dict__), len(model[0]._forward_hooks), set(model[0]._buffers)
    with nc.watch(model, only=lambda name, module: name == "0") as watch:
        model(torch.randn(4, 32)).sum().backward()
        assert watch.step()
    assert (set(model[0].__dict__), len(model[0]._forward_hooks), set(model[0]._buffers)) == before
    assert watch.records
    with nc.watch(model):  # not watched any more
        pass


def observed(x: Tensor, quantizer: Any, scale: Tensor | None = None) -> dict[str, float]:
    into = torch.full((len(OBSERVED),), math.nan)
    through = torch.randn(3)
    assert torch.equal(observe(x, quantizer, scale, into, through), through)
    return dict(zip(OBSERVED, into.tolist()))


def test_statistics_are_those_of_their_definitions() -> None:
    quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3, columnwise=False)
    x = torch.zeros(4, 32)
    x[0, :4] = torch.tensor([448.0, -1.0, 2.0**-12, 0.0])  # amax is the largest code, so the scale is 1
    row = observed(x, quantizer)
    assert (row["elements"], row["nonzero"], row["amax"]) == (128, 3, 448)
    assert (row["underflows"], row["saturations"]) == (1, 0)  # 2**-12 is below half of the least code, 2**-9
    assert row["squared_error"] == pytest.approx(2.0**-24) and row["squares"] == 448.0**2 + 1
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    row = observed(x, quantizer)
    error = (x - quantizer.quantize(x).dequantize()).square().sum()
    assert row["squared_error"] == pytest.approx(error.item(), rel=1e-5)


def test_the_sum_with_a_residual_is_what_is_seen() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows = []
    for inputs, named in (((x,), {"residual": 2 * x}), ((x + 2 * x,), {})):
        torch.manual_seed(0)
        model = nn.Sequential(nc.LayerNormMLP(64, 96, device=DEVICE))
        nc.set_recipe(model, nc.recipe.Float8CurrentScaling())
        watch = nc.watch(model)
        out = model[0](*inputs, **named)
        (out[0] if named else out).sum().backward()
        rows.append(watch.step())
    assert rows[0] == rows[1] and any(one.operand == "fc1_input" for one in rows[0])


def test_saturation_is_seen_where_a_scale_is_too_large() -> None:
    model = nn.Sequential(nc.Linear(32, 32, device="cpu", bias=False))
    nc.set_recipe(model, nc.recipe.DelayedScaling())
    x = torch.ones(16, 32)
    model(x).sum().backward()
    nc.renew_delayed_scaling(model)
    watch = nc.watch(model)
    x[:, :4] = 1000.0  # the scale is still that of the step before: 1 is the most
    model(x).sum().backward()
    (one,) = (one for one in watch.step() if one.operand == "input")
    assert one.saturation == 4 / 32 and one.amax == 1000


@pytest.mark.parametrize("how", ["set_recipe", "autocast", "compiled"])
def test_a_first_step_under_delayed_scaling_is_seen_as_one_under_current_scaling(how: str) -> None:
    """Whose scales are those of the tensors, in a group of rows, too; and the second step's are of the first."""
    rows = []
    for recipe in (nc.recipe.DelayedScaling(), nc.recipe.Float8CurrentScaling()):
        torch.manual_seed(0)
        model = nn.Sequential(nc.Linear(64, 96, device="cpu"), nc.GroupedLinear(2, 96, 32, device="cpu"))
        watch = nc.watch(model, every=1)
        if how != "autocast":
            nc.set_recipe(model, recipe)
        run = torch.compile(model[0], backend="aot_eager", fullgraph=True) if how == "compiled" else model[0]
        for _ in range(2):
            with nc.autocast(recipe=recipe) if how == "autocast" else contextlib.nullcontext():
                y = model[1](run(torch.linspace(-300.0, 500.0, 24 * 64).view(24, 64)), [9, 15])
            (y.sum() * 30).backward()
            rows.append(watch.step())
    assert rows[0] == rows[2] and len(rows[0]) == 6
    assert rows[1] == rows[3]


@pytest.mark.parametrize("kind", ["feed-forward", "operations"])
def test_the_first_graph_makes_state_that_watching_reads(kind: str) -> None:
    """That of both stages of a feed-forward, of which watching reads one before the forward does."""
    torch._dynamo.reset()
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model: Any = nc.LayerNormMLP(64, 128, device=DEVICE)
        if kind == "operations":
            model = nc.ops.Sequential(nc.ops.Linear(64, 64, device=DEVICE))
        watch = nc.watch(model) if watched else None
        run = torch.compile(functools.partial(nc.checkpoint, model), backend="aot_eager", fullgraph=True)
        with nc.autocast(recipe=QUANTIZED["delayed"]):
            out = run(torch.randn(32, 64).to(DEVICE))
        out.square().mean().backward()
        assert watch is None or len(watch.step()) == (4 if kind == "feed-forward" else 3)
        results.append([out.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


def test_every_format_knows_its_largest_code() -> None:
    for name in ("mxfp8", "block", "nvfp4", "mxfp6", "mxfp4"):
        quantizer = nc.recipe.linear_plan(RECIPES[name], "", True, True, module_type="linear").input.quantizer
        quantizer = quantizer.with_usage(rowwise=True, columnwise=False)
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
        row = observed(x, quantizer)
        assert row["saturations"] <= 0.01 * x.numel(), name
        assert 0 < row["squared_error"] < 0.05 * row["squares"], name


class Bypassing(nn.Module):
    """Multiplies weights in its own code, which no source of ``self.name.weight`` tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.linear(x, layer.weight)
        return self.out(x)


def test_layers_that_their_model_does_not_call_are_named() -> None:
    model = nc.convert(Bypassing(), QUANTIZED["current"])
    watch, receipt = nc.watch(model, every=1), nc.receipt(model)
    with receipt.recording():
        model(torch.randn(8, 64)).sum().backward()
    watch.step()
    assert receipt.idle == ("layers.0", "layers.1") and receipt.flops_covered == pytest.approx(1 / 3)
    assert str(watch).endswith("\nunder a recipe, but not called in a sampled step: 'layers.0' and 1 more")


def test_records_go_to_files(tmp_path: Path) -> None:
    scalars: dict[tuple[str, int], float] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            scalars[tag, step] = value

    model = stack(QUANTIZED["current"])
    watch = nc.watch(model, every=1)
    told = "nothing was sampled: no step was counted; call watch.step() once per step of the training"
    assert str(watch) == told
    for early in (
        lambda: watch.plot(tmp_path / "early.png"),
        lambda: watch.to_csv(tmp_path / "early.csv"),
        lambda: watch.to_tensorboard(Writer()),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            early()
    assert not [*tmp_path.iterdir()]
    for count in range(2):
        step(model, model, count)
        watch.step()
    watch.to_csv(tmp_path / "records.csv")
    rows = list(csv.DictReader((tmp_path / "records.csv").open()))
    assert len(rows) == len(watch.records) == 20
    read = [
        Record(int(row.pop("step")), row.pop("layer"), row.pop("operand"), *map(float, row.values()))
        for row in rows
    ]
    assert read == watch.records
    watch.to_tensorboard(Writer())
    assert scalars["quantization/sqnr/1.weight", 1] == next(
        one.sqnr for one in watch.latest() if (one.layer, one.operand) == ("1", "weight")
    )
    watch.plot(tmp_path / "watch.png")
    assert (tmp_path / "watch.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"^path is '.*w\.xyz'; end it in one of \..*\.png"):
        watch.plot(tmp_path / "w.xyz")
    with pytest.raises(TypeError, match="^path is 3, of type int; pass a path"):
        watch.plot(3)
    watch.plot(tmp_path / "watch.svg")
    told = (tmp_path / "watch.svg").read_text()
    assert f"narrowcast {nc.__version__}, torch {torch.__version__}" in told
    assert "Gray: " in told, "the MLP's operand between its GEMMs has none"
    assert "Recipe: Float8CurrentScaling." in told
    layer = nc.Linear(32, 32)
    nc.set_recipe(layer, QUANTIZED["current"])
    with nc.watch(layer, every=1) as whole:
        layer(torch.randn(32, 32)).sum().backward()
        whole.step()
        whole.plot(tmp_path / "whole.svg")
    drawn = figure(whole.records)
    drawn.draw_without_rendering()
    panel, bar = drawn.axes[0].get_position(), drawn.axes[-1].get_position()
    assert bar.width > 3 * panel.width, "the words below a scale stand side by side"
    assert "fc2_grad_output" in str(watch)
    told = (tmp_path / "whole.svg").read_text()
    assert "Gray" not in told and ">no record<" not in told, "a gradient of ones has no error, and a record"


@pytest.mark.parametrize("layer", ["{}", "model.layers.{}.self_attn.long_query_projection"])
def test_words_of_a_small_picture_are_apart(layer: str) -> None:
    """Two layers and one step left a scale on which its words and ticks were printed on each other."""
    pytest.importorskip("matplotlib")
    records = [
        Record(0, layer.format(index), operand, 1.0, 0.002, 0.0, 31.0)
        for index in (10, 11)
        for operand in ("input", "weight", "grad_output")
    ]
    drawn = figure(records)
    drawn.draw_without_rendering()
    for bar in drawn.axes[-2:]:
        for texts in (bar.texts, bar.get_xticklabels()):
            boxes = [text.get_window_extent() for text in texts if text.get_text()]
            assert len(boxes) > 1 and all(one.x1 < other.x0 for one, other in zip(boxes, boxes[1:]))
    names = [name.get_text() for name in drawn.axes[0].get_yticklabels()]
    assert all(str(index) in name for index, name in zip((10, 11), names)), "elided in the middle"


def test_the_headings_of_the_picture_start_below_its_title(tmp_path: Path) -> None:
    """The margin of the file moved the title, and left the headings at the edge."""
    matplotlib = pytest.importorskip("matplotlib")
    records = [Record(0, "a", "input", 1.0, 0.0, 0.0, 31.0)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(records, [], tmp_path / "watch.svg")
    told = (tmp_path / "watch.svg").read_text()
    lefts = [
        re.findall(rf' x="([0-9.]+)"[^>]*>{words}', told)
        for words in ("No layer loses", "Signal", "Underflow")
    ]
    assert lefts[0] and lefts == [lefts[0]] * 3


def test_the_title_of_the_picture_names_what_loses_its_values() -> None:
    pytest.importorskip("matplotlib")
    good = [
        Record(step, "a", operand, 1.0, 0.0, 0.0, 31.0) for step in (0, 10) for operand in ("input", "weight")
    ]
    lost = Record(10, "b", "input", 1.0, 0.5, 0.0, 99.0)
    later = Record(20, "b", "weight", 1.0, 0.9, 0.0, 31.0)
    noisy = Record(10, "b", "input", 1.0, 0.0, 0.0, 3.0)
    for records, title in (
        (good, "No layer loses many values or much signal"),
        ([*good, lost], "Layer b, input: up to 50% of the values become 0 from step 10"),
        ([*good, lost, later], "Layer b, input, and 1 more: up to 50% of the values become 0 from step 10"),
        ([*good, noisy], "Layer b, input: much quantization error from step 10"),
    ):
        assert figure(records).get_suptitle().replace("\n", " ") == title
    drawn = figure([*good, lost], ["Float8CurrentScaling"])
    red = [(name.get_text(), name.get_weight() == "bold") for name in drawn.axes[0].get_yticklabels()]
    assert red == [("a", False), ("b", True)], "a broken layer looked like the others"
    assert drawn.get_supxlabel().startswith("Recipe: Float8CurrentScaling. Remedy for a red layer: ")
    assert drawn.get_supxlabel().count("\n") < 4, "it had eight lines"
    assert "Remedy" not in figure(good).get_supxlabel()
    panels, told = (
        drawn.axes[3:6],
        "one number: the title's share is on the scale, and a panel without one is no blank",
    )
    assert panels[0].images[0].norm.vmax == 1.0, told
    assert [text.get_text() for axes in panels for text in axes.texts] == [
        "Underflow: values rounded to 0",
        "all 0%",
        "no record",
    ], told
    words = [text.get_text() for axes in figure(good).axes[:3] for text in axes.texts]
    assert words == ["all usual", "Signal to quantization noise (SQNR), dB", "all usual", "no record"]
    usual = drawn.axes[0].images[0]
    assert usual.cmap(usual.norm(24.0))[3] > 0, "what is usual was blank"


def test_a_watched_model_that_turns_back_trains_and_converts_again() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(32, 64)
    watch = nc.watch(nc.convert(model, QUANTIZED["current"]), every=1)
    model(x).sum().backward()
    assert len(watch.step()) == 6
    nc.revert(model)(x).sum().backward()
    with pytest.raises(RuntimeError, match="no watched layer is left: .*reverted"):
        watch.step()
    assert "0.weight" not in str(watch) and "not called" not in str(watch) and "last of" not in str(watch)
    nc.convert(model, QUANTIZED["current"])(x).sum().backward()
    assert len(watch.step()) == 6
    assert str(watch).endswith("\nlast of 2 samples; all are in watch.records")
    nc.revert(model)
    watch.close()
    assert not list(model.buffers()) and all(type(one) is nn.Linear for one in model)


def test_what_cannot_be_watched_is_said() -> None:
    with pytest.raises(ValueError, match="no layer of narrowcast"):
        nc.watch(nn.Linear(4, 4))
    model = stack(QUANTIZED["current"])
    with pytest.raises(ValueError, match="every is 0"):
        nc.watch(model, every=0)
    with pytest.raises(ValueError, match="matches"):
        nc.watch(model, only="nothing.*")
    with pytest.raises(ValueError, match="chooses none of the . layers of narrowcast"):
        nc.watch(model, only=lambda name, module: False)
    watch = nc.watch(model, only="1")
    with pytest.raises(ValueError, match="watched already"):
        nc.watch(model)
    with pytest.raises(RuntimeError, match="no watched layer was seen"):
        watch.step()
    with pytest.raises(TypeError, match="^writer is 'runs/', of type str; pass .*SummaryWriter"):
        watch.to_tensorboard("runs/")
    watch.close()
    with pytest.raises(
        RuntimeError,
        match="no watched layer is left: .*closed.*; call narrowcast.convert and narrowcast.watch",
    ):
        watch.step()
    nc.watch(model).close()
    operations = nc.ops.Sequential(nc.ops.GroupedLinear(2, 32, 32, device="cpu"))
    watch = nc.watch(nn.Sequential(operations, nc.Linear(32, 32, device="cpu")))
    assert watch.skipped == ("0.0",)
    with pytest.raises(ValueError, match="no layer of narrowcast"):
        nc.watch(operations)
    grouped = nn.Sequential(nc.GroupedLinear(2, 32, 32, device="cpu"))
    nc.watch(grouped)
    copy.deepcopy(grouped)


def test_the_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    layers = nn.ModuleList(nn.ModuleDict({"query_projection": nn.Linear(32, 32)}) for _ in range(2))
    model = nn.ModuleDict({"language_model": layers})
    watch = nc.watch(nc.convert(model, nc.recipe.Float8CurrentScaling()), every=1)
    for layer in layers:
        layer["query_projection"](torch.randn(3, 32)).sum().backward()
    watch.step()
    lines = str(watch).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2] == "language_model.0." and lines[3].split()[:3] == ["0", "query_projection", "input"]
    assert repr(watch) == str(watch)
