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
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import narrowcast as nc
from narrowcast.layers import LinearLayer
from narrowcast.state import renew

from . import programs
from .measure import Measure
from .models import DTYPES, Model, draw_layer, draw_recipe, draw_wrap, recipe_of, wrapped
from .programs import (
    Difference,
    Invalid,
    Program,
    attempt,
    compare,
    few_rows_as_many,
    leave_garbage,
    normal,
    refusal,
    said,
    settings,
)
from .terms import Terms

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
USES = ("save", "copy", "train a copy", "reload state")
_COPIES = ("deepcopy", "reload", "pickle", "failed", "train a copy", "reload state")
_NO_COPY = {"way": "hook", "between": "copy"}
STATELESS = ("current", "mxfp8", "block", "nvfp4", "mxfp6", "mxfp4", "hybrid")
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
# Errors of ours that are right in a drawn model; what is not here is reported once, and read.
REVIEWED = (
    "has no low-precision layer",
    "matches no low-precision layer",
    "parameters_split inside quantized_model_init",
    "ran under an autocast and is recomputed outside of it",
    "ran under several recipes since the last optimizer step",
    "the recipe in force wants",
    "GroupedLinear quantizes its input itself, pass a plain tensor",
    "collected an amax under delayed scaling",
    "that delayed scaling quantized cannot be written in place",
    "this GPU has no native",
)

# Errors of PyTorch's that depend on which operators run, so that its own modules may do without them: a retained graph
# whose compiled backward was donated an intermediate, and what a selective checkpoint refuses: in graphs of aot_eager
# any operator that writes to its arguments, and any kernel of Triton, too.
TORCHS_OWN = (
    "donated buffers",
    "backward once on any region computed under selective activation checkpoint",
    "Tensor cached during selective activation checkpoint has been mutated",
    "There was no rule registered for HigherOrderOperator auto_functionalized",
    "There was no rule registered for HigherOrderOperator triton_kernel_wrapper_functional",
)


_BACKWARDS = ThreadPoolExecutor(1)


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
        "apart": rng.random() < 0.2,
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
    program["scaler"] = rng.choice((None,) * 6 + (2.0**8, 2.0**15))
    flags = _flags_fit(program)
    if flags and rng.random() < 0.5:
        program["optimizer"] = rng.choice(("SGD fused", "AdamW fused"))
    program["history"] = [_draw_item(rng, flags) for _ in range(rng.choice((2, 3, 4, 6, 8)))]
    program["calibrated"] = rng.random() < 0.15
    if rng.random() < 0.6:
        draw_outer(rng, program)
    if rng.random() < 0.15:
        draw_autocasts(rng, program)
    elif rng.random() < 0.1:
        draw_written(rng, program)
    if rng.random() < 0.1:
        draw_inside(rng, program)
    if sums_in_another_order(program):  # bf16 would show nothing but the roundings of sums
        program["dtype"] = "float32"
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
        item |= draw_around_step(rng)
    elif do in ("evaluate", "no_grad", "inference", "dropped"):
        item["batch"] = rng.randrange(10**6)
        item["flag"] = rng.choice((True, False, None)) if flags else None
    elif do == "edit":
        item |= draw_edit(rng)
    elif do == "neutral":
        item["way"] = rng.choice(NEUTRAL)
    elif do == "recipe":
        item["recipe"] = draw_recipe(rng)
    elif do == "freeze":
        item |= {"which": rng.randrange(8), "frozen": rng.random() < 0.5}
    return item


def draw_around_step(rng: random.Random) -> Program:
    """Draw whether ``nc.watch`` sees a step, and whether its gradients are too large for a ``GradScaler``."""
    return {"watched": rng.random() < 0.1, "void": rng.random() < 0.15}


def draw_inside(rng: random.Random, program: Program) -> None:
    """Let the optimizer step in the backwards of some steps, but in the plain run."""
    # a checkpoint without an early stop around others runs layers again that were stepped, and they collect anew
    wraps = str([[wrap.get("checkpoint"), wrap.get("inner")] for wrap in _wraps(program)])
    layers = [layer for block in program["blocks"] for layer in block["layers"]]
    again = any(layer["kind"] == "again" for layer in layers)
    if program.get("written") or again or "reentrant" in wraps or "torch whole" in wraps:
        return
    program |= {"scaler": None, "stored": False}
    for item in program["history"]:
        if item["do"] == "step" and rng.random() < 0.5:
            plainly = {"retain": False, "parts": False, "between": None, "still": None, "raises": None}
            item |= plainly | {"inside": True, "update": True, "order": "each"}
            item |= {name: item[name][:1] for name in ("batches", "flags", "autocasts") if item.get(name)}


