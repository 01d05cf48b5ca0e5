"""Activations times one scale per row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import assert_same, step
from ops_checks import check, make_inputs
from recipes import DEVICE, QUANTIZED

from narrowcast import ops
from narrowcast.functional import scaled_act, scaled_act_backward

from .contract import check_split_forward

UNSCALED = {
    "swiglu": (ops.ScaledSwiGLU, ops.SwiGLU),
    "clamped_swiglu": (ops.ScaledClampedQGeGLU, ops.ClampedSwiGLU),
    "situ_glu": (ops.ScaledSiTUGLU, ops.SiTUGLU),
    "srelu": (ops.ScaledSReLU, ops.SReLU),
}
OPTIONS: dict[str, dict[str, float]] = {
    "clamped_swiglu": {"limit": 0.5, "alpha": 1.25, "glu_linear_offset": 0.5},
    "situ_glu": {"beta1": 0.5, "beta2": 3.0},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", UNSCALED)
def test_is_the_activation_times_the_scale(name: str, dtype: torch.dtype) -> None:
    scaled, unscaled = (kind(**OPTIONS.get(name, {})) for kind in UNSCALED[name])
    x, scale = make_inputs([(3, 7, 34), (3, 7)], dtype=dtype)
    wide, factor = (t.detach().float().requires_grad_() for t in (x, scale))
    exact = unscaled(wide) * factor[..., None]
    out = scaled(x, scale)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, scale), grad)
    theirs = torch.autograd.grad(exact, (wide, factor), grad.float())
    for a, b in zip((out, *ours), (exact, *theirs), strict=True):
        assert a.dtype == dtype
        tolerance = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("name", UNSCALED)
def test_is_the_operator(name: str) -> None:
    op = UNSCALED[name][0]()
    x, scale = make_inputs([(5, 34), (5,)])
    scale = scale.detach().float().requires_grad_()
    out = op(x, scale)
    ours = torch.autograd.grad(out, (x, scale), torch.ones_like(out))
    with torch.no_grad():
        assert torch.equal(out, scaled_act(x, scale, name, list(op.settings.parameters)))
        theirs = scaled_act_backward(torch.ones_like(out), x, scale, name, list(op.settings.parameters))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[1].dtype == torch.float32


@pytest.mark.parametrize("name", UNSCALED)
def test_promises(name: str) -> None:
    check(UNSCALED[name][0], [(5, 3, 34), (5, 3)])
    check_split_forward(UNSCALED[name][0](), *make_inputs([(5, 34), (5,)]))


def test_interleaved_channels() -> None:
    x, scale = make_inputs([(5, 24), (5,)])
    moved = ops.deinterleave_glu_tensor(x.detach().t(), 4).t().contiguous().requires_grad_()
    ours = step(ops.ScaledSwiGLU(glu_interleave_size=4), [x, scale])
    theirs = step(ops.ScaledSwiGLU(), [moved, scale])
    ours["d input0"] = ops.deinterleave_glu_tensor(ours["d input0"].t(), 4).t()
    assert_same(ours, theirs)
    check(lambda: ops.ScaledSiTUGLU(glu_interleave_size=4), [(5, 24), (5,)])


def between_linears() -> ops.Sequential:
    torch.manual_seed(3)
    kwargs: Any = {"device": DEVICE, "dtype": torch.bfloat16}
    return ops.Sequential(
        ops.BasicLinear(40, 48, **kwargs), ops.ScaledSwiGLU(), ops.BasicLinear(24, 40, **kwargs)
    )


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_quantizing_for_the_neighbours_changes_no_bit(recipe: str) -> None:
    sequence, separate = between_linears(), between_linears()
    first, scaled, second = separate
    for seed in range(2):
        inputs = make_inputs([(4, 8, 40), (4, 8)], seed=seed)
        ours = step(sequence, inputs, QUANTIZED[recipe])
        assert_same(
            ours, step(separate, inputs, QUANTIZED[recipe], lambda x, scale: second(scaled(first(x), scale)))
        )


def test_promises_between_linear_layers() -> None:
    check(between_linears, [(4, 8, 40), (4, 8)], QUANTIZED["delayed"])


def test_refuses() -> None:
    x = torch.ones(2, 6, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"scales have shape \(2, 1\); give one per row of the input, \(2,\)"
    ):
        ops.ScaledSwiGLU()(x, x[:, :1])
    with pytest.raises(ValueError, match="got 0 extra inputs, the operations take 1"):
        ops.ScaledSReLU()(x)
    with pytest.raises(
        ValueError, match="activation_recompute_in_mlp=True is not supported by ScaledClamped"
    ):
        ops.ScaledClampedQGeGLU(activation_recompute_in_mlp=True)
    with pytest.raises(ValueError, match="beta1 is -2"):
        ops.ScaledSiTUGLU(beta1=-2)
    with pytest.raises(ValueError, match="glu_interleave_size is 0"):
        ops.ScaledSwiGLU(glu_interleave_size=0)
    assert ops.ScaledSReLU(activation_recompute_in_mlp=True).activation_recompute_in_mlp
