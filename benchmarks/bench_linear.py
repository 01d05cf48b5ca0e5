"""One linear layer, forward and backward: native recipes eager and compiled, bf16 and torchao compiled beside them.

`share` is the time over that of the bf16 layer under torch.compile; `queued_share` the same without the host's time.
`saved_mib` is what a forward keeps for its backward besides the parameters. Before anything is timed, every recipe's
weight gradient is compared with bf16's.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from harness import RECIPES, Row, Step, measure_steps, parser, report, saved_mib, step_of
from peers import torchao

import narrowcast as nc

LARGEST_ERROR = 0.5  # above this a result is wrong, not coarse
SHAPES = ((8192, 4096, 14336), (8192, 4096, 4096), (16384, 8192, 8192))
SMALL = ((256, 512, 512),)
YARDSTICK = "bf16, compiled"


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    shapes = (SHAPES if chosen.device == "cuda" else SMALL)[: chosen.shapes]
    for tokens, in_features, out_features in shapes:
        torch.compiler.reset()
        where: Row = {"tokens": tokens, "in": in_features, "out": out_features}
        steps, saved = contenders(tokens, in_features, out_features, chosen)
        for row in measure_steps(steps, YARDSTICK, chosen.repeats, chosen.device):
            row["saved_mib"] = round(saved[str(row["contender"])], 1)
            rows.append({**where, **row})
    return rows


def contenders(
    tokens: int, in_features: int, out_features: int, chosen: Namespace
) -> tuple[dict[str, Step], dict[str, float]]:
    torch.manual_seed(0)
    factory = {"device": chosen.device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, in_features, **factory).requires_grad_()
    dy = torch.randn(tokens, out_features, **factory)
    plain = torch.nn.Linear(in_features, out_features, bias=False, **factory)
    steps: dict[str, Step] = {}
    saved: dict[str, float] = {}

    def add(name: str, layer: torch.nn.Module, recipe: nc.recipe.Recipe | None, compiled: bool) -> None:
        if name != YARDSTICK and (chosen.only not in name or (compiled and chosen.skip_compile)):
            return
        run = torch.compile(layer, fullgraph=True) if compiled else layer
        steps[name] = step_of(layer, run, x, dy, recipe)

        def forward() -> object:
            with nc.autocast(enabled=recipe is not None, recipe=recipe):
                return layer(x)

        saved[name] = saved_mib(forward, [*layer.parameters()])

    add(YARDSTICK, plain, None, True)
    add("bf16, eager", plain, None, False)
    for name, converted in torchao.converted(torch.nn.Sequential(plain)).items():
        add(f"torchao {name}, compiled", converted, None, True)
    exact = gradient(plain, step_of(plain, plain, x, dy, None))
    for name, build in {**RECIPES, "rowwise": nc.recipe.Float8RowwiseScaling}.items():
        layer = nc.Linear(in_features, out_features, bias=False, **factory)
        with torch.no_grad():
            layer.weight.copy_(plain.weight)
        recipe = build(emulate=chosen.device != "cuda")
        error = gradient(layer, step_of(layer, layer, x, dy, recipe)).sub(exact).norm() / exact.norm()
        assert error < LARGEST_ERROR, f"{name}: the weight gradient is wrong (relative error {error:.3g})"
        add(f"{name}, eager", layer, recipe, False)
        add(f"{name}, compiled", layer, recipe, True)
        with nc.quantized_model_init(recipe=recipe):
            quantized = nc.Linear(in_features, out_features, bias=False, **factory)
        add(f"{name}, quantized parameter, eager", quantized, recipe, False)
    return steps, saved


def gradient(layer: torch.nn.Module, step: Step) -> torch.Tensor:
    """Of the weight, after the second step: delayed scaling needs one to learn its scales."""
    step()
    step()
    return layer.weight.grad.float()  # type: ignore[union-attr, operator]


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--one-thread", action="store_true", help="run backwards in the calling thread, for all contenders"
    )
    chosen = options.parse_args()
    with torch.autograd.set_multithreading_enabled(not chosen.one_thread):
        rows = measure(chosen)
    for row in rows:
        row["backward_in"] = "calling thread" if chosen.one_thread else "thread of its own"
    report("linear", rows, chosen)


if __name__ == "__main__":
    main()