def draw_edit(rng: random.Random) -> Program:
    """Draw how a weight is written, which one, and by what factor."""
    return {
        "way": rng.choice(EDITS),
        "which": rng.randrange(8),
        "factor": rng.choice((1.5, 0.5, 1000.0, -1.0)),
    }


def _wraps(program: Program) -> list[Program]:
    return [wrap for wrap in (program["whole"], *(block.get("wrap") for block in program["blocks"])) if wrap]


def _recipes(program: Program) -> list[Program]:
    """The descriptions of all recipes."""
    described = [program["recipe"], *(item.get("recipe") for item in program["history"])]
    described += [layer.get("own") for block in program["blocks"] for layer in block["layers"]]
    described += [one for item in program["history"] for one in item.get("autocasts") or ()]
    return [one for one in described if one]


def _families(program: Program) -> set[str]:
    return {one["family"] for one in _recipes(program)}


def _is_invariant(program: Program) -> bool:
    """Whether it runs in the batch-invariant mode, which refuses most recipes."""
    return bool(program.get("invariant")) and _families(program) == {"delayed"}


def draw_autocasts(rng: random.Random, program: Program) -> None:
    """Let the forwards of a step run under several autocasts, their backwards outside or in those around the step."""
    families = STATELESS + ("delayed",) * len(STATELESS)
    for item in program["history"]:
        item.pop("outer", None)
        if item["do"] == "step":
            several = [draw_recipe(rng, families) if rng.random() < 0.6 else None for _ in item["batches"]]
            item |= {"autocasts": several, "flags": [None for _ in several]}
        elif "flag" in item:
            item["flag"] = None
        # which autocasts do not know a copy is not modeled
        item |= {name: other for name, other in _NO_COPY.items() if item.get(name) in _COPIES}


def draw_written(rng: random.Random, program: Program) -> None:
    """Let the optimizer write the weights' codes, but in the plain run: losses are the same to the bit."""
    program |= {"written": True, "optimizer": "FusedAdam", "stored": False, "around": False}
    program |= {"how": rng.choice(("set_recipe", "own")), "masters": rng.random() < 0.3}
    compiles = any(wrap.get("compile") for wrap in _wraps(program))
    for item in program["history"]:
        item.pop("outer", None)
        if "flag" in item:
            item["flag"] = None
        if item["do"] == "step":
            item["flags"] = [None for _ in item["batches"]]
        item["told"] = compiles or rng.random() < 0.5  # compiled code does not find what has changed


def _runs_under_several(program: Program) -> bool:
    return any(item.get("autocasts") for item in program["history"])


def has_outer(program: Program) -> bool:
    """Whether calls of layers with recipes of their own run under an autocast."""
    return any(item.get("outer") for item in program["history"])


def draw_outer(rng: random.Random, program: Program) -> None:
    """Let calls of layers with delayed recipes of their own run under an autocast of another rule."""
    if program["how"] == "autocast" or program["calibrated"] or _families(program) != {"delayed"}:
        return
    outer, always = draw_recipe(rng, ("delayed",)), rng.random() < 0.6
    outer["options"]["margin"] = rng.choice((0, 0, 1, 2))
    for item in program["history"]:
        if item["do"] == "step" and (always or rng.random() < 0.5):
            item["outer"] = outer
        elif item["do"] == "evaluate" and rng.random() < 0.3:
            item["outer"] = draw_recipe(rng, ("delayed",))
        elif item["do"] in ("no_grad", "inference", "dropped") and rng.random() < 0.3:
            item["outer"] = (
                outer  # an autocast's entry renews by the rule of the last one that layers ran under
            )
        elif item["do"] == "calibrate":
            item |= {"do": "neutral", "way": "deepcopy"}
        # what a failed call has renewed, and by which rule, is not modeled
        item |= {name: "copy" for name in ("way", "between") if item.get(name) == "failed"}


