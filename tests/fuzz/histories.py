"""Histories of a model: the same steps, edits, saves and evaluations under a wrapping, and plainly.

The plain run has no compiler, no checkpoint, no replay and no kept weights, edits weights by ``copy_`` in ``no_grad``,
and leaves out what must change nothing (copies, moves, hooks, reloading, evaluations). In it each ``Linear`` is also
measured against its product in fp64.

Of a call that fails: what a step has collected counts where its layers ran before the error, as it does in a call that
does not, and the scales are renewed when they would have been. So the plain run makes the call, too. A graph that fails
while it is traced runs nothing; there the call brings zeros, which collect nothing.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.state import renew

from .models import DTYPES, Model, draw_layer, draw_recipe, draw_wrap, recipe_of, wrapped
from .programs import Difference, Invalid, Program, attempt, compare, normal, refusal, said, settings

NEUTRAL = ("to", "cpu", "deepcopy", "reload", "pickle", "hook", "failed", "evaluated", "requires")
EDITS = (
    "mul_",
    "data",
    "data_assign",
    "numpy",
    "storage",
    "set_",
    "swap",
    "foreach",
    "transposed",
    "load",
    "vector",
    "data_copy",
)
OPTIMIZERS = (
    "SGD",
    "SGD foreach",
    "SGD fused",
    "AdamW",
    "AdamW foreach",
    "AdamW fused",
    "AdamW capturable",
    "FusedAdam",
    "FusedSGD",
)
# Largest relative error of a GEMM's output, and of its gradients: what the elements' bits allow, with room.
TOLERANCES = {
    "delayed": (0.08, 0.095),
    "current": (0.08, 0.095),
    "block": (0.08, 0.095),
    "hybrid": (0.08, 0.125),  # gradients in E5M2 blocks: of values that are alike, all may be an eighth off
    "mxfp8": (0.08, 0.095),
    "mxfp6": (0.2, 0.25),
    "mxfp4": (0.4, 0.4),
    "nvfp4": (0.4, 0.4),
    "none": (1e-5, 1e-5),
}

# Errors of ours that are right in a drawn model; what is not here is reported once, and read.
REVIEWED = (
    "has no low-precision layer",
    "matches no low-precision layer",
    "parameters_split inside quantized_model_init",
    "ran under an autocast and is recomputed outside of it",
    "renews its scales inside a compiled torch.utils.checkpoint",
    "the recipe in force wants",
    "that renews its own scales runs twice in one compiled function",
    "GroupedLinear quantizes its input itself, pass a plain tensor",
    "collected an amax under delayed scaling",
)


def draw(rng: random.Random, inductor: float = 0.04) -> Program:
    program: Program = {
        "seed": rng.randrange(10**6),
        "dtype": rng.choice(("float32", "float32", "float32", "bfloat16")),
        "features": rng.choice((16, 32, 32, 48, 64, 17, 1)),
        "magnitude": rng.choice((1.0, 1.0, 0.01, 30.0)),
        "wander": rng.random() < 0.4,
        "rows": rng.choice((16, 32, 64)),
        "odd_rows": rng.random() < 0.3,
        "loss": rng.choice(("sum", "weighted", "square")),
        "recipe": draw_recipe(rng),
        "how": rng.choice(("autocast", "set_recipe", "own")),
        "stored": rng.random() < 0.15,
        "preserve": rng.random() < 0.5,
        "replay": rng.random() < 0.3,
        "large": rng.random() < 0.3,
        "first_too": rng.random() < 0.5,
        "optimizer": rng.choice(OPTIMIZERS),
        "whole": None,
        "blocks": [],
        "history": [],
    }
    index = 0
    compiles = rng.random() < 0.35
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        layers = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            layers.append(draw_layer(rng, index))
            index += 1
        program["blocks"].append({"layers": layers, "wrap": draw_wrap(rng, inductor)})
    if rng.random() < 0.3:
        program["whole"] = draw_wrap(rng, inductor)
    for wrap in (program["whole"], *(block["wrap"] for block in program["blocks"])):
        if wrap and not compiles:
            wrap["compile"] = None
            wrap["inside"] = False
    flags = _flags_fit(program)
    if flags and rng.random() < 0.5:
        program["optimizer"] = rng.choice(("SGD fused", "AdamW fused"))
    program["history"] = [_draw_item(rng, flags) for _ in range(rng.choice((2, 3, 4, 6, 8)))]
    program["calibrated"] = rng.random() < 0.15
    return program


def _draw_item(rng: random.Random, flags: bool) -> Program:
    do = rng.choices(
        ("step", "evaluate", "no_grad", "inference", "dropped", "edit", "neutral", "recipe", "freeze"),
        (10, 2, 2, 0.5, 1, 3, 3, 0.5, 0.5),
    )[0]
    item: Program = {"do": do}
    if do == "step":
        item["batches"] = [rng.randrange(10**6) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        item["flags"] = [rng.choice((True, False, None)) if flags else None for _ in item["batches"]]
        item["order"] = rng.choice(("each", "each", "fifo", "lifo", "joined"))
        item["retain"] = rng.random() < 0.15
        item["update"] = rng.random() < 0.8
        item["parts"] = rng.random() < 0.1
        item["between"] = rng.choice((None, None, None, "no_grad", "evaluate"))
    elif do in ("evaluate", "no_grad", "inference", "dropped"):
        item["batch"] = rng.randrange(10**6)
        item["flag"] = rng.choice((True, False, None)) if flags else None
    elif do == "edit":
        item |= {
            "way": rng.choice(EDITS),
            "which": rng.randrange(8),
            "factor": rng.choice((1.5, 0.5, 1000.0, -1.0)),
        }
    elif do == "neutral":
        item["way"] = rng.choice(NEUTRAL)
    elif do == "recipe":
        item["recipe"] = draw_recipe(rng)
    elif do == "freeze":
        item |= {"which": rng.randrange(8), "frozen": rng.random() < 0.5}
    return item


def _wraps(program: Program) -> list[Program]:
    return [wrap for wrap in (program["whole"], *(block.get("wrap") for block in program["blocks"])) if wrap]


def _families(program: Program) -> set[str]:
    described = [program["recipe"], *(item.get("recipe") for item in program["history"])]
    described += [layer.get("own") for block in program["blocks"] for layer in block["layers"]]
    return {one["family"] for one in described if one}


def _flags_fit(program: Program) -> bool:
    """Whether kept weights give what weights quantized on every call do: scales have no state, nothing is compiled."""
    return "delayed" not in _families(program) and not any(wrap.get("compile") for wrap in _wraps(program))


class World:
    """One run of a program."""

    def __init__(self, program: Program, plain: bool, torchs: bool) -> None:
        self.program, self.plain, self.torchs = program, plain, torchs
        self.trace: list[tuple[str, Tensor | None]] = []
        self.recipe = None if torchs else recipe_of(program["recipe"])
        self.stored = bool(program["stored"]) and not torchs and self.recipe is not None
        torch.manual_seed(program["seed"])
        init: Any = contextlib.nullcontext()
        if self.stored:
            init = nc.quantized_model_init(
                recipe=self.recipe, preserve_high_precision_init_val=bool(program["preserve"])
            )
        with init:
            self.model = Model(program, plain, torchs)
        if program["how"] in ("set_recipe", "own") and not torchs:
            self._give(self.recipe)
        self.make_run()
        self.optimizer = self._optimizer()
        self.measure: Measure | None = None
        if plain and not torchs:
            self.measure = Measure(self)

    def _give(self, recipe: Any) -> None:
        """Recipes of the layers: as ``set_recipe`` gives them, or each by hand; a layer's own stays."""
        if self.program["how"] == "set_recipe":
            nc.set_recipe(self.model, recipe)
        for block in self.model.blocks:
            for described, module in zip(block.described, block.layers):
                own = described.get("own")
                if own is not None:
                    wanted = recipe_of(own)
                elif self.program["how"] == "own":
                    wanted = recipe
                else:
                    continue
                if described["kind"] == "again":
                    continue
                for inner in module.modules():
                    if isinstance(getattr(type(inner), "recipe", None), property):
                        inner.recipe = wanted

    def make_run(self) -> None:
        self.run = self.model if self.plain else wrapped(self.model, self.program["whole"], self.torchs)

    def context(self) -> Any:
        if self.torchs or self.program["how"] != "autocast":
            return contextlib.nullcontext()
        return (
            nc.autocast(enabled=self.recipe is not None, recipe=self.recipe)
            if self.recipe
            else contextlib.nullcontext()
        )

    def _optimizer(self) -> Any:
        parameters = list(self.model.parameters())
        if not parameters:
            raise Invalid("no parameters")
        name = "FusedAdam" if self.stored else self.program["optimizer"] or "SGD"
        if name == "FusedAdam":
            if self.torchs:
                return torch.optim.AdamW(parameters, lr=1e-3)
            return nc.optimizers.FusedAdam(parameters, lr=1e-3, master_weights=self.stored)
        if name == "FusedSGD":
            if self.torchs:
                return torch.optim.SGD(parameters, lr=1e-3)
            return nc.optimizers.FusedSGD(parameters, lr=1e-3, momentum=0.9)
        kind, _, form = name.partition(" ")
        options = {form: True} if form else {}
        return getattr(torch.optim, kind)(parameters, lr=1e-2, **options)

    # -- what happens -------------------------------------------------------------------------------------------------

    def record(self, label: str, tensor: Tensor | None) -> None:
        self.trace.append((label, None if tensor is None else tensor.detach().clone()))

    def batch(self, seed: int) -> Tensor:
        program, rng = self.program, random.Random(seed)
        rows = program["rows"] or 16
        if program["odd_rows"]:
            rows = rng.choice((rows, 0, 1, 2, 7, 33))
        scale = program["magnitude"] or 1.0
        if program["wander"]:
            scale *= rng.choice((0.1, 1.0, 8.0))
        dtype = DTYPES[program["dtype"] or "float32"]
        return normal(seed, rows, program["features"] or 16, dtype=dtype, scale=scale)

    def loss(self, y: Tensor, seed: int) -> Tensor:
        kind = self.program["loss"]
        if kind == "square":
            return 0.5 * y.float().square().sum()
        if kind == "weighted":
            return (y.float() * normal(seed + 1, *y.shape)).sum()
        return y.float().sum()

    def forward(self, x: Tensor, flag: bool | None, parts: bool = False) -> Tensor:
        flag = None if self.plain or self.torchs else flag
        with self.context():
            if parts:
                for run in self.model.run:
                    x = run(x, flag)
                return x
            return self.run(x, flag)

    def step(self, index: int, item: Program) -> None:
        self.model.train()
        losses, leaves = [], []
        joined = item["order"] == "joined"
        flags = list(item["flags"] or ()) + [None] * len(item["batches"])
        for number, seed in enumerate(item["batches"]):
            leaf = self.batch(seed).requires_grad_()
            y = self.forward(leaf, flags[number], bool(item.get("parts")))
            self.record(f"step {index} output {number}", y)
            leaves.append(leaf)
            if not y.requires_grad:
                continue
            losses.append(self.loss(y, seed))
            if item["order"] == "each":
                self.backward(losses.pop(), bool(item.get("retain")), seed)
            if item.get("between"):
                self.look(item["between"], seed + 3, None)
                self.model.train()
        if joined and losses:
            losses = [sum(losses[1:], losses[0])]
        for loss in losses if item["order"] != "lifo" else reversed(losses):
            self.backward(loss, bool(item.get("retain")), 5)
        for number, leaf in enumerate(leaves):
            self.record(f"step {index} gradient of x {number}", leaf.grad)
        for name, parameter in self.model.named_parameters():
            self.record(f"step {index} gradient of {name}", parameter.grad)
        if self.measure is not None:
            self.measure.end_of_step()
        if item["update"]:
            self.optimizer.step()
            for name, parameter in self.model.named_parameters():
                self.record(f"step {index} new {name}", _dense(parameter))
        self.optimizer.zero_grad()

    def calibrate(self) -> None:
        """Find the scales of the first step beforehand."""
        self.model.train()

        def step() -> None:
            y = self.forward(self.batch(7).requires_grad_(), None)
            if y.requires_grad:
                self.loss(y, 7).backward()

        nc.calibrate_delayed_scaling(self.model, step)
        if self.measure is not None:
            self.measure.wanted, self.measure.fitting = {}, {}

    def backward(self, loss: Tensor, retain: bool, seed: int) -> None:
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()

    def look(self, how: str, seed: int, flag: bool | None) -> Tensor:
        """A forward without a backward."""
        x = self.batch(seed)
        self.model.train(how != "evaluate")
        if how == "dropped":
            return self.forward(x.requires_grad_(), flag)
        x.requires_grad_(bool(seed % 2))  # as models with inputs that require gradients have it
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            return self.forward(x, flag).clone()

    def matrix(self, which: int) -> tuple[str, nn.Parameter] | None:
        matrices = [(name, p) for name, p in self.model.named_parameters() if p.dim() == 2]
        return matrices[which % len(matrices)] if matrices else None

    def edit(self, item: Program) -> None:
        found = self.matrix(item["which"] or 0)
        if found is None:
            return
        name, p = found
        factor, way = float(item["factor"] or 1.5), item["way"] or "mul_"
        value = (_dense(p).detach() * factor).to(p.dtype)
        if way == "transposed":
            if p.shape[0] != p.shape[1] or "fused" in (self.program["optimizer"] or "").lower():
                return  # fused kernels of PyTorch read a weight of other strides than their state as if it had the same
            value = _dense(p).detach().t().clone()
        with torch.no_grad():
            if self.plain or isinstance(p, nc.QuantizedTensor):
                p.copy_(value)
            else:
                _EDITS[way](self, name, p, value, factor)

    def delayed(self) -> list[Any]:
        """What keeps state of delayed scaling."""
        return [module for module in self.model.modules() if hasattr(module, "delayed_slots")]

    def fail(self) -> None:
        """A call of the wrong width, in every run: see the module's first lines."""
        x = self.batch(1)[:, :-1].requires_grad_()
        if any(wrap.get("compile") for wrap in _wraps(self.program)):
            if not self.torchs:
                renew(self.delayed())  # as the call does in eager code
            x = torch.zeros_like(x, requires_grad=True)
        with contextlib.suppress(Exception), self.context():
            self.run(x, None)
        # an error of the compiler refers to itself, and keeps the hooks of a checkpoint in force: of plain modules, too
        gc.collect()

    def neutral(self, way: str) -> None:
        """What must change nothing; the plain run leaves it out."""
        if way == "failed":
            self.fail()
        if self.plain or way == "failed":
            return
        model = self.model
        if way == "to":
            model.to(DTYPES[self.program["dtype"] or "float32"])
        elif way == "cpu":
            model.cpu()
        elif way == "hook":
            model.blocks[0].register_forward_hook(lambda *_: None)
        elif way == "requires":
            for p in model.parameters():
                flag = p.requires_grad
                p.requires_grad_(not flag)
                p.requires_grad_(flag)
        elif way == "evaluated":
            self.look("evaluate", 11, None)
            model.train()
        else:
            self._replace(way)

    def _replace(self, way: str) -> None:
        """Go on with a copy of the model, and an optimizer of its own."""
        if way == "reload":
            if self.stored:
                return
            kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            with torch.no_grad():
                for p in self.model.parameters():
                    p.zero_()
            self.model.load_state_dict(kept)
            return
        if way == "pickle":
            if self.stored:
                return
            file = io.BytesIO()
            torch.save(self.model.state_dict(), file)
            file.seek(0)
            self.model.load_state_dict(torch.load(file, weights_only=not self.stored))
            return
        frozen = [p.requires_grad for p in self.model.parameters()]
        self.model = copy.deepcopy(self.model)
        for p, flag in zip(self.model.parameters(), frozen):
            p.requires_grad_(flag)
        self.make_run()
        state = self.optimizer.state_dict()
        self.optimizer = self._optimizer()
        self.optimizer.load_state_dict(state)

    def play(self) -> list[tuple[str, Tensor | None]]:
        if self.program.get("calibrated") and not self.torchs and "delayed" in _families(self.program):
            self.calibrate()
        for index, item in enumerate(self.program["history"]):
            torch.manual_seed(index)
            do = item["do"]
            if do == "step":
                self.step(index, item)
            elif do in ("evaluate", "no_grad", "inference", "dropped"):
                self.record(f"{do} {index}", self.look(do, item["batch"] or 0, item.get("flag")))
            elif do == "edit":
                self.edit(item)
            elif do == "neutral":
                self.neutral(item["way"] or "to")
            elif do == "recipe":
                self._change_recipe(item["recipe"])
            elif do == "freeze":
                found = self.matrix(item["which"] or 0)
                if found is not None:
                    found[1].requires_grad_(not item["frozen"])
        for of, p in self.model.named_parameters():
            for name, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    self.record(f"at the end optimizer's {name} of {of}", _dense(value))
        if not self.torchs:
            for layer in self.delayed():  # a copy learns of an autocast's recipe in its next forward
                if self.program["how"] == "autocast" and self.recipe is not None and not layer._delayed:
                    layer._keep_state_of(self.recipe)
            renew(self.delayed())  # when scales are renewed does not matter, before the next training forward
            for name, tensor in self.model.state_dict().items():
                if "scale" in name or "amax" in name:
                    self.record(f"at the end state {name}", tensor)
        return self.trace

    def _change_recipe(self, described: Program | None) -> None:
        if self.torchs or self.stored or described is None:
            return
        self.recipe = recipe_of(described)
        if self.program["how"] != "autocast":
            self._give(self.recipe)
        if self.measure is not None:
            self.measure.forget()


