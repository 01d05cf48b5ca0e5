"""Activations against PyTorch in fp64, their gradients against autograd, and the layout of gated ones."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowcast.reference import activation

from .checks import DTYPES, EMPTY_SHAPES, assert_bitwise, assert_fresh, awkward_layouts, normal

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda a: F.gelu(a, approximate="tanh"),
    "qgelu": lambda a: a * torch.sigmoid(1.702 * a),
    "relu": F.relu,
    "srelu": lambda a: F.relu(a).square(),
    "silu": F.silu,
    "glu": torch.sigmoid,
}
GATE_OF = {
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "glu": "glu",
}
PARAMS: dict[str, list[dict[str, float]]] = {
    "clamped_swiglu": [{}, {"limit": 1.5}, {"limit": 0.75, "alpha": 2.0, "glu_linear_offset": 0.25}],
    "situ_glu": [{}, {"beta1": 0.5}, {"beta1": 3.3, "beta2": 0.7}],
}


def clamped_swiglu(
    a: Tensor, b: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Tensor:
    # The gradient of Tensor.clamp at the limit depends on the release of PyTorch.
    a = torch.where(a > limit, limit, a)
    b = torch.where(b.abs() > limit, b.sign() * limit, b)
    return a * torch.sigmoid(alpha * a) * (b + glu_linear_offset)


def situ_glu(a: Tensor, b: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def expected(x: Tensor, name: str, **params: float) -> Tensor:
    """The definition, in the precision of ``x``."""
    if name in GATES and name not in GATE_OF:
        return GATES[name](x)
    a, b = x.chunk(2, dim=-1)
    if name in PARAMS:
        return {"clamped_swiglu": clamped_swiglu, "situ_glu": situ_glu}[name](a, b, **params)
    return GATES[GATE_OF[name]](a) * b


def assert_close(actual: Tensor, reference: Tensor) -> None:
    """Within the sigmoid's error and a rounding to the dtype."""
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), reference, rtol=max(eps, 2e-6), atol=1e-6)


def test_sigmoid_is_within_its_stated_error() -> None:
    x = torch.cat((torch.linspace(-86.0, 86.0, 400_001), torch.linspace(-1e-3, 1e-3, 1001)))
    exact = torch.sigmoid(x.double())
    error = (activation.sigmoid(x).double() - exact).abs() / exact
    assert (error <= (0.7 * x.double().abs() + 3) * 2.0**-23).all()


def test_sigmoid_of_special_values() -> None:
    x = torch.tensor([0.0, -0.0, math.inf, 3e38, -3e38, -math.inf, math.nan, 1e-40])
    assert_bitwise(
        activation.sigmoid(x)[[0, 1, 2, 3, 4, 5, 7]],
        torch.tensor([0.5, 0.5, 1.0, 1.0, 2.0**-125, 2.0**-125, 0.5]),
    )
    assert activation.sigmoid(x)[6].isnan()


def test_tanh_is_within_its_stated_error() -> None:
    x = torch.cat([torch.linspace(-width, width, 100_001) for width in (42.5, 1.0, 1e-3)])
    x = torch.cat((x, 0.625 + torch.arange(-500, 500) * 2.0**-24))
    x = x[x != 0.0]
    value, slope = activation.tanh(x)
    wide = x.double()
    assert ((value - wide.tanh()).abs() <= wide.tanh().abs() * (2.5 * 2.0**-23)).all()
    exact = wide.cosh().square().reciprocal()
    assert ((slope - exact).abs() <= exact * (1.4 * wide.abs() + 6) * 2.0**-23).all()
    assert_bitwise(activation.tanh(-x)[0], -value)


def test_tanh_of_special_values() -> None:
    value, slope = activation.tanh(torch.tensor([0.0, math.inf, -math.inf, 3e38, 1e-40, math.nan]))
    assert_bitwise(value[:5], torch.tensor([0.0, 1.0, -1.0, 1.0, 1e-40]))
    assert slope[0] == 1.0 and (slope[1:4] < 1e-36).all()
    assert value[5].isnan() and slope[5].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_forward_and_backward_are_those_of_pytorch(name: str, dtype: torch.dtype) -> None:
    x = normal((37, 64), dtype, std=2.0)
    for params in PARAMS.get(name, [{}]):
        exact = x.double().requires_grad_()
        y = expected(exact, name, **params)
        grad = normal(y.shape, dtype, seed=1)
        y.backward(grad.double())
        assert exact.grad is not None
        assert_close(activation.forward(x, name, **params), y.detach())
        assert_close(activation.backward(grad, x, name, **params), exact.grad)