def _flags_fit(program: Program) -> bool:
    """Whether kept weights give what weights quantized on every call do: scales have no state, nothing is compiled."""
    return "delayed" not in _families(program) and not any(wrap.get("compile") for wrap in _wraps(program))


class Stopped(Exception):
    """What stops a call in the middle."""


class World:
    """One run of a program."""

    def __init__(self, program: Program, plain: bool, torchs: bool, measured: bool = True) -> None:
        self.program, self.plain, self.torchs = program, plain, torchs
        self.trace: list[tuple[str, Tensor | None]] = []
        self.recipe = None if torchs else recipe_of(program["recipe"])
        self.trained = False  # in training mode, where layers learn of an autocast's rule
        self.outer: Any = None  # of an autocast that is of one forward
        self.stored = bool(program["stored"]) and not torchs and self.recipe is not None
        self.writes = bool(program.get("written")) and not torchs and not plain
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
        scale = program.get("scaler")
        self.scaler = torch.amp.GradScaler(programs.DEVICE, init_scale=scale) if scale else None
        self.terms: Terms | None = None
        self.measure: Measure | None = None
        alone = not _is_invariant(program) and not _runs_under_several(
            program
        )  # else first steps read constants
        if plain and measured and not torchs and alone:
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
        if self.outer is not None:
            return nc.autocast(recipe=self.outer)
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
            codes = self.model if self.writes else None
            masters = self.program.get("masters") and self.program["dtype"] == "bfloat16"
            masters = self.stored or bool(masters)
            return nc.optimizers.FusedAdam(parameters, lr=1e-3, master_weights=masters, weight_codes=codes)
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
        x = normal(seed, rows, program["features"] or 16, dtype=dtype, scale=scale)
        return x.to(programs.DEVICE)

    def loss(self, y: Tensor, seed: int) -> Tensor:
        kind, loss = self.program["loss"], y.float()
        if kind == "square":
            loss = 0.5 * loss.square()
        elif kind == "weighted":
            loss = loss * normal(seed + 1, *y.shape).to(y.device)
        return loss.sum() if self.scaler is None else self.scaler.scale(loss.sum())

    def forward(
        self, x: Tensor, flag: bool | None, parts: bool = False, outer: Program | None = None
    ) -> Tensor:
        leave_garbage()
        flag = None if self.plain or self.torchs else flag
        self.trained |= self.model.training
        self.outer = recipe_of(outer) if outer and not self.torchs else None
        try:
            with self.context():
                return self.model.call_parts(x, flag) if parts else self.run(x, flag)
        finally:
            self.outer = None

    def train(self, item: Program) -> None:
        """Set the mode: for training, but for a block that is left in evaluation."""
        self.model.train()
        if item.get("still") is not None:
            self.block(item["still"]).eval()

    def block(self, which: int) -> nn.Module:
        return self.model.blocks[which % len(self.model.blocks)]

    def step(self, index: int, item: Program) -> None:
        self.train(item)
        around = self.context() if self.program.get("around") else contextlib.nullcontext()
        ours = not self.plain and not self.torchs
        inside, watched = bool(item.get("inside")), bool(item.get("watched")) and ours and self.watchable()
        watched = (
            watched and item.get("between") != "failed"
        )  # which collects up to where it fails: a watch is there first
        steps = nc.optimizers.step_in_backward(self.optimizer, self.model.blocks) if inside and ours else None
        with around, nc.watch(self.model, every=1) if watched else contextlib.nullcontext():
            self._forwards_and_backwards(index, item)
        if self.terms is not None:
            self.terms.move()
        for name, parameter in self.model.named_parameters() if not inside else ():
            self.record(f"step {index} gradient of {name}", parameter.grad)
        if self.measure is not None:
            self.measure.end_of_step()
        if item["update"]:
            stepped = self._update(bool(item.get("void")))
            if steps is not None:
                steps.remove()
            if self.measure is not None and stepped:
                self.measure.renew()
            for name, parameter in self.model.named_parameters():
                self.record(f"step {index} new {name}", _dense(parameter))
        self.optimizer.zero_grad()

    def watchable(self) -> bool:
        return any(isinstance(module, LinearLayer) for module in self.model.modules())

    def _update(self, void: bool) -> bool:
        """Let the optimizer step; return whether a scaler let it."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.scaler is None or not grads:
            self.optimizer.step()
            return True
        if void:
            grads[0].view(-1)[:1].fill_(float("inf"))
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def _forwards_and_backwards(self, index: int, item: Program) -> None:
        losses, leaves = [], []
        joined = item["order"] == "joined"
        flags = list(item["flags"] or ()) + [None] * len(item["batches"])
        outers = list(item.get("autocasts") or ()) + [item.get("outer")] * len(item["batches"])
        for number, seed in enumerate(item["batches"]):
            leaf = self.batch(seed).requires_grad_()
            stopped = item.get("raises") if number == 0 else None
            # no generator may meet the error: before 2.15 its frame, and so a checkpoint, would live until collected
            stops = contextlib.suppress(Stopped, KeyboardInterrupt) if stopped else contextlib.nullcontext()
            with self.raising(stopped) if stopped else contextlib.nullcontext(), stops:
                y = self.forward(leaf, flags[number], bool(item.get("parts")), outers[number])
                if stopped and y.requires_grad:
                    self.run_backward(self.loss(y, seed))
            if stopped:
                self._forget_gradients(leaf)
                continue
            self.record(f"step {index} output {number}", y)
            leaves.append(leaf)
            if not y.requires_grad:
                continue
            losses.append(self.loss(y, seed))
            if item["order"] == "each":
                self.backward(losses.pop(), bool(item.get("retain")), seed)
            if item["order"] == "1f1b" and len(losses) > 1:
                self.backward(losses.pop(0), bool(item.get("retain")), seed)
            # inside of one autocast, the first forward in training renews a copy, but not its original
            waits = self.program.get("around") and item.get("still") is not None
            if item.get("between") and not waits:
                # what a forward saved may not be loaded anew before its backward, scales no more than weights
                between = "copy" if item["between"] == "reload state" else item["between"]
                self.between(between, seed + 3)
                self.train(item)
        if joined and losses:
            losses = [sum(losses[1:], losses[0])]
        for loss in losses if item["order"] != "lifo" else reversed(losses):
            self.backward(loss, bool(item.get("retain")), 5)
        for number, leaf in enumerate(leaves):
            self.record(f"step {index} gradient of x {number}", leaf.grad)

    @contextlib.contextmanager
    def raising(self, stopped: Program) -> Iterator[None]:
        """Let a block raise before its forward, or before its backward."""
        block, hooks = self.block(stopped["block"] or 0), []

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt("of the case") if stopped.get("interrupt") else Stopped()

        if stopped.get("backward"):

            def stop_backward(_: Any, __: Any, y: Tensor) -> Tensor | None:
                if not (y.requires_grad and torch.is_grad_enabled()):
                    return None
                y = y.clone()  # what measures the last layer sees no gradient
                y.register_hook(stop)
                return y

            hooks = [block.register_forward_hook(stop_backward)]
        else:
            hooks = [block.register_forward_pre_hook(stop)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _forget_gradients(self, leaf: Tensor) -> None:
        leaf.grad = None
        self.optimizer.zero_grad()
        if self.measure is not None:
            self.measure.start_of_step()

    def between(self, how: str, seed: int) -> None:
        """Do something between the forwards and backwards of a step."""
        if how in ("no_grad", "evaluate", "inference", "dropped"):
            self.look(how, seed, None)
        elif how == "failed":
            self.fail()
        elif not self.plain:  # nothing of this may change what follows
            self._use(how, seed)

    def _use(self, how: str, seed: int) -> None:
        """Save or copy the model, and go on with the original."""
        state = self.model.state_dict()
        if how == "save":
            torch.save(state, io.BytesIO())
        elif how == "reload state":
            kept = {name: one.clone() for name, one in state.items() if "scale" in name or "amax" in name}
            self.model.load_state_dict(kept, strict=False)
        else:
            twin = copy.deepcopy(self.model)
            if how == "train a copy":
                with self.context():
                    y = twin.train()(self.batch(seed).requires_grad_(), None)
                    self.run_backward(self.loss(y, seed))

    def calibrate(self) -> None:
        """Find the scales of the first step beforehand."""
        self.model.train()
        passes = itertools.count()

        def step() -> None:
            if next(passes) and self.measure is not None:
                self.measure.renew()
            y = self.forward(self.batch(7).requires_grad_(), None)
            if y.requires_grad:
                self.run_backward(self.loss(y, 7))

        if self.torchs:
            step()
            self.optimizer.zero_grad()
            return
        for _ in range(2):
            with torch.random.fork_rng():
                step()
            self.optimizer.zero_grad()
            nc.renew_delayed_scaling(self.model)
        if self.measure is not None:
            self.measure.renew()
            self.measure.start_of_step()

    def backward(self, loss: Tensor, retain: bool, seed: int) -> None:
        if self.terms is not None:
            self.terms.watch(loss)
        for retained in (True, False) if retain else (False,):
            self.run_backward(loss, retained)

    def run_backward(self, loss: Tensor, retain: bool = False) -> None:
        """Run a backward, in a thread of its own where the program says so, as it runs on a GPU."""
        run = partial(loss.backward, retain_graph=retain)
        if self.program.get("apart") and not self.plain:
            # what is set for this thread alone
            names = ("recompile_limit", "skip_nnmodule_hook_guards", "automatic_dynamic_shapes")
            set_here = {name: getattr(torch._dynamo.config, name) for name in names}
            _BACKWARDS.submit(torch.set_num_threads, torch.get_num_threads()).result()
            _BACKWARDS.submit(torch._dynamo.config.patch(**set_here)(run)).result()
        else:
            run()

    def look(self, how: str, seed: int, flag: bool | None, outer: Program | None = None) -> Tensor:
        """A forward without a backward."""
        x = self.batch(seed)
        self.model.train(how != "evaluate")
        if how == "dropped":
            return self.forward(x.requires_grad_(), flag, outer=outer)
        x.requires_grad_(bool(seed % 2))  # as models with inputs that require gradients have it
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            return self.forward(x, flag, outer=outer).clone()

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
        if is_reentrant(
            self.program
        ):  # in evaluation a layer collects in the recomputation, which never comes
            self.model.train()
        x = self.batch(1)[:, :-1].requires_grad_()
        if any(wrap.get("compile") for wrap in _wraps(self.program)):
            x = torch.zeros_like(x, requires_grad=True)
            with contextlib.suppress(Exception), self.context():
                self.run(x, None)
            # an error of the compiler refers to itself, and keeps the hooks of a checkpoint in force: of plain modules
            gc.collect()
            return
        with contextlib.suppress(Exception), self.context():
            self.run(x, None)

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
            model.cpu().to(programs.DEVICE)
        elif way == "hook":
            model.blocks[0].register_forward_hook(lambda *_: None)
        elif way == "requires":
            for p in model.parameters():
                flag = p.requires_grad
                p.requires_grad_(not flag)
                p.requires_grad_(flag)
        elif way == "evaluated":
            modes = [(module, module.training) for module in model.modules()]
            self.look("evaluate", 11, None)
            for module, training in modes:
                module.training = training
        elif way in USES:
            self._use(way, 13)
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
        if self.program.get("calibrated") and "delayed" in _families(self.program):
            self.calibrate()
        for index, item in enumerate(self.program["history"]):
            torch.manual_seed(index)
            do = item["do"]
            if do == "step":
                self.step(index, item)
            elif do in ("evaluate", "no_grad", "inference", "dropped"):
                look = self.look(do, item["batch"] or 0, item.get("flag"), item.get("outer"))
                self.record(f"{do} {index}", look)
                del look  # its graph holds weights, of which an edit may take the place
            elif do == "edit":
                self.edit(item)
            elif do == "neutral":
                self.neutral(item["way"] or "to")
            elif do == "calibrate":
                self.calibrate()
            elif do == "recipe":
                self._change_recipe(item["recipe"])
            elif do == "freeze":
                found = self.matrix(item["which"] or 0)
                if found is not None:
                    found[1].requires_grad_(not item["frozen"])
            if self.writes and item.get("told") and do in ("edit", "neutral"):
                self.optimizer.write_weight_codes()
            if programs.is_something_in_force():
                gc.collect()  # before 2.15 PyTorch ends one that raised with its frame, which the error may refer to
            if programs.is_something_in_force():
                raise Difference(f"after {do} a checkpoint is still in force")
        for of, p in self.model.named_parameters():
            for name, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    self.record(f"at the end optimizer's {name} of {of}", _dense(value))
        if not self.torchs:
            self._renew()
            for name, tensor in self.model.state_dict().items():
                if "scale" in name or "amax" in name:
                    self.record(f"at the end state {name}", tensor)
        return self.trace

    def _renew(self) -> None:
        """Renew scales now, of all layers."""
        layers = self.delayed()
        for layer in layers:  # a copy learns of an autocast's recipe in its next forward
            if self.program["how"] == "autocast" and self.recipe is not None:
                if layer.recipe is None or self.trained:  # else it knows its own rule alone
                    layer._keep_state_of(self.recipe)
            elif has_outer(self.program) and layer.recipe is not None:
                layer._keep_state_of(layer.recipe)
        renew(layers)
        if self.measure is not None:
            self.measure.renew()

    def _change_recipe(self, described: Program | None) -> None:
        if self.torchs or self.stored or described is None:
            return
        recipe = recipe_of(described)
        if self.program["how"] == "autocast" or recipe is None:
            self._renew()  # by the rule that was in force: a copy, or one without a recipe, does not know it
        self.recipe = recipe
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
    if p.dtype == torch.bfloat16 or p.device.type != "cpu":
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


def refused(error: BaseException) -> bool:
    """Whether the error is one that a user can act on in such a model: each of them was read by a person.

    With ``fullgraph=True`` the compiler raises its own, which quotes it.
    """
    quoted = isinstance(error, torch._dynamo.exc.Unsupported)
    return (quoted or refusal(error)) and any(words in str(error) for words in REVIEWED)


def play(program: Program, *, plain: bool, torchs: bool = False) -> list[tuple[str, Tensor | None]]:
    """The trace of one run, from a clean start."""
    ours = not plain and not torchs
    with _started(program, ours):
        return World(program, plain, torchs).play()


@contextlib.contextmanager
def _started(program: Program, ours: bool) -> Iterator[None]:
    torch._dynamo.reset()
    nc.set_deterministic("batch-invariant" if _is_invariant(program) else None)
    with (
        warnings.catch_warnings(),
        settings(bool(program["replay"]) and ours, bool(program["large"]) and ours),
        few_rows_as_many() if is_reentrant(program) else contextlib.nullcontext(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            nc.set_deterministic(None)


class Rooms:
    """By how much tensors of the trace may differ, as norms: twice what moved gradients make of the plain run.

    Each draw of how they move makes them larger: few draws move a value across the rounding of a quantizer.

    Args:
        wanted: the plain run's trace.
    """

    def __init__(self, program: Program, wanted: dict[str, Tensor | None]) -> None:
        self.program, self.wanted = program, wanted
        self.norms: dict[str, float] = {}
        self.draws = [None, *(torch.Generator().manual_seed(seed) for seed in range(12))]

    def hold(self, compared: Callable[..., None], label: str) -> bool:
        """Whether two tensors compare in the room of their label, after as many draws as there are."""
        while True:
            with contextlib.suppress(Difference):
                compared(room=self.norms.get(label, 0.0))
                return True
            if not self.draws:
                return False
            self._move(self.draws.pop(0))

    def _move(self, generator: torch.Generator | None) -> None:
        with _started(self.program, ours=False):
            world = World(self.program, plain=True, torchs=False, measured=False)
            world.terms = Terms(world.model, generator)
            moved = world.play()
        for label, tensor in moved:
            other = self.wanted.get(label)
            if tensor is not None and other is not None and tensor.shape == other.shape:
                difference = (tensor.double() - other.double()).nan_to_num(0.0, 0.0, 0.0).norm().item()
                self.norms[label] = max(self.norms.get(label, 0.0), 2 * difference)


def run(program: Program) -> dict[str, float]:
    if not program["blocks"] or not any(block["layers"] for block in program["blocks"]):
        raise Invalid("no layers")
    flags = [flag for item in program["history"] for flag in (*(item.get("flags") or ()), item.get("flag"))]
    if flags.count(None) < len(flags) and not _flags_fit(program):
        raise Invalid("kept weights where they have other scales")
    on_gpu, edits = programs.DEVICE != "cpu", any(item["do"] == "edit" for item in program["history"])
    untold = program.get("written") and not all(item.get("told", True) for item in program["history"])
    if on_gpu and edits and (False in flags or untold):
        raise Invalid("a GPU's memory is not compared with the weights that were kept")
    compiles = any(wrap.get("compile") for wrap in _wraps(program))
    if on_gpu and compiles and _transposes(program) and torch.__version__.startswith("2.11."):
        raise Invalid("pytorch/pytorch#177525: 2.11 does not trace again for other strides of a weight")
    theirs, error = attempt(lambda: play(program, plain=True))
    if error is not None:
        if refused(error):
            return {f"refused: {said(error)}": 1.0}
        _, twin = attempt(lambda: play(program, plain=True, torchs=True))
        if twin is None:
            raise error
        return {"torch refuses": 1.0}
    ours, error = attempt(lambda: play(program, plain=False))
    if error is not None and _may_repeat_another_graph(error, program):
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            ours, error = attempt(lambda: play(program, plain=False))
    if error is not None and _is_torchs_own(error, program):
        return {"torch refuses": 1.0}
    if error is not None:
        if refused(error):
            return {f"refused wrapped: {said(error)}": 1.0}
        _, twin = attempt(lambda: play(program, plain=False, torchs=True))
        if twin is None:
            raise error
        return {"torch refuses": 1.0}
    # a copy on the host has other strides, and its products sum in another order
    tolerance = 1e-6 if any(wrap.get("offload") for wrap in _wraps(program)) else 0.0
    reorders = sums_in_another_order(program)
    compiled = [wrap["compile"] for wrap in _wraps(program) if wrap.get("compile")]
    if compiled:
        tolerance = 0.03 if "inductor" in compiled or program["dtype"] == "bfloat16" else 2e-3
    elif reorders or reads_expanded_gradients(program) or _multiplies_other_strides(program):
        # a rounding more or less, after the quantization that follows; of Adam in bf16 also the sign of a step
        tolerance = 0.1 if program["dtype"] == "bfloat16" else 0.02
    if on_gpu:
        tolerance = max(tolerance, 1e-3)
    if tolerance and program["loss"] != "weighted" and _ends_in_a_norm(program):
        raise Invalid("gradients that are what rounding leaves of 0")
    how = "+".join(sorted({_how(wrap) for wrap in _wraps(program)})) or "eager"
    found, wanted = dict(ours), dict(theirs)
    rooms = Rooms(program, wanted) if reorders else None
    for label in [*wanted, *(label for label in found if label not in wanted)]:
        if program.get("written") and "at the end state" in label:
            continue  # a step that writes a weight has its amax, where a forward would have had it
        kind = " ".join(word for word in label.split() if not word[0].isdigit() and "." not in word)
        if tolerance and "key_bias" in label:
            continue  # softmax takes it away: its gradient is what rounding leaves of 0
        if label in found and label in wanted:
            compared = partial(compare, found[label], wanted[label], f"{how}: {kind}", tolerance)
            try:
                compared()
            except Difference:
                if compiled and _differs_in_torch(program, label, tolerance):
                    continue
                if rooms is None or not rooms.hold(compared, label):
                    raise
        elif "at the end state" not in label or ("amax" in label and (found | wanted)[label].any()):
            raise Difference(f"{how}: {kind}: in {'ours' if label in found else 'the plain run'} alone")
    return {}


def _differs_in_torch(program: Program, label: str, tolerance: float) -> bool:
    """Whether the tensor differs as much with PyTorch's own modules: it is what rounding leaves of 0."""
    runs = [attempt(lambda plain=plain: play(program, plain=plain, torchs=True)) for plain in (False, True)]
    (found, _), (wanted, _) = runs
    if found is None or wanted is None:
        return False
    try:
        compare(dict(found).get(label), dict(wanted).get(label), label, tolerance)
    except Difference:
        return True
    return False


