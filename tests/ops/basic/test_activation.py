"""Activations as operations: alone, and between linear layers that want FP8 on both sides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import assert_same, step
from ops_checks import check, check_compiled, make_inputs, unfused
from recipes import DEVICE, QUANTIZED, RECIPES, kinds
from torch import Tensor, nn

import narrowcast as nc
from narrowcast import ops
from narrowcast.functional import act, act_backward
from narrowcast.tensors import QuantizedTensorStorage

from .contract import check_split_forward

PLAIN = {"gelu": ops.GELU, "qgelu": ops.QGELU, "relu": ops.ReLU, "srelu": ops.SReLU, "silu": ops.SiLU}
GATED = {
    "geglu": ops.GEGLU,
    "glu": ops.GLU,
    "qgeglu": ops.QGEGLU,
    "reglu": ops.ReGLU,
    "sreglu": ops.SReGLU,
    "swiglu": ops.SwiGLU,
    "clamped_swiglu": ops.ClampedSwiGLU,
    "situ_glu": ops.SiTUGLU,
}
ALL = PLAIN | GATED
F_IN, F_OUT = 40, 24


def halves(x: Tensor, size: int) -> Tensor:
    """Blocks of ``size`` gate and ``size`` linear channels, gates first; one block after the other, in plain loops."""
    blocks = x.split(size, dim=-1)
    return torch.cat((*blocks[0::2], *blocks[1::2]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_is_the_activation(name: str, dtype: torch.dtype) -> None:
    op = ALL[name]()
    (x,) = make_inputs([(3, 7, 34)], dtype=dtype)
    out = op(x)
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(out, act(x.detach(), name)) and torch.equal(dx, act_backward(grad, x.detach(), name))
    assert out.shape == (3, 7, 34 if name in PLAIN else 17)


@pytest.mark.parametrize(
    ("name", "of_torch"),
    [("gelu", lambda x: F.gelu(x, approximate="tanh")), ("silu", F.silu), ("relu", F.relu), ("glu", None)],
)
def test_is_that_of_torch(name: str, of_torch: Any) -> None:
    (x,) = make_inputs([(5, 34)], dtype=torch.float32)
    a, b = x.chunk(2, dim=-1)
    exact = of_torch(x) if of_torch else torch.sigmoid(a) * b
    torch.testing.assert_close(ALL[name]()(x), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "situ_glu"])
def test_promises(name: str) -> None:
    check(ALL[name], [(5, 3, 34)])
    check_split_forward(ALL[name](), make_inputs([(5, 34)])[0])


def test_parameters() -> None:
    (x,) = make_inputs([(6, 10)], dtype=torch.float32)
    clamped = ops.ClampedSwiGLU(limit=0.5, alpha=2.0, glu_linear_offset=0.25)
    a, b = x.chunk(2, dim=-1)
    exact = a.clamp(max=0.5) * torch.sigmoid(2.0 * a.clamp(max=0.5)) * (b.clamp(-0.5, 0.5) + 0.25)
    torch.testing.assert_close(clamped(x), exact)
    exact = 0.5 * torch.tanh(a / 0.5) * torch.sigmoid(a) * 2.0 * torch.tanh(b / 2.0)
    torch.testing.assert_close(ops.SiTUGLU(beta1=0.5, beta2=2.0)(x), exact)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_values_at_the_limit_keep_their_gradient(compiled: bool) -> None:
    """As with ``torch.where``; the gradient of ``Tensor.clamp`` there depends on the release of PyTorch."""
    gate, value = torch.cartesian_prod(
        torch.tensor([-7.25, -7.0, 7.0, 7.25]), torch.tensor([-7.0, 7.0, 7.5])
    ).T
    x = torch.cat((gate, value))[None].to(DEVICE, torch.bfloat16).requires_grad_()
    op = ops.ClampedSwiGLU()
    (torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op)(x).sum().backward()
    assert x.grad is not None
    of_gate, of_value = x.grad[0].chunk(2)
    assert torch.equal(of_gate != 0, (gate <= 7.0).to(DEVICE))
    assert torch.equal(of_value != 0, (value.abs() <= 7.0).to(DEVICE))


# -- interleaved channels ----------------------------------------------------------------------------------------------


def test_interleaving_converts_weights() -> None:
    weight = torch.arange(24.0).reshape(12, 2)
    made = ops.interleave_glu_tensor(weight, interleave_size=3)  # Transformer Engine's keyword
    assert made[:, 0].tolist() == [0, 2, 4, 12, 14, 16, 6, 8, 10, 18, 20, 22]
    assert torch.equal(ops.deinterleave_glu_tensor(made, 3), weight)
    assert torch.equal(ops.interleave_glu_tensor(weight[:, 0], 3), made[:, 0])
    assert torch.equal(ops.interleave_glu_tensor(weight, 6), weight)
    with pytest.raises(ValueError, match=r"tensor has shape \(12, 2\); .* first dim must be a multiple of 8"):
        ops.interleave_glu_tensor(weight, 4)
    with pytest.raises(ValueError, match="interleave_size is 0; use a positive whole number"):
        ops.deinterleave_glu_tensor(weight, 0)


@pytest.mark.parametrize("kind", [ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU])
def test_interleaved_channels(kind: Any) -> None:
    (x,) = make_inputs([(2, 5, 24)])
    moved = halves(x, 3).detach().requires_grad_()
    out, expected = kind(glu_interleave_size=3)(x), kind()(moved)
    assert torch.equal(out, expected)
    (dx,), (dmoved,) = (
        torch.autograd.grad(y, at, torch.ones_like(y)) for y, at in ((out, x), (expected, moved))
    )
    assert torch.equal(halves(dx, 3), dmoved) and dx.abs().sum() > 0


def test_promises_of_interleaved_channels() -> None:
    check(lambda: ops.SwiGLU(glu_interleave_size=4, cache_quantized_input=True), [(5, 3, 24)])


# -- the cached input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_cached_input_is_rounded_to_e4m3_for_the_backward_only(name: str) -> None:
    op = ALL[name](cache_quantized_input=True)
    (x,) = make_inputs([(3, 5, 34)])
    out = op(x)
    grad = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, grad)
    rounded = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3).quantize(x.detach()).dequantize()
    assert torch.equal(out, act(x.detach(), name))
    assert torch.equal(dx, act_backward(grad, rounded, name))
    assert not torch.equal(dx, act_backward(grad, x.detach(), name))


def test_cached_input_takes_a_byte_per_element() -> None:
    sizes = {}
    for cached in (False, True):
        (x,) = make_inputs([(64, 32)])
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            ops.GELU(cache_quantized_input=cached)(x)
        sizes[cached] = sum(t.numel() * t.element_size() for t in saved)
    assert sizes == {False: 4096, True: 2048 + 4}


def test_promises_with_a_cached_input() -> None:
    check(lambda: ops.SwiGLU(cache_quantized_input=True), [(5, 34)])
    check_split_forward(ops.SwiGLU(cache_quantized_input=True), make_inputs([(5, 34)])[0])


# -- between linear layers ---------------------------------------------------------------------------------------------


class Spy(ops.SwiGLU):
    """Notes what it gives in both directions."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gave: list[Any] = []

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> Any:
        made = super().op_forward_compute(input_, **kwargs)
        self.gave.append(made[0])
        return made

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        made = super().op_backward(ctx, grad_output)
        self.gave.append(made[0])
        return made


