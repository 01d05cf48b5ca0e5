"""FSDP2 training steps of four layers of the 8B shape, compiled per block, 8192 tokens on each GPU.

    torchrun --nproc-per-node 2 benchmarks/bench_fsdp.py [--save]

Contenders: bf16; torchao's tensorwise recipe, with and without its FP8 all-gather, where it is installed; the recipes
of this library, with weights gathered in bf16 and quantized. Parameters, the reduction of gradients and AdamW are
fp32, computation is bf16; AdamW is PyTorch's fused one, or this library's where the name says FusedAdam. The last layer
stays gathered between forward and backward, which reads it at once. "one GPU": each by itself with the same training,
parameters in bf16 whose masters and moments FusedAdam keeps in fp32. "unsharded": each by itself with all of these in
bf16, of which AdamW moves as many bytes as of half of them in fp32. With ``--nproc-per-node 1`` FSDP2 shards over one
rank. A step is forward, backward and optimizer. Steps follow each other without a wait for the GPU, as in training: a
time is that of a run of ``--repeats`` steps, divided, the median of three. ``gathered``: bytes that the all-gathers of
a step deliver, counted where they are called. Before anything is timed, quantized gathers must give the losses of
high-precision ones, to the bit.
"""

from __future__ import annotations

import importlib.util
import statistics
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Row, parser, rank_ms, report_of_ranks, train_in_turns
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import narrowcast as nc
from narrowcast.distributed import gather_in_place
from narrowcast.functional.collectives import all_gather_single

LAYERS, BATCH, SEQUENCE = 4, 2, 4096
WIDE = (4096, 14336, 32, 8)  # hidden, ffn, heads, heads of keys and values
NARROW = (512, 1024, 4, 2)
RECIPES = {
    "current": nc.recipe.Float8CurrentScaling,
    "delayed": nc.recipe.DelayedScaling,
    "block": nc.recipe.Float8BlockScaling,
}


class PlainMLP(nn.Module):
    """RMSNorm and SwiGLU feed-forward block of PyTorch's layers."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5, device="cuda")
        self.up = nn.Linear(hidden, 2 * ffn, bias=False, device="cuda")
        self.down = nn.Linear(ffn, hidden, bias=False, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """A layer of a decoder; without rotary embeddings, which cost all contenders the same."""

    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int, ours: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        rows = (heads + 2 * kv_heads) * self.size
        if ours:
            options: dict[str, Any] = {"bias": False, "device": "cuda"}
            self.qkv: nn.Module = nc.LayerNormLinear(hidden, rows, normalization="RMSNorm", **options)
            self.out: nn.Module = nc.Linear(hidden, hidden, **options)
            self.mlp: nn.Module = nc.LayerNormMLP(
                hidden, ffn, normalization="RMSNorm", activation="swiglu", **options
            )
        else:
            norm = nn.RMSNorm(hidden, eps=1e-5, device="cuda")
            self.qkv = nn.Sequential(norm, nn.Linear(hidden, rows, bias=False, device="cuda"))
            self.out = nn.Linear(hidden, hidden, bias=False, device="cuda")
            self.mlp = PlainMLP(hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        counts = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).split(counts, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Stack(nn.Module):
    """Layers, and no embedding or head, which no contender quantizes."""

    def __init__(self, shape: tuple[int, int, int, int], ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(*shape, ours) for _ in range(LAYERS))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(model: Stack, quantized: bool | None) -> Stack:
    """FSDP2 with bf16 computation; ``quantized``: by ``nc.distributed.shard``, None by PyTorch alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if quantized is None:
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    else:
        nc.distributed.shard(model, mesh, blocks=model.layers, quantized_gather=quantized, mp_policy=policy)
    model.layers[-1].set_reshard_after_forward(False)  # type: ignore[operator]
    return model


def compiled(model: Stack) -> Stack:
    for layer in model.layers:
        layer.compile(fullgraph=True)
    return model


def ours(recipe: str, quantized: bool) -> Callable[[], tuple[Stack, Callable[[], None]]]:
    def make(shape: Any = WIDE) -> tuple[Stack, Callable[[], None]]:
        model = Stack(shape, True)
        nc.set_recipe(model, RECIPES[recipe]())
        return sharded(model, quantized), lambda: None

    return make


def of_torchao(gathered: bool) -> Callable[[], tuple[Stack, Callable[[], None]]]:
    def make() -> tuple[Stack, Callable[[], None]]:
        from torchao import float8

        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gathered)
        model = sharded(float8.convert_to_float8_training(Stack(WIDE, False), config=config), None)
        after = float8.precompute_float8_dynamic_scale_for_fsdp
        return model, (lambda: after(model)) if gathered else lambda: None

    return make


