"""Producers: an operand made by a norm or an activation equals the two steps, bit for bit, for every quantizer."""

from __future__ import annotations

import pytest
import torch
from reference.checks import assert_bitwise, normal

from narrowcast.functional import (
    act,
    act_backward,
    draw_seed,
    norm,
    norm_backward,
    quantize,
    quantize_dbias,
)
from narrowcast.quantizers import (
    ActivationSettings,
    DelayedFloat8Quantizer,
    NormSettings,
    QuantizerHandle,
    handle_of,
    quantize_activation,
    quantize_activation_gradient,
    quantize_norm,
    quantize_norm_gradient,
)
from narrowcast.reference.activation import ACTIVATIONS
from narrowcast.tensors import QuantizedTensorStorage

from .catalog import E4M3, USAGES, VARIANTS

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(33, 50), (1, 2), (0, 32), (130, 16)]
HANDLES = {name: handle_of(quantizer) for name, quantizer in VARIANTS.items()}
NORMS = {
    "LayerNorm": NormSettings("LayerNorm", 1e-5, False),
    "RMSNorm": NormSettings("RMSNorm", 1e-3, True),
}
SWIGLU, GELU = ActivationSettings("swiglu", ()), ActivationSettings("gelu", ())


def assert_holds(operand: QuantizedTensorStorage, expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    buffers = [buffer for buffer in operand.get_data_tensors() if buffer is not None]
    assert operand.dtype == dtype
    assert len(buffers) == len(expected)
    for ours, theirs in zip(buffers, expected):
        assert_bitwise(ours, theirs)


def seed_of(handle: QuantizerHandle, x: torch.Tensor) -> torch.Tensor | None:
    torch.manual_seed(3)
    seed = draw_seed(x) if handle.stochastic else None
    torch.manual_seed(3)  # the producer draws the same one
    return seed


@pytest.mark.parametrize("settings", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_norm(name: str, dtype: torch.dtype, settings: NormSettings) -> None:
    handle = HANDLES[name]
    for shape in SHAPES:
        x, weight = normal(shape, dtype), normal(shape[1:], torch.float32, seed=1)
        bias = normal(shape[1:], torch.float32, seed=2) if settings.normalization == "LayerNorm" else None
        y, *statistics, _ = norm(
            x, None, weight, bias, settings.eps, settings.normalization, settings.zero_centered_gamma
        )
        expected = quantize(y, handle.quantizer, seed_of(handle, y))
        operand, mean, rstd = quantize_norm(x, weight, bias, settings, handle)
        assert_holds(operand, expected, dtype)
        assert_bitwise(mean, statistics[0])
        assert_bitwise(rstd, statistics[1])
        assert rstd.shape == (shape[0],)
        assert mean.numel() == (shape[0] if bias is not None else 0)


@pytest.mark.parametrize("settings", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_gradient_of_a_norm(name: str, dtype: torch.dtype, settings: NormSettings) -> None:
    handle = HANDLES[name]
    for shape in SHAPES:
        x, grad, residual_grad = (normal(shape, dtype, seed) for seed in range(3))
        weight = normal(shape[-1:], torch.float32, 3)
        bias = weight if settings.normalization == "LayerNorm" else None
        how = (settings.eps, settings.normalization, settings.zero_centered_gamma)
        _, mean, rstd, _ = norm(x, None, weight, bias, *how)
        for added in (None, residual_grad):
            inputs = (grad, x, weight, mean, rstd, settings.zero_centered_gamma, added)
            dx, dweight, dbias = norm_backward(*inputs)
            seed = seed_of(handle, grad)
            operand, *parameters = quantize_norm_gradient(*inputs, handle)
            assert_holds(operand, quantize(dx, handle.quantizer, seed), dtype)
            for ours, theirs in zip(parameters, (dweight, dbias), strict=True):
                assert_bitwise(ours, theirs)


@pytest.mark.parametrize("settings", [GELU, SWIGLU], ids=lambda settings: settings.activation)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_activation_and_its_gradient(name: str, dtype: torch.dtype, settings: ActivationSettings) -> None:
    handle = HANDLES[name]
    for shape in SHAPES:
        x = normal(shape, dtype)
        y = act(x, settings.activation)
        expected = quantize(y, handle.quantizer, seed_of(handle, y))
        assert_holds(quantize_activation(x, settings, handle), expected, dtype)

        grad = normal(tuple(y.shape), dtype, seed=1)
        dx = act_backward(grad, x, settings.activation)
        *expected, sums = quantize_dbias(dx, handle.quantizer, seed_of(handle, dx))
        operand, ours = quantize_activation_gradient(grad, x, settings, handle)
        assert_holds(operand, expected, dtype)
        assert_bitwise(ours, sums)


@pytest.mark.parametrize("usage", USAGES.values(), ids=USAGES)
def test_delayed_slots(usage: tuple[bool, bool]) -> None:
    handle = handle_of(DelayedFloat8Quantizer(E4M3, 1, rowwise=usage[0], columnwise=usage[1]))
    x, weight = normal((33, 50), torch.bfloat16), normal((50,), torch.bfloat16, seed=1)
    grad = normal((33, 25), torch.bfloat16, seed=2)
    scale = torch.tensor([1.0, 2.0, 4.0])
    y, mean, rstd, _ = norm(x, None, weight, None, 1e-5, "RMSNorm", False)
    norm_inputs = (y, x, weight, mean, rstd, False, None)
    produced = {
        "norm": (
            y,
            lambda amax: quantize_norm(
                x, weight, None, NormSettings("RMSNorm", 1e-5, False), handle, scale, amax
            )[0],
        ),
        "activation": (act(x, "swiglu"), lambda amax: quantize_activation(x, SWIGLU, handle, scale, amax)),
        "gradient": (
            act_backward(grad, x, "swiglu"),
            lambda amax: quantize_activation_gradient(grad, x, SWIGLU, handle, scale, amax)[0],
        ),
        "norm gradient": (
            norm_backward(*norm_inputs)[0],
            lambda amax: quantize_norm_gradient(*norm_inputs, handle, scale, amax)[0],
        ),
    }
    for value, produce in produced.values():
        ours, theirs = torch.zeros(3), torch.zeros(3)
        operand = produce(ours)
        assert_holds(operand, quantize(value, handle.quantizer, None, scale, theirs), torch.bfloat16)
        assert torch.equal(ours, theirs)
        assert ours[1] == value.float().abs().max() and ours.count_nonzero() == 1


def test_parameters_reach_the_activation() -> None:
    x, handle = 10 * normal((8, 64), torch.bfloat16), HANDLES["identity"]
    default = ActivationSettings("clamped_swiglu", tuple(ACTIVATIONS["clamped_swiglu"].params.values()))
    tight = ActivationSettings("clamped_swiglu", (0.5, 1.702, 1.0))
    expected = {s: act(x, "clamped_swiglu", list(s.parameters)) for s in (default, tight)}
    assert not torch.equal(expected[default], expected[tight])
    for settings, y in expected.items():
        assert_bitwise(quantize_activation(x, settings, handle).dequantize(), y)
