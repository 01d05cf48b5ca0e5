"""The head of a language model with its loss, forward and backward: quantized beside bf16, in chunks and whole.

`share` is the time over that of whole bf16 logits under torch.compile; `peak_mib` is the memory a step takes beside its
parameters and inputs.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from harness import Row, Step, measure_steps, parser, report
from torch import Tensor

import narrowcast as nc

YARDSTICK = "bf16 logits, compiled"
RECIPES = ("current", "block")


def whole(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def contenders(shape: tuple[int, int, int], chosen: argparse.Namespace) -> dict[str, Step]:
    tokens, width, classes = shape
    torch.manual_seed(0)
    factory = {"device": chosen.device, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, width, **factory).requires_grad_()
    weight = torch.randn(classes, width, **factory).mul_(0.02).requires_grad_()
    target = torch.randint(0, classes, (tokens,), device=chosen.device)

    def step_of(loss_of: object, recipe: str | None = None) -> Step:
        options = {} if recipe is None else {"recipe": recipe}

        def step() -> None:
            hidden.grad = weight.grad = None
            loss_of(hidden, weight, target, **options).backward()  # type: ignore[operator]

        return step

    steps = {YARDSTICK: step_of(torch.compile(whole, fullgraph=True))}
    for name in (None, *RECIPES):
        label = "bf16 in chunks" if name is None else f"{name} in chunks"
        steps[f"{label}, eager"] = step_of(nc.linear_cross_entropy, name)
        compiled = torch.compile(nc.linear_cross_entropy, fullgraph=True)
        steps[f"{label}, compiled"] = step_of(compiled, name)
    return {
        name: step
        for name, step in steps.items()
        if name == YARDSTICK
        or (chosen.only in name and not (chosen.skip_compile and name.endswith("compiled")))
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", type=int, nargs=3, metavar=("TOKENS", "WIDTH", "CLASSES"))
    chosen = options.parse_args()
    shapes = [(8192, 2048, 32000), (8192, 4096, 128256)] if chosen.device == "cuda" else [(64, 64, 500)]
    rows: list[Row] = []
    for shape in [tuple(chosen.shape)] if chosen.shape else shapes:
        where: Row = dict(zip(("tokens", "width", "classes"), shape))
        steps = contenders(shape, chosen)
        rows += [{**where, **row} for row in measure_steps(steps, YARDSTICK, chosen.repeats, chosen.device)]
        torch.compiler.reset()
    report("linear_cross_entropy", rows, chosen)


if __name__ == "__main__":
    main()
