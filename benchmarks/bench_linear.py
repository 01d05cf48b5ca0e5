"""One linear layer, forward and backward, in bf16 and in every recipe, eager and compiled.

`error` is the relative difference of the weight gradient to bf16's, so that a fast wrong result shows.
`native` is no where the recipe was emulated: such a time says nothing about the format.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from harness import Row, parser, report, time_ms

import narrowcast as nc

LARGEST_ERROR = 0.5  # above this a result is wrong, not coarse

Available = Callable[[], bool]
CASES: dict[str, tuple[Callable[[bool], nc.recipe.Recipe], Available]] = {
    "delayed": (lambda emulate: nc.recipe.DelayedScaling(emulate=emulate), nc.is_fp8_available),
    "current": (lambda emulate: nc.recipe.Float8CurrentScaling(emulate=emulate), nc.is_fp8_available),
    "block": (
        lambda emulate: nc.recipe.Float8BlockScaling(emulate=emulate),
        nc.is_fp8_block_scaling_available,
    ),
    "mxfp8": (lambda emulate: nc.recipe.MXFP8BlockScaling(emulate=emulate), nc.is_mxfp8_available),
    "nvfp4": (lambda emulate: nc.recipe.NVFP4BlockScaling(emulate=emulate), nc.is_nvfp4_available),
}


def step_of(
    layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, recipe: nc.recipe.Recipe | None, compiled: bool
):
    """A forward and backward of ``layer``, as a function without arguments."""
    forward = torch.compile(layer, fullgraph=True) if compiled else layer

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            y = forward(x)
        y.backward(dy)

    return step


def measure(options: argparse.Namespace) -> list[Row]:
    tokens, in_features, out_features = options.shape
    torch.manual_seed(0)
    factory = {"device": options.device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, in_features, **factory).requires_grad_()
    dy = torch.randn(tokens, out_features, **factory)
    layer = nc.Linear(in_features, out_features, device=options.device, params_dtype=torch.bfloat16)
    step_of(layer, x, dy, None, False)()
    exact = layer.weight.grad.float()

    rows = []
    for name, (build, available) in {"bf16": (None, lambda: True), **CASES}.items():
        native = options.device == "cuda" and available()
        recipe = build(not native) if build else None
        for compiled in (False, True):
            torch.compiler.reset()
            step = step_of(layer, x, dy, recipe, compiled)
            step()
            step()  # delayed scaling needs a step to learn its scales
            error = ((layer.weight.grad.float() - exact).norm() / exact.norm()).item()
            assert error < LARGEST_ERROR, f"{name}: the weight gradient is wrong (relative error {error:.3g})"
            row: Row = {"recipe": name, "mode": "compiled" if compiled else "eager"}
            row |= {"native": "yes" if native or recipe is None else "no"}
            row |= {"tokens": tokens, "in": in_features, "out": out_features, "error": error}
            row |= time_ms(step, options.device, options.repeats)
            row["tflops"] = 6 * tokens * in_features * out_features / (float(str(row["p50_ms"])) * 1e9)
            rows.append(row)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", type=int, nargs=3, metavar=("TOKENS", "IN", "OUT"))
    chosen = options.parse_args()
    if chosen.shape is None:
        chosen.shape = (8192, 4096, 4096) if chosen.device == "cuda" else (256, 512, 512)
    report("linear", measure(chosen), chosen)


if __name__ == "__main__":
    main()