def unsharded(recipe: str | None) -> Callable[[], tuple[Stack, Callable[[], None]]]:
    def make() -> tuple[Stack, Callable[[], None]]:
        model = Stack(WIDE, recipe is not None).to(torch.bfloat16)
        if recipe is not None:
            nc.set_recipe(model, RECIPES[recipe]())
        return model, lambda: None

    return make


def contenders(chosen: Namespace) -> dict[str, Callable[[], tuple[Stack, Callable[[], None]]]]:
    """Makers of a model and of what follows the step of its optimizer, the most telling first."""
    made: dict[str, Any] = {"bf16": lambda: (sharded(Stack(WIDE, False), None), lambda: None)}
    for recipe in ("current", "delayed"):
        made[f"{recipe}, quantized gather"] = ours(recipe, True)
        made[f"{recipe}, quantized gather, FusedAdam"] = ours(recipe, True)
        made[f"{recipe}, one GPU, FusedAdam"] = unsharded(recipe)
    has_torchao = importlib.util.find_spec("torchao") is not None
    made |= {"torchao tensorwise": of_torchao(False)} if has_torchao else {}
    made |= {f"{recipe}, unsharded": unsharded(recipe) for recipe in ("delayed", "current")}
    for name in ("delayed, unsharded", "current, unsharded", "bf16"):
        made[f"{name}, FusedAdam"] = made[name]
    made |= {"bf16, one GPU, FusedAdam": unsharded(None), "bf16, unsharded": unsharded(None)}
    made["block, quantized gather"] = ours("block", True)
    made |= {"torchao tensorwise, FP8 gather": of_torchao(True)} if has_torchao else {}
    made |= {recipe: ours(recipe, False) for recipe in RECIPES}
    return {name: make for name, make in made.items() if chosen.only in name}


def optimizer_of(name: str, model: Stack) -> torch.optim.Optimizer:
    """What steps the parameters of a contender."""
    if name.endswith("FusedAdam"):
        dtype = next(model.parameters()).dtype  # as PyTorch's, whose moments have that of the parameters
        moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        kept: dict[str, Any] = {"master_weights": True} if "one GPU" in name else moments
        return nc.optimizers.FusedAdam(model.parameters(), lr=1e-5, weight_decay=1e-2, **kept)
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def losses(model: Stack, after: Callable[[], None], shape: tuple[int, ...], steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    found = []
    for _ in range(steps):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        after()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def gate() -> None:
    """Quantized gathers give the losses of high-precision ones, small and eager.

    Raises:
        RuntimeError: they do not.
    """
    for recipe in RECIPES:
        both = []
        for quantized in (True, False):
            model, after = ours(recipe, quantized)(NARROW)  # type: ignore[call-arg]
            with sdpa_kernel(SDPBackend.MATH):  # the others sum the gradients of attention in any order
                both.append(losses(model, after, (2, 128, NARROW[0]), 4))
        if both[0] != both[1]:
            raise RuntimeError(f"{recipe}: losses {both[0]} with quantized gathers, {both[1]} without")


class Bytes:
    """What all-gathers deliver while this is entered."""

    def __enter__(self) -> Bytes:
        self.delivered = 0
        self.patches = [
            mock.patch.object(holder, name, self.counted(getattr(holder, name)))
            for holder, name in ((dist, all_gather_single.__name__), (gather_in_place, "all_gather_single"))
        ]
        for patch in self.patches:
            patch.start()
        return self

    def counted(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = kwargs.get("output_tensor", args[0] if args else None)
            self.delivered += out.numel() * out.itemsize
            return gather(*args, **kwargs)

        return run

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


def timed(name: str, make: Callable[[], tuple[Stack, Callable[[], None]]], repeats: int) -> Row:
    torch.compiler.reset()
    model, after = make()
    compiled(model)
    optimizer = optimizer_of(name, model)
    x = torch.randn(BATCH, SEQUENCE, WIDE[0], device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x) / x.numel()

    def step() -> None:
        model(x).backward(dy)
        optimizer.step()
        after()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with Bytes() as gathered:
        step()
    ms = torch.tensor(statistics.median(rank_ms(step, repeats) for _ in range(3)), device="cuda")
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)  # the slowest GPU says when a step is done
    return {
        "tokens/s/GPU": round(1e3 * BATCH * SEQUENCE / ms.item()),
        "ms": round(ms.item(), 2),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "gathered MB": round(gathered.delivered / 1e6),
    }


def measure(chosen: Namespace) -> list[Row]:
    if not chosen.skip_gate:
        gate()
    runs = {name: partial(timed, name, make, chosen.repeats) for name, make in contenders(chosen).items()}
    return train_in_turns(runs, chosen.budget)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--budget", type=float, default=240, help="seconds after which no contender starts")
    report_of_ranks("fsdp", measure, options.parse_args())


if __name__ == "__main__":
    main()
