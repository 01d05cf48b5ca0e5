"""Every module in every recipe under torch.compile (Inductor, fullgraph): how far from eager, how many graphs.

`difference` is the largest over output and gradients of max |compiled - eager| / max |eager|; 0 means bit for bit.
`graphs` counts what was compiled over three steps. Emulated recipes are there for their numbers.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable

import torch
from harness import Row, parser, report
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc

TOKENS, FEATURES, GROUPS = 512, 512, 4
RECIPES: dict[str, Callable[[bool], nc.recipe.Recipe | None]] = {
    "none": lambda emulate: None,
    "delayed": lambda emulate: nc.recipe.DelayedScaling(emulate=emulate),
    "current": lambda emulate: nc.recipe.Float8CurrentScaling(emulate=emulate),
    "block": lambda emulate: nc.recipe.Float8BlockScaling(emulate=emulate),
    "mxfp8": lambda emulate: nc.recipe.MXFP8BlockScaling(emulate=True),
    "nvfp4": lambda emulate: nc.recipe.NVFP4BlockScaling(emulate=True, disable_stochastic_rounding=True),
}
SPLITS = [FEATURES // 8, FEATURES // 4, 0, TOKENS - FEATURES // 8 - FEATURES // 4]


def pre_norm_mlp(**factory: object) -> torch.nn.Module:
    ops = nc.ops
    return ops.Sequential(
        ops.RMSNorm(FEATURES, **factory),
        ops.Linear(FEATURES, 2 * FEATURES, bias=False, **factory),
        ops.SwiGLU(),
        ops.Linear(FEATURES, FEATURES, bias=False, **factory),
    )


def modules(device: str) -> dict[str, Callable[[], torch.nn.Module]]:
    factory = {"device": device, "params_dtype": torch.bfloat16}
    return {
        "Linear": lambda: nc.Linear(FEATURES, FEATURES, **factory),
        "LayerNormLinear": lambda: nc.LayerNormLinear(FEATURES, FEATURES, **factory),
        "LayerNormMLP gelu": lambda: nc.LayerNormMLP(FEATURES, FEATURES, activation="gelu", **factory),
        "LayerNormMLP swiglu": lambda: nc.LayerNormMLP(
            FEATURES, FEATURES, activation="swiglu", normalization="RMSNorm", **factory
        ),
        "GroupedLinear": lambda: nc.GroupedLinear(GROUPS, FEATURES, FEATURES, **factory),
        "GroupedLinear, single parameter": lambda: nc.GroupedLinear(
            GROUPS, FEATURES, FEATURES, single_grouped_parameter=True, **factory
        ),
        "ops.Sequential MLP": lambda: pre_norm_mlp(device=device, dtype=torch.bfloat16),
    }


def steps(
    module: torch.nn.Module, forward: Callable[..., Tensor], recipe: nc.recipe.Recipe | None, device: str
) -> list[Tensor]:
    """Output and gradients of the third step."""
    splits = (torch.tensor(SPLITS, device=device),) if isinstance(module, nc.GroupedLinear) else ()
    made: list[Tensor] = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(TOKENS, FEATURES, device=device, dtype=torch.bfloat16).requires_grad_()
        module.zero_grad(set_to_none=True)
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            y = forward(x, *splits)
        y.backward(torch.randn_like(y))
        assert x.grad is not None
        made = [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
    return made


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        scale = b.float().abs().max().item() or 1.0  # zero for the weight of an empty group
        largest = max(largest, (a.float() - b.float()).abs().max().item() / scale)
    return largest


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    for name, build in modules(chosen.device).items():
        for recipe_name, make in RECIPES.items():
            if chosen.only not in f"{name}, {recipe_name}":
                continue
            torch.compiler.reset()
            torch.manual_seed(0)
            recipe = make(chosen.device != "cuda")
            eager, module = build(), build()
            module.load_state_dict(eager.state_dict())
            counter = CompileCounterWithBackend("inductor")
            start = time.perf_counter()
            compiled = steps(
                module, torch.compile(module, fullgraph=True, backend=counter), recipe, chosen.device
            )
            seconds = time.perf_counter() - start
            row: Row = {"module": name, "recipe": recipe_name}
            row["difference"] = f"{difference(compiled, steps(eager, eager, recipe, chosen.device)):.2g}"
            rows.append({**row, "graphs": counter.frame_count, "compile_s": round(seconds, 1)})
            print(row, flush=True)
    return rows


def main() -> None:
    chosen = parser(__doc__).parse_args()
    report("compile", measure(chosen), chosen)


if __name__ == "__main__":
    main()
