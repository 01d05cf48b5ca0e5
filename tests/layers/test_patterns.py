"""Which modules patterns and functions stand for, and what is said when that is none."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import narrowcast as nc
from narrowcast.layers.patterns import matching_names, selected_names

NAMES = [
    *(f"model.layers.{block}.mlp.{part}_proj" for block in range(12) for part in ("up", "gate", "down")),
    "lm_head",
]


def test_any_number_of_parts_is_also_none() -> None:
    assert matching_names("**.lm_head", NAMES, nn.Module(), "layer", "only") == ["lm_head"]
    assert matching_names("**.up_proj", NAMES, nn.Module(), "layer", "only") == NAMES[:-1:3]
    assert matching_names("model.**.layers.3.**.down_proj", NAMES, nn.Module(), "layer", "only") == [
        NAMES[11]
    ]
    assert matching_names("**", NAMES, nn.Module(), "layer", "only") == NAMES
    for inside_a_part in ("lm**.head", "model.layers.1**.mlp.up", "**.head", "**.proj"):
        with pytest.raises(ValueError, match="matches no layer"):
            matching_names(inside_a_part, NAMES, nn.Module(), "layer", "only")


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("lm_haed", "the nearest: 'lm_head'"),
        ("**.gate_porj", r"the nearest: '\*\*\.gate_proj'"),
        ("mlp.up_porj", r"the nearest: '\*\*\.mlp\.up_proj'"),
        ("model.layer.*.mlp", r"the nearest: 'model\.layers\.\*\.mlp'"),
        ("model.layers.7.mlp.up", "the nearest: .*'model.layers.7.mlp.up_proj', "),
        ("model.layer", "the nearest: 'model.layers'"),
        ("up_proj", r"for that name anywhere, write '\*\*\.up_proj'"),
        ("embed", r"it matches 'embed' \(Embedding\), which is none"),
        (".*up_proj$", r"patterns are no regular expressions: .*, as in '\*\*\.up_proj'$"),
        ("up|down", "patterns are no regular expressions: "),
        ("model.layers.12.mlp", r"it has: 'model\.layers\.0\.mlp' and others, 12 in all$"),
        ("xyz", r"it has: '\*\*\.up_proj', .*'lm_head'$"),
    ],
)
def test_a_pattern_without_a_match_tells_the_nearest(pattern: str, told: str) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(2, 2)})
    with pytest.raises(ValueError, match=rf"^only: .* matches no layer of this ModuleDict; {told}"):
        matching_names(pattern, NAMES, model, "layer", "only")


def test_few_names_are_all_listed_and_many_are_counted() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    for size, told in ((2, "it has: '0', '1'$"), (12, "it has: '0' and others, 12 in all$")):
        with pytest.raises(ValueError, match=told):
            matching_names("lm_head", [str(number) for number in range(size)], model[:size], "layer", "only")
        with pytest.raises(ValueError, match=told):
            matching_names("13", [str(number) for number in range(size)], model[:size], "layer", "only")


def test_functions_choose_by_name_and_module() -> None:
    modules = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 3)}
    model = nn.ModuleDict(modules)

    def narrow(name: str, module: Any) -> bool:
        return module.out_features == 2

    assert selected_names(narrow, modules, model, "layer", "only") == ["a"]
    assert selected_names(["b", narrow], modules, model, "layer", "only") == ["b", "a"]
    assert selected_names(lambda name, module: False, modules, model, "layer", "only") == []
    for wrong in (3, ["a", 3]):
        with pytest.raises(TypeError, match=r"^only: .*3 chooses no modules; use a pattern of names such as"):
            selected_names(wrong, modules, model, "layer", "only")  # type: ignore[arg-type]
    for module, remedy in (
        (nn.Linear, "the class Linear .*; write lambda name, module: isinstance\\(module, Linear\\)"),
        (modules["b"], "a Linear is no function of .*; write its name: 'b'"),
        (nn.Linear(2, 2), "a Linear is no function of .*; write the name of a module of the model"),
    ):
        for wrong in (module, ["a", module]):
            with pytest.raises(TypeError, match=f"^only: {remedy}"):
                selected_names(wrong, modules, model, "layer", "only")


def test_names_may_come_from_a_generator() -> None:
    assert matching_names("**.up_proj", iter(NAMES), nn.Module(), "layer", "only") == NAMES[:-1:3]
    told = []
    for names in (NAMES, iter(NAMES)):
        with pytest.raises(ValueError, match="matches no layer") as error:
            matching_names("lm_hed", names, nn.Module(), "layer", "only")
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "selector, raised",
    [
        (lambda layer, key: "head" in key, "not iterable|not a container"),
        (lambda module: True, "positional argument"),
    ],
)
def test_a_function_of_other_arguments_tells_its_signature(selector: Any, raised: str) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    for option in ("only", "skip"):
        with pytest.raises(
            TypeError, match=rf"<lambda>\('0', Linear\) raised .*({raised}).*\(name, module\), in this order"
        ):
            nc.convert(model, "current", **{option: selector})
