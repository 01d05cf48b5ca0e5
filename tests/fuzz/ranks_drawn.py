"""Two ranks that talk through gloo: amax that is reduced, layers under DDP, FSDP2 and ``nc.distributed.shard``.

Delayed scaling reduces nothing by itself. A program with a group calls ``reduce_delayed_scaling`` after every backward,
and then the ranks' states are equal; ``seldom``, once per step, it must be told if scales differ. Accuracy is asked for
where the calls before tell the scales, as in :mod:`.histories`.

Every program runs in two processes of its own, so that one that hangs can be ended: some seconds each.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from quantizers.catalog import VARIANTS
from torch import Tensor, nn

import narrowcast as nc

from . import rank_programs
from .models import draw_recipe, recipe_of
from .programs import Difference, Invalid, Program, attempt, normal, refusal, said

NAMES = tuple(name for name in VARIANTS if "stochastic" not in name)
SECONDS = 90


def draw(rng: random.Random) -> Program:
    if rng.random() < 0.7:
        return rank_programs.draw(rng)
    return {
        "do": rng.choice(("quantize", "train", "train")),
        "seed": rng.randrange(10**6),
        "quantizer": rng.choice(NAMES),
        "reduction": rng.random() < 0.5,
        "group": rng.random() < 0.7,
        "recipe": draw_recipe(rng, ("delayed", "delayed", "current", "mxfp8", "block", "nvfp4", "none")),
        "wrap": rng.choice(("ddp", "ddp", "fsdp2", "shard", "shard", None)),
        "how": rng.choice(("autocast", "set_recipe")),
        "by_type": rng.random() < 0.4,
        "layers": [
            rng.choice(("linear", "linear", "lnmlp", "grouped", "relu")) for _ in range(rng.randint(1, 3))
        ],
        "steps": rng.choice((1, 2, 4)),
        "micro": rng.choice((1, 1, 2)),
        "louder": rng.choice((1.0, 20.0)),
        "bias": rng.random() < 0.5,
        "seldom": rng.random() < 0.3,
    }


class Grouped(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nc.GroupedLinear(2, 32, 32, bias=bias, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, [x.shape[0] // 2, x.shape[0] - x.shape[0] // 2])


def _by_type(role: nc.QuantizerRole) -> Any:
    if role.module_type == "grouped_linear":
        return nc.MXFP8Quantizer(nc.DType.kFloat8E4M3, with_2d_quantization=True)
    return nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)


def _train(program: Program, rank: int) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = _trained(program, rank)
    result["told"] = any("differ between ranks" in str(one.message) for one in caught)
    return result


def _trained(program: Program, rank: int) -> dict[str, Any]:
    torch.manual_seed(program["seed"])
    recipe = nc.recipe.CustomRecipe(qfactory=_by_type) if program["by_type"] else recipe_of(program["recipe"])
    made: list[nn.Module] = []
    for kind in program["layers"]:
        if kind == "linear":
            made.append(nc.Linear(32, 32, bias=bool(program["bias"]), device="cpu"))
        elif kind == "lnmlp":
            made.append(nc.LayerNormMLP(32, 64, bias=bool(program["bias"]), device="cpu"))
        elif kind == "grouped":
            made.append(Grouped(bool(program["bias"])))
        else:
            made.append(nn.ReLU())
    model: Any = nn.Sequential(*made)
    if program["how"] == "set_recipe" or program["wrap"] == "shard":
        nc.set_recipe(model, recipe)
    errors: list[float] = []
    amaxes: dict[nn.Module, list[float]] = {}

    def after(layer: Any, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        weight = layer.weight
        if isinstance(weight, nc.QuantizedTensor):
            return
        weight = getattr(weight, "full_tensor", lambda: weight)()
        x, found = inputs[0].detach().double(), y.detach().double()
        wanted = x @ weight.detach().double().t() + (
            0 if layer.bias is None else layer.bias.detach().double()
        )
        past, amax = amaxes.setdefault(layer, []), x.abs().max().item()
        # the input's scale is a constant at first, or from the last step or an earlier one, of at most two calls each
        if (max(past) / 50 <= amax <= 1.1 * min(past[-4:])) if past else amax <= 28:
            errors.append(((found - wanted).norm() / wanted.norm().clamp_min(1e-30)).item())
        past.append(amax)

    if program["wrap"] in ("ddp", None):
        for module in model.modules():
            if type(module) is nc.Linear:
                module.register_forward_hook(after)
    wrapped = model
    if program["wrap"] == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif program["wrap"] == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif program["wrap"] == "shard":
        nc.distributed.shard(model)
    louder = program["louder"] or 1.0
    # Three layers that learn louder data at the rate of the quiet diverge in plain fp32, too, to NaN.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 / louder)
    group = dist.group.WORLD if program["group"] else None
    for step in range(program["steps"] or 1):
        for micro in range(program["micro"] or 1):
            scale = louder if rank else 1.0
            x = normal(program["seed"] + 100 * step + 10 * micro + rank, 32, 32, scale=scale).requires_grad_()
            if program["how"] == "autocast" and program["wrap"] != "shard" and recipe is not None:
                with nc.autocast(recipe=recipe, amax_reduction_group=group):
                    y = wrapped(x)
            else:
                y = wrapped(x)
            y.square().sum().backward()
            if group is not None and (not program["seldom"] or micro + 1 == (program["micro"] or 1)):
                nc.reduce_delayed_scaling(model, group)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        name: getattr(value, "full_tensor", lambda value=value: value)().detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    return {"state": state, "errors": errors, "calls": len(errors)}


def _quantize(program: Program, rank: int) -> dict[str, Any]:
    quantizer: Any = VARIANTS[program["quantizer"]]
    if program["reduction"]:
        quantizer = quantizer.replace(with_amax_reduction=True)
    x = normal(program["seed"] + rank, 32, 32, scale=(program["louder"] or 1.0) if rank else 1.0)
    t = quantizer.quantize(x, amax_reduction_group=dist.group.WORLD if program["group"] else None)
    names, _ = t.__tensor_flatten__()
    scales = {name: getattr(t, name).clone() for name in names if "scale" in name or "amax" in name}
    return {"scales": scales, "x": t.dequantize()}


def _rank(rank: int, program: Program, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    work = {"quantize": _quantize, "train": _train}[program["do"]]
    result, error = attempt(lambda: work(program, rank))
    if error is not None:
        text = "".join(traceback.format_exception(error))[-3000:]
        result = {"error": said(error), "refusal": refusal(error), "text": text}
    torch.save(result, f"{folder}/writing{rank}")
    os.replace(f"{folder}/writing{rank}", f"{folder}/rank{rank}.pt")
    if error is None:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def run(program: Program) -> dict[str, float]:
    """Run a program in processes of its own, or in those of :mod:`.rank_programs`."""
    if program["do"] == "mesh":
        return rank_programs.run(program)
    layers = [kind for kind in program["layers"] if kind != "relu"]
    if not layers or not program["quantizer"]:
        raise Invalid("no layers")
    with tempfile.TemporaryDirectory() as folder:
        mp.set_forkserver_preload(rank_programs.PRELOADED)
        processes: Any = mp.start_processes(
            _rank, (program, folder), 2, join=False, start_method="forkserver"
        )
        end = time.monotonic() + SECONDS
        try:
            while time.monotonic() < end and not processes.join(timeout=0.5):
                done = [Path(f"{folder}/rank{r}.pt").exists() for r in range(2)]
                failed = [
                    r
                    for r in range(2)
                    if done[r] and "error" in torch.load(f"{folder}/rank{r}.pt", weights_only=False)
                ]
                if failed:
                    time.sleep(1.0)
                    break
        finally:
            for process in processes.processes:
                process.kill()
        results = [
            torch.load(f"{folder}/rank{r}.pt", weights_only=False)
            if Path(f"{folder}/rank{r}.pt").exists()
            else {"hangs": True}
            for r in range(2)
        ]
    errors = [result for result in results if "error" in result]
    if errors:
        if all(one["refusal"] and "in force wants" not in one["text"] for one in errors):
            return {f"refused: {errors[0]['error']}": 1.0}
        bad = next(one for one in errors if not one["refusal"] or "in force wants" in one["text"])
        raise Difference(f"two ranks, {program['do']}, {program['wrap']}: {bad['error']}\n{bad['text']}")
    if any("hangs" in result for result in results):
        raise Difference(f"two ranks, {program['do']}, {program['wrap']}: does not end")
    return _compare(program, results)


def _compare(program: Program, results: list[dict[str, Any]]) -> dict[str, float]:
    if program["do"] == "quantize":
        if not program["group"]:
            return {}
        one_scale = [name for name, value in results[0]["scales"].items() if value.numel() == 1]
        for name in one_scale:
            if not torch.equal(results[0]["scales"][name], results[1]["scales"][name]):
                raise Difference(f"quantize with a group: {name} differs between ranks")
        return {}
    family = "custom" if program["by_type"] else program["recipe"]["family"]
    for rank, result in enumerate(results):
        allowed = {"nvfp4": 0.4, "none": 1e-4}.get(family, 0.2 if family == "delayed" else 0.1)
        for number, error in enumerate(result["errors"]):
            if not error <= allowed:
                raise Difference(
                    f"{program['wrap']}: output of rank {rank} under {family}, call {number}: off by {error:.3g}"
                )
    differ: list[str] = []
    for name, value in results[0]["state"].items():
        other = results[1]["state"][name]
        is_state = "scale" in name or "amax" in name
        if not is_state and not (value.isfinite().all() and other.isfinite().all()):
            raise Difference(f"{program['wrap']}: {name} is not finite under {family}")
        if not program["group"] if is_state else program["wrap"] is None:
            continue
        if not torch.equal(value, other):
            if is_state and program["seldom"]:
                differ.append(name)
                continue
            kind = "scales" if is_state else "parameters"
            raise Difference(
                f"{program['wrap']}: {kind} differ between ranks under {family}, {program['how']}"
            )
    told = [result["told"] for result in results]
    scales_differ = any(name.split(".")[-1].partition("scale")[1] and "amax" not in name for name in differ)
    if any(told) != all(told) or scales_differ > all(told) or (any(told) and not program["seldom"]):
        raise Difference(
            f"{program['wrap']}: that scales differ between ranks is {told}: told by the reduction"
        )
    return {"told": float(all(told))}
