"""The linear layers of one 8B-shape block, shared by the GPUs of a host: tensor and sequence parallel, compiled.

    torchrun --nproc-per-node 2 benchmarks/bench_tensor_parallel.py

LayerNormLinear (column), a stand-in for attention, Linear (row), LayerNormMLP: hidden 4096, ffn 14336, RMSNorm, SwiGLU,
no biases, ``--tokens`` rows of all GPUs together. ``torch bf16`` is the same block of plain PyTorch with functional
collectives; it saves what it gathered. ``--graphs`` also replays every step as a CUDA graph, which the host does not
slow down; ``--overlap`` adds contenders that overlap what they send with their GEMMs
(``nc.distributed.async_tensor_parallel``).

Before anything is timed, every contender's output and gradients are compared with those of the whole block on one GPU.
Every rank times the same fixed number of steps: no collective waits for ever.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RECIPES, Row, captured, error_of, parser, rank_ms, report_of_ranks
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.functional.collectives import gather_rows, scatter_rows

HIDDEN, QKV, FFN, EPS = 4096, 6144, 14336, 1e-5
OVERLAPPED = ("torch bf16", "current", "delayed")  # what PyTorch's micro-pipeline knows the GEMMs of
STEPS = 8  # of a contender before the next one's turn
LARGEST_ERROR = {"torch bf16": 2e-2, "narrowcast bf16": 2e-2}  # of the others 0.15


class Block(nn.Module):
    """The three layers of ours; whole without a group."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        split: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}
        if group is not None:
            split |= {"tp_group": group, "sequence_parallel": True}
        norm = {"normalization": "RMSNorm", "eps": EPS}
        self.qkv = nc.LayerNormLinear(HIDDEN, QKV, parallel_mode="column", **norm, **split)
        self.projection = nc.Linear(HIDDEN, HIDDEN, parallel_mode="row", **split)
        self.mlp = nc.LayerNormMLP(HIDDEN, FFN, activation="swiglu", set_parallel_mode=True, **norm, **split)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.projection(attention(self.qkv(x)))
        return y + self.mlp(y)


