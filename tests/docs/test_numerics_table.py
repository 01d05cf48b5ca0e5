"""The table of docs/numerics.md that says how far one NaN or infinity reaches is computed, and compared."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from recipes import DEVICE, MORE_FORMATS, RECIPES
from torch import Tensor

import narrowcast as nc
from narrowcast.quantizers import MXFP4Quantizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numerics.md"
NAMES: dict[str, nc.recipe.Recipe | None] = {
    "none": None,
    "`DelayedScaling`": RECIPES["delayed"],
    "`Float8CurrentScaling`": RECIPES["current"],
    "`Float8BlockScaling`": RECIPES["block"],
    "`MXFP8BlockScaling`": RECIPES["mxfp8"],
    "`MXFP6BlockScaling`": MORE_FORMATS["mxfp6"],
    "`MXFP4BlockScaling`": MORE_FORMATS["mxfp4"],
    "`NVFP4BlockScaling`": RECIPES["nvfp4"],
}
SIZE = 256
# Of each operand: the two results it takes part in, and the dimension of them that its element's line lies along.
RESULTS = {"x": (("y", 1), ("dw", 0)), "w": (("y", 0), ("dx", 0)), "dy": (("dx", 1), ("dw", 1))}


def results(
    recipe: nc.recipe.Recipe | None, operand: str, value: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    torch.manual_seed(3)
    layer = nc.Linear(SIZE, SIZE, bias=False, params_dtype=dtype, device=DEVICE, recipe=recipe)
    x, dy = (torch.randn(SIZE, SIZE, dtype=dtype, device=DEVICE) for _ in range(2))
    layer(x).backward(dy)  # a first step under delayed scaling is one of current scaling
    with torch.no_grad():
        {"x": x, "w": layer.weight, "dy": dy}[operand][200, 40] = value
    x.requires_grad_()
    y = layer(x)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    return {"y": y.detach(), "dx": dx, "dw": dw}


def cell(recipe: nc.recipe.Recipe | None, operand: str, value: float, dtype: torch.dtype) -> str:
    """How many lines of the two results are not finite; every line is so as a whole, and the third result is finite."""
    lines: list[str] = []
    computed = results(recipe, operand, value, dtype)
    for name, dim in RESULTS[operand]:
        lost = ~computed.pop(name).isfinite()
        assert torch.equal(lost.any(dim), lost.all(dim)), name
        count = int(lost.any(dim).sum())
        lines.append("all" if count == SIZE else str(count))
    assert all(result.isfinite().all() for result in computed.values())
    return ", ".join(lines)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_table_of_what_is_not_finite(dtype: torch.dtype) -> None:
    expected = [
        f"| {name} | "
        + " | ".join(cell(recipe, o, v, dtype) for v in (math.nan, math.inf) for o in RESULTS)
        + " |"
        for name, recipe in NAMES.items()
    ]
    page = PAGE.read_text()
    assert "\n".join(expected) in page, "put this into docs/numerics.md:\n" + "\n".join(expected)


def test_values_are_exact_in_bf16_but_for_the_ends_of_the_range() -> None:
    """The smallest of MXFP8 are below bf16's; what rounds up to 2**128 is infinite in every dtype."""
    small = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3).quantize(torch.full((32, 96), 2.0**-135, device=DEVICE))
    assert (small.dequantize(dtype=torch.float32) == 2.0**-135).all()
    assert (small.dequantize(dtype=torch.bfloat16) == 0).all()
    large = MXFP4Quantizer().quantize(torch.full((32, 96), 3e38, device=DEVICE))
    assert all(large.dequantize(dtype=dtype).isinf().all() for dtype in (torch.float32, torch.bfloat16))
