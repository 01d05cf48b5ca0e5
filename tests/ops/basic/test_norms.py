"""LayerNorm, RMSNorm and L2Normalization as operations: alone, and in front of a linear layer that wants FP8."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import assert_same, make_input, randomized, step
from ops_checks import check, check_compiled, make_inputs
from recipes import DEVICE, QUANTIZED, RECIPES
from torch import Tensor, nn

import narrowcast as nc
from narrowcast import ops
from narrowcast.tensors import QuantizedTensorStorage

from .contract import check_split_forward, wanted_by

K = 50
NOTHING_WANTED: dict[str, Any] = {
    "prev_op_grad_output_quantizer": None,
    "next_op_input_quantizer": None,
    "requires_grad": True,
}
NORMS: dict[str, Any] = {
    "LayerNorm": lambda **kwargs: ops.LayerNorm(K, device=DEVICE, **kwargs),
    "RMSNorm": lambda **kwargs: ops.RMSNorm(K, device=DEVICE, **kwargs),
    "L2Normalization": lambda **kwargs: ops.L2Normalization(),
}


def make_norm(name: str, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> ops.BasicOperation:
    norm = NORMS[name](dtype=dtype, **kwargs)
    randomized(norm)
    return norm


def of_torch(norm: Any, x: Tensor) -> Tensor:
    if isinstance(norm, ops.L2Normalization):
        return x / (x.square().sum(-1, keepdim=True) + norm.eps).sqrt()
    gamma = norm.weight.double() + (1.0 if norm.settings.zero_centered_gamma else 0.0)
    if isinstance(norm, ops.RMSNorm):
        return F.rms_norm(x, (K,), gamma, norm.settings.eps)
    return F.layer_norm(x, (K,), gamma, norm.bias.double(), norm.settings.eps)


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_is_that_of_torch(name: str, zero_centered_gamma: bool) -> None:
    norm = make_norm(name, torch.float32, zero_centered_gamma=zero_centered_gamma, eps=1e-3)
    x = make_input(K, 3, 7, dtype=torch.float32)
    out = norm(x)
    assert out.shape == x.shape and out.dtype == x.dtype
    grad = torch.randn_like(out)
    operands = [x, *norm.parameters()]
    ours = torch.autograd.grad(out, operands, grad)
    exact = of_torch(norm, x.double())
    theirs = torch.autograd.grad(exact, operands, grad.double())
    for a, b in zip((out, *ours), (exact, *theirs), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_equals_the_module(name: str) -> None:
    norm = make_norm(name)
    module = getattr(nc, name)(K, device=DEVICE, dtype=torch.bfloat16)
    module.load_state_dict(norm.state_dict())
    assert_same(step(norm, make_input(K), None), step(module, make_input(K), None))


@pytest.mark.parametrize("name", NORMS)
def test_promises(name: str) -> None:
    check(lambda: make_norm(name), [(5, 3, K)])
    check_split_forward(make_norm(name), make_inputs([(5, 3, K)])[0])


def apart(sequence: ops.Sequential) -> nn.Sequential:
    """The same operations, each behind a boundary of its own, so that nothing quantized passes between them."""
    return nn.Sequential(*copy.deepcopy(sequence))


def in_front_of_linear(name: str) -> ops.Sequential:
    torch.manual_seed(5)
    return ops.Sequential(make_norm(name), ops.BasicLinear(K, 24, device=DEVICE, dtype=torch.bfloat16))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NORMS)
def test_quantizing_in_the_norm_changes_no_bit(name: str, recipe: str) -> None:
    sequence = in_front_of_linear(name)
    separate = apart(sequence)
    for seed in range(2):
        x = make_input(K, 5, 8, seed=seed)
        assert_same(step(sequence, x, RECIPES[recipe]), step(separate, x, RECIPES[recipe]))


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("name", NORMS)
def test_quantizing_the_gradient_in_the_norm_changes_no_bit(name: str, recipe: str) -> None:
    sequence = ops.Sequential(ops.BasicLinear(40, K, device=DEVICE, dtype=torch.bfloat16), make_norm(name))
    separate = apart(sequence)
    for seed in range(2):
        x = make_input(40, 5, 8, seed=seed)
        assert_same(step(sequence, x, RECIPES[recipe]), step(separate, x, RECIPES[recipe]))
    linear, norm = sequence
    with nc.autocast(recipe=RECIPES[recipe]):
        wanted = wanted_by(linear, "backward")
    ctx = ops.OperationContext(prev_op_grad_output_quantizer=wanted)
    given = make_input(K, 5, 8).detach()
    ctx.save_for_backward(*norm.op_forward_compute(given, **NOTHING_WANTED)[1])  # type: ignore[operator]
    made, _ = norm.op_backward(ctx, given)  # type: ignore[operator]
    assert isinstance(made, QuantizedTensorStorage) and made.shape == given.shape


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("name", NORMS)
def test_gives_what_the_next_operation_wants(name: str, recipe: str) -> None:
    norm, linear = in_front_of_linear(name)
    x = make_input(K, 5, 8)
    with nc.autocast(recipe=RECIPES[recipe]):
        wanted = wanted_by(linear, "forward")
        made, _ = norm.op_forward_compute(x, **NOTHING_WANTED | {"next_op_input_quantizer": wanted})  # type: ignore[operator]
    assert isinstance(made, QuantizedTensorStorage)
    assert made.shape == x.shape
    assert made.get_usages() == {"rowwise": True, "columnwise": True}


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_compiled_in_front_of_a_linear_layer(recipe: str) -> None:
    name = "LayerNorm" if recipe == "delayed" else "RMSNorm"
    check_compiled(in_front_of_linear(name), [(5, 8, K)], QUANTIZED[recipe], dynamic=recipe == "mxfp8")


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K), (K,)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_no_rows_and_no_lead(name: str, shape: tuple[int, ...]) -> None:
    sequence = in_front_of_linear(name)
    for recipe in (None, RECIPES["current"]):
        (x,) = make_inputs([shape])
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            out = sequence(x)
        assert out.shape == (*shape[:-1], 24)
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert dx.shape == shape and (not dx.numel() or dx.abs().sum() > 0)


def test_casts_under_torch_autocast() -> None:
    norm, x = make_norm("RMSNorm", torch.float32), make_input(K, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = norm(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, norm(x.bfloat16()))
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_takes_a_quantized_input() -> None:
    norm, x = make_norm("LayerNorm"), make_input(64).detach()[..., :K].contiguous()
    quantized = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3).quantize(x)
    assert torch.equal(norm(quantized), norm(quantized.dequantize()))


def test_parameters_on_the_meta_device() -> None:
    norm = ops.LayerNorm(K, device="meta", dtype=torch.bfloat16)
    assert norm.weight.is_meta
    norm(make_input(K))
    assert torch.equal(norm.weight, torch.ones_like(norm.weight)) and not norm.bias.any()  # type: ignore[union-attr]


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"normalized_shape is \[2, 3\]; give the size of the last dim"):
        ops.RMSNorm([2, 3])
    with pytest.raises(
        ValueError, match=r"input has shape \(40, 48\); its last dim must be that of the weight"
    ):
        make_norm("RMSNorm")(make_input(48))
    with pytest.raises(ValueError, match=r"input has shape \(3, 0\); there is nothing to normalize"):
        ops.L2Normalization()(torch.ones(3, 0))
    assert not hasattr(ops.L2Normalization(seq_length=3, micro_batch_size=2), "weight")
    assert "eps=1e-05" in repr(make_norm("LayerNorm"))


@pytest.mark.gpu
def test_refuses_another_device() -> None:
    with pytest.raises(RuntimeError, match="input is on cpu, the parameters are on cuda"):
        make_norm("RMSNorm")(torch.ones(3, K))
