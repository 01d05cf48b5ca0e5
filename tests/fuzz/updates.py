"""Optimizers: histories of ours beside PyTorch's own: gradients that come late, empty groups, saves and loads."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

import narrowcast as nc

from .programs import Difference, Invalid, Program, attempt, compare, normal, refusal

STEP = 0.1  # learning rate, and how far an element moves in a step of Adam


def draw(rng: random.Random) -> Program:
    kind = rng.choice(("AdamW", "AdamW", "AdamW", "Adam", "SGD"))
    return {
        "seed": rng.randrange(10**6),
        "kind": kind,
        "decay": rng.choice((0.0, 0.1)),
        "momentum": rng.choice((0.0, 0.9)),
        "nesterov": rng.random() < 0.3,
        "capturable": kind != "SGD" and rng.random() < 0.3,
        "master": rng.random() < 0.3,
        "groups": [
            [_shape(rng) for _ in range(rng.choice((0, 1, 1, 2, 3)))] for _ in range(rng.choice((1, 1, 2)))
        ],
        "history": [_item(rng) for _ in range(rng.randint(1, 8))],
    }


def _shape(rng: random.Random) -> list[int]:
    return [rng.choice((0, 1, 3, 16, 33)) for _ in range(rng.choice((1, 2)))]


def _item(rng: random.Random) -> Program:
    do = rng.choices(
        (
            "step",
            "steps",
            "state",
            "cross",
            "crossed",
            "group",
            "rate",
            "zero",
            "scaler",
            "deepcopy",
            "multi",
            "inside",
        ),
        (10, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2),
    )[0]
    return {
        "do": do,
        "mask": rng.choice((-1, -1, -1, 1, 2, 5, 0)),
        "seed": rng.randrange(10**6),
        "count": rng.choice((3, 30)),
    }


def _make(program: Program, groups: list[dict[str, Any]], ours: bool) -> Any:
    kind = program["kind"] or "AdamW"
    if kind == "SGD":
        options = {
            "lr": STEP,
            "momentum": program["momentum"] or 0.0,
            "weight_decay": program["decay"] or 0.0,
        }
        options["nesterov"] = bool(program["nesterov"]) and options["momentum"] > 0
        return (nc.optimizers.FusedSGD if ours else torch.optim.SGD)(groups, **options)
    options = {"lr": STEP, "weight_decay": program["decay"] or 0.0}
    if not ours:
        return getattr(torch.optim, kind)(groups, **options)
    options |= {
        "adam_w_mode": kind == "AdamW",
        "capturable": bool(program["capturable"]),
        "master_weights": bool(program["master"]),
    }
    return nc.optimizers.FusedAdam(groups, **options)


class Twins:
    """One optimizer of ours, one of PyTorch's."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sides: list[tuple[list[nn.Parameter], Any]] = []
        for ours in (True, False):
            groups: list[dict[str, Any]] = []
            all_parameters: list[nn.Parameter] = []
            for number, shapes in enumerate(program["groups"]):
                made = [nn.Parameter(normal(number * 7 + i, *shape)) for i, shape in enumerate(shapes)]
                groups.append({"params": made})
                all_parameters += made
            self.sides.append((all_parameters, _make(program, groups, ours)))

    def both(self, item: Program) -> None:
        for ours, (parameters, optimizer) in zip((True, False), list(self.sides)):
            self._one(item, ours, parameters, optimizer)
        (a, _), (b, _) = self.sides
        for mine, theirs in zip(a, b, strict=True):
            # Rounding adds up over steps of this length, however close to 0 they end.
            step = STEP * max(mine.numel(), 1) ** 0.5
            compare(
                mine, theirs.double(), f"parameter after {item['do']} of {self.program['kind']}", 1e-4, step
            )

    def _gradients(self, item: Program, parameters: list[nn.Parameter], step: int = 0) -> None:
        mask = item["mask"] if item["mask"] is not None else -1
        for number, p in enumerate(parameters):
            p.grad = (
                normal(item["seed"] + number + 100 * step, *p.shape) if mask >> (number % 8) & 1 else None
            )

    def _one(self, item: Program, ours: bool, parameters: list[nn.Parameter], optimizer: Any) -> None:
        do = item["do"]
        if do in ("step", "steps"):
            for step in range(item["count"] or 1 if do == "steps" else 1):
                self._gradients(item, parameters, step)
                optimizer.step()
        elif do == "state":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif do == "zero":
            optimizer.zero_grad()
        elif do == "rate":
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(0.05)
                else:
                    group["lr"] = 0.05
        elif do == "group":
            fresh = nn.Parameter(normal(item["seed"], 4))
            optimizer.add_param_group({"params": [fresh]})
            parameters.append(fresh)
        elif do == "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            self._gradients(item, parameters)
            scaled = [p for p in parameters if p.grad is not None]
            if not scaled:
                return
            for p in scaled:
                p.grad = p.grad * 8.0
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        elif do == "deepcopy":
            optimizer.state_dict()
        elif do == "inside":
            self._step_inside(item, ours, parameters, optimizer)

    def _step_inside(self, item: Program, ours: bool, parameters: list[nn.Parameter], optimizer: Any) -> None:
        """Ours steps in the backward: a part of some parameters, whose gradients may not all come, and the others."""
        self._gradients(item, parameters)
        terms = [(p * p.grad).sum() for p in parameters if p.grad is not None]
        optimizer.zero_grad()
        if not terms:
            return
        part = nn.ParameterList(parameters[: item["count"] % (len(parameters) + 1)])
        steps = nc.optimizers.step_in_backward(optimizer, [part]) if ours else None
        torch.stack(terms).sum().backward()
        if steps is not None and len(part) == 0 and any(p.grad is not None for p in parameters):
            raise Difference("step_in_backward leaves gradients of parameters that are parts of their own")
        optimizer.step()
        if steps is not None:
            steps.remove()


