"""Programs of two or four ranks: layouts of a model, and what is done with it: train, save, load, export, merge, clip.

The oracle is a plain model in the same process that gets the whole batch. After a step of training the gathered weights
are compared with it and copied into it, so that what follows is compared closely: bits for what moves weights, the
tolerance of the recipe for what computes. All ranks must gather the same bits.

Ranks live in a pool and run one program after the other; a program that fails or hangs ends its pool.
"""

from __future__ import annotations

import atexit
import copy
import datetime
import random
import tempfile
import time
import traceback
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
HIDDEN, ROWS, EXPERTS = 64, 16, 4
LAYOUTS = {
    2: ("none", "ddp", "fsdp", "shard", "tp", "tp_group", "ep"),
    4: ("ddp", "fsdp", "shard", "hsdp", "tp", "tp_group", "fsdp+tp", "ep"),
}
ROW_WISE = ("none", "ddp", "fsdp", "hsdp")  # each rank computes as one process with its rows
TOLERANCES = {"none": 1e-4, "nvfp4": 0.5, "mxfp4": 0.5}
FORMATS = {"none": "bf16", "block": "hf-fp8-block128"}
STEPS = ("train", "train", "evaluate", "save and load", "save and load", "export", "merge", "clip")


def draw(rng: random.Random) -> Program:
    world = rng.choice((2, 2, 4))
    family = rng.choice(("none", "none", "current", "block", "mxfp8", "nvfp4"))
    options = {"disable_stochastic_rounding": True, "disable_rht": True} if family == "nvfp4" else {}
    layouts = [rng.choice(LAYOUTS[world]) for _ in range(3)]
    has_experts = "ep" in layouts
    return {
        "do": "mesh",
        "world": world,
        "seed": rng.randrange(10**6),
        "recipe": {"family": family, "options": options},
        "blocks": rng.choice((1, 2)),
        "bias": rng.random() < 0.7,
        "inner": rng.choice((128, 128, 96, 256)),
        "experts": has_experts,
        "layouts": [one for one in layouts if not has_experts or not one.startswith("tp_group")],
        "steps": [rng.choice(STEPS) for _ in range(rng.randint(3, 7))],
    }


