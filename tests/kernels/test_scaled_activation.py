"""Kernels of scaled activations against the reference."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise

from narrowcast import kernels
from narrowcast.reference import activation
from narrowcast.reference import scaled_activation as reference

from .checks import DTYPES, KINDS, SHAPES_2D, compare, grid, make

NAMES = ("srelu", "swiglu", "clamped_swiglu", "situ_glu")


def check(
    shape, kind, dtype, device, name: str, scale_dtype: torch.dtype = torch.float32, **params: float
) -> None:
    x = make(kind, shape, dtype)
    scale = make("normal", shape[:-1], scale_dtype, seed=1)
    compare(
        lambda x: [kernels.scaled_activation.forward(x, scale.to(device), name, **params)],
        lambda x: [reference.forward(x, scale, name, **params)],
        x,
        device,
        f"scaled {name} {kind}",
    )
    width = shape[-1] // 2 if activation.ACTIVATIONS[name].gated else shape[-1]
    grad = make(kind, (*shape[:-1], width), dtype, seed=2)
    compare(
        lambda x: [*kernels.scaled_activation.backward(grad.to(device), x, scale.to(device), name, **params)],
        lambda x: [*reference.backward(grad, x, scale, name, **params)],
        x,
        device,
        f"gradients of scaled {name} {kind}",
    )


@pytest.mark.parametrize("shape", [(1, 2), (7, 6), (3, 1, 130), (5, 2050), (0, 4), (4, 0)], ids=str)
def test_shapes(shape: tuple[int, ...], device: torch.device) -> None:
    for name, dtype in zip(NAMES, (*DTYPES, torch.bfloat16)):
        check(shape, "normal", dtype, device, name, torch.bfloat16)


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kinds(dtype: torch.dtype, name: str, kind: str, device: torch.device) -> None:
    check((5, 66), kind, dtype, device, name)


def test_parameters_and_strides(device: torch.device) -> None:
    check((6, 20), "normal", torch.float32, device, "situ_glu", beta1=0.3, beta2=1e-3)
    x, scale = make("normal", (20, 6), torch.float16).t(), make("normal", (6, 2), torch.float32, 1)[:, 0]
    y = reference.forward(x, scale, "swiglu")
    moved, moved_scale = x.t().contiguous().to(device).t(), scale.to(device)
    assert_bitwise(kernels.scaled_activation.forward(moved, moved_scale, "swiglu"), y)
    ours = kernels.scaled_activation.backward(y.to(device), moved, moved_scale, "swiglu")
    for a, b in zip(ours, reference.backward(y, x, scale, "swiglu"), strict=True):
        assert_bitwise(a, b)


def test_refuses(device: torch.device) -> None:
    x = torch.ones(2, 4, device=device)
    with pytest.raises(
        ValueError, match=r"scale of swiglu has shape \(2, 1\), expected one value per row, \(2,\)"
    ):
        kernels.scaled_activation.forward(x, x[:, :1], "swiglu")
    with pytest.raises(TypeError, match="scale of srelu must be torch.bfloat16"):
        kernels.scaled_activation.forward(x, x[:, 0].double(), "srelu")
    with pytest.raises(ValueError, match=r"gradient of swiglu has shape \(2, 4\), expected \(2, 2\)"):
        kernels.scaled_activation.backward(x, x, x[:, 0], "swiglu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_every_shape_and_kind(name: str, device: torch.device) -> None:
    gated = activation.ACTIVATIONS[name].gated
    for shape, kind, dtype in grid(SHAPES_2D):
        check((*shape[:-1], 2 * shape[-1]) if gated else shape, kind, dtype, device, name)
