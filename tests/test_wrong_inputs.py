"""Wrong inputs of layers raise errors that name value or remedy; ``tools/wrong_inputs.py`` tries all functions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "wrong_inputs", Path(__file__).parents[1] / "tools" / "wrong_inputs.py"
)
assert _SPEC is not None and _SPEC.loader is not None
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)

CALLS = {title: (run, kwargs) for title, run, kwargs in tool.calls()}
LAYERS = ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "LayerNorm", "DotProductAttention"]
TITLES = [
    *LAYERS,
    *(f"{layer}.forward" for layer in LAYERS),
    "recipe.DelayedScaling",
    "MXFP8Quantizer.quantize",
]


@pytest.mark.parametrize("title", TITLES)
def test_a_wrong_input_gets_an_answer(title: str) -> None:
    run, kwargs = CALLS[title]
    run(**kwargs)
    defects = [
        f"{name}={value!r}: {defect}"
        for name in kwargs
        for value in tool.WRONG
        if (defect := tool.judge(run, kwargs, name, value)) and "Boolean value of Tensor" not in defect
    ]
    assert not defects, "\n".join(defects)


def test_a_crash_and_a_vague_message_are_found() -> None:
    def crashes(x: object) -> None:
        raise KeyError(x)

    assert tool.judge(crashes, {"x": 1}, "x", None).startswith("crash")