@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_far_out(name: str) -> None:
    """No overflow where the function is finite; NaN stays NaN."""
    x = torch.tensor([[1e19, 30.0], [-1e19, 1.0], [-200.0, 1.0], [200.0, 2.0]])
    grad = torch.ones_like(activation.forward(x, name))
    assert activation.backward(grad, x, name).isnan().sum() == 0
    nan = torch.full((3, 2), math.nan)
    assert activation.forward(nan, name).isnan().all()


def test_decay() -> None:
    for name in ("gelu", "qgelu", "silu"):
        y = activation.forward(torch.tensor([-100.0, -1e6]), name)
        assert (y.abs() < 1e-30).all()


def test_clamped_values_have_no_gradient() -> None:
    x = torch.tensor([[3.0, 1.0, 0.5, -3.0, 3.0, 0.5]])  # gates, then values; limit 2
    dx = activation.backward(torch.ones(1, 3), x, "clamped_swiglu", limit=2.0)
    assert (dx == 0.0).tolist() == [[True, False, False, True, True, False]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_limit_keep_their_gradient(dtype: torch.dtype) -> None:
    """On every release of PyTorch, as in Transformer Engine; the next value beyond has none."""
    limit = torch.tensor(7.0, dtype=dtype)
    beyond = torch.nextafter(limit, torch.tensor(math.inf, dtype=dtype))
    a = torch.stack([limit, beyond, -limit, -beyond, limit, limit])
    b = torch.stack([limit, limit, -limit, -limit, beyond, -beyond])
    x = torch.cat((a, b))[None]
    da, db = activation.backward(torch.ones(1, 6, dtype=dtype), x, "clamped_swiglu").chunk(2, dim=-1)
    assert (da != 0.0).tolist() == [[True, False, True, True, True, True]]
    assert (db != 0.0).tolist() == [[True, True, True, True, False, False]]
    exact = x.double().requires_grad_()
    expected(exact, "clamped_swiglu").sum().backward()
    assert exact.grad is not None
    assert_close(torch.cat((da, db), dim=-1), exact.grad)


def test_gate_is_the_first_half() -> None:
    x = torch.tensor([[-1.0, 2.0, 3.0, 5.0]])
    assert_bitwise(activation.forward(x, "reglu"), torch.tensor([[0.0, 10.0]]))
    assert_bitwise(activation.backward(torch.ones(1, 2), x, "reglu"), torch.tensor([[0.0, 5.0, 0.0, 2.0]]))


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_shapes_strides_and_fresh_memory(name: str) -> None:
    gated = activation.ACTIVATIONS[name].gated
    for shape in [(6,), (1, 2), (3, 1, 4), (2, 3, 50), *(s for s in EMPTY_SHAPES if s[-1] % 2 == 0)]:
        x = normal(shape, torch.bfloat16)
        y = activation.forward(x, name)
        assert y.shape == (*shape[:-1], shape[-1] // 2 if gated else shape[-1])
        dx = activation.backward(y, x, name)
        assert dx.shape == shape
        assert_fresh([y, dx], [x])
    x = normal((6, 10), torch.bfloat16)
    for layout, strided in awkward_layouts(x).items():
        assert_bitwise(activation.forward(strided, name), activation.forward(x, name), layout)


def test_relu_makes_a_copy() -> None:
    x = torch.rand(4, 4) + 1.0
    assert_fresh([activation.forward(x, "relu")], [x])


def test_traces() -> None:
    with FakeTensorMode():
        y = activation.forward(torch.empty(3, 8, dtype=torch.float16), "swiglu")
    assert (y.shape, y.dtype) == ((3, 4), torch.float16)


def test_refuses() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="activation is 'tanh'; use one of 'gelu', 'qgelu'"):
        activation.forward(x, "tanh")
    with pytest.raises(ValueError, match="swiglu has no parameter 'limit'; it takes none"):
        activation.forward(x, "swiglu", limit=1.0)
    with pytest.raises(ValueError, match="no parameter 'clip'; it takes limit, alpha, glu_linear_offset"):
        activation.forward(x, "clamped_swiglu", clip=1.0)
    with pytest.raises(ValueError, match=r"swiglu needs an even last dim, got shape \(2, 3\)"):
        activation.backward(x, x, "swiglu")
    with pytest.raises(ValueError, match="a last dim"):
        activation.forward(torch.tensor(1.0), "gelu")
    with pytest.raises(ValueError, match=r"gradient of gelu has shape \(2, 2\), expected \(2, 3\)"):
        activation.backward(torch.ones(2, 2), x, "gelu")
    with pytest.raises(TypeError, match="gelu takes float32, bfloat16 or float16, got torch.float64"):
        activation.forward(x.double(), "gelu")
