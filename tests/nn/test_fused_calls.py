"""Modules called as one: the bits of the fused modules, and when they run one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn import norm_linear, norm_mlp

PLACE: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
RECIPES = ["current", "delayed", "block", "mxfp8"]


def parts(
    recipe: str | None, norm: str = "RMSNorm", bias: bool = False
) -> tuple[nn.Module, nc.Linear, nc.Linear]:
    torch.manual_seed(1)
    first = getattr(nn, norm)(96, eps=1e-5, **PLACE)
    nn.init.uniform_(first.weight, 0.5, 1.5)
    layers = nc.Linear(96, 224, bias=bias, **PLACE), nc.Linear(112, 96, bias=bias, **PLACE)
    nc.set_recipe(nn.ModuleList(layers), {"": recipe})
    return first, *layers


def gradients(out: Any, x: Tensor, *modules: nn.Module) -> list[Tensor]:
    """Return outputs, and gradients of input and parameters."""
    outputs = out if isinstance(out, tuple) else (out,)
    read = [x, *(p for module in modules for p in module.parameters())]
    given = [torch.randn_like(y) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, read, given)]


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(7, 9, 96, dtype=torch.bfloat16, requires_grad=True), torch.randn(
        7, 9, 96, dtype=torch.bfloat16
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("norm, bias", [("RMSNorm", False), ("LayerNorm", True)])
def test_the_bits_are_those_of_the_fused_modules(recipe: str, norm: str, bias: bool) -> None:
    first, up, down = parts(recipe, norm, bias)
    options = {"normalization": norm, "bias": bias, "recipe": recipe, **PLACE}
    linear = nc.LayerNormLinear(96, 224, **options)
    mlp = nc.LayerNormMLP(96, 112, activation="swiglu", **options)
    for module, other in ((linear, {"": up}), (mlp, {"fc1_": up, "fc2_": down})):
        given = {
            f"{prefix}{name}": p for prefix, layer in other.items() for name, p in layer.named_parameters()
        }
        given |= {f"layer_norm_{name}": p for name, p in first.named_parameters()}
        module.load_state_dict({**module.state_dict(), **given})
    x, residual = inputs()
    with torch.random.fork_rng():
        ours = gradients(norm_linear(first, up, x), x, first, up)
    with torch.random.fork_rng():
        theirs = gradients(linear(x), x, linear)
    for one in theirs:
        assert any(torch.equal(one, other) for other in ours)
    first, up, down = parts(recipe, norm, bias)  # with new delayed state
    with torch.random.fork_rng():
        ours = gradients(norm_mlp(first, up, down, x, residual=residual), x, first, up, down)
    with torch.random.fork_rng():
        theirs = gradients(mlp(x, residual=residual), x, mlp)
    for one in theirs:
        assert any(torch.equal(one, other) for other in ours)


@pytest.mark.parametrize("recipe", RECIPES)
def test_they_compute_what_the_modules_do_one_after_the_other(recipe: str) -> None:
    x, residual = inputs()
    first, up, down = parts(recipe)
    with torch.random.fork_rng():
        out, total = norm_mlp(first, up, down, x, residual=residual)
        ours = gradients(out + total, x, first, up, down)
    first, up, down = parts(recipe)
    with torch.random.fork_rng():
        gate, value = up(first(x + residual)).chunk(2, -1)
        theirs = gradients(down(nn.functional.silu(gate) * value) + x + residual, x, first, up, down)
    for one, other in zip(ours, theirs, strict=True):
        one, other = one.float(), other.float()
        assert (one - other).norm() < 0.08 * other.norm()


def test_without_a_recipe_and_with_hooks_the_modules_are_called() -> None:
    x, residual = inputs()
    first, up, down = parts(None)
    assert torch.equal(norm_linear(first, up, x), up(first(x)))
    _, total = norm_mlp(first, up, down, x, residual=residual)
    assert torch.equal(total, x + residual)
    first, up, down = parts("current")
    seen: list[nn.Module] = []
    for module in (first, down):
        handle = module.register_forward_hook(lambda own, _, result: seen.append(own))
        norm_mlp(first, up, down, x, residual=residual)
        assert seen == [module]
        handle.remove()
        seen.clear()
    nc.set_recipe(down, "block")  # of another recipe
    down.register_forward_hook(lambda own, _, result: seen.append(own))
    norm_mlp(first, up, down, x, residual=residual)
    assert seen == [down]
    plain = nn.Linear(96, 8, bias=False, **PLACE)
    assert torch.equal(norm_linear(first, plain, x), plain(first(x)))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which casts the norm's output, not its input
        wide = x.float()
        assert torch.equal(norm_linear(first.float(), up, wide), up(first(wide)))


class Loud(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


class Renamed(nc.RMSNorm):
    pass


@pytest.mark.parametrize("kind", ["of the class", "of the norm", "of the layer", "of its base"])
def test_a_forward_of_its_own_is_called(kind: str) -> None:
    """Of a subclass or put on an instance, as by accelerate; also in code compiled before."""
    x, residual = inputs()
    first, up, down = parts("current")
    if kind in ("of the class", "of its base"):
        first = (Loud if kind == "of the class" else Renamed)(96, eps=1e-5, **PLACE)
    called: list[Any] = [norm_linear]
    if kind == "of the norm":
        called.append(torch.compile(norm_linear, backend="eager", fullgraph=True))
        called[-1](first, up, x)
    patched = {"of the norm": first, "of the layer": up}.get(kind)
    if patched is not None:
        forward: Any = patched.forward
        patched.forward = lambda x, **options: forward(x, **options) * 3  # type: ignore[method-assign]
    expected = up(first(x))
    for call in called:
        assert (call(first, up, x) - expected).norm() < 0.02 * expected.norm()
    out, total = norm_mlp(first, up, down, x, residual=residual)
    gate, value = up(first(total)).chunk(2, -1)
    expected = down(nn.functional.silu(gate) * value)
    assert (out - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_default_eps_is_pytorchs(dtype: torch.dtype) -> None:
    """That of fp32, in which the norm computes; the input's would shrink these inputs to a hundredth."""
    place: dict[str, Any] = {"device": "cpu", "dtype": dtype}
    norm, layer = nn.RMSNorm(96, **place), nc.Linear(96, 40, bias=False, recipe="current", **place)
    x = torch.full((3, 96), 1e-3, **place)
    torch.testing.assert_close(norm_linear(norm, layer, x), layer(norm(x)), rtol=0.01, atol=1e-3)
