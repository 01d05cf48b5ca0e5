"""Quantizers of a user's own: subclasses that encode in their own way, made anywhere, eager and compiled."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

import narrowcast as nc

from .programs import Invalid, Program, attempt, compare, normal, refusal, settings

E4M3 = nc.DType.kFloat8E4M3
BASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "Float8CurrentScalingQuantizer": (nc.Float8CurrentScalingQuantizer, (E4M3,)),
    "MXFP8Quantizer": (nc.MXFP8Quantizer, (E4M3,)),
    "MXFP6Quantizer": (nc.MXFP6Quantizer, (nc.DType.kFloat6E2M3,)),
    "MXFP4Quantizer": (nc.MXFP4Quantizer, ()),
    "NVFP4Quantizer": (nc.NVFP4Quantizer, ()),
    "IdentityQuantizer": (nc.IdentityQuantizer, ()),
}
SOURCE = """
class {name}(Base):
    def _encode(self, numerics, x, seed):
        return super({name}, self)._encode(numerics, x * {factor}, seed)
"""
PLAIN = """
class {name}(Base):
    pass
"""


def draw(rng: random.Random) -> Program:
    return {
        "seed": rng.randrange(10**6),
        "replay": rng.random() < 0.3,
        "large": rng.random() < 0.5,
        "base": rng.choice(tuple(BASES)),
        "encodes": rng.random() < 0.7,
        "registered": rng.random() < 0.7,
        "where": rng.choice(("__main__", "module", "local")),
        "compile": rng.choice((None, None, None, "eager", "aot_eager", "aot_eager", "inductor")),
        "fullgraph": rng.random() < 0.5,
        "after": rng.choice((None, "relu", "sum", "twice")),
        "for": rng.choice(("all", "weight", "input")),
        "calls": rng.choice((1, 2, 3)),
        "use": rng.choice(("layer", "layer", "direct")),
    }


def make_class(program: Program) -> Any:
    """The class, made where a user would make it."""
    base, _ = BASES[program["base"]]
    name = f"Mine{program['seed']}"
    source = (SOURCE if program["encodes"] else PLAIN).format(name=name, factor=0.5)
    where = program["where"] or "module"
    scope: dict[str, Any] = {"Base": base, "super": super}
    scope["__name__"] = "__main__" if where == "__main__" else "users_module"
    if where == "local":
        body = "".join(f"    {line}\n" for line in source.splitlines())
        source = f"def make():\n{body}    return {name}\n"
    exec(source, scope)
    made = scope["make"]() if where == "local" else scope[name]
    if where != "local":
        module = sys.modules.get(scope["__name__"]) or sys.modules.setdefault(
            "users_module", type(sys)("users_module")
        )
        setattr(module, name, made)
    return nc.dynamo.register_value_opaque_quantizer(made) if program["registered"] else made


def run(program: Program) -> dict[str, float]:
    with settings(bool(program["replay"]), bool(program["large"])):
        return _run(program)


def _run(program: Program) -> dict[str, float]:
    if program["base"] is None:
        raise Invalid("no base")
    arguments = BASES[program["base"]][1]
    made, error = attempt(lambda: make_class(program))
    if error is not None:
        if refusal(error):
            return {"refused": 1.0}
        raise error
    quantizer = made(*arguments)

    def factory(role: nc.QuantizerRole) -> Any:
        if program["for"] in (None, "all") or role.tensor_type == program["for"]:
            return quantizer
        return nc.IdentityQuantizer()

    after: Callable[[torch.Tensor], torch.Tensor] = {
        "relu": torch.relu,
        "sum": lambda y: y + y.sum(),
        "twice": lambda y: 2 * y,
    }.get(program["after"] or "", lambda y: y)

    def layer_of() -> nc.Linear:
        torch.manual_seed(program["seed"])
        recipe = nc.recipe.CustomRecipe(qfactory=factory, emulate=True)
        return nc.Linear(32, 48, bias=False, device="cpu", recipe=recipe)

    x, dy = normal(program["seed"], 64, 32), normal(program["seed"] + 1, 64, 48)

    def direct(compiled: bool) -> list[torch.Tensor]:
        """The quantizer called by a function of the user's."""
        run: Callable[..., Any] = lambda t: after(quantizer.quantize(t).dequantize())  # noqa: E731
        if compiled:
            run = torch.compile(run, backend=program["compile"], fullgraph=bool(program["fullgraph"]))
        return [run(x) for _ in range(program["calls"] or 1)]

    def step(compiled: bool) -> list[torch.Tensor]:
        if program["use"] == "direct":
            return direct(compiled)
        layer = layer_of()
        run: Callable[..., Any] = lambda t: after(layer(t))  # noqa: E731
        if compiled:
            run = torch.compile(run, backend=program["compile"], fullgraph=bool(program["fullgraph"]))
        results: list[torch.Tensor] = []
        for _ in range(program["calls"] or 1):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            results += [y.detach(), *torch.autograd.grad(y, [leaf, layer.weight], dy)]
        return results

    plain, error = attempt(lambda: step(False))
    if error is not None:
        if refusal(error):
            return {"refused": 1.0}
        raise error
    weight = layer_of().weight.detach()
    used = [quantizer if program["for"] in (None, "all", kind) else None for kind in ("input", "weight")]
    decoded = [
        t.double() if q is None else q.quantize(t).dequantize().double() for q, t in zip(used, (x, weight))
    ]
    if program["use"] != "direct":
        compare(plain[0], after(decoded[0] @ decoded[1].t()), "operands of a user's quantizer", 5e-3)
    if program["use"] != "direct" and program["after"] in (None, "twice"):  # whose gradient is known
        wide = dy.double() * (2 if program["after"] else 1)
        across = [quantizer.with_usage(rowwise=False, columnwise=True)] * 2
        alone = program["for"] not in (None, "all")
        grads = [
            wide if alone else q.quantize(wide.float()).dequantize().double()
            for q in (quantizer, *across[:1])
        ]
        columns = [
            t.double() if q is None else across[0].quantize(t).dequantize().double()
            for q, t in zip(used, (x, weight))
        ]
        compare(plain[1], grads[0] @ columns[1], "operands of a user's quantizer, dgrad", 5e-3)
        compare(plain[2], grads[1].t() @ columns[0], "operands of a user's quantizer, wgrad", 5e-3)
    if not program["compile"]:
        return {}
    torch._dynamo.reset()
    found, error = attempt(lambda: step(True))
    if error is not None:
        if refusal(error) or (program["fullgraph"] and not program["registered"]):
            return {"refused": 1.0}
        raise error
    for a, b in zip(found, plain, strict=True):
        compare(a, b, f"a user's quantizer in {program['compile']}", 1e-2)
    return {}