def _dense(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, nc.QuantizedTensor) else tensor


def _swap(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    with torch.enable_grad():
        torch.utils.swap_tensors(p, nn.Parameter(value.clone(), requires_grad=p.requires_grad))


def _load(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    world.model.load_state_dict({**world.model.state_dict(), name: value})


def _foreach(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    torch._foreach_mul_([p], factor)


def _transposed(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    p.data = p.data.t()


def _data_assign(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    p.data = value.clone()


def _numpy(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    if p.dtype == torch.bfloat16:
        p.data.copy_(value)
    else:
        p.detach().numpy()[...] = value.numpy()


def _storage(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    if p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes:
        p.untyped_storage().copy_(value.contiguous().clone().untyped_storage())
    else:  # weights that share one
        p.copy_(value)


def _set(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    p.set_(value.clone())


def _vector(world: World, name: str, p: nn.Parameter, value: Tensor, factor: float) -> None:
    nn.utils.vector_to_parameters(value.clone().reshape(-1), [p])


_EDITS: dict[str, Callable[..., None]] = {
    "mul_": lambda world, name, p, value, factor: p.mul_(factor),
    "data": lambda world, name, p, value, factor: p.data.mul_(factor),
    "data_copy": lambda world, name, p, value, factor: p.data.copy_(value),
    "data_assign": _data_assign,
    "numpy": _numpy,
    "storage": _storage,
    "set_": _set,
    "swap": _swap,
    "foreach": _foreach,
    "transposed": _transposed,
    "load": _load,
    "vector": _vector,
}


class Product(NamedTuple):
    """A product in fp64, and the sums of its squared terms: where terms cancel, their roundings do not."""

    value: Tensor
    squares: Tensor

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Product:
        return cls(a @ b, a.square() @ b.square())

    def __add__(self, other: Product) -> Product:  # type: ignore[override]
        return Product(self.value + other.value, self.squares + other.squares)

    def size(self) -> Tensor:
        return torch.maximum(self.value.norm(), self.squares.sum().sqrt())


class Measure:
    """What each ``Linear`` does, beside its products in fp64.

    Delayed scaling is held to it where the last calls tell the scales: an operand that is not much larger than in each
    of them, and not much smaller than in any call before. Before the first call they are constants, which are told to
    saturate: there it is held to what these hold. A weight has its own scale then, and in each evaluation.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.wanted: dict[nn.Module, Product] = {}
        self.fitting: dict[nn.Module, bool] = {}
        self.amaxes: dict[nn.Module, tuple[list[float], list[float], list[float]]] = {}
        """Of each layer under delayed scaling: what was collected of its input, its weight, its output's gradient."""
        self.steps = 0
        self.starts = True
        for module in world.model.modules():
            if type(module) is nc.Linear:
                module.register_forward_hook(self.after)

    def forget(self) -> None:
        """Another recipe is in force, whose scales no call has told."""
        self.amaxes, self.starts = {}, False

    def recipe(self, layer: Any) -> Any:
        if self.world.program["how"] == "autocast" and self.world.recipe is not None:
            return self.world.recipe
        return layer.recipe

    def fits(self, layer: Any, past: list[float], operand: Tensor, kind: str) -> bool:
        """Whether the scale that an operand of a layer gets suits it.

        Args:
            kind: "input", "weight" or "gradient".
        """
        recipe, evaluates = self.recipe(layer), not layer.training
        if kind == "weight" and evaluates:
            return True
        if past or not self.starts:
            return fits_scales(past, operand, layer.training)
        amax = operand.abs().max().item() if operand.numel() else 0.0
        if getattr(recipe, "initial_scale", "range") != "range":
            return False
        least, largest = {"weight": (0.0, math.inf), "input": (0.01, 28.0), "gradient": (1e-6, 0.875)}[kind]
        return least <= amax <= largest

    def family(self, layer: Any) -> str:
        recipe = self.recipe(layer)
        if recipe is None:
            return "none"
        return {"float8_block": "block", "custom": "hybrid"}.get(recipe._family, recipe._family)

    def check(
        self, layer: Any, found: Tensor, wanted: Product, what: str, gradient: bool, fits: bool = True
    ) -> None:
        family = self.family(layer)
        tolerance = TOLERANCES.get(family, (0.4, 0.4))[gradient]
        if found.dtype == torch.bfloat16:
            tolerance = max(tolerance, 0.02)
        if family == "delayed":
            tolerance = 0.15
            if not fits:
                return
        size = wanted.size()
        if min(found.shape) < 8 or layer.in_features < 16 or size < 1e-20:
            return
        if not size < torch.finfo(found.dtype).max:  # a run that diverged
            return
        error = ((found.double() - wanted.value).norm() / size).item()
        if not error <= tolerance:
            when = "a later step" if self.steps else "the first step"
            raise Difference(f"accuracy of {what} under {family} in {when}: off by {error:.3g}")

    def after(self, layer: Any, inputs: tuple[Tensor, ...], y: Any) -> None:
        x = inputs[0]
        if isinstance(layer.weight, nc.QuantizedTensor) or not isinstance(y, Tensor):
            return
        weight = layer.weight.detach().double().clone()
        wide = x.detach().double().reshape(-1, x.shape[-1]).clone()
        bias = layer.bias.detach().double() if layer.bias is not None else 0.0
        past = self.amaxes.setdefault(layer, ([], [], []))
        fits = self.fits(layer, past[0], wide, "input") and self.fits(layer, past[1], weight, "weight")
        wanted = Product.of(wide, weight.t())
        wanted = wanted._replace(value=wanted.value + bias)
        self.check(layer, y.detach().reshape(-1, y.shape[-1]), wanted, "a product", False, fits)
        if layer.training and y.requires_grad:
            collect_amax(past[0], wide)
            collect_amax(past[1], weight)
        if not y.requires_grad:
            return
        known = list(past[2])

        def seen(dy: Tensor) -> None:
            flat = dy.detach().double().reshape(-1, dy.shape[-1])
            part = Product.of(flat.t(), wide)
            self.wanted[layer] = self.wanted[layer] + part if layer in self.wanted else part
            fit = fits and self.fits(layer, known, flat, "gradient")
            self.fitting[layer] = self.fitting.get(layer, True) and fit
            collect_amax(past[2], flat)
            if x.requires_grad:
                x_grads.append((Product.of(flat, weight), fit))

        x_grads: list[tuple[Product, bool]] = []

        def seen_x(dx: Tensor) -> None:
            if x_grads:
                grads, fit = x_grads[-1]
                self.check(layer, dx.detach().reshape(-1, dx.shape[-1]), grads, "dgrad", True, fit)

        y.register_hook(seen)
        if x.requires_grad and x.grad_fn is not None:
            x.register_hook(seen_x)

    def end_of_step(self) -> None:
        for layer, wanted in self.wanted.items():
            if layer.weight.requires_grad and layer.weight.grad is not None:
                self.check(layer, layer.weight.grad.detach(), wanted, "wgrad", True, self.fitting[layer])
        self.wanted, self.fitting = {}, {}
        self.steps += 1


def collect_amax(past: list[float], operand: Tensor) -> None:
    amax = operand.abs().max().item() if operand.numel() else 0.0
    if amax:
        past.append(amax)


def fits_scales(past: list[float], operand: Tensor, training: bool) -> bool:
    """Whether scales that come from any of the last calls, or from the largest of all, suit the operand.

    An evaluation reads those from before the last training forward, a layer that runs twice in a forward, too.
    """
    amax = operand.abs().max().item() if operand.numel() else 0.0
    return len(past) > (not training) and max(past) / 50 <= amax <= 1.1 * min(past[-4:])


def refused(error: BaseException) -> bool:
    """Whether the error is one that a user can act on in such a model: each of them was read by a person."""
    return refusal(error) and any(words in str(error) for words in REVIEWED)


def play(program: Program, *, plain: bool, torchs: bool = False) -> list[tuple[str, Tensor | None]]:
    """The trace of one run, from a clean start."""
    torch._dynamo.reset()
    ours = not plain and not torchs
    with (
        warnings.catch_warnings(),
        settings(bool(program["replay"]) and ours, bool(program["large"]) and ours),
    ):
        warnings.simplefilter("ignore")
        return World(program, plain, torchs).play()


def run(program: Program) -> dict[str, float]:
    if not program["blocks"] or not any(block["layers"] for block in program["blocks"]):
        raise Invalid("no layers")
    flags = [flag for item in program["history"] for flag in (*(item.get("flags") or ()), item.get("flag"))]
    if flags.count(None) < len(flags) and not _flags_fit(program):
        raise Invalid("kept weights where they have other scales")
    theirs, error = attempt(lambda: play(program, plain=True))
    if error is not None:
        if refused(error):
            return {f"refused: {said(error)}": 1.0}
        _, twin = attempt(lambda: play(program, plain=True, torchs=True))
        if twin is None:
            raise error
        return {"torch refuses": 1.0}
    ours, error = attempt(lambda: play(program, plain=False))
    if error is not None and "donated buffers" in str(error):
        return {
            "torch refuses": 1.0
        }  # the compiler's backward of a retained graph, where any intermediate was donated
    if error is not None:
        if refused(error):
            return {f"refused wrapped: {said(error)}": 1.0}
        _, twin = attempt(lambda: play(program, plain=False, torchs=True))
        if twin is None:
            raise error
        return {"torch refuses": 1.0}
    tolerance = 0.0
    compiled = [wrap["compile"] for wrap in _wraps(program) if wrap.get("compile")]
    if compiled:
        tolerance = 0.03 if "inductor" in compiled or program["dtype"] == "bfloat16" else 2e-3
    elif _sums_in_another_order(program):
        # a rounding more or less, after the quantization that follows; of Adam in bf16 also the sign of a step
        tolerance = 0.05 if program["dtype"] == "bfloat16" else 0.02
    how = "+".join(sorted({_how(wrap) for wrap in _wraps(program)})) or "eager"
    found, wanted = dict(ours), dict(theirs)
    for label in [*wanted, *(label for label in found if label not in wanted)]:
        kind = " ".join(word for word in label.split() if not word[0].isdigit() and "." not in word)
        if tolerance and "key_bias" in label:
            continue  # softmax takes it away: its gradient is what rounding leaves of 0
        if label in found and label in wanted:
            compare(found[label], wanted[label], f"{how}: {kind}", tolerance)
        elif "at the end state" not in label or ("amax" in label and (found | wanted)[label].any()):
            raise Difference(f"{how}: {kind}: in {'ours' if label in found else 'the plain run'} alone")
    return {}


def _sums_in_another_order(program: Program) -> bool:
    """Whether a gradient may be the sum of three or more parts, of which a recomputation adds some first."""
    parts = max(
        (len(item.get("batches") or ()) * (1 + bool(item.get("retain"))) for item in program["history"]),
        default=1,
    )
    calls = 1 + sum(layer["kind"] == "again" for block in program["blocks"] for layer in block["layers"])
    return parts * calls > 2 and any(wrap.get("checkpoint") for wrap in _wraps(program))


def _how(wrap: Program) -> str:
    parts = [str(wrap.get(name)) for name in ("compile", "checkpoint") if wrap.get(name)]
    return " in ".join(reversed(parts) if wrap.get("inside") else parts) or "plain"
