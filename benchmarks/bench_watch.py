"""What `nc.watch` costs a step: without it, with it between its samples, in a sampled step, and at every=100.

Blocks of a plain feed-forward model, converted; compiled ones share one graph. `between_percent` is what the hooks add
to a step that is not sampled, `samples_percent` what one sample in a hundred adds to the mean step, from medians.
`same_bits`: the loss and every gradient of the same batch, without the watch and in a sampled step.
"""

from __future__ import annotations

import statistics
from argparse import Namespace

import torch
from harness import RECIPES, Row, parser, report, seconds_of
from torch import nn

import narrowcast as nc

EVERY = 100
SIZES = {"cuda": (2048, 8192, 8, 8192), "cpu": (64, 128, 2, 32)}  # width, hidden, blocks, tokens


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def case(name: str, recipe: nc.recipe.Recipe, compiled: bool, options: Namespace) -> Row:
    device = options.device
    torch.compiler.reset()
    torch.manual_seed(0)
    width, hidden, blocks, tokens = SIZES[device]
    with torch.device(device):
        model = nn.Sequential(*(Block(width, hidden) for _ in range(blocks))).to(torch.bfloat16)
        x = torch.randn(tokens, width, dtype=torch.bfloat16)
    nc.convert(model, recipe)
    if compiled:
        for block in model:
            block.compile(backend="inductor" if device == "cuda" else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def timed(repeats: int, watch: nc.inspect.Watch | None = None) -> float:
        def watched() -> None:
            step()
            if watch is not None:
                watch.step()

        return statistics.median(seconds_of(watched, 1, device) * 1e3 for _ in range(repeats))

    def numbers() -> list[torch.Tensor]:
        loss = step().detach()
        return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    timed(4)  # compiles, and has delayed scaling learn its scales: all steps see the same batch
    plain, before = timed(options.repeats), numbers()
    watch = nc.watch(model, every=1)
    after = numbers()
    timed(2, watch)
    sampled = timed(max(options.repeats // 4, 3), watch)
    watch.close()
    watch = nc.watch(model, every=10**9)  # samples the first step alone
    timed(3, watch)
    between = timed(options.repeats, watch)
    watch.close()
    timed(3)
    again = timed(options.repeats)
    base = (plain + again) / 2
    row: Row = {"recipe": name, "code": "compiled" if compiled else "eager", "without_ms": plain}
    row |= {"between_ms": between, "sampled_ms": sampled, "without_again_ms": again}
    row["between_percent"] = (between / base - 1) * 100
    row["samples_percent"] = (sampled - between) / EVERY / base * 100
    row["same_bits"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    print(row, flush=True)
    return row


def measure(options: Namespace) -> list[Row]:
    return [
        case(name, recipe(), code == "compiled", options)
        for name, recipe in RECIPES.items()
        for code in ("eager", "compiled")
        if options.only in f"{name}, {code}"
    ]


def main() -> None:
    options = parser(__doc__).parse_args()
    report("watch", measure(options), options)


if __name__ == "__main__":
    main()
