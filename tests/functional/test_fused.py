"""Fused producers against the two operators they replace, bit for bit, in every format, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from quantizers.catalog import VARIANTS
from reference.checks import assert_bitwise
from torch import Tensor

import narrowcast as nc
from narrowcast import functional as F
from narrowcast.quantizers import DelayedFloat8Quantizer

E4M3 = nc.DType.kFloat8E4M3
SHAPES = [(1, 4), (33, 40), (2, 5, 130), (0, 32)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def seed_for(quantizer: nc.Quantizer) -> Tensor | None:
    return torch.tensor([7]) if quantizer._is_stochastic() else None


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert_bitwise(a, b)


def delayed_state() -> tuple[Tensor, Tensor, DelayedFloat8Quantizer]:
    return torch.tensor([1.0, 24.0]), torch.zeros(2), DelayedFloat8Quantizer(E4M3, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_fused_equals_unfused(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    quantizer = VARIANTS[name]
    seed = seed_for(quantizer)
    x, residual = torch.randn(2, *shape, dtype=dtype).unbind()
    weight, bias = torch.randn(2, shape[-1], dtype=dtype).unbind()

    activation = F.act_quantize(x, "geglu", quantizer, [], seed)
    assert_same(activation, F.quantize(F.act(x, "geglu"), quantizer, seed))

    grad = torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype)
    *gradient, dbias = F.act_backward_quantize(grad, x, "geglu", quantizer, [], True, seed)
    dx = F.act_backward(grad, x, "geglu")
    assert_same([*gradient, dbias], F.quantize_dbias(dx, quantizer, seed))
    assert_same(gradient, F.quantize(dx, quantizer, seed))

    arguments = (x, residual, weight, bias, 1e-5, "LayerNorm", True)
    y, *statistics = F.norm(*arguments)
    assert_same(F.norm_quantize(*arguments, quantizer, seed), [*F.quantize(y, quantizer, seed), *statistics])

    mean, rstd, total = statistics
    gradients = (torch.randn_like(x), total, weight, mean, rstd, True, residual)
    dx, dweight, dbias = F.norm_backward(*gradients)
    fused = F.norm_backward_quantize(*gradients, quantizer, seed)
    assert_same(fused, [*F.quantize(dx, quantizer, seed), dweight, dbias])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_delayed_fused_equals_unfused(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    weight = torch.randn(shape[-1], dtype=torch.bfloat16)
    scale, amax, quantizer = delayed_state()
    _, expected_amax, _ = delayed_state()

    def both(fused: list[Tensor], unfused: list[Tensor]) -> None:
        assert_same(fused, unfused)
        assert_same([amax], [expected_amax])

    state, expected_state = (None, scale, amax), (None, scale, expected_amax)
    fused = F.act_quantize(x, "silu", quantizer, [], *state)
    both(fused, F.quantize(F.act(x, "silu"), quantizer, *expected_state))

    grad = torch.randn_like(x)
    fused = F.act_backward_quantize(grad, x, "silu", quantizer, [], True, *state)
    dx = F.act_backward(grad, x, "silu")
    both(fused, F.quantize_dbias(dx, quantizer, *expected_state))

    arguments = (x, None, weight, None, 1e-6, "RMSNorm", False)
    y, *statistics = F.norm(*arguments)
    fused = F.norm_quantize(*arguments, quantizer, *state)
    both(fused, [*F.quantize(y, quantizer, *expected_state), *statistics])

    mean, rstd, _ = statistics
    gradients = (grad, x, weight, mean, rstd, False, None)
    dx, dweight, dbias = F.norm_backward(*gradients)
    fused = F.norm_backward_quantize(*gradients, quantizer, *state)
    both(fused, [*F.quantize(dx, quantizer, *expected_state), dweight, dbias])
    assert amax[0] == 0 and (amax[1] > 0 or not x.numel())


def test_what_a_call_does_not_have_is_empty() -> None:
    x, weight = torch.randn(6, 8), torch.ones(8)
    _, mean, rstd, total = F.norm(x, None, weight, None, 1e-5, "RMSNorm", False)
    assert (mean.numel(), rstd.shape, total.numel()) == (0, (6,), 0)
    _, _, dbias = F.norm_backward(x, x, weight, mean, rstd, False, None)
    assert dbias.numel() == 0


def test_dbias_is_the_sum_over_rows() -> None:
    x = torch.randn(3, 70, 24, dtype=torch.bfloat16)
    *_, dbias = F.quantize_dbias(x, nc.MXFP8Quantizer(E4M3))
    exact = x.double().sum(dim=(0, 1))
    assert dbias.dtype == torch.float32
    assert (dbias - exact).abs().max() <= 1e-6 * x.double().abs().sum(dim=(0, 1)).max()


def test_a_quantizer_of_ones_own_gets_a_tensor() -> None:
    seen = []

    class Mine(nc.IdentityQuantizer):
        def _encode(self, numerics, x, seed):  # type: ignore[no-untyped-def]
            seen.append(type(x))
            return super()._encode(numerics, x, seed)

    nc.dynamo.register_value_opaque_quantizer(Mine)
    x = torch.randn(4, 6)
    (out,) = F.act_quantize(x, "relu", Mine())
    assert seen == [Tensor] and torch.equal(out, x.relu())


@pytest.mark.parametrize("dynamic", [False, True])
def test_traced(dynamic: bool) -> None:
    quantizer = nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)

    def step(x: Tensor, weight: Tensor, scale: Tensor, amax: Tensor) -> list[Tensor]:
        normed = F.norm_quantize(x, None, weight, None, 1e-5, "RMSNorm", False, quantizer)
        acted = F.act_quantize(x, "swiglu", delayed_state()[2], [], None, scale, amax)
        gradient = F.act_backward_quantize(x[..., :20], x, "swiglu", quantizer)
        return [*normed, *acted, *gradient]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (8, 12):
        x, weight = torch.randn(rows, 40), torch.randn(40)
        scale, amax, _ = delayed_state()
        _, other, _ = delayed_state()
        assert_same(compiled(x, weight, scale, amax), step(x, weight, scale, other))
        assert_same([amax], [other])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, q: F.act(x, "swiglo"),
            "activation is 'swiglo'; the nearest: 'swiglu'; use one of 'gelu'",
        ),
        (lambda x, q: F.act(x[:, :5], "swiglu"), "needs an even last dim"),
        (lambda x, q: F.act(x, "clamped_swiglu", [1.0]), "takes 3 parameters"),
        (lambda x, q: F.act_quantize(x, "silu", q, [1.0]), "takes 0 parameters"),
        (lambda x, q: F.norm(x, None, x[0], None, 1e-5, "BatchNorm", False), "unknown normalization"),
        (lambda x, q: F.norm(x, x[:2], x[0], None, 1e-5, "RMSNorm", False), "residual"),
    ],
)
def test_bad_input(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call(torch.randn(4, 6), nc.MXFP8Quantizer(E4M3))
