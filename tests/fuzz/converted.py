"""Models of PyTorch's layers, converted: what they compute, which experts their routers choose, and back again."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc

from .models import draw_recipe, recipe_of
from .programs import Difference, Invalid, Program, attempt, compare, normal, refusal

# Names that published models give to their routers, and to what is none.
ROUTERS = (
    "gate",
    "router",
    "gate.wg",
    "router.classifier",
    "router.layer",
    "wg",
    "gate.linear",
    "expert_gate",
)
PARTS = (
    "linear",
    "linear",
    "relu_",
    "relu",
    "norm",
    "moe",
    "gelu",
    "shared",
    "attention",
    "dropout",
    "double",
)


def draw(rng: random.Random) -> Program:
    return {
        "seed": rng.randrange(10**6),
        "features": rng.choice((16, 32, 48)),
        "rows": rng.choice((1, 16, 33)),
        "dtype": rng.choice(("float32", "bfloat16")),
        "recipe": draw_recipe(rng),
        "norms": rng.random() < 0.3,
        "stored": rng.random() < 0.15,
        "compile": rng.choice((None, None, None, "aot_eager")),
        "parts": [
            {
                "kind": rng.choice(PARTS),
                "router": rng.choice(ROUTERS),
                "experts": rng.choice((4, 8, 16)),
                "topk": rng.choice((1, 2)),
                "bias": rng.random() < 0.3,
            }
            for _ in range(rng.randint(1, 4))
        ],
    }


class Experts(nn.Module):
    """A block of experts; its router is a ``Linear`` under one of the names that models give it."""

    def __init__(self, features: int, part: Program, dtype: torch.dtype) -> None:
        super().__init__()
        self.names = (part["router"] or "gate").split(".")
        owner: nn.Module = self
        for name in self.names[:-1]:
            inner = nn.Module()
            setattr(owner, name, inner)
            owner = inner
        setattr(
            owner,
            self.names[-1],
            nn.Linear(features, part["experts"] or 4, bias=bool(part["bias"]), dtype=dtype),
        )
        self.experts = nn.ModuleList(
            nn.Linear(features, features, dtype=dtype) for _ in range(part["experts"] or 4)
        )
        self.topk = part["topk"] or 1
        self.chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        router: Any = self
        for name in self.names:
            router = getattr(router, name)
        logits = router(x)
        weights, chosen = logits.softmax(-1).topk(self.topk, -1)
        self.chosen.append(logits.detach())
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            share = (weights * (chosen == index)).sum(-1, keepdim=True)
            y = y + share * expert(x)
        return x + y


class Shared(nn.Module):
    """One layer called twice."""

    def __init__(self, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc = nn.Linear(features, features, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.fc(x)))


class Attention(nn.Module):
    def __init__(self, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(features, 2, batch_first=True, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x[None], x[None], x[None], need_weights=False)[0][0]


def _model(program: Program) -> nn.Sequential:
    torch.manual_seed(program["seed"])
    features, dtype = program["features"] or 16, getattr(torch, program["dtype"] or "float32")
    made: list[nn.Module] = []
    for part in program["parts"]:
        kind = part["kind"]
        if kind == "linear":
            made.append(nn.Linear(features, features, bias=bool(part["bias"]), dtype=dtype))
        elif kind == "moe":
            made.append(Experts(features, part, dtype))
        elif kind == "shared":
            made.append(Shared(features, dtype))
        elif kind == "attention":
            made.append(Attention(features, dtype))
        elif kind == "norm":
            made.append(nn.LayerNorm(features, dtype=dtype))
        elif kind == "double":
            made.append(
                nn.Sequential(
                    nn.Linear(features, 2 * features, dtype=dtype),
                    nn.ReLU(inplace=True),
                    nn.Linear(2 * features, features, dtype=dtype),
                )
            )
        else:
            made.append(
                {
                    "relu": nn.ReLU(),
                    "relu_": nn.ReLU(inplace=True),
                    "gelu": nn.GELU(),
                    "dropout": nn.Dropout(0.0),
                }[kind]
            )
    return nn.Sequential(*made)


def _step(model: nn.Module, program: Program, compiled: bool = False) -> list[Tensor]:
    dtype = getattr(torch, program["dtype"] or "float32")
    x = normal(program["seed"], program["rows"] or 1, program["features"] or 16, dtype=dtype).requires_grad_()
    run = torch.compile(model, backend=program["compile"]) if compiled else model
    y = run(x * 1.0)
    y.float().square().sum().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


def run(program: Program) -> dict[str, float]:
    recipe = recipe_of(program["recipe"])
    if recipe is None or not program["parts"]:
        raise Invalid("nothing to convert")
    plain, ours = _model(program), _model(program)
    kept = {name: value.clone() for name, value in ours.state_dict().items()}
    _, error = attempt(lambda: nc.convert(ours, recipe, norms=bool(program["norms"]), heads=True, small=True))
    if error is not None:
        if refusal(error):
            return {"refused": 1.0}
        raise error
    theirs, error = attempt(lambda: _step(plain, program))
    if error is not None:  # two operators in place in a row, say
        return {"torch refuses": 1.0}
    found, error = attempt(lambda: _step(ours, program, bool(program["compile"])))
    if error is not None:
        if refusal(error):
            return {"refused": 1.0}
        raise error
    if theirs[0].shape != found[0].shape:
        raise Difference("converted, the model has another output")
    for module in ours.modules():
        if isinstance(module, Experts):
            router: Any = module
            for word in module.names:
                router = getattr(router, word)
            if isinstance(router, nc.Linear):
                raise Difference(f"the router {'.'.join(module.names)!r} runs in low precision")
    copied = copy.deepcopy(ours)
    for a, b in zip(copied.parameters(), ours.parameters(), strict=True):
        compare(a, b, "parameters of a copy of a converted model")
    nc.revert(ours)
    for name, value in ours.state_dict().items():
        if name not in kept:
            raise Difference("revert leaves something in the state dict")
        compare(value, kept[name], "a reverted model's state")
    found = _step(ours, program)
    for a, b in zip(found, _step(_model(program), program), strict=True):
        compare(a, b, "a reverted model")
    return {}