def _may_repeat_another_graph(error: BaseException, program: Program) -> bool:
    """Whether PyTorch may have recomputed the graph of one size with that of all sizes, compiled since.

    The two save other tensors, which a checkpoint around them refuses. With a graph for each size there is no other.
    """
    sizes = bool(program["odd_rows"]) and any(wrap.get("compile") for wrap in _wraps(program))
    return sizes and isinstance(error, CheckpointError)


def _is_torchs_own(error: BaseException, program: Program) -> bool:
    """Whether PyTorch raises so of itself.

    After a call that failed inside of an autograd function, of anyone, PyTorch 2.15 runs its caller in eager code: the
    forward of all modules of a class. One of them that is compiled with ``fullgraph=True`` then raises.

    Without ``fullgraph``, what failed to be traced in a checkpoint, of any module, runs in eager code from then on, in
    all releases. The recomputation of a forward before that saves other tensors.

    In a graph that runs a module outside of a checkpoint and again inside, 2.15 takes the two casts of the weight for
    one. If such an operator is of anyone's library and has several results, the partitioner then fails.

    In 2.11 what an autograd function of anyone runs in a compiled checkpoint has no mark to be recomputed
    (pytorch/pytorch#177396). Where random numbers follow an operator of several results there, the partitioner fails.

    In 2.11 a graph is not traced again after ``requires_grad_(True)``, not of ``nn.Linear`` either
    (pytorch/pytorch#177158). A recomputation that is, for another reason, saves other tensors: a checkpoint refuses.

    In 2.11 a trace that failed keeps weak references to the weights that it has met, of ``nn.Linear`` as well
    (pytorch/pytorch#180566), if another size makes a dimension symbolic. ``swap_tensors`` refuses these weights.
    """
    if torch.__version__.startswith("2.11.") and isinstance(error, CheckpointError):
        compiles = any(wrap.get("compile") for wrap in _wraps(program))
        if compiles and any(item["do"] == "freeze" for item in program["history"]):
            return True
    breaks = any(wrap.get("compile") and not wrap.get("fullgraph") for wrap in _wraps(program))
    failed = any(item.get("between") == "failed" for item in program["history"])
    if isinstance(error, CheckpointError) and breaks and failed:
        return True
    own = TORCHS_OWN
    if any("failed" in (item.get("way"), item.get("between")) for item in program["history"]):
        own += ("with fullgraph=True found no compiled frames",)
        if torch.__version__.startswith("2.11."):
            own += ("because it has weakref associated with it",)
    kinds = {layer["kind"] for block in program["blocks"] for layer in block["layers"]}
    if "again" in kinds or ("noise" in kinds and torch.__version__.startswith("2.11.")):
        own += ("failed to partition the joint forward-backward graph",)
    return any(words in str(error) for words in own)


