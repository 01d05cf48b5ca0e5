"""Wrong inputs raise errors that name value or remedy; ``tools/wrong_inputs.py`` tries all public functions."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import narrowcast as nc
from narrowcast import _checks

SOURCE = Path(_checks.__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location(
    "wrong_inputs", Path(__file__).parents[1] / "tools" / "wrong_inputs.py"
)
assert _SPEC is not None and _SPEC.loader is not None
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)

EVERY = list(tool.calls())
CALLS = [(title, run, kwargs) for title, run, kwargs in EVERY if title not in tool.EXCEPTIONS]
TITLES = list(dict.fromkeys(title for title, _, _ in CALLS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", TITLES)
def test_a_wrong_input_gets_an_answer(title: str) -> None:
    for run, kwargs in [(run, kwargs) for name, run, kwargs in CALLS if name == title]:
        run(**kwargs)
        defects = [
            f"{name}={value!r}: {defect}"
            for name in kwargs
            for value in tool.WRONG
            if (defect := tool.judge(run, kwargs, name, value))
        ]
        assert not defects, "\n".join(defects)


def test_every_room_is_asked_and_exceptions_have_reasons() -> None:
    asked = {title.partition(".")[0] for title in TITLES}
    assert {
        "ops",
        "optimizers",
        "recipe",
        "distributed",
        "convert",
        "watch",
        "export",
        "moe_permute",
    } <= asked
    assert len(CALLS) > 130
    assert set(tool.EXCEPTIONS) <= {title for title, _, _ in EVERY} and all(tool.EXCEPTIONS.values())


def test_a_crash_and_a_vague_message_are_found() -> None:
    def crashes(x: object) -> None:
        raise KeyError(x)

    assert tool.judge(crashes, {"x": 1}, "x", None).startswith("crash")


SHOWN = [
    ("misspelled", "'misspelled'"),
    ("m" * 50 + "n" * 50, "'" + "m" * 40 + "..." + "n" * 40 + "'"),
    (nc.recipe.Format.E5M2, "Format.E5M2"),
    (nc.Linear, "the class Linear"),
    (_checks.shown, "a function shown"),
    (torch.tensor(3.0), "tensor(3.)"),
    (torch.ones(3, 700), "a Tensor of shape (3, 700) and torch.float32"),
    (np.zeros((3, 700)), "an ndarray of shape (3, 700) and float64"),
    ([1, "two"], "[1, 'two']"),
    ([0] * 100_000, "a list of 100000"),
    ({str(at): torch.ones(9, 9) for at in range(700)}, "a dict of 700"),
    (nc.MXFP8Quantizer(nc.DType.kFloat8E4M3), "MXFP8Quantizer("),
]


@pytest.mark.parametrize("value, text", SHOWN, ids=[text[:20] for _, text in SHOWN])
def test_a_message_shows_a_value_in_few_characters(value: Any, text: str) -> None:
    found = _checks.shown(value)
    assert found.startswith(text) and len(found) <= 90 and "\n" not in found


WHOLE = {"__repr__", "__getattr__", "__fx_repr__", "recipe_name"}
"""Functions whose text is not a message about a value, or is Python's own."""


def reprs(source: str) -> list[int]:
    """Return lines that write ``{value!r}`` in a text of another function than those."""
    tree = ast.parse(source)
    whole = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in WHOLE]
    allowed = {id(node) for function in whole for node in ast.walk(function)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.FormattedValue)
        and node.conversion == ord("r")
        and node.format_spec is None  # {value!r:.60} ends
        and id(node) not in allowed
    ]


def places(lines: Callable[[str], list[int]]) -> list[str]:
    """Return the places of our source whose lines a check of a file's text returns."""
    return [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.glob("narrowcast*/**/*.py"))
        for line in lines(path.read_text())
    ]


def test_no_message_writes_a_value_out() -> None:
    """``{value!r}`` may be a whole array, or a state dict; use ``{shown(value)}``."""
    found = places(reprs)
    assert not found, f"use {{shown(value)}}: {', '.join(found)}"
    assert reprs("def f(x): raise ValueError(f'x is {x!r}')") == [1]