def run(program: Program) -> dict[str, float]:
    twins, error = attempt(lambda: Twins(program))
    if error is not None:
        _, plain = attempt(
            lambda: [
                _make(
                    program,
                    [{"params": [nn.Parameter(torch.zeros(*s)) for s in g]} for g in program["groups"]],
                    False,
                )
            ]
        )
        if plain is not None or refusal(error):
            return {"refused": 1.0}
        raise error
    for item in program["history"]:
        if item["do"] == "multi":
            _multi(item)
            continue
        if item["do"] in ("cross", "crossed"):
            if _cross(twins, item):
                return {"crossed": 1.0}
            continue
        _, error = attempt(lambda: twins.both(item))
        if error is not None:
            if refusal(error):
                return {"refused": 1.0}
            raise error
    return {}


def _cross(twins: Twins, item: Program) -> bool:
    """Load the state of the other kind: taken, and then right, or refused at once."""
    if item["do"] == "crossed" and twins.program["capturable"]:
        return True  # PyTorch's own are not capturable on a CPU, and say so in their step
    (mine, ours), (theirs, torchs) = twins.sides
    source, target = (torchs, ours) if item["do"] == "cross" else (ours, torchs)
    _, error = attempt(lambda: target.load_state_dict(copy.deepcopy(source.state_dict())))
    if error is not None:
        if refusal(error) or isinstance(error, ValueError):
            return True
        raise error
    with torch.no_grad():
        for p, other in zip(mine, theirs):
            (p.copy_(other) if item["do"] == "cross" else other.copy_(p))
    twins.both({**item, "do": "step", "mask": -1})
    return False


def _multi(item: Program) -> None:
    """The functions over lists of tensors, beside loops."""
    rng = random.Random(item["seed"])
    tensors = [normal(item["seed"] + i, *_shape(rng)) for i in range(rng.randint(1, 3))]
    flag = torch.zeros(1, dtype=torch.int32)
    scale = rng.choice((2.0, torch.tensor(2.0), torch.tensor([2.0])))
    apply = (
        nc.optimizers.multi_tensor_scale_tensor
        if isinstance(scale, torch.Tensor)
        else nc.optimizers.multi_tensor_scale
    )
    out = [torch.empty_like(t) for t in tensors]
    _, error = attempt(lambda: apply(2048, flag, [tensors, out], scale))
    if error is not None:
        if refusal(error):
            return
        raise error
    for a, b in zip(out, tensors):
        compare(a, b * 2.0, "multi_tensor_scale", 1e-6)
    norm, each = nc.optimizers.multi_tensor_l2norm(2048, flag, [tensors], True)
    compare(
        norm,
        torch.cat([t.reshape(-1) for t in tensors]).norm().reshape(1).double(),
        "multi_tensor_l2norm",
        1e-5,
    )
    del each


__all__ = ["Invalid", "draw", "run"]
