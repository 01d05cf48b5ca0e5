"""Scaled activations against PyTorch in fp64 and autograd, and against the unscaled ones."""

import pytest
import torch
from torch import Tensor

from narrowcast.reference import activation, scaled_activation

from .checks import DTYPES, assert_bitwise, assert_fresh, normal
from .test_activation import assert_close, expected


def width(name: str, columns: int) -> int:
    return columns // 2 if activation.ACTIVATIONS[name].gated else columns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu", "situ_glu", "srelu"])
def test_forward_and_backward_are_those_of_pytorch(name: str, dtype: torch.dtype) -> None:
    x, scale = normal((3, 7, 34), dtype), normal((3, 7), torch.float32, seed=1)
    grad = normal((3, 7, width(name, 34)), dtype, seed=2)
    exact, factor = x.double().requires_grad_(), scale.double().requires_grad_()
    y = expected(exact, name) * factor[..., None]
    y.backward(grad.double())
    assert exact.grad is not None and factor.grad is not None
    assert_close(scaled_activation.forward(x, scale, name), y.detach())
    dx, dscale = scaled_activation.backward(grad, x, scale, name)
    assert_close(dx, exact.grad)
    torch.testing.assert_close(dscale.double(), factor.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_a_scale_of_one_changes_nothing(name: str) -> None:
    x = normal((5, 600), torch.bfloat16)
    ones = torch.ones(5)
    y = scaled_activation.forward(x, ones, name)
    assert_bitwise(y, activation.forward(x, name))
    dx, dscale = scaled_activation.backward(y, x, ones, name)
    assert_bitwise(dx, activation.backward(y, x, name))
    assert_fresh([y, dx, dscale], [x, ones])


@pytest.mark.parametrize("shape", [(6,), (0, 4), (4, 0), (2, 1, 2)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x, scale = normal(shape, torch.float16), torch.ones(shape[:-1], dtype=torch.bfloat16)
    y = scaled_activation.forward(x, scale, "swiglu")
    dx, dscale = scaled_activation.backward(y, x, scale, "swiglu")
    assert y.shape == (*shape[:-1], shape[-1] // 2)
    assert (dx.shape, dscale.shape) == (x.shape, scale.shape)
    assert (dx.dtype, dscale.dtype) == (torch.float16, torch.bfloat16)


def test_the_result_is_rounded_once() -> None:
    x, scale = torch.tensor([[1.0, 1.0 + 2.0**-7]], dtype=torch.bfloat16), torch.tensor([1.0 + 2.0**-7])
    y = scaled_activation.forward(x, scale, "reglu")
    assert_bitwise(y, torch.tensor([[1.0 + 2.0**-6]], dtype=torch.bfloat16))
    x = torch.tensor([[1.0 + 2.0**-7, 1.0 + 2.0**-7]], dtype=torch.bfloat16)  # 1 + 2**-6 + 2**-14
    y = scaled_activation.forward(x, torch.tensor([1.0 + 2.0**-8 - 2.0**-15]), "reglu")
    once: Tensor = torch.tensor([[(1.0 + 2.0**-7) ** 2 * (1.0 + 2.0**-8 - 2.0**-15)]]).bfloat16()
    assert_bitwise(y, once)


def test_refuses() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(
        ValueError, match=r"scale of swiglu has shape \(2, 1\), expected one value per row, \(2,\)"
    ):
        scaled_activation.forward(x, torch.ones(2, 1), "swiglu")
    with pytest.raises(
        TypeError, match="scale of srelu must be float32, bfloat16 or float16, got torch.int64"
    ):
        scaled_activation.forward(x, torch.ones(2, dtype=torch.int64), "srelu")
    with pytest.raises(ValueError, match=r"gradient of swiglu has shape \(2, 4\), expected \(2, 2\)"):
        scaled_activation.backward(x, x, torch.ones(2), "swiglu")
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        scaled_activation.forward(x, torch.ones(2), "tanh")