def _ends_in_a_norm(program: Program) -> bool:
    """Whether the last layer normalizes what it returns, whose sum and sum of squares do not depend on its input."""
    last = [layer for block in program["blocks"] for layer in block["layers"]][-1]
    ops = [one for one in last.get("ops") or () if one not in ("bias", "quantize", "quantize_grad")]
    return last["kind"] in ("norm", "ournorm") or ops[-1:] == ["norm"]


def _multiplies_other_strides(program: Program) -> bool:
    """Whether a product in high precision may have a weight of other strides, and so sum in another order."""
    return _transposes(program) and _multiplies_in_high_precision(program)


def _transposes(program: Program) -> bool:
    return any(item.get("way") == "transposed" for item in program["history"])


def sums_in_another_order(program: Program) -> bool:
    """Whether a gradient may be the sum of three or more parts, of which a recomputation adds some first."""
    parts = max(
        (len(item.get("batches") or ()) * (1 + bool(item.get("retain"))) for item in program["history"]),
        default=1,
    )
    calls = 1 + sum(layer["kind"] == "again" for block in program["blocks"] for layer in block["layers"])
    recomputes = any(wrap.get("checkpoint") or wrap.get("inner") for wrap in _wraps(program))
    return parts * calls > 2 and recomputes


def reads_expanded_gradients(program: Program) -> bool:
    """Whether a GEMM in high precision reads the gradient of a sum: expanded, or as a reentrant checkpoint copies it.

    PyTorch's products of the two add in different orders.
    """
    high = _multiplies_in_high_precision(program)
    return program["loss"] == "sum" and high and is_reentrant(program)


def _multiplies_in_high_precision(program: Program) -> bool:
    return any(
        one["family"] == "none" or (one["options"] or {}).get("backward_override") == "high_precision"
        for one in _recipes(program)
    )


def is_reentrant(program: Program) -> bool:
    """Whether a reentrant checkpoint runs layers without gradients first."""
    return any(
        "reentrant" in str(wrap.get(name)) for wrap in _wraps(program) for name in ("checkpoint", "inner")
    )


def _how(wrap: Program) -> str:
    parts = [str(wrap.get(name)) for name in ("compile", "checkpoint", "inner") if wrap.get(name)]
    return " in ".join(reversed(parts) if wrap.get("inside") else parts) or "plain"