def attention(qkv: Tensor) -> Tensor:
    """In place of attention: something of its output's shape that reads all of its input."""
    rest = qkv[..., qkv.shape[-1] * HIDDEN // QKV :]
    return qkv[..., : qkv.shape[-1] * HIDDEN // QKV] + rest.repeat_interleave(2, -1)


class Rows(torch.autograd.Function):
    """Rows of all ranks gathered, or summed and scattered; in the backward the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return gather_rows(x, group) if gathers else scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        back = scatter_rows(grad, ctx.group) if ctx.gathers else gather_rows(grad, ctx.group)
        return back, None, None


def plain(block: Block, group: str) -> Callable[[Tensor], Tensor]:
    """The block in plain PyTorch, on the parameters of ours."""
    qkv, projection, mlp = block.qkv, block.projection, block.mlp

    def forward(x: Tensor) -> Tensor:
        normalized = F.rms_norm(x, (HIDDEN,), qkv.layer_norm_weight, EPS)
        heads = attention(F.linear(Rows.apply(normalized, group, True), qkv.weight))
        y = x + Rows.apply(F.linear(heads, projection.weight), group, False)
        normalized = F.rms_norm(y, (HIDDEN,), mlp.layer_norm_weight, EPS)
        gate, up = F.linear(Rows.apply(normalized, group, True), mlp.fc1_weight).chunk(2, -1)
        return y + Rows.apply(F.linear(F.silu(gate) * up, mlp.fc2_weight), group, False)

    return forward


# -- parts of the whole ------------------------------------------------------------------------------------------------

DIMS = {"qkv.weight": 0, "projection.weight": 1, "mlp.fc1_weight": 0, "mlp.fc2_weight": 1}


def part_of(name: str, value: Tensor, rank: int, size: int) -> Tensor:
    """A process's part of a parameter or its gradient; of qkv and fc1, of each of their sections."""
    if name not in DIMS:
        return value
    sections = {"qkv.weight": [HIDDEN, QKV - HIDDEN], "mlp.fc1_weight": [FFN, FFN]}.get(
        name, [value.shape[DIMS[name]]]
    )
    parts = [section.chunk(size, DIMS[name])[rank] for section in value.split(sections, DIMS[name])]
    return torch.cat(parts, DIMS[name])


def check(
    name: str, step: Callable[[], Tensor], block: Block, whole: dict[str, Tensor], x: Tensor
) -> dict[str, float]:
    """Relative errors of the output and of all gradients against the whole block's.

    Raises:
        AssertionError: one is too large.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {"y": (step(), whole["y"].chunk(size)[rank]), "dx": (x.grad, whole["dx"].chunk(size)[rank])}
    for key, parameter in block.named_parameters():
        grad = parameter.grad
        if key not in DIMS:
            dist.all_reduce(grad)
        found[key] = (grad, part_of(key, whole[key], rank, size))
    errors = {key: error_of(ours, theirs) for key, (ours, theirs) in found.items()}
    worst = max(errors.values())
    assert worst <= LARGEST_ERROR.get(name, 0.15), f"{name}: {errors}"
    return {"largest error": worst}


def whole_block(
    x: Tensor, dy: Tensor, recipe: nc.recipe.Recipe | None, state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Output and gradients of the block on one GPU; of the second step, when delayed scaling has scales."""
    block, x = Block(), x.clone().requires_grad_(True)
    block.load_state_dict(state, strict=False)
    for _ in range(2):
        block.zero_grad()
        x.grad = None
        with nc.autocast(recipe=recipe) if recipe else nullcontext():
            y = block(x)
        y.backward(dy)
    grads = {key: parameter.grad for key, parameter in block.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}  # type: ignore[dict-item]


# -- timing ------------------------------------------------------------------------------------------------------------


def times_of(steps: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds per step, contender after contender, ``repeats`` times around."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            step()
            times[name].append(rank_ms(step, STEPS))
    return times


def measure(chosen: Namespace) -> list[Row]:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(0)  # the same on all ranks
    whole = Block()
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    del whole
    x_whole = torch.randn(chosen.tokens, 1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    dy_whole = torch.randn_like(x_whole) * 1e-2
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, Row] = {}
    contenders = [(name, name) for name in ("torch bf16", "narrowcast bf16", *RECIPES) if chosen.only in name]
    if chosen.overlap:
        contenders += [(f"{name}, overlapped", name) for name in OVERLAPPED if chosen.only in name]
    for label, name in contenders:
        if label != name:
            nc.distributed.async_tensor_parallel(group)
            torch.compiler.reset()
        recipe = RECIPES[name]() if name in RECIPES else None
        block = Block(group)
        with torch.no_grad():
            for key, parameter in block.named_parameters():
                parameter.copy_(part_of(key, state[key], rank, size))
        x = x_whole.chunk(size)[rank].clone().requires_grad_(True)
        dy = dy_whole.chunk(size)[rank].contiguous()
        model: Any = plain(block, group.group_name) if name == "torch bf16" else block
        if recipe is not None:
            nc.set_recipe(block, recipe)
        run = torch.compile(model, fullgraph=True)

        def step(
            run: Any = run, block: Block = block, x: Tensor = x, dy: Tensor = dy, name: str = name
        ) -> Tensor:
            block.zero_grad(set_to_none=True)
            x.grad = None
            y = run(x)
            y.backward(dy)
            if name == "delayed":
                nc.renew_delayed_scaling(block)  # as an optimizer's step does
            return y.detach()

        step()  # the first of two: delayed scaling learns its scales
        rows[label] = {"contender": label}
        if not chosen.skip_gate:
            expected = whole_block(x_whole, dy_whole, recipe, state)
            rows[label] |= {
                key: round(value, 5) for key, value in check(name, step, block, expected, x).items()
            }
            with torch.no_grad():
                same = torch.equal(block.qkv(x), first_of_whole(state, recipe, x_whole))
            rows[label]["column output is the whole's"] = str(same)
            del expected
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        rows[label]["peak_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        steps[label] = step
        if chosen.graphs:
            steps[f"{label}, graph"] = captured(step)
            rows[f"{label}, graph"] = {"contender": f"{label}, graph"}
    times = times_of(steps, chosen.repeats)
    for name, values in times.items():
        yardstick = "torch bf16, graph" if name.endswith("graph") else "torch bf16"
        base = statistics.median(times.get(yardstick, next(iter(times.values()))))
        median = statistics.median(values)
        rows[name] |= {"ms_p50": round(median, 3), "ms_min": round(min(values), 3)}
        rows[name]["times torch bf16"] = round(base / median, 3)
        rows[name]["tokens/s/GPU"] = round(chosen.tokens / size / median * 1e3)
    return list(rows.values())


@torch.no_grad()
def first_of_whole(state: dict[str, Tensor], recipe: nc.recipe.Recipe | None, x: Tensor) -> Tensor:
    """This rank's columns of what one GPU makes of the first column-parallel layer."""
    whole = Block()
    whole.load_state_dict(state, strict=False)
    with nc.autocast(recipe=recipe) if recipe else nullcontext():
        y = whole.qkv(x)
    rank, size = dist.get_rank(), dist.get_world_size()
    return torch.cat([part.chunk(size, -1)[rank] for part in y.split([HIDDEN, QKV - HIDDEN], -1)], -1)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=8192, help="rows of all GPUs together (default 8192)")
    options.add_argument("--graphs", action="store_true", help="also replay every step as a CUDA graph")
    options.add_argument("--overlap", action="store_true", help="also with async_tensor_parallel")
    report_of_ranks("tensor_parallel", measure, options.parse_args())


if __name__ == "__main__":
    main()