def between_linears(op: nn.Module, columns: int) -> ops.Sequential:
    torch.manual_seed(4)
    kwargs: Any = {"device": DEVICE, "dtype": torch.bfloat16}
    return ops.Sequential(
        ops.BasicLinear(F_IN, columns, **kwargs), op, ops.BasicLinear(F_OUT, F_IN, **kwargs)
    )


def check_changes_no_bit(sequence: ops.Sequential, recipe: nc.recipe.Recipe | None) -> None:
    """Two steps of the sequence, and of its operations behind boundaries of their own."""
    separate = nn.Sequential(*copy.deepcopy(sequence))
    for seed in range(2):
        inputs = make_inputs([(4, 8, F_IN)], seed=seed)
        with unfused():
            expected = step(separate, inputs, recipe)
        assert_same(step(sequence, inputs, recipe), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantizing_in_the_activation_changes_no_bit(recipe: str) -> None:
    check_changes_no_bit(between_linears(ops.SwiGLU(), 2 * F_OUT), RECIPES[recipe])
    check_changes_no_bit(between_linears(ops.GELU(), F_OUT), RECIPES[recipe])


@pytest.mark.parametrize("name", ALL)
def test_every_activation_changes_no_bit(name: str) -> None:
    columns = F_OUT if name in PLAIN else 2 * F_OUT
    check_changes_no_bit(between_linears(ALL[name](), columns), RECIPES["mxfp8"])


@pytest.mark.parametrize("options", [{"glu_interleave_size": 4}, {"cache_quantized_input": True}], ids=str)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_options_change_no_bit(recipe: str, options: dict[str, Any]) -> None:
    check_changes_no_bit(between_linears(ops.SwiGLU(**options), 2 * F_OUT), RECIPES[recipe])


@pytest.mark.parametrize("options", [{}, {"glu_interleave_size": 4}], ids=str)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_gives_what_its_neighbours_want(recipe: str, options: dict[str, Any]) -> None:
    spy = Spy(**options)
    with unfused():
        step(between_linears(spy, 2 * F_OUT), make_inputs([(4, 8, F_IN)]), RECIPES[recipe])
    forward, backward = spy.gave
    assert isinstance(forward, QuantizedTensorStorage) and forward.shape == (4, 8, F_OUT)
    assert isinstance(backward, QuantizedTensorStorage) and backward.shape == (4, 8, 2 * F_OUT)


def test_gives_plain_tensors_without_a_recipe() -> None:
    spy = Spy()
    with unfused():
        step(between_linears(spy, 2 * F_OUT), make_inputs([(4, 8, F_IN)]))
    assert [type(made) for made in spy.gave] == [Tensor, Tensor]


@pytest.mark.parametrize("recipe", kinds(QUANTIZED))
def test_compiled_between_linear_layers(recipe: str) -> None:
    sequence = between_linears(ops.SwiGLU(), 2 * F_OUT)
    check_compiled(sequence, [(4, 8, F_IN)], QUANTIZED[recipe], dynamic=recipe in ("delayed", "mxfp8"))


@pytest.mark.requested
@pytest.mark.inductor
def test_inductor() -> None:
    sequence = between_linears(ops.SiTUGLU(glu_interleave_size=4, cache_quantized_input=True), 2 * F_OUT)
    check_compiled(sequence, [(4, 8, F_IN)], RECIPES["mxfp8"], backend="inductor", steps=1)


def test_recomputed_between_linear_layers() -> None:
    check(lambda: between_linears(ops.GEGLU(), 2 * F_OUT), [(4, 8, F_IN)], RECIPES["current"])


@pytest.mark.parametrize("shape", [(0, F_IN), (2, 0, F_IN), (F_IN,)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"glu_interleave_size": 4}, {"cache_quantized_input": True}], ids=str
)
def test_no_rows_and_no_lead(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    sequence = between_linears(ops.SwiGLU(**options), 2 * F_OUT)
    for recipe in (None, RECIPES["current"]):
        (x,) = make_inputs([shape])
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            out = sequence(x)
        assert out.shape == shape
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert dx.shape == shape and (not dx.numel() or dx.abs().sum() > 0)


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_casts_under_torch_autocast() -> None:
    (x,) = make_inputs([(4, 6)], dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = ops.GELU()(x)
    assert torch.equal(out, ops.GELU()(x.bfloat16()))
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_takes_a_quantized_input() -> None:
    (x,) = make_inputs([(4, 32)], grad=False)
    quantized = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3).quantize(x)
    assert torch.equal(ops.SiLU()(quantized), ops.SiLU()(quantized.dequantize()))


def test_refuses() -> None:
    x = torch.ones(2, 6, device=DEVICE)
    with pytest.raises(ValueError, match=r"swiglu needs an even last dim, got shape \(2, 5\)"):
        ops.SwiGLU()(x[:, :5])
    with pytest.raises(ValueError, match=r"input has shape \(2, 6\); .* last dim must be a multiple of 4"):
        ops.SwiGLU(glu_interleave_size=2)(x)
    with pytest.raises(ValueError, match="glu_interleave_size is -1"):
        ops.SiTUGLU(glu_interleave_size=-1)
    for beta in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="beta2 is .*; use a finite number above 0"):
            ops.SiTUGLU(beta2=beta)
    with pytest.raises((TypeError, ValueError), match="gelu takes"):
        ops.GELU()(x.double())
