"""The receipt: a record per weight, honest totals, expected memory that is what a step saves, three ways to show it."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import QUANTIZED
from torch import nn
from torch.nn.utils import prune

import narrowcast as nc
from narrowcast.convert.show import as_text

from .models import Conv1D, Experts, Model

CURRENT, BLOCK = nc.recipe.Float8CurrentScaling(), nc.recipe.Float8BlockScaling()


def test_a_dry_run_changes_nothing_and_says_what_would_be() -> None:
    model, other = Model(), Model()
    dry = nc.convert(model, CURRENT, skip="head", dry_run=True)
    assert not nc.get_recipes(model) and dry.dry_run
    assert "would be converted (dry run)" in str(dry)
    assert dry.gemms == nc.receipt(nc.convert(other, CURRENT, skip="head")).gemms


def test_the_verbs_return_the_model() -> None:
    model = Model()
    assert nc.convert(model, CURRENT) is nc.set_recipe(model, BLOCK) is nc.revert(model) is model


def test_a_receipt_is_made_at_any_time() -> None:
    """The same after training, of a copy, of what was loaded, and of a model that it is a part of."""
    model = nn.Sequential(
        nn.Linear(32, 32), Conv1D(48, 32), Experts(width=48), nn.RMSNorm(48), nn.Linear(48, 2)
    )
    dry = nc.convert(model, CURRENT, skip="4", norms=True, dry_run=True)
    receipt = nc.receipt(nc.convert(model, CURRENT, skip="4", norms=True))
    assert [one.reason for one in receipt.gemms if one.decision == "kept"] == ["skip"]
    assert (dry.gemms, dry.norms, dry.memory) == (receipt.gemms, receipt.norms, receipt.memory)
    model[1](model[0](torch.randn(4, 32))).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for later in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert nc.receipt(later) == receipt
    inside = nc.receipt(nn.ModuleDict({"model": model}))
    assert [one.name for one in inside.gemms] == [f"model.{one.name}" for one in receipt.gemms]
    nc.set_recipe(model, {"0": BLOCK, "1": None})
    first, second = nc.receipt(model).gemms[:2]
    assert first.recipe == "Float8BlockScaling" and (second.decision, second.recipe) == ("converted", "")
    assert "no recipe: its own is None" in str(nc.receipt(model))
    assert (
        "_conversion_reason" in model[4].__dict__ and "_conversion_reason" not in nc.revert(model)[4].__dict__
    )


def test_a_model_that_was_never_converted_has_one() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nc.Linear(32, 32, device="cpu", recipe=CURRENT), nn.RMSNorm(32))
    receipt = nc.receipt(model)
    assert [(one.decision, one.recipe) for one in receipt.gemms] == [
        ("kept", ""),
        ("narrowcast", "Float8CurrentScaling"),
    ]
    assert receipt.gemms[0].reason == "not converted; nc.convert(model, recipe) does"
    assert receipt.flops_covered == 0.5 and not receipt.norms and receipt.sharding is None
    assert "0 of 1 weights" in str(nc.receipt(nn.Linear(4, 4))) and nc.receipt(nn.ReLU()).gemms == ()


def test_a_receipt_that_is_taken_for_the_model_says_where_that_is() -> None:
    receipt = nc.receipt(nn.Linear(8, 8))
    for name in ("train", "parameters", "to"):
        with pytest.raises(AttributeError, match=rf"`model = narrowcast.convert\(.*`model\.{name}`"):
            getattr(receipt, name)
    with pytest.raises(AttributeError, match="'coverage'; did you mean assert_coverage or flops_covered[?]"):
        receipt.coverage  # noqa: B018
    with pytest.raises(TypeError, match="receipt: model is a Receipt; pass the torch.nn.Module"):
        nc.receipt(receipt)  # type: ignore[arg-type]


def test_shares_and_parameters_of_a_model_with_ties() -> None:
    receipt = nc.receipt(nc.convert(Model(32, 48), CURRENT, skip="head"))
    block, head = 3 * 32 * 64, 32 * 48
    assert receipt.flops_covered == pytest.approx(2 * block / (2 * block + head))
    total = sum(parameter.numel() for parameter in Model(32, 48).parameters())  # the tied weight once
    assert receipt.parameter_count == total
    assert receipt.parameters_covered == pytest.approx(2 * block / total)
    first = receipt.gemms[0]
    assert (first.name, first.type, first.shape) == ("layers.0.up", "Linear", (64, 32))
    assert (first.decision, first.reason, first.recipe) == ("converted", "", "Float8CurrentScaling")
    assert first.parameters == 64 * 32


def test_experts_count_as_often_as_a_token_meets_them() -> None:
    experts = Experts(experts=8, width=32, inner=48)  # two of them for each token
    receipt = nc.receipt(nc.convert(nn.ModuleList([experts, nn.Linear(32, 32)]), CURRENT))
    assert [one.name for one in receipt.gemms] == ["0.gate_up_proj", "0.down_proj", "1"]
    of_experts = 2 * 3 * 32 * 48
    assert receipt.gemms[2].flops_share == pytest.approx(32 * 32 / (of_experts + 32 * 32))


def test_a_list_of_experts_counts_as_often_as_a_token_meets_them() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top_k, self.experts = 2, nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(8))

    receipt = nc.receipt(nc.convert(nn.ModuleList([Mixture(), nn.Linear(32, 32)]), CURRENT))
    assert receipt.gemms[0].name == "0.experts.0.0"
    assert receipt.gemms[0].flops_share == pytest.approx(2 / 8 / 3)
    assert receipt.gemms[-1].flops_share == pytest.approx(1 / 3)


def test_padding_is_what_the_gemm_adds() -> None:
    sizes = {"current": (nn.Linear(40, 16), 48 / 40 - 1), "block": (nn.Linear(192, 128), 256 / 192 - 1)}
    for name, (layer, padding) in sizes.items():
        receipt = nc.convert(layer, QUANTIZED[name], dry_run=True)
        assert receipt.gemms[0].padding == pytest.approx(padding)
    assert nc.receipt(nc.convert(nn.Linear(64, 64), CURRENT)).gemms[0].padding == 0.0


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("frozen", [False, True], ids=["trains", "frozen"])
def test_expected_memory_is_what_a_step_saves(recipe: Any, frozen: bool) -> None:
    layer, tokens = nn.Linear(128, 256, bias=False).requires_grad_(not frozen), 4096
    receipt = nc.receipt(nc.convert(layer, recipe))
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() != layer.weight.data_ptr():  # it is there anyway
            saved.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        layer(torch.randn(tokens, 128, requires_grad=True))
    expected = receipt.memory.quantized_weights + tokens * receipt.memory.saved_per_token
    assert sum(saved) == pytest.approx(expected, abs=64)  # scales of delayed scaling are not counted
    assert receipt.memory.saved_per_token_before == (0 if frozen else 4 * 128)
    assert receipt.memory.parameters == 4 * 128 * 256


def test_coverage_is_asserted_and_what_is_missing_named() -> None:
    receipt = nc.receipt(nc.convert(Model(), CURRENT, skip="head"))
    receipt.assert_coverage(0.85)
    with pytest.raises(AssertionError, match=r"88\.9% .* 95\.0% .*: 'head' 11\.1% \(skip\)"):
        receipt.assert_coverage(0.95)
    with pytest.raises(TypeError, match="least is 'all', of type str; use a share from 0 to 1, such as .9"):
        receipt.assert_coverage("all")
    for least in (90, -0.1):
        with pytest.raises(ValueError, match=f"least is {least!r}; use a share from 0 to 1, such as .9"):
            receipt.assert_coverage(least)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "compute",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "old weight_norm", "old spectral_norm", "pruned"],
)
def test_a_layer_whose_weight_is_computed_is_listed_once(compute: Any, tmp_path: Path) -> None:
    model = nc.convert(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)), CURRENT)
    compute(model[0])
    receipt, reason = nc.receipt(model), "its weight is computed by a parametrization"
    found = [(one.name, one.shape, one.recipe, one.reason, one.flops_share) for one in receipt.gemms]
    assert found == [
        ("0", (128, 64), "Float8CurrentScaling", reason, 0.5),
        ("1", (64, 128), "Float8CurrentScaling", "", 0.5),
    ]
    with receipt.recording():
        model(torch.randn(32, 64))
    assert receipt.flops_covered == 1.0 and len(receipt.ran().gemms) == 2
    written = nc.export(model, tmp_path / "out", format="compressed-tensors")
    assert [(one.name, one.reason) for one in written.weights] == [("0.weight", reason), ("1.weight", "")]


def test_layers_of_narrowcast_count_when_they_have_a_recipe() -> None:
    model = nn.Sequential(
        nc.Linear(32, 32, device="cpu"), nc.LayerNormMLP(32, 64, device="cpu", recipe=CURRENT)
    )
    receipt = nc.receipt(model)
    assert [one.name for one in receipt.gemms] == ["0", "1.fc1_weight", "1.fc2_weight"]
    assert [one.covered for one in receipt.gemms] == [False, True, True]
    assert nc.get_recipes(model) == {"0": None, "1": CURRENT}
    text = str(receipt)
    assert text.count("set_recipe gives it a recipe") == 1 and text.count(type(CURRENT).__name__) == 2


def test_what_layers_of_narrowcast_save_is_not_told_as_zero() -> None:
    own = nc.Linear(32, 32, device="cpu", recipe=CURRENT)
    text = str(nc.receipt(nn.Sequential(own)))
    assert "Sequential: 1 of 1 weights in layers built from narrowcast\n" in text
    assert text.endswith("as before; not estimated: what layers built from narrowcast save")
    assert "0 B" not in text and "converted" not in text
    mixed = str(nc.receipt(nc.convert(nn.Sequential(own, nn.Linear(32, 32)), CURRENT)))
    assert "1 of 2 weights converted, 1 of 2 weights in layers built from narrowcast\n" in mixed
    assert "before 128 B; not estimated: what layers" in mixed
    assert "0 B" not in str(nc.receipt(nn.Linear(32, 32)))


def test_a_converted_layer_without_a_recipe_is_counted_apart() -> None:
    model = nc.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), CURRENT)
    nc.set_recipe(model[1], None)
    receipt = nc.receipt(model)
    assert "2 of 2 weights converted, 1 without a recipe\n" in str(receipt) and receipt.flops_covered == 0.5


def test_the_row_of_a_layer_without_a_recipe_does_not_say_converted() -> None:
    layer = nc.convert(nn.Linear(32, 32), CURRENT)
    nc.set_recipe(layer, None)
    assert "  no recipe  no recipe: its own is None" in str(nc.receipt(layer))


def test_padding_of_a_tiny_layer_is_told_as_a_factor() -> None:
    """Linear(7, 5) had a padding of 631.4%."""
    assert " 7.3 times" in str(nc.receipt(nc.convert(nn.Linear(7, 5), CURRENT)))


def test_frozen_weights_save_nothing_and_the_receipt_is_silent_about_it() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(False)
    assert " 0 B" not in str(nc.receipt(nc.convert(model, CURRENT, weights="stored")))


def test_no_line_of_a_receipt_begins_with_a_comma() -> None:
    """A column of 20 letters broke "Float8CurrentScaling, stored" before its comma."""
    inner = nn.Linear(64, 192).requires_grad_(False)
    model = nn.ModuleDict({"query_key_value_projection_of_every_head": inner})
    receipt = nc.receipt(nc.convert(model, CURRENT, weights="stored"))
    for width in range(72, 100):
        lines = as_text(receipt, width).splitlines()
        assert not [line for line in lines if line.lstrip().startswith(",")] and max(map(len, lines)) <= width


def test_json_and_text_tell_the_same() -> None:
    model = nn.Sequential(nn.Linear(32, 40), Conv1D(48, 40), nn.Conv2d(3, 4, 2))
    receipt = nc.receipt(nc.convert(model, CURRENT))
    told = json.loads(receipt.to_json())
    assert told["flops_covered"] == receipt.flops_covered
    assert [one["name"] for one in told["gemms"]] == ["0", "1", "2"]
    lines = str(receipt).splitlines()
    titles = "name type shape decision recipe or reason parameters FLOPs padding"
    assert " ".join(lines[0].split()) == titles
    assert lines[2].split()[:7] == ["0", "Linear", "40", "x", "32", "converted", "Float8CurrentScaling"]
    assert "a convolution, for which narrowcast has no layer" in lines[4]
    assert "2 of 3 weights converted" in lines[5]
    assert all(len(line) <= len(lines[0]) for line in lines[1:5])


def test_the_page_is_complete_and_its_picture_adds_up(tmp_path: Path) -> None:
    receipt = nc.receipt(nc.convert(Model(), CURRENT, skip="head"))
    receipt.to_html(tmp_path / "receipt.html")
    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))  # type: ignore[method-assign]
    parser.feed((tmp_path / "receipt.html").read_text())
    assert sum(tag == "tr" for tag, _ in tags) == 1 + len(receipt.gemms)
    bars = [one for tag, one in tags if tag == "rect" and one["height"] == "48"]
    assert len(bars) == len(receipt.gemms)
    assert sum(float(one["width"] or 0) for one in bars) == pytest.approx(640, abs=0.1)
    told = (tmp_path / "receipt.html").read_text()
    covered = f"{receipt.flops_covered:.1%}"
    assert f">converted {covered}</text>" in told and ">narrowcast " not in told, "a legend of what is there"
    assert f">{receipt.gemms[0].flops_share:.1%}</text>" in told, "a part says how large it is"
    assert "width: share of the FLOPs per token" in told
    assert not any("src" in one or "href" in one for _, one in tags)


def test_a_narrow_console_breaks_names_at_dots_and_underscores() -> None:
    rich, inner = pytest.importorskip("rich.console"), nn.ModuleDict()
    inner["query_key_value_projection_of_all_heads"] = nn.Linear(64, 192)
    receipt = nc.receipt(nc.convert(nn.ModuleDict({"self_attention": inner}), CURRENT))
    with io.StringIO() as file:
        rich.Console(width=80, file=file).print(receipt)
        lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines[2:] if line.strip()]
    assert names[:2] == ["self_attention.query_key_", "value_projection_of_all_heads"]


def test_rich_shows_it_and_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rich, receipt = pytest.importorskip("rich.console"), nc.receipt(nc.convert(Model(), CURRENT))
    with open(tmp_path / "shown", "w") as file:
        console = rich.Console(width=200, record=True, file=file)
        console.print(receipt)
    assert "layers.0-1.down" in console.export_text()
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "layers.0-1.down" in str(receipt) and receipt.to_json()
    receipt.to_html(tmp_path / "receipt.html")


@pytest.mark.parametrize(
    "budget, counted, warns", [(1.0, False, False), (0.9, False, True), (0.9, True, False)]
)
def test_a_memory_budget_that_repeats_gemms_is_said(budget: float, counted: bool, warns: bool) -> None:
    receipt = nc.receipt(nc.convert(nn.Linear(48, 32), CURRENT))
    config = {"activation_memory_budget": budget, "is_non_builtin_to_include": counted}
    with torch._functorch.config.patch(config):
        assert ("is_non_builtin_to_include = True" in str(receipt)) == warns


def test_a_model_without_gemms_is_refused() -> None:
    with pytest.raises(ValueError, match="this ReLU has no linear layer; pass the model"):
        nc.convert(nn.ReLU(), CURRENT)


def test_what_a_fast_path_leaves_out_is_said() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    receipt = nc.receipt(nc.convert(layer, CURRENT))
    notes = {one.name: one.reason for one in receipt.gemms if one.decision == "converted"}
    assert set(notes) == {"linear1", "linear2"} and all("fast path" in note for note in notes.values())
    assert "Float8CurrentScaling; without gradients, torch's fast path" in str(receipt)
    with receipt.recording(), torch.no_grad():
        layer(torch.randn(2, 8, 32))
    assert receipt.ran().idle == ("linear1", "linear2")


@pytest.mark.parametrize("width", [80, 100, 166])
def test_equal_layers_are_one_row_of_the_terminal_s_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    blocks = [nn.ModuleDict({"q_proj": nn.Linear(64, 64), "router": nn.Linear(64, 4)}) for _ in range(12)]
    experts = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in range(2)) for _ in range(3))
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(blocks), "experts": experts, "lm_head": nn.Linear(64, 100)}
    )
    receipt = nc.receipt(nc.convert(model, CURRENT, skip="layers.3.q_proj"))
    lines = str(receipt).splitlines()
    assert max(map(len, lines)) <= width
    first = lines.index(next(line for line in lines if line.startswith("---")))
    rows = [line for line in lines[first + 1 :] if " x " in line]
    assert len(receipt.gemms) == 31 and len(rows) == 5 and len(lines) < 30
    named = ("layers.0-2,4-11.", "layers.3.q_proj", "layers.0-11.router", "experts.*.* (6)", "lm_head")
    assert all(any(row.startswith(name) for row in rows) for name in named)


@pytest.mark.parametrize("width", [60, 80, 100, 166])
def test_long_names_stand_below_what_they_have_in_common(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    blocks = [nn.ModuleDict({"q_proj": nn.Linear(64, 64), "v_proj": nn.Linear(64, 64)}) for _ in range(12)]
    inner = nn.ModuleDict({"layers": nn.ModuleList(blocks), "output_projection": nn.Linear(64, 100)})
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"language_model": inner})})
    text = str(nc.receipt(nc.convert(model, CURRENT)))
    prefix = "base_model.language_model.layers.0-11."
    lines = text.splitlines()
    assert max(map(len, lines)) <= max(width, 70)
    if width == 166:
        assert f"\n{prefix}q_proj  Linear" in text and f"\n{prefix}v_proj  Linear" in text
    else:
        place = lines.index(prefix)
        assert lines[place + 1].startswith("  q_proj ") and lines[place + 2].startswith("  v_proj ")
        assert lines[place + 3].startswith("base_model.")
