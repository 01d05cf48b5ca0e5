"""An activation as a differentiable function: once, and not inside a transform."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from narrowcast.autograd import ActivationSettings, activate

PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "srelu": lambda x: F.relu(x).square(),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("name", PLAIN)
def test_is_what_pytorch_computes(name: str) -> None:
    ours, theirs = (torch.linspace(-4, 4, 96).view(3, 2, 16).requires_grad_() for _ in range(2))
    y, expected = activate(ours, ActivationSettings(name, ())), PLAIN[name](theirs)
    torch.testing.assert_close(y, expected)
    for result in (y, expected):
        result.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_no_second_derivative_and_no_transform() -> None:
    x, settings = torch.randn(4, 8, requires_grad=True), ActivationSettings("gelu", ())
    (grad,) = torch.autograd.grad(activate(x, settings).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match="gelu is inside a transform"):
        torch.func.vmap(lambda row: activate(row, settings))(x)
