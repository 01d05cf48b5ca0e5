"""A layer's three products, of operands that any quantizers make, in fp64 from what these decode to."""

from __future__ import annotations

import random
from typing import Any

import torch
from quantizers.catalog import VARIANTS

import narrowcast as nc

from .programs import Invalid, Program, attempt, compare, normal, refusal, settings

NAMES = tuple(
    name
    for name in VARIANTS
    if "stochastic" not in name and "row-scaled" not in name and "4over6" not in name
)


def draw(rng: random.Random) -> Program:
    return {
        "seed": rng.randrange(10**6),
        "replay": rng.random() < 0.3,
        "large": rng.random() < 0.5,
        "rows": rng.choice((0, 1, 2, 15, 16, 32, 33, 64)),
        "inputs": rng.choice((1, 16, 17, 32, 48, 64)),
        "outputs": rng.choice((1, 16, 17, 32, 48, 64)),
        "input": rng.choice(NAMES),
        "weight": rng.choice(NAMES),
        "grad_output": rng.choice(NAMES),
        "alike": rng.random() < 0.6,
        "by_type": rng.random() < 0.3,
        "layer": rng.choice(("Linear", "Linear", "ops.Linear", "GroupedLinear")),
        "flag": rng.random() < 0.2,
        "stored": rng.random() < 0.2,
        "dtype": rng.choice(("float32", "bfloat16")),
    }


def run(program: Program) -> dict[str, float]:
    with settings(bool(program["replay"]), bool(program["large"])):
        return _run(program)


def _run(program: Program) -> dict[str, float]:
    names = {
        one: program["input"] if program["alike"] else program[one]
        for one in ("input", "weight", "grad_output")
    }
    if None in names.values() or not program["inputs"] or not program["outputs"] or not program["layer"]:
        raise Invalid("no sizes")

    own = "grouped_linear" if program["layer"] == "GroupedLinear" else "linear"

    def factory(role: nc.QuantizerRole) -> Any:
        if program["by_type"] and role.module_type != own:  # what a layer of another type would get
            return nc.IdentityQuantizer()
        kind = "grad_output" if role.tensor_type.startswith("grad") else role.tensor_type
        return VARIANTS[names.get(kind, names["input"])]

    k, n, rows, seed = program["inputs"], program["outputs"], program["rows"], program["seed"]
    dtype = getattr(torch, program["dtype"] or "float32")

    def ours() -> list[Any]:
        recipe = nc.recipe.CustomRecipe(qfactory=factory)
        torch.manual_seed(seed)
        with nc.quantized_model_init(
            enabled=bool(program["stored"]), recipe=recipe, preserve_high_precision_init_val=True
        ):
            if program["layer"] == "ops.Linear":
                layer = nc.ops.Linear(k, n, bias=False, device="cpu", dtype=dtype)
                nc.set_recipe(layer, recipe)
            elif program["layer"] == "GroupedLinear":
                layer = nc.GroupedLinear(1, k, n, bias=False, device="cpu", dtype=dtype, recipe=recipe)
            else:
                layer = nc.Linear(k, n, bias=False, device="cpu", dtype=dtype, recipe=recipe)
        x = normal(seed, rows, k, dtype=dtype).requires_grad_()
        dy = normal(seed + 1, rows, n, dtype=dtype)
        weight = next(layer.parameters())
        kept = (
            weight.get_high_precision_init_val()
            if isinstance(weight, nc.QuantizedTensor)
            else weight.detach()
        )
        extra = ([rows],) if program["layer"] == "GroupedLinear" else ()
        flagged = program["flag"] and program["layer"] != "ops.Linear"
        y = layer(x, *extra, **({"is_first_microbatch": True} if flagged else {}))
        dx, dw = torch.autograd.grad(y, [x, weight], dy)
        return [x.detach(), dy, kept.clone(), y.detach(), dx, dw]

    results, error = attempt(ours)
    if error is not None:
        if refusal(error) and "in force wants" not in str(error):  # the same recipe made them
            return {"refused": 1.0}
        raise error
    x, dy, w, y, dx, dw = results

    def decoded(kind: str, value: torch.Tensor, columnwise: bool) -> torch.Tensor:
        quantizer = VARIANTS[names[kind]].with_usage(rowwise=not columnwise, columnwise=columnwise)
        return quantizer.quantize(value).dequantize(dtype=torch.float32).double()

    def wanted() -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = [
            (decoded("input", x, False), decoded("weight", w, False).t()),
            (decoded("grad_output", dy, False), decoded("weight", w, True)),
            (decoded("grad_output", dy, True).t(), decoded("input", x, True)),
        ]
        return [(a @ b, a.abs() @ b.abs()) for a, b in pairs]

    if not rows:
        return {}
    expected, error = attempt(wanted)
    if error is not None:
        if refusal(error):
            return {"refused": 1.0}
        raise error
    if any("rht" in name for name in names.values()):
        return {"rotated": 1.0}  # column-wise codes are those of rotated columns
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-3
    for name, a, (e, terms) in zip(("y", "dx", "dw"), (y, dx, dw), expected, strict=True):
        if e.norm() > 1e-12:  # of terms that cancel, fp32 leaves its rounding
            compare(a, e, f"decoded operands, {name}", tolerance, least=1e-3 * terms.norm().item())
    return {}
