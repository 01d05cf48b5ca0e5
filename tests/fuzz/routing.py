"""Experts: scores, choices and losses of routers, and the permutations, against their definitions."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn import functional as F

import narrowcast as nc

from .programs import Invalid, Program, attempt, compare, normal, refusal

WHAT = ("scores", "topk", "loss", "permute", "permute_index", "sort")


def draw(rng: random.Random) -> Program:
    experts = rng.choice((1, 2, 4, 8, 7))
    return {
        "do": rng.choice(WHAT),
        "seed": rng.randrange(10**6),
        "tokens": rng.choice((0, 1, 5, 16, 33)),
        "experts": experts,
        "topk": rng.randint(1, experts),
        "function": rng.choice(("softmax", "sigmoid", "sqrtsoftplus")),
        "pre": rng.random() < 0.5,
        "bias": rng.random() < 0.4,
        "factor": rng.choice((None, 2.5)),
        "features": rng.choice((1, 16, 33)),
        "dtype": rng.choice(("float32", "float32", "bfloat16")),
        "weighted": rng.random() < 0.5,
    }


def _scored(logits: Tensor, function: str) -> Tensor:
    """As Megatron and Transformer Engine define them for the auxiliary loss: they always sum to 1."""
    values = logits.double()
    if function == "softmax":
        return values.softmax(-1)
    scores = values.sigmoid() if function == "sigmoid" else F.softplus(values).sqrt()
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def run(program: Program) -> dict[str, float]:
    if not program["experts"] or not program["topk"] or program["topk"] > program["experts"]:
        raise Invalid("experts")
    result, error = attempt(lambda: _SUITES[program["do"]](program))
    if error is not None and not refusal(error):
        raise error
    return {"refused": 1.0} if error is not None else result or {}


def _logits(program: Program) -> Tensor:
    return normal(
        program["seed"],
        program["tokens"],
        program["experts"],
        dtype=getattr(torch, program["dtype"] or "float32"),
    )


def scores(program: Program) -> None:
    logits = _logits(program)
    function = program["function"] or "softmax"
    leaf, other = logits.clone().requires_grad_(), logits.double().clone().requires_grad_()
    _, ours = nc.fused_compute_score_for_moe_aux_loss(leaf, program["topk"], function)
    theirs = _scored(other, function)
    compare(ours, theirs, f"scores of {function}", 1e-5)
    weight = normal(program["seed"] + 1, *ours.shape)
    terms = (theirs * weight).norm().item()
    ours, theirs = ((y * weight).sum() for y in (ours, theirs))
    (a,), (e,) = torch.autograd.grad(ours, leaf), torch.autograd.grad(theirs, other)
    if e.norm() > 1e-6:
        tolerance = 2e-2 if logits.dtype == torch.bfloat16 else 1e-4
        # terms that cancel leave their roundings: of two experts whose weights are nearly equal
        compare(a, e, f"gradient of scores of {function}", tolerance, least=0.01 * terms)


def topk(program: Program) -> None:
    logits = _logits(program).float()
    function, k = program["function"] or "softmax", program["topk"]
    bias = (
        normal(program["seed"] + 2, program["experts"]) if program["bias"] and function != "softmax" else None
    )
    ours, chosen = nc.fused_topk_with_score_function(
        logits,
        k,
        use_pre_softmax=bool(program["pre"]),
        scaling_factor=program["factor"],
        score_function=function,
        expert_bias=bias,
    )
    values = logits.double()
    if function == "softmax":
        raw = values.softmax(-1) if program["pre"] else values
    else:
        raw = values.sigmoid() if function == "sigmoid" else F.softplus(values).sqrt()
    index = (raw if bias is None else raw + bias.double()).topk(k, -1)[1]
    picked = raw.gather(-1, index)
    if function == "softmax":
        picked = picked if program["pre"] else picked.softmax(-1)
    elif k > 1:
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    expected = torch.zeros_like(values).scatter(-1, index, picked) * (program["factor"] or 1.0)
    compare(ours, expected, f"weights of {function}", 1e-5)
    compare(chosen.double(), torch.zeros_like(values).scatter(-1, index, 1.0), "the routing map", 0.5e-9)


def loss(program: Program) -> None:
    if not program["tokens"]:
        raise Invalid("no tokens")
    probs = _scored(_logits(program), "softmax").float()
    counts = torch.randint(0, 9, (program["experts"],), generator=torch.Generator().manual_seed(3))
    ours = nc.fused_moe_aux_loss(probs, counts, program["tokens"], program["experts"], program["topk"], 0.1)
    expected = (
        (probs.double().sum(0) * counts).sum()
        * 0.1
        * program["experts"]
        / program["topk"]
        / program["tokens"] ** 2
    )
    compare(ours, expected, "the auxiliary loss", 1e-5)


def permute(program: Program) -> None:
    tokens, experts = program["tokens"], program["experts"]
    routing = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(program["seed"])) < 0.5
    rows = int(routing.sum())
    x = normal(program["seed"], tokens, program["features"] or 1).requires_grad_()
    y, rest = nc.moe_permute(x, routing.int(), num_out_tokens=rows or -1, map_type="mask")
    order = [t for e in range(experts) for t in range(tokens) if routing[t, e]]
    if rows:
        compare(y, x[order], "permuted rows", 0.0)
    probs = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1)) * routing
    back = nc.moe_unpermute(y, rest, merging_probs=probs if program["weighted"] else None)
    factor = probs.sum(-1) if program["weighted"] else routing.sum(-1).float()
    compare(back, x.double() * factor[:, None].double(), "unpermuted rows", 1e-5)
    (dx,) = torch.autograd.grad(back.sum(), x)
    compare(dx, factor[:, None].double().expand_as(x), "gradient of the permutation", 1e-5)


def permute_index(program: Program) -> None:
    tokens, k = program["tokens"], program["topk"]
    indices = (
        torch.stack(
            [
                torch.randperm(
                    program["experts"], generator=torch.Generator().manual_seed(program["seed"] + t)
                )[:k]
                for t in range(tokens)
            ]
        )
        if tokens
        else torch.empty(0, k, dtype=torch.long)
    )
    x = normal(program["seed"], tokens, program["features"] or 1)
    y, rest = nc.moe_permute(x, indices.int(), map_type="index")
    pairs = sorted(
        ((int(indices[t, j]), t, j) for t in range(tokens) for j in range(k)), key=lambda one: one[:2]
    )
    compare(
        y, x[[t for _, t, _ in pairs]] if pairs else x.new_empty(0, x.shape[1]), "rows permuted by index", 0.0
    )
    back = nc.moe_unpermute(y, rest, map_type="index")
    compare(back, x.double() * k, "rows unpermuted by index", 1e-5)


def sort(program: Program) -> None:
    rng = random.Random(program["seed"])
    sizes = [rng.randrange(0, 5) for _ in range(program["experts"])]
    order = list(range(len(sizes)))
    rng.shuffle(order)
    x = normal(program["seed"], sum(sizes), program["features"] or 1)
    parts = x.split(sizes)
    as_tensors = bool(program["weighted"])
    given = [torch.tensor(v, dtype=torch.int32) if as_tensors else v for v in (sizes, order)]
    compare(
        nc.moe_sort_chunks_by_index(x, *given), torch.cat([parts[i] for i in order]), "sorted chunks", 0.0
    )


_SUITES = {
    "scores": scores,
    "topk": topk,
    "loss": loss,
    "permute": permute,
    "permute_index": permute_index,
    "sort": sort,
}
