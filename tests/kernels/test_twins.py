"""A kernel and its reference are called alike, and the reference alone describes what both compute."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

TWINS = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "census.py"))["twins"]()
Parameter = tuple[str, str, str]  # name, kind, default ("" for none)


def parameters(function: ast.FunctionDef) -> list[Parameter]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    found = [("positional", argument.arg, default) for argument, default in zip(positional, defaults)]
    found += [
        ("keyword", argument.arg, default) for argument, default in zip(given.kwonlyargs, given.kw_defaults)
    ]
    found += [("rest", given.kwarg.arg, None)] if given.kwarg else []
    return [(name, kind, "" if default is None else ast.unparse(default)) for kind, name, default in found]


def test_there_are_twins() -> None:
    assert len(TWINS) > 45 and "mx.quantize" in TWINS


@pytest.mark.parametrize("twin", TWINS)
def test_twins_take_the_same_arguments(twin: str) -> None:
    """What one has beyond the other can be left out."""
    reference, kernel = map(parameters, TWINS[twin])
    names = [{name for name, *_ in one} for one in (reference, kernel)]
    if any(kind == "rest" for _, kind, _ in reference):  # hands the rest on to a function of the reference
        names[0] |= names[1]
        reference += [one for one in kernel if one[0] not in {name for name, *_ in reference}]
    shared = names[0] & names[1]
    assert {one for one in reference if one[0] in shared} == {one for one in kernel if one[0] in shared}
    order = [
        [name for name, kind, _ in one if kind == "positional" and name in shared]
        for one in (reference, kernel)
    ]
    assert order[0] == order[1]
    extra = [one for one in (*reference, *kernel) if one[0] not in shared]
    assert not [name for name, kind, default in extra if not default and kind != "rest"]


@pytest.mark.parametrize("twin", TWINS)
def test_the_reference_alone_describes_the_numerics(twin: str) -> None:
    reference, kernel = (ast.get_docstring(function) or "" for function in TWINS[twin])
    assert reference and kernel
    assert "Numerics:" not in kernel
    described = [name for name, *_ in parameters(TWINS[twin][0]) if f"\n    {name}: " in reference]
    repeated = [name for name in described if f"\n    {name}: " in kernel]
    assert not repeated
