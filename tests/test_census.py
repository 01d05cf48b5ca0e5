"""The census counts something, and what it counts does not grow unnoticed."""

from __future__ import annotations

import ast
import contextlib
import re
import runpy
from pathlib import Path

import pytest
import torch

import narrowcast as nc
from narrowcast.functional import replay

CENSUS = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "census.py"))


@pytest.mark.parametrize(
    "count, most", [("dtype_sets", 1), ("caches", 10), ("questions", 23), ("delayed_lines", 1497)]
)
def test_what_stands_more_than_once_gets_no_more(count, most):
    assert 0 < CENSUS[count]() <= most


# Operators and their numerics, what methods by names of Transformer Engine call, and what users call. Take rows away.
WIDE = {
    "convert/convert.py:convert": 13,
    "functional/adam.py:adam_": 16,
    "functional/adam.py:adam_quantize_": 14,
    "functional/grouped_gemm.py:_grouped_gemm": 18,
    "kernels/adam.py:step": 16,
    "kernels/float8_block.py:_launch": 13,
    "kernels/grouped_gemm.py:rows": 14,
    "layers/grouped_layer.py:GroupedLinearLayer.__init__": 14,
    "nn/moe_router.py:MoERouter.__init__": 17,
    "ops/basic/linear_functional.py:functional_backward": 23,
    "ops/basic/linear_functional.py:functional_forward": 19,
    "reference/adam.py:step": 16,
    "reference/nvfp4.py:quantize": 13,
}


def test_no_other_function_takes_more_than_twelve_arguments():
    assert CENSUS["wide_functions"]() == WIDE


def test_operators_quantize_in_few_ways():
    ways = CENSUS["ways_to_quantize"]()
    assert "_producers.encode" in ways and len(ways) <= 8


@pytest.mark.parametrize("recipe", [nc.recipe.Float8CurrentScaling, nc.recipe.DelayedScaling])
def test_a_list_of_operations_takes_few_more_calls_than_a_module(recipe, monkeypatch):
    monkeypatch.setattr(replay, "ON_CPU", True)
    module, operations = (CENSUS["mlp_calls"](kind, recipe()) for kind in ("nn", "ops"))
    assert operations <= 1.1 * module


@pytest.mark.parametrize("given, most", [("own", 51), ("set_recipe", 51), ("autocast", 70)])
def test_a_linear_layer_takes_few_calls_under_delayed_scaling(given, most, monkeypatch):
    monkeypatch.setattr(replay, "ON_CPU", True)
    recipe = nc.recipe.DelayedScaling()
    layer = nc.Linear(64, 64, bias=False, device="cpu", recipe=recipe if given == "own" else None)
    if given == "set_recipe":
        nc.set_recipe(layer, recipe)
    x = torch.randn(32, 64, requires_grad=True)

    def step():
        with nc.autocast(recipe=recipe) if given == "autocast" else contextlib.nullcontext():
            y = layer(x)
        y.sum().backward()

    assert CENSUS["calls"](step) <= most


def test_counts_the_calls_of_a_step():
    def step():
        return nc.formats.cdiv(3, 2)

    assert CENSUS["calls"](step) == 1


def test_the_first_sentence_of_a_file_names_what_is_in_it():
    """A noun or an imperative, not a clause that begins with what, which or how."""
    source = Path(CENSUS["SOURCE"]).parent
    first = {
        path: ast.get_docstring(ast.parse(path.read_text())) for path in source.glob("narrowcast*/**/*.py")
    }
    assert not [path for path, text in first.items() if not text]
    clause = re.compile(r"(What|Which|How|Who|Whose|Whether|Where|When|Of|Not)\b")
    assert not {path.name: text.split(".")[0] for path, text in first.items() if clause.match(text)}
