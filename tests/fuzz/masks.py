"""Attention: masks, windows, formats and groups against softmax written out, and autograd of that."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import narrowcast as nc

from .programs import Invalid, Program, attempt, compare, normal, refusal

TYPES = (
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)


def draw(rng: random.Random) -> Program:
    heads = rng.choice((1, 2, 4))
    return {
        "seed": rng.randrange(10**6),
        "batch": rng.choice((1, 2, 3)),
        "queries": rng.choice((0, 1, 1, 2, 5, 16, 17)),
        "keys": rng.choice((1, 2, 5, 16, 17)),
        "heads": heads,
        "groups": rng.choice([g for g in (1, 2, 4) if heads % g == 0]),
        "channels": rng.choice((8, 16, 5)),
        "type": rng.choice(TYPES),
        "window": rng.choice((None, None, [-1, 0], [2, 0], [0, 0], [1, 2], [-1, 3])),
        "bottom_right": rng.choice((None, None, True, False)),
        "format": rng.choice(("sbhd", "bshd")),
        "sink": rng.choice(("vanilla", "vanilla", "off-by-one")),
        "bias": rng.random() < 0.2,
        "checkpoint": rng.random() < 0.2,
        "max_logit": rng.random() < 0.15,
        "dtype": rng.choice(("float32", "float32", "bfloat16")),
    }


def visible(program: Program, n_q: int, n_k: int) -> Tensor:
    """What a query of one sequence sees, from the definition of the mask types."""
    kind = program["type"] or "no_mask"
    left, right = program["window"] or (-1, -1)
    causal = "causal" in kind
    bottom = program["bottom_right"]
    if bottom is None:
        bottom = kind not in ("causal", "padding_causal")
    seen = torch.zeros(n_q, n_k, dtype=torch.bool)
    for i in range(n_q):
        place = i + (n_k - n_q if bottom else 0)
        for j in range(n_k):
            after = j > place if causal else (right >= 0 and j > place + right)
            seen[i, j] = not after and not (left >= 0 and j < place - left)
    return seen


def run(program: Program) -> dict[str, float]:
    b, n_q, n_k = program["batch"] or 1, program["queries"], program["keys"]
    h, g, d, seed = program["heads"] or 1, program["groups"] or 1, program["channels"] or 8, program["seed"]
    if not n_k or h % g or (program["window"] is not None and len(program["window"]) != 2):
        raise Invalid("sizes")
    kind, dtype = program["type"] or "no_mask", getattr(torch, program["dtype"] or "float32")
    q, k, v = (
        normal(seed + i, b, n, m, d, dtype=dtype) for i, (n, m) in enumerate(((n_q, h), (n_k, g), (n_k, g)))
    )
    rng = random.Random(seed)
    lengths = [(n_q, n_k)] * b
    options: dict[str, Any] = {}
    if "padding" in kind:
        lengths = [(rng.randint(0, n_q), rng.randint(1, n_k)) for _ in range(b)]
        masks = []
        for side, n in ((0, n_q), (1, n_k)):
            mask = torch.ones(b, 1, 1, n, dtype=torch.bool)
            for row, one in enumerate(lengths):
                mask[row, ..., : one[side]] = False
            masks.append(mask)
        options["attention_mask"] = tuple(masks)
    seen = torch.zeros(b, h, n_q, n_k, dtype=torch.bool)
    for row, (a, c) in enumerate(lengths):
        seen[row, :, :a, :c] = visible(program, a, c)
    if kind == "arbitrary":
        hidden = torch.rand(b, 1, n_q, n_k, generator=torch.Generator().manual_seed(seed)) < 0.4
        options["attention_mask"] = hidden
        seen &= ~hidden
    bias = normal(seed + 9, 1, h, n_q, n_k, dtype=dtype) if program["bias"] else None
    if bias is not None:
        options |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    flip = program["format"] == "sbhd"

    def ours() -> list[Tensor]:
        module = nc.DotProductAttention(
            h,
            d,
            num_gqa_groups=g,
            qkv_format=program["format"] or "sbhd",
            attn_mask_type=kind,
            window_size=None if program["window"] is None else tuple(program["window"]),
            bottom_right_diagonal=program["bottom_right"],
            softmax_type=program["sink"] or "vanilla",
            return_max_logit=bool(program["max_logit"]),
        )
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        given = [t.transpose(0, 1) if flip else t for t in leaves]
        out = module(*given, checkpoint_core_attention=bool(program["checkpoint"]), **options)
        out = out[0] if program["max_logit"] else out
        out = out.transpose(0, 1) if flip else out
        return [
            out.reshape(b, n_q, h, d),
            *torch.autograd.grad((out.float() * dy.reshape(out.shape)).sum(), leaves),
        ]

    dy = normal(seed + 3, b, n_q, h * d)
    results, error = attempt(ours)
    if error is not None:
        if refusal(error):
            return {"refused": 1.0}
        raise error
    leaves = [t.double().clone().requires_grad_() for t in (q, k, v)]
    wide = [t.repeat_interleave(h // t.shape[2], dim=2).transpose(1, 2) for t in leaves]
    scores = wide[0] @ wide[1].transpose(-1, -2) * d**-0.5
    scores = scores + (0 if bias is None else bias.double())
    scores = scores.masked_fill(~seen, -1e300)
    top = scores.amax(-1, keepdim=True) if n_q else scores[..., :1]
    if program["sink"] == "off-by-one":
        top = top.clamp_min(0.0)
    weights = torch.exp(scores - top) * seen
    total = weights.sum(-1, keepdim=True) + (torch.exp(-top) if program["sink"] == "off-by-one" else 0)
    out = (weights / total.clamp_min(1e-300)) @ wide[2]
    out = out.transpose(1, 2)
    with torch.no_grad():
        probabilities = weights / total.clamp_min(1e-300)
        # a sum over channels, whose terms may cancel, of values that have the rounding of their dtype
        dp = dy.double().abs().reshape(b, n_q, h, d).transpose(1, 2) @ wide[2].abs().transpose(-1, -2)
        larger = probabilities * (dp + (probabilities * dp).sum(-1, keepdim=True)) * d**-0.5
        terms = {"dq": larger @ wide[1].abs(), "dk": larger.transpose(-1, -2) @ wide[0].abs()}
    expected = [out, *torch.autograd.grad((out.reshape(b, n_q, h * d) * dy.double()).sum(), leaves)]
    for name, a, e in zip(("the output", "dq", "dk", "dv"), results, expected, strict=True):
        if a.numel() and e.norm() < 1e-9:
            e = e + 1e-12
            if a.double().norm() > 1e-3:
                compare(a, e, f"attention, {name}", 1.0)
            continue
        tolerance = 6e-2 if dtype == torch.bfloat16 else 1e-4
        if name in terms:  # a gradient of the softmax is a difference, of which little may be left
            tolerance *= max(1.0, (terms[name].norm() / e.norm()).item())
        compare(a, e, f"attention, {name}", tolerance)
    return {}