def pages(source: str) -> list[int]:
    """Return lines with a text, other than a docstring, that names a file of ``docs/``."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and id(node) not in docstrings
        and isinstance(node.value, str)
        and re.search(r"docs/\S*\.md", node.value)
    ]


def test_no_message_names_a_file_of_the_docs() -> None:
    """A wheel has no ``docs/``; name the page by its title."""
    found = places(pages)
    assert not found, f"name the page by its title: {', '.join(found)}"
    assert pages("'Reads docs/a.md.'\nPAGE = 'docs/a.md lists all'") == [2]
    assert pages("raise ValueError(f'see docs/b-c.md {x}')") == [1]


@pytest.mark.parametrize("value", ["no", 2.5, object(), [True], torch.ones(1), torch.bfloat16, np.zeros(3)])
def test_a_flag_is_true_or_false(value: object) -> None:
    with pytest.raises(TypeError, match=r"^bias is .*; use True or False"):
        _checks.flags(checkpoint=True, bias=value)
    _checks.flags(a=True, b=False, c=None, d=1, e=0)


def test_checks_name_argument_value_and_remedy() -> None:
    for check, message in (
        (lambda: _checks.whole(rows=2.5), "rows is 2.5, of type float; use a whole number"),
        (lambda: _checks.numbers(scale="big"), "scale is 'big', of type str; use a number"),
        (lambda: _checks.positive(heads=2.5), "heads is 2.5, of type float; use a positive whole number"),
        (lambda: _checks.positive(heads="8"), "heads is '8', of type str; use a positive whole number"),
        (lambda: _checks.in_range("eps", "1e-5", "use 0"), "eps is '1e-5', of type str; use 0"),
        (lambda: nc.Linear(8, 8, device=2.5), "device is 2.5; use a torch.device"),
        (lambda: _checks.text(name=3), "name is 3, of type int; use a text or None"),
        (lambda: _checks.module("model", None), "model is None, of type NoneType; pass a torch.nn.Module"),
        (lambda: _checks.tensor("x", nc.Linear), "x is the class Linear; give a tensor"),
        (
            lambda: nc.ops.Sequential(nc.ops.Linear),
            "operation 0 is the class Linear; pass a torch.nn.Module, as",
        ),
        (lambda: _checks.path("path", 1), "path is 1, of type int; pass a path"),
        (
            lambda: _checks.optimizer("optimizer", 1),
            "optimizer is 1, of type int; pass a torch.optim.Optimizer",
        ),
        (
            lambda: _checks.tensor("x", np.zeros((3, 5))),
            "x is an ndarray of shape (3, 5) and float64; give a",
        ),
        (lambda: _checks.tensor("x", [7] * 99), "x is a list of 99; give a tensor"),
    ):
        with pytest.raises(TypeError) as raised:
            check()
        assert str(raised.value).startswith(message)
    with pytest.raises(ValueError, match="heads is 0; use a positive whole number"):
        _checks.positive(heads=0)
    with pytest.raises(ValueError, match="eps is -1.0; use 0"):
        _checks.in_range("eps", -1.0, "use 0")


def test_names_have_the_article_that_is_spoken() -> None:
    names = ["int", "list", "ndarray", "MXFP8Tensor", "NVFP4Tensor", "Module", "Float8Tensor", "Parameter"]
    said = ["an int", "a list", "an ndarray", "an MXFP8Tensor", "an NVFP4Tensor", "a Module"]
    assert [_checks.article(name) for name in names] == [*said, "a Float8Tensor", "a Parameter"]


def test_a_value_that_is_no_choice_is_told_the_nearest_one() -> None:
    choices = ("LayerNorm", "RMSNorm")
    assert (
        _checks.not_among("rmsnrom", choices)
        == "'rmsnrom'; the nearest: 'RMSNorm'; use one of 'LayerNorm' or 'RMSNorm'"
    )
    assert _checks.not_among(3, choices) == "3; use one of 'LayerNorm' or 'RMSNorm'"


def sampled(model: torch.nn.Module) -> Any:
    """Return a watch with a record."""
    watch = nc.watch(model)
    model(torch.ones(2, 32)).sum().backward()
    watch.step()
    return watch


@pytest.mark.parametrize(
    "write",
    [
        lambda model, path: nc.receipt(model).to_html(path),
        lambda model, path: sampled(model).to_csv(path),
        lambda model, path: nc.export(model, path, format="bf16"),
        lambda model, path: nc.distributed.save_checkpoint(path, model),
    ],
    ids=["to_html", "to_csv", "export", "save_checkpoint"],
)
def test_a_path_that_cannot_be_written_is_named(write: Any, tmp_path: Path) -> None:
    model = nc.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "current")
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"^cannot write '.*'.*\(.+\); give a path in a folder that exists"
    ) as raised:
        write(model, tmp_path / "file" / "given")
    assert raised.value.errno and "given'" in str(raised.value) and raised.value.__cause__ is not None


def test_a_page_needs_a_path() -> None:
    model = nc.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "current")
    with pytest.raises(TypeError, match="^path is 3, of type int; pass a path"):
        nc.receipt(model).to_html(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu", "cuda:99", torch.device("mps")], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda device: nc.Linear(7, 9, device=device),
        lambda device: nc.LayerNorm(7, device=device),
        lambda device: nc.GroupedLinear(2, 7, 9, device=device),
        lambda device: nc.TransformerLayer(32, 64, 4, device=device),
        lambda device: nc.ops.Linear(7, 9, device=device),
        lambda device: nc.ops.Quantize(device=device),
        lambda device: nc.InferenceParams(2, 16, device=device),
    ],
)
def test_a_device_that_is_not_there_is_named_with_one_that_is(make: Any, device: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^device is .*, which this machine or this PyTorch lacks; use 'cpu'"
    ):
        make(device)


def test_a_fake_device_needs_none() -> None:
    with FakeTensorMode():
        assert nc.Linear(7, 9, device="cuda").weight.device.type == "cuda"
    assert nc.Linear(7, 9, device="meta").weight.is_meta
