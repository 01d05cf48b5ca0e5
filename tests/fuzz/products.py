"""Layers against float64 products of their quantized operands, forward and both gradients.

The operands are quantized once more with the recipe's quantizers from outside, decoded and multiplied in float64. What
a GEMM may add is bounded: a share of the sum of absolute products, and the rounding of the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc

from .draw import Draw

EMULATED = 2.0**-16  # of the summed magnitudes: fp32 accumulation in any order
NATIVE = 2.0**-6  # Hopper's tensor cores keep about 14 bits of FP8 sums, and drop them term by term


def case(draw: Draw) -> dict[str, float]:
    kind = draw.pick("layer", ("Linear", "Linear", "LayerNormLinear", "GroupedLinear"))
    recipe = draw.recipe(with_none=True, stochastic=kind != "GroupedLinear")
    dtype, k, n = draw.dtype(), draw.size("k"), draw.size("n")
    splits = [draw.size("rows")]
    if kind == "GroupedLinear":
        sizes = (0, 1, 17, 32, 128, draw.random.randint(1, 130))
        splits = [draw.random.choice(sizes) for _ in range(draw.random.randint(1, 4))]
        splits[-1] = max(splits[-1], 1)
        draw.note("splits", splits)
    x, dy = draw.values("x", (sum(splits), k), dtype), draw.values("dy", (sum(splits), n), dtype)
    bias = draw.chance("bias")
    try:
        return {"share of the bound": _steps(draw, kind, (x, dy), splits, recipe, bias)}
    except RuntimeError as error:
        if recipe is None or recipe.emulate or "no native" not in str(error):
            raise
    draw.note("emulated", True)
    return {"share of the bound": _steps(draw, kind, (x, dy), splits, replace(recipe, emulate=True), bias)}


def _steps(
    draw: Draw, kind: str, tensors: tuple[Tensor, Tensor], splits: list[int], recipe: Any, bias: bool
) -> float:
    """The largest error of two steps of a new layer; under delayed scaling the second has other scales."""
    x, dy = tensors
    place = {"device": draw.device, "dtype": x.dtype, "recipe": recipe, "bias": bias}
    if kind == "GroupedLinear":
        module: nn.Module = nc.GroupedLinear(len(splits), x.shape[-1], dy.shape[-1], **place)
    elif kind == "Linear":
        module = nc.Linear(x.shape[-1], dy.shape[-1], **place)
    else:
        module = nc.LayerNormLinear(x.shape[-1], dy.shape[-1], return_layernorm_output=True, **place)
    share = EMULATED if draw.device == "cpu" or (recipe is not None and recipe.emulate) else NATIVE
    worst = 0.0
    for i in range(2):
        worst = max(worst, _step(module, x, dy, splits, recipe, share, draw.seed + i))
        if recipe is not None and recipe.delayed():
            nc.renew_delayed_scaling(module)
    return worst


def _step(
    module: nn.Module, x: Tensor, dy: Tensor, splits: list[int], recipe: Any, share: float, seed: int
) -> float:
    leaf = x.detach().requires_grad_(True)
    y, multiplied = _forward(module, leaf, splits)
    weights = [p for name, p in module.named_parameters() if "weight" in name and p.dim() == 2]
    biases = [p for name, p in module.named_parameters() if name.startswith("bias")]
    torch.manual_seed(seed)
    found = torch.autograd.grad(y, [leaf, *weights, *biases], dy)
    torch.manual_seed(seed)
    worst, start = 0.0, 0
    for group, size in enumerate(splits):
        at = slice(start, start + size)
        start += size
        ours = {"y": y.detach()[at], "dx": found[0][at], "dw": found[1 + group]}
        if isinstance(module, nc.LayerNormLinear):
            del ours["dx"]  # the gradient of the norm comes after it
        if size == 0:
            assert not ours["dw"].any(), f"group {group} has no rows, and a gradient"
            continue
        pairs = _operands(module, recipe, multiplied[at], weights[group], dy[at], group, len(splits))
        for name, ours_of in ours.items():
            shift = biases[group].detach() if biases and name == "y" else None
            rotated = name == "dw" and recipe is not None and recipe.nvfp4()
            worst = max(worst, _share_of_bound(name, ours_of, *pairs[name], shift, share, rotated))
        if biases:
            ones = torch.ones(1, size, dtype=torch.float64, device=x.device)
            exact = (ones, dy[at].double().t())
            worst = max(
                worst, _share_of_bound("db", found[1 + len(weights) + group][None], *exact, None, EMULATED)
            )
    return worst


def _share_of_bound(
    name: str,
    ours: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    share: float,
    rotated: bool = False,
) -> float:
    """The largest error in units of what is allowed; beyond 1 it raises."""
    exact, summed = left @ right.t(), left.abs() @ right.abs().t()
    if rotated:  # the GEMM sums in another basis: what bounds the absolute products in every one
        summed = left.norm(dim=1)[:, None] * right.norm(dim=1)
    if bias is not None:
        exact, summed = exact + bias.double(), summed + bias.double().abs()
    assert ours.shape == exact.shape, f"{name} has shape {tuple(ours.shape)}, not {tuple(exact.shape)}"
    info = torch.finfo(ours.dtype)
    # A native GEMM rounds before the bias is added, and results at the edge of the dtype may fall off either way.
    allowed = share * summed + info.eps * (summed if bias is not None else exact.abs()) + info.smallest_normal
    fits = exact.abs() + allowed < info.max
    errors = torch.where(fits, (ours.double() - exact).abs() / allowed, 0.0)
    worst = float(errors.max()) if errors.numel() else 0.0
    assert worst <= 1.0, f"{name} is off by {worst:.2f} of what is allowed"
    return worst


def _forward(module: nn.Module, x: Tensor, splits: list[int]) -> tuple[Tensor, Tensor]:
    """The output, and what the linear layer inside multiplied."""
    if isinstance(module, nc.GroupedLinear):
        return module(x, splits), x.detach()
    if isinstance(module, nc.Linear):
        return module(x), x.detach()
    y, normed = module(x)
    return y, normed.detach()


def _operands(
    module: nn.Module, recipe: Any, x: Tensor, w: Tensor, dy: Tensor, group: int, groups: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """What fprop, dgrad and wgrad multiply as ``left @ right.T``, in float64, quantized from outside."""
    if recipe is None:
        x, w, dy = x.double(), w.detach().double(), dy.double()
        return {"y": (x, w), "dx": (dy, w.t()), "dw": (dy.t(), x.t())}
    halves = []
    for name, tensor in (("input", x), ("weight", w.detach()), ("grad_output", dy)):
        direction = "backward" if name == "grad_output" else "forward"
        if not recipe.delayed():
            quantizer = recipe.resolve(direction, [nc.QuantizerRole("linear", name, "")])[0][0]
        elif name == "weight":
            quantizer = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
        else:
            scale = module.scale.unflatten(0, (4, -1))[2 if direction == "backward" else 0, group].clone()
            quantizer = _delayed_quantizer(scale, direction, recipe, tensor)
        halves.append(_both(quantizer, tensor))
    (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = halves
    return {"y": (x_row, w_row), "dx": (dy_row, w_col[: w.shape[0]].t()), "dw": (dy_col.t(), x_col.t())}


def _delayed_quantizer(scale: Tensor, direction: str, recipe: Any, tensor: Tensor) -> nc.Quantizer:
    """The quantizer of activations or gradients, whose scale is 0 as long as nothing was seen."""
    backward = direction == "backward"
    element = nc.DType.kFloat8E5M2 if backward else nc.DType.kFloat8E4M3
    if not scale:
        largest = (57344.0 if backward else 448.0) / 2 ** recipe.delayed_scaling().margin
        scale = torch.full_like(scale, largest) / tensor.abs().max().float() if tensor.any() else scale + 1
    return nc.Float8Quantizer(scale.view(1), torch.zeros(1, device=tensor.device), element)


def _both(quantizer: nc.Quantizer, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Both directions decoded. Rows are padded to whole groups: a rotation spreads over all of a group, and the GEMM
    reads what it left in the padding."""
    rows = tensor.shape[0]
    padded = F.pad(tensor, (0, 0, 0, -rows % 16)) if isinstance(quantizer, nc.NVFP4Quantizer) else tensor
    quantized = quantizer.replace(rowwise_usage=True, columnwise_usage=True).quantize(padded.contiguous())
    row = quantized.dequantize(dtype=torch.float32).double()[:rows]
    quantized.update_usage(rowwise_usage=False)
    return row, quantized.dequantize(dtype=torch.float32).double()
