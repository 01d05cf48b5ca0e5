"""Programs of ranks: layouts of a model, and what is done with it: train, save, load, export, merge, clip.

Saves and exports are interrupted, too, where one rank's disk is full or one rank is killed, and two runs save into one
folder. A program may go on in another world: its ranks save a checkpoint, and ranks of another number, other processes,
load it.

The oracle is a plain model in the same process that gets the whole batch. After a step of training the gathered weights
and moments are compared with it and copied into it, so that what follows is compared closely: bits for what moves
them, nearly the same for what computes: the oracle calls its layers for the same rows, with the same parts of weights
and the same scales. All ranks must gather the same bits.

Ranks live in a pool and run one program after the other; a program that fails or hangs ends its pool.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import datetime
import errno
import functools
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from convert.test_adapters import Adapted
from serving.test_weights import Experts
from torch import Tensor, nn

import narrowcast as nc

from .models import recipe_of
from .programs import Difference, Invalid, Program, normal, refusal, said

SECONDS = 120
PRELOADED = [__name__, "torch.distributed.fsdp"]  # by the server that ranks are forked from
HIDDEN, ROWS, EXPERTS = 64, 32, 4
TOKENS, HEADS = 8, 4  # of a sequence; the rows are four of them
LAYOUTS = {
    1: ("none", "ddp", "fsdp", "shard", "tp"),
    2: ("none", "ddp", "fsdp", "shard", "tp", "tp_group", "ep", "pp", "cp"),
    4: (
        *("ddp", "fsdp", "shard", "hsdp", "tp", "tp_group", "fsdp+tp", "ep", "hsdp+ep", "tp+ep", "pp", "cp"),
        *("pp+ddp", "pp+fsdp", "pp+tp", "pp+cp"),
    ),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    # with an epsilon beside which gradients are small: signs of noise would be steps
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=0.1),
    "fused": lambda parameters: nc.optimizers.FusedAdam(parameters, lr=1e-2, eps=0.1, weight_decay=0.01),
}
STORED = ("none", "ddp", "fsdp", "shard", "hsdp", "ep", "hsdp+ep", "pp", "pp+ddp", "pp+fsdp", "cp", "pp+cp")
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")
WHOLE = ("none", "ddp", "cp")  # each rank has all parameters
ROW_WISE = ("none", "ddp", "fsdp", "hsdp")  # each rank computes as one process with its rows
SAME = 5e-3  # operands are the same, but where another order of sums crosses the rounding of a few of them
CROSSED = 5e-2  # attention adds in another order: noise of 1e-7 there has moved a step of NVFP4 by 0.02
FORMATS = {"none": "bf16", "block": "hf-fp8-block128"}
FULL_AT = 12  # a disk takes fewer files than this, of which a save and an export write some
STEPS = (
    *("train", "train", "evaluate", "save and load", "save and load", "export", "merge", "clip"),
    *("interrupted save", "interrupted export", "two runs", "dispatch"),
)
KILLED = ("killed save", "killed export")  # as the last step: its ranks are no more
MOMENT = "moment of "


def draw(rng: random.Random) -> Program:
    worlds = [rng.choice((2, 2, 4))]
    while len(worlds) < 3 and rng.random() < 0.4:
        worlds.append(rng.choice([world for world in LAYOUTS if world != worlds[-1]]))
    family = rng.choice(("none", "none", "current", "delayed", "block", "mxfp8", "nvfp4"))
    options = {"disable_stochastic_rounding": True, "disable_rht": True} if family == "nvfp4" else {}
    drawn = [[rng.choice(LAYOUTS[world]) for _ in range(3)] for world in worlds]
    every = {layout for layouts in drawn for layout in layouts}
    experts = any(map(shares_experts, every))
    stages = any(map(has_stages, every))
    parts = [
        {
            "world": world,
            # experts count rows, which microbatches and parts of sequences have not in order
            "layouts": [one for one in layouts if not experts or not (has_stages(one) or has_context(one))]
            or ["ddp"],
            "steps": [
                step
                for _ in range(rng.randint(3, 7))
                if (step := rng.choice(STEPS)) != "two runs" or world > 1
            ],
        }
        for world, layouts in zip(worlds, drawn)
    ]
    if rng.random() < 0.2:
        parts[-1]["steps"] += [rng.choice(KILLED)]
    return {
        "do": "mesh",
        **parts[0],
        "then": parts[1:],
        "seed": rng.randrange(10**6),
        "recipe": {"family": family, "options": options},
        "blocks": max(worlds) - 1 if stages else rng.choice((1, 2)),
        "bias": rng.random() < 0.7,
        "inner": rng.choice((128, 128, 96, 256)),
        "experts": experts,
        "attention": any(map(has_context, every)) or rng.random() < 0.2,
        "schedule": rng.choice(SCHEDULES),
        "full": [rng.randrange(worlds[0]), rng.randrange(FULL_AT)],
        "kill": [rng.randrange(worlds[-1]), rng.randrange(FULL_AT // 3)],
        "optimizer": rng.choice(("sgd", *OPTIMIZERS)),
        "asynchronous": rng.random() < 0.3,
        "stored": rng.choice((None, "stored", "nvfp4"))
        if family != "none" and every <= set(STORED)
        else None,
    }


def shares_experts(layout: str) -> bool:
    return "ep" in layout.split("+")


def has_stages(layout: str) -> bool:
    return "pp" in layout.split("+")


def has_context(layout: str) -> bool:
    return "cp" in layout.split("+")


# -- the model and its layouts -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Attention(nn.Module):
    """Sequences among the rows: of ``tokens`` each, of which ranks may have parts."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.project, self.merge = nn.Linear(HIDDEN, 3 * HIDDEN, bias), nn.Linear(HIDDEN, HIDDEN, bias)
        self.core = nc.DotProductAttention(HEADS, HIDDEN // HEADS, qkv_format="bshd").to("cpu")
        self.tokens = TOKENS

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(-1, self.tokens, HEADS, 3, HIDDEN // HEADS)
        return x + self.merge(self.core(*heads.unbind(3)).reshape(x.shape))


class Model(nn.Module):
    """Blocks, attention, experts and a head, or some of these: a stage of a pipeline."""

    def __init__(self, program: Program, group: Any = None) -> None:
        super().__init__()
        inner, bias = program["inner"], bool(program["bias"])
        recipe = recipe_of(program["recipe"])
        blocks = []
        for _ in range(program["blocks"] or 1):
            if group is None:
                blocks.append(Block(nn.Linear(HIDDEN, inner, bias), nn.Linear(inner, HIDDEN, bias)))
                continue
            own: dict[str, Any] = {"bias": bias, "tp_group": group, "device": "cpu", "recipe": recipe}
            up = nc.Linear(HIDDEN, inner, parallel_mode="column", **own)
            blocks.append(Block(up, nc.Linear(inner, HIDDEN, parallel_mode="row", **own)))
        self.blocks: Any = nn.ModuleList(blocks)
        self.attention = Attention(bias) if program["attention"] else None
        self.experts = Experts(EXPERTS, HIDDEN, 32) if program["experts"] else None
        self.out: Any = nn.Linear(HIDDEN, HIDDEN, bias)

    def become_stage(self, stage: int, stages: int) -> None:
        """Keep the blocks of a stage, under their names in the whole model; the last stage has the rest."""
        pieces = len(self.blocks) + 1
        own = [number for number in range(pieces) if number * stages // pieces == stage]
        blocks = {str(number): self.blocks[number] for number in own if number < len(self.blocks)}
        self.blocks = nn.ModuleDict(blocks)
        if stage + 1 < stages:
            self.attention = self.out = None

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        if self.attention is not None:
            x = self.attention(x)
        if self.experts is not None:
            index = (torch.arange(len(x)) + first)[:, None] % EXPERTS
            x = x + self.experts(x, index, torch.ones(len(x), 1)) * 0.02
        return x if self.out is None else self.out(x)


def build(program: Program, seed: int, group: Any = None) -> Any:
    torch.manual_seed(seed)
    model = Model(program, group)
    recipe, stored = recipe_of(program["recipe"]), program.get("stored") or "plain"
    if recipe is not None:
        model.blocks[0].up.requires_grad_(stored == "plain")
        nc.convert(model, recipe, heads=True, small=True, blocks=True, routers=True, weights=stored)
    elif program["experts"]:
        nc.convert(model, nc.recipe.Float8CurrentScaling(), only="experts")
        nc.set_recipe(model, {"experts": None})
    return model


class Laid:
    """A model in a layout: ``called`` is what runs; the batch is divided into ``parts``, of which this rank has one."""

    def __init__(self, program: Program, layout: str, whole: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import parallelize_module

        world, rank = dist.get_world_size(), dist.get_rank()
        self.layout, self.parts, self.part, self.stage = layout, world, rank, rank
        exact = CROSSED if has_context(layout) else SAME
        self.tolerance = 1e-4 if program["recipe"]["family"] == "none" else exact
        self.writes = layout not in WHOLE or rank == 0  # whether this rank takes part in an export
        self.pipeline = dist.group.WORLD if layout == "pp" else None
        self.reduces = None if layout == "pp" else dist.group.WORLD  # whose ranks have other layers
        if layout == "tp_group":
            self.model = build(program, 0, dist.group.WORLD)
            split = parts_of_ranks(whole, world, rank)
            self.model.load_state_dict(
                {k: split[k] for k in self.model.state_dict() if k in split}, strict=False
            )
        else:
            self.model = build(program, 0)
            self.model.load_state_dict(whole.state_dict())
        self.called, model = self.model, self.model
        if has_stages(layout) and layout != "pp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "inner"))
            self.stage, self.pipeline, self.reduces = (
                mesh.get_local_rank("pp"),
                mesh["pp"].get_group(),
                mesh["inner"].get_group(),
            )
            self.parts, self.part = (1, 0) if layout == "pp+tp" else (2, mesh.get_local_rank("inner"))
            self.writes = layout not in ("pp+ddp", "pp+cp") or self.part == 0
            model.become_stage(self.stage, 2)
            if layout == "pp+tp":
                parallelize_module(model, mesh["inner"], styles_of(model))
            elif layout == "pp+fsdp":
                fully_shard(model, mesh=mesh["inner"])
            else:
                if layout == "pp+cp":
                    self.split_sequences(self.reduces)
                self.called = nn.parallel.DistributedDataParallel(model, process_group=self.reduces)
            self.schedule = schedule_of(program, self, 2)
        elif "tp" in layout.split("+"):
            shape, names = ((world,), ("tp",)) if layout == "tp" else ((2, world // 2), ("dp", "tp"))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            parallelize_module(model, mesh["tp"], styles_of(model))
            self.parts, self.part = (1, 0) if layout == "tp" else (2, mesh.get_local_rank("dp"))
            if layout != "tp":
                apart = set()
                if shares_experts(layout):
                    # its replicas have the same tokens
                    apart = nc.distributed.expert_parallel(
                        model, mesh["dp"], quantizer=None, has_replicas=False
                    )
                fully_shard(model, mesh=mesh["dp"], ignored_params=apart)
        elif layout in ("none", "tp_group"):
            self.parts, self.part = 1, 0
        elif layout == "pp":
            self.parts, self.part = 1, 0
            model.become_stage(rank, world)
            self.schedule = schedule_of(program, self, world)
        elif layout in ("ddp", "cp"):
            if layout == "cp":
                self.split_sequences(dist.group.WORLD)
            self.called = nn.parallel.DistributedDataParallel(model)
        elif layout == "shard":
            nc.distributed.shard(model, init_device_mesh("cpu", (world,)), blocks=list(model.blocks))
        else:
            shape = (2, 2) if layout.startswith("hsdp") else (world,)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            apart = set()
            if shares_experts(layout):
                apart = nc.distributed.expert_parallel(model, mesh, quantizer=None)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh, ignored_params=apart)
        self.optimizer = optimizer_of(program, model)

    def split_sequences(self, group: Any) -> None:
        """Let ranks have parts of each sequence; only the last stage of a pipeline has attention."""
        if self.model.attention is not None:
            self.model.attention.tokens = self.tokens
            self.model.attention.core.set_context_parallel_group(group, cp_comm_type="all_gather")

    @property
    def tokens(self) -> int:
        """How many tokens of a sequence this rank has."""
        return TOKENS // self.parts if has_context(self.layout) else TOKENS

    def rows(self, x: Tensor, part: int | None = None) -> tuple[Tensor, int]:
        """Return the rows of a part of the batch, by default this rank's, and the number of the first."""
        part = self.part if part is None else part
        if has_context(self.layout):
            # the load of causal attention is balanced: a part of the front, one of the end
            pieces = x.unflatten(0, (-1, TOKENS)).chunk(2 * self.parts, 1)
            return torch.cat([pieces[part], pieces[-1 - part]], 1).flatten(0, 1), 0
        each = len(x) // self.parts
        return x[part * each : (part + 1) * each], part * each

    def calls(self, trains: bool) -> list[Tensor]:
        """Return the rows of each call of a layer, on all ranks: operands of a product that is quantized by itself."""
        parts = [self.rows(torch.arange(ROWS), part)[0] for part in range(self.parts)]
        if trains and has_stages(self.layout):
            return [rows for part in parts for rows in part.split(self.tokens)]
        return parts

    def calls_of_experts(self, trains: bool) -> list[Tensor]:
        """Return the same of experts, to which ranks that share them send their rows."""
        if not shares_experts(self.layout):
            return self.calls(trains)
        return [*torch.arange(ROWS).chunk(2 if self.layout == "hsdp+ep" else 1)]

    @property
    def shards(self) -> int:
        """In how many parts ranks have the weights of a block."""
        if not {"tp", "tp_group"} & {*self.layout.split("+")}:
            return 1
        return dist.get_world_size() if self.layout in ("tp", "tp_group") else dist.get_world_size() // 2

    @property
    def means(self) -> int:
        """How many means the loss of the batch is the mean of: inside, gradients are as many times larger."""
        return ROWS // self.tokens if has_stages(self.layout) else self.parts

    def backward(self, x: Tensor) -> None:
        """Make the gradients of the mean square of all outputs."""
        self.called.train()
        if has_stages(self.layout):
            x, _ = self.rows(x)
            first, last = self.stage == 0, self.stage == dist.get_world_size(self.pipeline) - 1
            self.schedule.step(*((x,) if first else ()), **({"target": x} if last else {}))
        else:
            self.called(*self.rows(x)).square().mean().backward()

    def output(self, x: Tensor) -> Tensor:
        """Return what an evaluation gives for this rank's rows; of a pipeline's last stage on all."""
        self.called.eval()
        with torch.no_grad():
            if not has_stages(self.layout):
                return self.called(*self.rows(x))
            x, _ = self.rows(x)
            for stage in range(dist.get_world_size(self.pipeline)):
                x = self.called(x) if stage == self.stage else torch.empty_like(x)
                dist.broadcast(x, group=self.pipeline, group_src=stage)
            return x

    def gathered(self) -> dict[str, Tensor]:
        found = {}
        for name, value in held(self.model, self.optimizer).items():
            value = getattr(value, "full_tensor", lambda value=value: value)()
            dim = split_dim(name) if self.layout == "tp_group" else None
            if dim is not None and value.dim():
                every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
                dist.all_gather(every, value.detach().contiguous())
                value = torch.cat(every, dim)
            found[name] = value.detach().clone()
        if not has_stages(self.layout):
            return found
        return {name: value for stage in of_all_ranks(found) for name, value in stage.items()}


def held(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The tensors of a model's state, and the moments of its parameters."""
    found = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, parameter in model.named_parameters():
        for key, moment in optimizer.state.get(parameter, {}).items():
            if isinstance(moment, Tensor):
                found[f"{MOMENT}{key} {name}"] = moment
    return found


def optimizer_of(program: Program, model: nn.Module) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return OPTIMIZERS[program.get("optimizer") or "sgd"](trained)


def follow(whole: nn.Module, optimizer: Any, found: dict[str, Tensor]) -> None:
    """Let the oracle go on from what the ranks hold; experts of which that has no scales begin anew, as on ranks."""
    whole.load_state_dict(found, strict=False)
    parameters = dict(whole.named_parameters())
    for name, value in found.items():
        if name.startswith(MOMENT):
            key, _, own = name.removeprefix(MOMENT).partition(" ")
            optimizer.state[parameters[own]].setdefault(key, value.clone()).copy_(value)


def of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def styles_of(model: Any) -> dict[str, Any]:
    """How tensor parallelism splits the blocks that a model has."""
    blocks = model.blocks if isinstance(model.blocks, nn.ModuleDict) else range(len(model.blocks))
    ways = {"up": nc.distributed.ColwiseParallel, "down": nc.distributed.RowwiseParallel}
    return {f"blocks.{i}.{name}": way() for i in blocks for name, way in ways.items()}


def schedule_of(program: Program, one: Laid, stages: int) -> Any:
    """A schedule of microbatches, each a sequence, or this rank's part of one."""
    from torch.distributed import pipelining

    inputs, outputs = (torch.empty(one.tokens, HIDDEN, requires_grad=grad) for grad in (one.stage > 0, True))
    made = pipelining.PipelineStage(
        one.called,
        one.stage,
        stages,
        torch.device("cpu"),
        input_args=inputs,
        output_args=outputs,
        group=one.pipeline,
    )
    schedule = getattr(pipelining, program["schedule"] or SCHEDULES[0])
    microbatches = ROWS // one.parts // one.tokens
    return schedule(made, microbatches, loss_fn=lambda y, target: y.square().mean())


def split_dim(name: str) -> int | None:
    if name.endswith(("up.weight", "up.bias")):
        return 0
    return 1 if name.endswith("down.weight") else None


def parts_of_ranks(whole: nn.Module, world: int, rank: int) -> dict[str, Tensor]:
    state = whole.state_dict()
    return {
        name: value if split_dim(name) is None else value.chunk(world, split_dim(name))[rank]  # type: ignore[arg-type]
        for name, value in state.items()
    }


# -- what is done ------------------------------------------------------------------------------------------------------


class Shards(nn.Module):
    """A linear layer in one process as the parts of it that ranks have, each with scales of its own weight."""

    def __init__(self, layer: Any, parts: int, dim: int) -> None:
        super().__init__()
        self.layer, self.dim, made = [layer], dim, []
        biases = [None] * parts if layer.bias is None else layer.bias.detach().chunk(parts)
        for weight, bias in zip(layer.weight.detach().chunk(parts, dim), biases):
            part = copy.deepcopy(layer)
            part.out_features, part.in_features = weight.shape
            part.weight = nn.Parameter(weight.clone())
            part.bias = None if bias is None or dim else nn.Parameter(bias.clone())
            for name, buffer in part.named_buffers():
                if name.endswith("scale"):  # ranks that join codes begin with a constant
                    buffer[:2].masked_fill_(buffer[:2] == 0, 448 / 28)
                    buffer[2:].masked_fill_(buffer[2:] == 0, 57344 / 0.875)
            made.append(part)
        self.made = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 0:
            return torch.cat([part(x) for part in self.made], -1)
        y = sum(part(own) for part, own in zip(self.made, x.chunk(len(self.made), -1)))
        return y if self.layer[0].bias is None else y + self.layer[0].bias

    def give_back(self) -> None:
        """Add gradients to those of the whole layer, and the largest amaxes."""
        (layer,) = self.layer
        layer.weight.grad = torch.cat([part.weight.grad for part in self.made], self.dim)
        if layer.bias is not None and self.dim == 0:
            layer.bias.grad = torch.cat([part.bias.grad for part in self.made])
        for name, buffer in layer.named_buffers():
            if name.endswith("amax"):
                buffer.copy_(torch.stack([part.get_buffer(name) for part in self.made]).amax(0))


class Calls(nn.Module):
    """Layers in one process, called for some rows each, as ranks or microbatches call theirs."""

    def __init__(self, layers: list[nn.Module], calls: list[Tensor]) -> None:
        super().__init__()
        self.layers, self.calls, self.back = nn.ModuleList(layers), calls, torch.cat(calls).argsort()

    def forward(self, *values: Tensor) -> Tensor:
        parts = [layer(*(value[rows] for value in values)) for layer, rows in zip(self.layers, self.calls)]
        return torch.cat(parts)[self.back]


def experts_of_replicas(one: Laid, experts: Any) -> list[nn.Module]:
    """Return an oracle's experts, once for each group of ranks that share them, with the scales that these have.

    No state dict has them.
    """
    own = {name: value for name, value in one.model.experts.named_buffers() if name.endswith("scale")}
    every = of_all_ranks(own)
    groups = {"hsdp+ep": [every[:2], every[2:]], "tp+ep": [every[::2]]}.get(one.layout, [every])
    made = []
    for group in groups:
        made.append(copy.deepcopy(experts, {id(value): value for value in experts.parameters()}))
        for name in own:
            of_groups = [rank[name].unflatten(-1, (4, -1)) for rank in group]
            made[-1].get_buffer(name).copy_(torch.cat(of_groups, -1).flatten())
    return made


@contextlib.contextmanager
def as_on_ranks(whole: Any, one: Laid, trains: bool) -> Iterator[None]:
    """Let the oracle quantize what ranks quantize: the rows of a call, and the parts of weights that ranks have."""
    made, split = [], []
    for name, layer in [
        (name, layer) for name, layer in whole.named_modules() if isinstance(layer, (nn.Linear, Experts))
    ]:
        parent, _, attribute = name.rpartition(".")
        calls = (one.calls_of_experts if attribute == "experts" else one.calls)(trains)
        layers = [layer] * len(calls)
        if attribute == "experts" and shares_experts(one.layout):
            layers = experts_of_replicas(one, layer)
        elif attribute in ("up", "down") and one.shards > 1:
            split.append(Shards(layer, one.shards, 0 if attribute == "up" else 1))
            layers = split[-1:] * len(calls)
        made.append((whole.get_submodule(parent), attribute, layer))
        setattr(whole.get_submodule(parent), attribute, Calls(layers, calls))
    try:
        yield
    finally:
        for parent, attribute, layer in made:
            setattr(parent, attribute, layer)
        for shards in split:
            if shards.made[0].weight.grad is not None:
                shards.give_back()


def error_of(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()


def must_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    for name, value in wanted.items():
        if name not in found or not torch.equal(found[name], value):
            raise Difference(f"{what}: {name} differs")


def is_scale(name: str) -> bool:
    """Whether a value is of delayed scaling."""
    return name.endswith(("scale", "amax_history", "amax"))


def kept_by(layout: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a layout loads of a state: experts on other ranks begin delayed scaling anew."""
    anew = {
        name for name in state if shares_experts(layout) and name.startswith("experts.") and is_scale(name)
    }
    return {name: value for name, value in state.items() if name not in anew}


def train(one: Laid, whole: Any, optimizer: Any, x: Tensor, clip: bool) -> None:
    before = {name: value.clone() for name, value in whole.state_dict().items() if isinstance(value, Tensor)}
    one.backward(x)
    # Quantized as on ranks: a scale from before may be too large for the gradients of some rows' mean.
    with as_on_ranks(whole, one, trains=True):
        (whole(x, 0).square().mean() * one.means).backward()
    for parameter in whole.parameters():
        if parameter.grad is not None:
            parameter.grad /= one.means
    if clip:
        norm = nc.distributed.clip_grad_norm_(one.model, 0.05, pipeline=one.pipeline)
        wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        if not error_of(norm, wanted) <= one.tolerance:
            raise Difference(f"{one.layout}: the norm of gradients is {norm}, not {wanted}")
    if one.reduces is not None:
        nc.reduce_delayed_scaling(one.model, one.reduces)
    for each in (one.optimizer, optimizer):
        each.step()
        each.zero_grad()
    found = one.gathered()
    for name, value in held(whole, optimizer).items():
        if value.is_floating_point() and name in found:
            # A scale has the noise of what was computed, and may hardly move.
            start = before[name] if name in before and not is_scale(name) else 0
            off = error_of(found[name] - start, value - start)
            rounding = 1e-6 * value.norm() + 1e-7  # of the weight, which may be large beside the step
            if not off <= one.tolerance and (found[name] - value).norm() > rounding:
                raise Difference(f"{one.layout}: a step moves {name} otherwise, {off:.3g}")
    follow(whole, optimizer, found)


def evaluate(one: Laid, whole: Any, x: Tensor) -> None:
    whole.eval()
    with torch.no_grad():
        with as_on_ranks(whole, one, trains=False):
            wanted = whole(x, 0)
        alone = whole(*one.rows(x)) if one.layout in ROW_WISE else None
    found, wanted = one.output(x), one.rows(wanted)[0]
    if alone is not None and not torch.equal(found, alone):
        raise Difference(f"{one.layout}: an evaluation has other bits, {error_of(found, alone):.3g} off")
    if not error_of(found, wanted) <= one.tolerance:
        raise Difference(f"{one.layout}: an evaluation is {error_of(found, wanted):.3g} off")
    whole.train()


def save_and_load(one: Laid, program: Program, layout: str, folder: Path) -> Laid:
    wanted = one.gathered()
    if program.get("asynchronous"):
        saving = nc.distributed.save_checkpoint(
            folder, one.model, one.optimizer, group=group_of_saves(), asynchronous=True
        )
        saving.result()
        dist.barrier()
    else:
        nc.distributed.save_checkpoint(folder, one.model, one.optimizer)
    return load(program, layout, folder, wanted, f"saved by {one.layout}")


@functools.cache
def group_of_saves() -> Any:
    return dist.new_group(backend="gloo")


_limits: list[Any] = []  # how many files this rank still writes, and what it does then


def _count_files(event: str, args: tuple[Any, ...]) -> None:
    writes = event in ("os.rename", "os.mkdir") or (event == "open" and set(str(args[1])) & set("wxa+"))
    if _limits and writes:
        _limits[0] -= 1
        if _limits[0] < 0:
            _limits[1]()


def find_no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def limited(drawn: list[int] | None, then: Callable[[], None]) -> Iterator[None]:
    """Let one rank do something in place of writing, after some files."""
    rank, files = drawn or (0, 0)
    if rank % dist.get_world_size() == dist.get_rank():
        _limits.extend((files, then))
    try:
        yield
    finally:
        _limits.clear()


def raises(function: Callable[[], Any], program: Program) -> bool:
    """Whether a call fails for want of room: on all ranks or on none."""
    error: BaseException | None = None
    with limited(program["full"], find_no_room):
        try:
            function()
        except BaseException as raised:  # CheckpointException is no Exception
            error = raised
    told = of_all_ranks(None if error is None else f"{type(error).__name__}: {error}")
    if None in told and told.count(None) < len(told):
        raise Difference(
            f"of a full disk some ranks hear, others do not: {[one and one[:200] for one in told]}"
        )
    if error is not None and not any("No space left" in one for one in told):
        raise error  # such as a refusal
    return error is not None


def interrupted_save(one: Laid, program: Program, layout: str, folder: Path) -> Laid:
    """After a save that may fail, the checkpoint is the one of before or the new one."""
    nc.distributed.save_checkpoint(folder / "at", one.model, one.optimizer, extra={"save": 0})
    wanted = one.gathered()
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.neg_()  # of the same norm: a model that has grown diverges

    def save() -> None:
        nc.distributed.save_checkpoint(folder / "at", one.model, one.optimizer, extra={"save": 1})

    raised = raises(save, program)
    left = [path.name for path in folder.iterdir()]
    if left != ["at"] and not (raised and left == ["at.old"]):  # the last rename may be what fails
        raise Difference(f"a save that {'fails' if raised else 'ends'} leaves more than its folder")
    if not raised:
        wanted = one.gathered()
    return load(program, layout, folder / "at", wanted, f"interrupted, saved by {one.layout}")


def killed(one: Laid, program: Program, folder: Path, saves: bool) -> None:
    """Save or export in peace, and again while one rank is killed in place of writing a file."""
    rank, files = program["kill"] or (0, 0)
    own, form = dist.get_rank(), FORMATS.get(program["recipe"]["family"], "compressed-tensors")
    suffix = f"-{one.stage}" if has_stages(one.layout) else ""
    for turn in range(2):
        if saves:
            state = one.gathered()
            if own == 0:
                torch.save(state, folder.parent / f"wanted{turn}")
        dist.barrier()
        with limited([rank if saves else 0, files], die) if turn else contextlib.nullcontext():
            if saves:
                nc.distributed.save_checkpoint(folder / "at", one.model, one.optimizer, extra={"turn": turn})
            elif one.writes:
                nc.export(one.model.eval(), folder / f"at{turn}{suffix}", format=form)
        with torch.no_grad():
            for parameter in one.model.parameters() if saves else ():
                parameter.mul_(1.25)
    dist.barrier()


def check_killed(program: Program, folder: Path) -> None:
    """What a killed save or export leaves is the old or the new; the next save takes away the rest."""
    place = folder / str(len(program["steps"]) - 1)
    if program["steps"][-1] == "killed export":
        if not any(place.glob("at0*")):
            raise Difference("a rank died before it was killed")
        for new in place.glob("at1*"):
            for path in (place / new.name.replace("at1", "at0")).iterdir():
                if (new / path.name).read_bytes() != path.read_bytes():
                    raise Difference(f"a killed export leaves another {path.name}")
        return
    whole, optimizer = started(program, 1)
    turn = nc.distributed.load_checkpoint(place / "at", whole, optimizer)["turn"]
    must_equal(
        held(whole, optimizer),
        torch.load(folder / f"wanted{turn}"),
        f"what a killed save left, of turn {turn}",
    )
    nc.distributed.save_checkpoint(place / "at", whole)
    if [path.name for path in place.iterdir()] != ["at"]:
        raise Difference("the save behind a killed one leaves more than its folder")


def two_runs(program: Program, folder: Path) -> None:
    """Halves of the ranks are runs of their own that save into one folder: what is there is of one of them."""
    from torch.distributed.fsdp import fully_shard

    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("run", "ranks"))
    own, run = mesh["ranks"], 2 * rank // world
    for turn in range(3):
        model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))
        fully_shard(model, mesh=own)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2 * turn + run)
        error = None
        try:
            nc.distributed.save_checkpoint(
                folder / "at", model, extra={"run": 2 * turn + run}, group=own.get_group()
            )
        except OSError as raised:  # both put theirs in place at once
            error = raised
        except RuntimeError as raised:
            error = raised
        failed = [one for one in of_all_ranks(None if error is None else str(error)) if one is not None]
        if len(failed) == world:
            raise Difference(f"of two runs that save into one folder, none can: {failed}")
        alone = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(3)))
        found = nc.distributed.load_checkpoint(folder / "at", alone)["run"]
        if found // 2 != turn or not all(parameter.eq(found).all() for parameter in alone.parameters()):
            raise Difference(f"a checkpoint of two runs holds parts of both, of run {found}")


def export(one: Laid, whole: Any, program: Program, folder: Path, interrupted: bool = False) -> None:
    form = FORMATS.get(program["recipe"]["family"], "compressed-tensors")
    whole.eval()
    one.model.eval()
    first = dist.get_rank() == 0
    staged = has_stages(one.layout)
    place = folder / (f"stage{one.stage}" if staged else "shared")

    def write() -> None:
        if one.writes:
            nc.export(one.model, place, format=form)

    if interrupted and one.layout not in WHOLE and not staged:
        raised = raises(write, program)
        left = [path.name for path in folder.iterdir()]
        if left != ([] if raised else ["shared"]):
            raise Difference(f"{one.layout}: an export that {'fails' if raised else 'ends'} leaves {left}")
        dist.barrier()
        if raised:
            write()
    else:
        write()
    dist.barrier()
    if first:
        from safetensors.torch import load_file

        nc.export(whole, folder / "alone", format=form)
        if staged:
            stages = [load_file(path / "model.safetensors") for path in folder.glob("stage*")]
            together = {name: value for stage in stages for name, value in stage.items()}
            must_equal(together, load_file(folder / "alone" / "model.safetensors"), "pp: an export")
        for name in ("model.safetensors", "config.json") if not staged else ():
            if (place / name).read_bytes() != (folder / "alone" / name).read_bytes():
                raise Difference(f"{one.layout}: an export has another {name} than that of one process")
    whole.train()
    one.model.train()


def dispatch(program: Program, tolerance: float) -> None:
    """Experts on other ranks, behind a router with a capacity, beside all experts on each rank."""
    seed, world, rank = program["seed"] or 0, dist.get_world_size(), dist.get_rank()
    rng = random.Random(seed)
    topk, limit = rng.choice((1, 2)), rng.choice((None, 1.0, 1.5))
    torch.manual_seed(seed)
    recipe: Any = {"device": "cpu", "recipe": recipe_of(program["recipe"])}
    router = nc.MoERouter(HIDDEN, EXPERTS, topk, capacity_factor=limit, device="cpu")
    whole = nc.GroupedLinear(EXPERTS, HIDDEN, HIDDEN, bias=False, **recipe)
    own = nc.GroupedLinear(EXPERTS // world, HIDDEN, HIDDEN, bias=False, **recipe)
    first = rank * EXPERTS // world
    with torch.no_grad():
        for number in range(EXPERTS // world):
            getattr(own, f"weight{number}").copy_(getattr(whole, f"weight{first + number}"))
    everywhere = ROWS * min(topk, EXPERTS // world)
    exchange, alone = (
        nc.distributed.MoEDispatch(EXPERTS, group, quantizer=None, capacity=room)
        for group, room in ((None, rng.choice((None, everywhere))), (groups_of_one()[rank], None))
    )
    batch = [normal(seed + number, ROWS, HIDDEN).requires_grad_(True) for number in range(world)]
    # a router's capacity counts the rows of a rank
    probs, routing_maps, _ = zip(*map(router, batch))
    wanted = alone(torch.cat(batch), torch.cat(probs), torch.cat(routing_maps), world * ROWS * topk, whole)
    wanted.square().sum().backward()
    x = batch[rank].detach().requires_grad_(True)
    probs, routing_map, _ = router(x)
    y = exchange(x, probs, routing_map, ROWS * topk, own)
    y.square().sum().backward()
    compared = [("results", wanted.chunk(world)[rank], y), ("gradients", batch[rank].grad, x.grad)]
    for number in range(EXPERTS // world):
        weights = getattr(whole, f"weight{first + number}"), getattr(own, f"weight{number}")
        compared.append(("weight gradients", *(weight.grad for weight in weights)))
    for what, expected, found in compared:
        if not error_of(found, expected) <= tolerance:
            raise Difference(f"{what} of experts on other ranks are {error_of(found, expected):.3g} off")


@functools.cache
def groups_of_one() -> list[Any]:
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())]


def merge(one: Laid, program: Program, whole: Any, folder: Path) -> None:
    """Adapters over layers of their own, sharded as the model is: in place, or written."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(program["seed"] or 0)
    base = (
        nn.Sequential(*(copy.deepcopy(block.up) for block in whole.blocks[:1]))
        .bfloat16()
        .requires_grad_(False)
    )
    alone, shared = Adapted(copy.deepcopy(base)), None
    shared = copy.deepcopy(alone)
    fully_shard(shared.model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    x = normal(program["seed"], ROWS, HIDDEN).bfloat16()
    shared(x)
    form = FORMATS.get(program["recipe"]["family"], "compressed-tensors")
    nc.export(shared, folder / "merged", format=form, merge="kept")
    merged, wanted = nc.merge_adapters(shared), nc.merge_adapters(alone)
    for _ in range(2):
        if not torch.equal(merged(x), wanted(x)):
            raise Difference("merged adapters give other outputs on ranks")
    if dist.get_rank() == 0:
        nc.export(wanted, folder / "wanted", format=form)
        files = [(folder / name / "model.safetensors").read_bytes() for name in ("merged", "wanted")]
        if files[0] != files[1]:
            raise Difference("an export that merges has other bytes on ranks")


def load(program: Program, layout: str, folder: Path, wanted: dict[str, Tensor], saved: str) -> Laid:
    """Load into a model with other weights, which must hold the bits that were saved then."""
    other = Laid(program, layout, build(program, 1))
    nc.distributed.load_checkpoint(folder, other.model, other.optimizer)
    must_equal(other.gathered(), kept_by(layout, wanted), f"{saved}, loaded by {layout}")
    return other


def started(program: Program, seed: int) -> tuple[Any, torch.optim.SGD]:
    """The model in one process, and its optimizer."""
    whole = build(program, seed)
    return whole, optimizer_of(program, whole)


def work(program: Program, folder: Path, came: Path | None, goes: Path | None) -> dict[str, float]:
    """Run the steps of one world, from the checkpoint that another left to one that it leaves."""
    family = program["recipe"]["family"]
    layouts = list(program["layouts"] or ["none"])
    whole, optimizer = started(program, program["seed"] or 0)
    if came is None:
        one = Laid(program, layouts.pop(0), whole)
    else:
        saved, wanted = torch.load(came.with_suffix(".pt"))
        one = load(program, layouts.pop(0), came, wanted, f"in another world saved by {saved}")
        follow(whole, optimizer, one.gathered())
    done = {}
    for number, step in enumerate(program["steps"]):
        x = normal((program["seed"] or 0) + number, ROWS, HIDDEN)
        place = folder / str(number)
        if step in ("train", "clip"):
            train(one, whole, optimizer, x, step == "clip")
        elif step == "evaluate":
            evaluate(one, whole, x)
        elif step in ("save and load", "interrupted save"):
            layout = layouts.pop(0) if layouts else one.layout
            one = (save_and_load if step == "save and load" else interrupted_save)(
                one, program, layout, place
            )
            follow(whole, optimizer, one.gathered())
        elif step in ("export", "interrupted export"):
            place.mkdir(exist_ok=True)
            export(one, whole, program, place, step != "export")
        elif step in KILLED:
            place.mkdir(exist_ok=True)
            killed(one, program, place, step == "killed save")
        elif step == "two runs":
            two_runs(program, place)
        elif step == "dispatch":
            dispatch(program, min(one.tolerance, SAME))
        elif step == "merge" and family != "none":
            place.mkdir(exist_ok=True)
            merge(one, program, whole, place)
        done[step] = 1.0
    sums = torch.stack(
        [value.double().sum() for value in one.gathered().values() if value.is_floating_point()]
    )
    every = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(every, sums)
    if not all(torch.equal(sums, other) for other in every):
        raise Difference(f"{one.layout}: ranks gather other weights")
    if goes is not None:
        nc.distributed.save_checkpoint(goes, one.model, one.optimizer)
        gathered = one.gathered()
        if dist.get_rank() == 0:
            torch.save((one.layout, gathered), goes.with_suffix(".pt"))
        dist.barrier()
    return done


# -- the pool ----------------------------------------------------------------------------------------------------------


def _rank(rank: int, world: int, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    sys.addaudithook(_count_files)
    warnings.simplefilter("ignore")
    patience = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=patience
    )
    while True:
        given = pipe.recv()
        try:
            result: dict[str, Any] = dict(work(*given))
        except BaseException as error:  # CheckpointException is no Exception
            text = "".join(traceback.format_exception(error))[-3000:]
            refused = not isinstance(error, Difference) and refusal(error)
            result = {"error": said(error), "refusal": refused, "text": text}
        pipe.send(result)


class Pool:
    """Ranks that run one program after the other."""

    def __init__(self, world: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pipes = [context.Pipe() for _ in range(world)]
        self.pipes, self.runs = [near for near, _ in pipes], 0
        self.ranks = [
            context.Process(target=_rank, args=(rank, world, self.folder.name, far), daemon=True)
            for rank, (_, far) in enumerate(pipes)
        ]
        for process in self.ranks:
            process.start()

    def run(self, *given: Any) -> list[dict[str, Any]]:
        """Return what each rank gave; {} of one that did not end."""
        self.runs += 1
        for pipe in self.pipes:
            pipe.send(given)
        results: list[dict[str, Any]] = [{} for _ in self.pipes]
        waiting, end = set(range(len(self.pipes))), time.monotonic() + SECONDS
        while waiting and time.monotonic() < end:
            for rank in list(waiting):
                if self.pipes[rank].poll(0.01):
                    try:
                        results[rank] = self.pipes[rank].recv()
                    except EOFError:
                        results[rank] = {"died": True, "error": "the rank died", "refusal": False, "text": ""}
                    waiting.discard(rank)
                    if "error" in results[rank]:
                        end = min(end, time.monotonic() + 5.0)
        return results

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def end(self) -> None:
        self.kill()
        self.folder.cleanup()


_pools: dict[int, Pool] = {}


@atexit.register
def _end_pools() -> None:
    for pool in _pools.values():
        pool.end()


def run(program: Program) -> dict[str, float]:
    parts = [program, *({**program, **part} for part in program.get("then") or ())]
    for part in parts:
        if not part["steps"] or not part["layouts"] or part["world"] not in LAYOUTS:
            raise Invalid("nothing to do")
        if any(layout not in LAYOUTS[part["world"]] and layout != "none" for layout in part["layouts"]):
            raise Invalid("a layout of another number of ranks")
        if part is not parts[-1] and part["steps"][-1] in KILLED:
            raise Invalid("ranks that are no more leave nothing")
    done: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(parts):
            place, came, goes = (
                Path(folder, f"run{number}"),
                Path(folder, f"at{number}"),
                Path(folder, f"at{number + 1}"),
            )
            place.mkdir()
            said = run_part(part, place, came if number else None, goes if number + 1 < len(parts) else None)
            done |= said
            if any(word.startswith("refused") for word in said):
                return said
            if number:
                done[f"saved on {parts[number - 1]['world']} ranks, loaded on {part['world']}"] = 1.0
    return done


def run_part(program: Program, place: Path, came: Path | None, goes: Path | None) -> dict[str, float]:
    """Run what one world does."""
    world = program["world"]
    pool = _pools.pop(world, None) or Pool(world)
    results = pool.run(program, place, came, goes)
    failed = [one for one in results if "error" in one]
    died = any("died" in one for one in failed)
    if program["steps"][-1] in KILLED and (died or (all(results) and not failed)):
        try:
            pool.kill()
            check_killed(program, place)
        finally:
            pool.end()
        return {f"{program['steps'][-1]}{'' if died else ', too late'}": 1.0}
    if not failed and all(results) and pool.runs < 40:
        _pools[world] = pool
    else:
        pool.end()
    label = f"{world} ranks, {program['layouts']}, {program['recipe']['family']}"
    if failed and all(one["refusal"] for one in failed) and len(failed) == world:
        if os.environ.get("SHOW"):
            print(failed[0]["text"])
        return {f"refused: {failed[0]['error'][:80]}": 1.0}
    if failed:
        # of an error on one rank, others say that it was on another
        bad = next((one for one in failed if not one["refusal"]), failed[0])
        raise Difference(f"{label}: {bad['error']}\n{bad['text']}")
    if not all(results):
        raise Difference(f"{label}: does not end")
    return results[0]