# -- the model and its layouts -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
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
        self.blocks = nn.ModuleList(blocks)
        self.experts = Experts(EXPERTS, HIDDEN, 32) if program["experts"] else None
        self.out = nn.Linear(HIDDEN, HIDDEN, bias)

    def forward(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.experts is not None:
            index = (torch.arange(len(x)) + first)[:, None] % EXPERTS
            x = x + self.experts(x, index, torch.ones(len(x), 1)) * 0.02
        return self.out(x)


def build(program: Program, seed: int, group: Any = None) -> Any:
    torch.manual_seed(seed)
    model = Model(program, group)
    recipe = recipe_of(program["recipe"])
    if recipe is not None:
        nc.convert(model, recipe, heads=True, small=True, blocks=True, routers=True)
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
        self.layout, self.parts, self.part = layout, world, rank
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
        styles = {
            f"blocks.{i}.{name}": style
            for i in range(len(model.blocks))
            for name, style in (("up", "ColwiseParallel"), ("down", "RowwiseParallel"))
        }
        if "tp" in layout.split("+"):
            shape, names = ((world,), ("tp",)) if layout == "tp" else ((2, world // 2), ("dp", "tp"))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            made = {name: getattr(nc.distributed, style)() for name, style in styles.items()}
            parallelize_module(model, mesh["tp"], made)
            self.parts, self.part = (1, 0) if layout == "tp" else (2, mesh.get_local_rank("dp"))
            if layout != "tp":
                fully_shard(model, mesh=mesh["dp"])
        elif layout in ("none", "tp_group"):
            self.parts, self.part = 1, 0
        elif layout == "ddp":
            self.called = nn.parallel.DistributedDataParallel(model)
        elif layout == "shard":
            nc.distributed.shard(model, init_device_mesh("cpu", (world,)), blocks=list(model.blocks))
        else:
            names = ("replicate", "shard")[-1 if layout != "hsdp" else 0 :]
            mesh = init_device_mesh("cpu", (2, 2) if layout == "hsdp" else (world,), mesh_dim_names=names)
            apart = set()
            if layout == "ep":
                apart = nc.distributed.expert_parallel(model, mesh, quantizer=None)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh, ignored_params=apart)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def rows(self, x: Tensor) -> tuple[Tensor, int]:
        each = len(x) // self.parts
        return x[self.part * each : (self.part + 1) * each], self.part * each

    def gathered(self) -> dict[str, Tensor]:
        found = {}
        for name, value in self.model.state_dict().items():
            if not isinstance(value, Tensor):
                continue
            value = getattr(value, "full_tensor", lambda value=value: value)()
            dim = split_dim(name) if self.layout == "tp_group" else None
            if dim is not None:
                every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
                dist.all_gather(every, value.detach().contiguous())
                value = torch.cat(every, dim)
            found[name] = value.detach().clone()
        return found


def split_dim(name: str) -> int | None:
    if ".up." in name:
        return 0
    return 1 if name.endswith("down.weight") else None


def parts_of_ranks(whole: nn.Module, world: int, rank: int) -> dict[str, Tensor]:
    state = whole.state_dict()
    return {
        name: value if split_dim(name) is None else value.chunk(world, split_dim(name))[rank]  # type: ignore[arg-type]
        for name, value in state.items()
    }


# -- what is done ------------------------------------------------------------------------------------------------------


def error_of(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-12)).item()


def must_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    for name, value in wanted.items():
        if name not in found or not torch.equal(found[name], value):
            raise Difference(f"{what}: {name} differs")


def train(one: Laid, whole: Any, optimizer: Any, x: Tensor, tolerance: float, clip: bool) -> None:
    before = {name: value.clone() for name, value in whole.state_dict().items() if isinstance(value, Tensor)}
    rows, first = one.rows(x)
    one.called.train()
    one.called(rows, first).square().mean().backward()
    whole(x, 0).square().mean().backward()
    if clip and "tp" not in one.layout and one.layout != "ep":  # clip_grad_norm_ takes tensors of one mesh
        norms = []
        for model in (one.model, whole):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            norms.append(getattr(norm, "full_tensor", lambda norm=norm: norm)())
        if not error_of(*norms) <= tolerance:
            raise Difference(f"{one.layout}: norms of gradients are {norms}")
    for each in (one.optimizer, optimizer):
        each.step()
        each.zero_grad()
    found = one.gathered()
    for name, value in whole.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and name in found:
            off = error_of(found[name] - before[name], value - before[name])
            rounding = 1e-6 * value.norm() + 1e-7  # of the weight, which may be large beside the step
            if not off <= tolerance and (found[name] - value).norm() > rounding:
                raise Difference(f"{one.layout}: a step moves {name} otherwise, {off:.3g}")
    whole.load_state_dict(found, strict=False)


def evaluate(one: Laid, whole: Any, x: Tensor, tolerance: float) -> None:
    rows, first = one.rows(x)
    one.called.eval()
    whole.eval()
    with torch.no_grad():
        found, wanted = one.called(rows, first), whole(rows, first)
    if one.layout in ROW_WISE and not torch.equal(found, wanted):
        raise Difference(f"{one.layout}: an evaluation has other bits, {error_of(found, wanted):.3g} off")
    if not error_of(found, wanted) <= tolerance:
        raise Difference(f"{one.layout}: an evaluation is {error_of(found, wanted):.3g} off")
    whole.train()


def save_and_load(one: Laid, program: Program, layout: str, folder: Path) -> Laid:
    wanted = one.gathered()
    nc.distributed.save_checkpoint(folder, one.model, one.optimizer)
    other = Laid(program, layout, build(program, 1))
    nc.distributed.load_checkpoint(folder, other.model, other.optimizer)
    must_equal(other.gathered(), wanted, f"saved by {one.layout}, loaded by {layout}")
    return other


def export(one: Laid, whole: Any, family: str, folder: Path, **merge: Any) -> None:
    form = FORMATS.get(family, "compressed-tensors")
    whole.eval()
    one.model.eval()
    first = dist.get_rank() == 0
    if first or one.layout not in ("none", "ddp"):
        nc.export(one.model, folder / "shared", format=form, **merge)
    if first:
        nc.export(whole, folder / "alone", format=form, **merge)
        for name in ("model.safetensors", "config.json"):
            if (folder / "shared" / name).read_bytes() != (folder / "alone" / name).read_bytes():
                raise Difference(f"{one.layout}: an export has another {name} than that of one process")
    whole.train()
    one.model.train()


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


def work(program: Program, folder: Path) -> dict[str, float]:
    family = program["recipe"]["family"]
    tolerance = TOLERANCES.get(family, 0.3)
    layouts = list(program["layouts"] or ["none"])
    whole = build(program, program["seed"] or 0)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    one = Laid(program, layouts.pop(0), whole)
    done = {}
    for number, step in enumerate(program["steps"]):
        x = normal((program["seed"] or 0) + number, ROWS, HIDDEN)
        place = folder / str(number)
        if step in ("train", "clip"):
            train(one, whole, optimizer, x, tolerance, step == "clip")
        elif step == "evaluate":
            evaluate(one, whole, x, tolerance)
        elif step == "save and load":
            layout = layouts.pop(0) if layouts else one.layout
            one = save_and_load(one, program, layout, place)
        elif step == "export":
            place.mkdir(exist_ok=True)
            export(one, whole, family, place)
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
    return done


# -- the pool ----------------------------------------------------------------------------------------------------------


def _rank(rank: int, world: int, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=patience
    )
    while True:
        program, place = pipe.recv()
        try:
            result: dict[str, Any] = dict(work(program, Path(place)))
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
        context.set_forkserver_preload(["narrowcast", "torch.distributed.fsdp"])
        pipes = [context.Pipe() for _ in range(world)]
        self.pipes, self.runs = [near for near, _ in pipes], 0
        self.ranks = [
            context.Process(target=_rank, args=(rank, world, self.folder.name, far), daemon=True)
            for rank, (_, far) in enumerate(pipes)
        ]
        for process in self.ranks:
            process.start()

    def run(self, program: Program) -> list[dict[str, Any]]:
        """Return what each rank gave; {} of one that did not end."""
        self.runs += 1
        place = Path(self.folder.name, f"run{self.runs}")
        place.mkdir()
        for pipe in self.pipes:
            pipe.send((program, str(place)))
        results: list[dict[str, Any]] = [{} for _ in self.pipes]
        waiting, end = set(range(len(self.pipes))), time.monotonic() + SECONDS
        while waiting and time.monotonic() < end:
            for rank in list(waiting):
                if self.pipes[rank].poll(0.01):
                    try:
                        results[rank] = self.pipes[rank].recv()
                    except EOFError:
                        results[rank] = {"error": "the rank died", "refusal": False, "text": ""}
                    waiting.discard(rank)
                    if "error" in results[rank]:
                        end = min(end, time.monotonic() + 5.0)
        return results

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
        self.folder.cleanup()


_pools: dict[int, Pool] = {}


@atexit.register
def _end_pools() -> None:
    for pool in _pools.values():
        pool.end()


def run(program: Program) -> dict[str, float]:
    if not program["steps"] or not program["layouts"] or program["world"] not in LAYOUTS:
        raise Invalid("nothing to do")
    if any(layout not in LAYOUTS[program["world"]] and layout != "none" for layout in program["layouts"]):
        raise Invalid("a layout of another number of ranks")
    world = program["world"]
    pool = _pools.pop(world, None) or Pool(world)
    results = pool.run(program)
    failed = [one for one in results if "error" in one]
    if not failed and all(results) and pool.runs < 40:
        _pools[world] = pool
    else:
        pool.end()
    label = f"{world} ranks, {program['layouts']}, {program['recipe']['family']}"
    if failed and all(one["refusal"] for one in failed) and len(failed) == world:
        return {f"refused: {failed[0]['error'][:80]}": 1.0}
    if failed:
        # of an error on one rank, others say that it was on another
        bad = next((one for one in failed if not one["refusal"]), failed[0])
        raise Difference(f"{label}: {bad['error']}\n{bad['text']}")
    if not all(results):
        raise Difference(f"{label}: does not end")
    return results[0]
