"""Options of the layers change where things are kept and when they are computed, and no bit of what is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc

from .draw import Draw, assert_same, gradients

Make = Callable[..., nn.Module]
SEED = 7


def case(draw: Draw) -> dict[str, float]:
    recipe, dtype = draw.recipe(with_none=True), draw.dtype()
    kind = draw.pick("layer", ("Linear", "LayerNormLinear", "LayerNormMLP"))
    features, n, rows = draw.size("features", 130), draw.size("n", 130), draw.size("rows", 130)
    options: dict[str, Any] = {
        "device": draw.device,
        "dtype": dtype,
        "recipe": recipe,
        "bias": draw.chance("bias"),
    }
    state: dict[str, Tensor] = {}

    def make(**more: Any) -> nn.Module:
        module = getattr(nc, kind)(features, n, **options, **more)
        if state:
            module.load_state_dict(state)
        else:
            state.update({name: tensor.clone() for name, tensor in module.state_dict().items()})
        return module

    make()
    # Contiguous: PyTorch's own products in high precision take other ways for other strides.
    x = draw.values("x", (rows, features), dtype).contiguous()
    dy = draw.values("dy", (rows, features if kind == "LayerNormMLP" else n), dtype).contiguous()
    checks = [CHECKS[name] for name in draw.pick("checks", BY_LAYER[kind])]
    for check in checks:
        check(draw, make, x, dy)
    return {}


def _twice(step: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Two steps, so that delayed scaling moves."""
    return [*step(), *step()]


def main_grad(draw: Draw, make: Make, x: Tensor, dy: Tensor) -> None:
    """Gradients added to fp32 buffers: no rounding to the weight's dtype between the product and the sum."""
    plain, fused = make(), make(fuse_wgrad_accumulation=True)
    for parameter in fused.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device=draw.device)  # type: ignore[attr-defined]
    expected = gradients(plain, x, dy, seed=SEED)
    torch.manual_seed(SEED)
    leaf = x.detach().requires_grad_(True)
    y = fused(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    assert_same([y.detach(), leaf.grad], expected[:2], "with main_grad")
    for parameter, gradient in zip(fused.parameters(), expected[2:], strict=True):
        if parameter.dim() == 2:
            info, fits = torch.finfo(gradient.dtype), gradient.isfinite()  # in fp16 some are not
            mine, theirs = parameter.main_grad[fits].double(), gradient[fits].double()
            allowed = (2 * info.eps + 1e-6) * theirs.norm() + info.smallest_normal * mine.numel() ** 0.5
            assert (mine - theirs).norm() <= allowed, "main_grad is no gradient"


def delayed_wgrad(draw: Draw, make: Make, x: Tensor, dy: Tensor) -> None:
    """Weight gradients computed when ``backward_dw`` asks for them, two backwards behind one another."""
    plain, later = make(), make(delay_wgrad_compute=True)
    expected = [gradients(plain, x, dy, seed=SEED) for _ in range(2)]
    leaf = x.detach().requires_grad_(True)
    for step in range(2):
        later.zero_grad()
        torch.manual_seed(SEED)
        y = later(leaf)
        leaf.grad = None
        y.backward(dy)
        later.backward_dw()  # type: ignore[operator]
        found = [y.detach(), leaf.grad, *(p.grad for p in later.parameters())]
        if draw.quantized:
            assert_same(found, expected[step], f"delayed weight gradients, step {step}")
            continue
        for ours, theirs in zip(
            found, expected[step], strict=True
        ):  # PyTorch's own product, in another order of sums
            assert ours is not None
            error = (ours.double() - theirs.double()).norm()
            fits = not theirs.isfinite().all() or error <= torch.finfo(x.dtype).eps * theirs.double().norm()
            assert fits, f"delayed weight gradients, step {step}, in high precision are off by {error}"


def microbatches(draw: Draw, make: Make, x: Tensor, dy: Tensor) -> None:
    """A weight that is quantized for the first microbatch and kept for the next."""
    plain, kept = make(), make()
    for first in (True, False, False, True):
        expected = gradients(plain, x, dy, seed=SEED)
        found = gradients(kept, x, dy, first, seed=SEED)
        if _delayed(kept) and not first:
            return  # a kept weight keeps its scale
        assert_same(found, expected, f"is_first_microbatch={first}")


def original_input(draw: Draw, make: Make, x: Tensor, dy: Tensor) -> None:
    plain = make()
    gradients(plain, x, dy, seed=SEED)
    if _delayed(plain):
        return  # refused
    assert_same(
        gradients(make(save_original_input=True), x, dy, seed=SEED),
        gradients(plain, x, dy, seed=SEED),
        "save_original_input",
    )


def checkpoint(draw: Draw, make: Make, x: Tensor, dy: Tensor) -> None:
    plain, again = make(), make(checkpoint=True)
    expected = _twice(lambda: gradients(plain, x, dy, seed=SEED))
    assert_same(_twice(lambda: gradients(again, x, dy, seed=SEED)), expected, "checkpoint=True")


def own_recipe_or_autocast(draw: Draw, make: Make, x: Tensor, dy: Tensor) -> None:
    """A recipe of the layer, of an autocast around it, and of ``set_recipe``."""
    own = make()
    recipe = own.recipe  # type: ignore[union-attr]
    others = {name: copy.deepcopy(own) for name in ("autocast", "set_recipe")}
    expected = _twice(lambda: gradients(own, x, dy, seed=SEED))
    nc.set_recipe(others["autocast"], None)

    def under_autocast() -> list[Tensor]:
        torch.manual_seed(SEED)
        leaf = x.detach().requires_grad_(True)
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            y = others["autocast"](leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *others["autocast"].parameters()], dy)]

    assert_same(_twice(under_autocast), expected, "under an autocast")
    nc.set_recipe(others["set_recipe"], recipe)
    assert_same(
        _twice(lambda: gradients(others["set_recipe"], x, dy, seed=SEED)), expected, "after set_recipe"
    )


def _delayed(module: nn.Module) -> bool:
    return any("scale" in name for name, _ in module.named_buffers())


CHECKS: dict[str, Callable[[Draw, Make, Tensor, Tensor], None]] = {
    check.__name__: check
    for check in (main_grad, delayed_wgrad, microbatches, original_input, checkpoint, own_recipe_or_autocast)
}
COMMON = ("main_grad", "microbatches", "own_recipe_or_autocast")
BY_LAYER: dict[str, tuple[tuple[str, ...], ...]] = {
    "Linear": (COMMON, ("delayed_wgrad", "original_input")),
    "LayerNormLinear": (COMMON, ("delayed_wgrad",)),
    "LayerNormMLP": (COMMON, ("delayed_wgrad", "checkpoint")),
}
