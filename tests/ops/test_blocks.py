"""A Llama feed-forward block and a whole pre-norm block as operations: one graph, the bits of the fused modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autograd.test_program import Alive
from modules import assert_same, step
from ops_checks import check, check_compiled, make_inputs, unfused
from recipes import DEVICE, QUANTIZED, RECIPES, kinds
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc
from narrowcast import ops

HIDDEN, FFN, HEADS = 64, 96, 4


def skip(name: str) -> tuple[ops.MakeExtraOutput, ops.AddExtraInput]:
    """Both ends of a residual connection."""
    begin, end = ops.MakeExtraOutput(), ops.AddExtraInput(in_place=True)
    begin.set_extra_output_channel(0, name, output_to_caller=False)
    end.set_extra_input_channel(0, name)
    return begin, end


def feed_forward(dtype: torch.dtype = torch.bfloat16) -> list[nn.Module]:
    place: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
    return [
        ops.RMSNorm(HIDDEN, **place),
        ops.Linear(HIDDEN, 2 * FFN, bias=False, **place),
        ops.SwiGLU(),
        ops.Linear(FFN, HIDDEN, bias=False, **place),
    ]


class Attention(nn.Module):
    """Causal attention on (batch, tokens, query | key | value)."""

    def forward(self, qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(-1, (3 * HEADS, HIDDEN // HEADS)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def llama_mlp(dtype: torch.dtype = torch.bfloat16) -> ops.Sequential:
    torch.manual_seed(0)
    begin, end = skip("mlp")
    return ops.Sequential(begin, *feed_forward(dtype), end)


def block(dtype: torch.dtype = torch.bfloat16) -> ops.Sequential:
    torch.manual_seed(0)
    place: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
    begin, end = skip("attention")
    return ops.Sequential(
        begin,
        ops.RMSNorm(HIDDEN, **place),
        ops.Linear(HIDDEN, 3 * HIDDEN, bias=False, **place),
        Attention(),
        ops.Linear(HIDDEN, HIDDEN, bias=False, **place),
        end,
        *llama_mlp(dtype),
    )


def test_llama_mlp() -> None:
    check(llama_mlp, [(2, 20, HIDDEN)], RECIPES["mxfp8"])


def fused_module(parameters: list[Tensor]) -> nc.LayerNormMLP:
    module = nc.LayerNormMLP(
        HIDDEN,
        FFN,
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        params_dtype=torch.bfloat16,
        device=DEVICE,
    )
    with torch.no_grad():
        for own, other in zip(module.parameters(), parameters, strict=True):
            own.copy_(other)
    return module


def saved(module: nn.Module, x: Tensor, recipe: nc.recipe.Recipe | None) -> list[tuple[Any, ...]]:
    """Shapes and dtypes of what the forward keeps besides the parameters, each memory once."""
    skipped = {parameter.data_ptr() for parameter in module.parameters()}
    kept: dict[int, tuple[Any, ...]] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in skipped:
            kept[tensor.data_ptr()] = (tuple(tensor.shape), str(tensor.dtype))
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        nc.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        module(x)
    return sorted(kept.values())


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_bits_and_the_memory_of_layernorm_mlp(name: str) -> None:
    ours = ops.Sequential(*feed_forward())
    theirs = fused_module(list(ours.parameters()))
    (x,) = make_inputs([(40, HIDDEN)])
    for _ in range(2):  # the second step has scales of its own under delayed scaling
        found, expected = step(ours, [x], QUANTIZED[name]), step(theirs, [x], QUANTIZED[name])
        for one, other in zip(found.values(), expected.values(), strict=True):
            assert torch.equal(one, other)
    assert saved(ours, x, QUANTIZED[name]) == saved(theirs, x, QUANTIZED[name])


@pytest.mark.parametrize("name, inlines", [("current", True), ("current", False), ("mxfp8", True)])
def test_the_gradient_of_a_linear_layer_with_bias_is_freed_as_it_is_read(name: str, inlines: bool) -> None:
    """As the weight gradient's GEMM begins, the codes that the input's has read are gone, as in ``nc.Linear``.

    ``inlines``: Python calls functions of Python without a frame of C, which would hold the arguments. Python 3.10
    never does, and none while Dynamo evaluates frames.
    """
    x = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for kind in (nc.Linear, ops.Linear):
        layer = kind(256, 256, device=DEVICE, dtype=torch.bfloat16)
        module = nc.set_recipe(
            nn.Sequential(layer) if kind is nc.Linear else ops.Sequential(layer), QUANTIZED[name]
        )
        out = module(x)
        grad = torch.ones_like(out)
        with Alive(grad) as alive:
            (out.backward if inlines else torch._dynamo.run(out.backward))(grad)
        found.append([made for name, made in alive.marks if name.startswith("gemm")][-1])
    ours, theirs = found[::-1]
    assert ours <= theirs + 2 * 256 * 4  # sums for the bias


@pytest.mark.parametrize("name", kinds(RECIPES))
def test_a_whole_block_is_one_graph(name: str) -> None:
    module, (x,) = block(), make_inputs([(2, 24, HIDDEN)])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = copy.deepcopy(module)
    forward = torch.compile(compiled, fullgraph=True, backend=counter)
    for _ in range(2):
        assert_same(step(compiled, [x], RECIPES[name], forward), step(module, [x], RECIPES[name]))
    assert counter.frame_count == 1


def test_a_whole_block_with_dynamic_shapes() -> None:
    check_compiled(block(), [(2, 24, HIDDEN)], RECIPES["current"], dynamic=True)


def test_one_dynamic_graph_for_any_number_of_rows() -> None:
    layers = feed_forward()
    module = ops.Sequential(*layers[:2], ops.ScaledSwiGLU(), layers[3])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = copy.deepcopy(module)
    forward = torch.compile(compiled, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for rows in (40, 48, 72):
        inputs = make_inputs([(rows, HIDDEN), (rows,)])
        assert_same(step(compiled, inputs, RECIPES["mxfp8"], forward), step(module, inputs, RECIPES["mxfp8"]))
        counts.append(
            counter.frame_count
        )  # the first may be 2: the compiler starts over once for the norm's eps
    assert counts[0] == counts[-1]


def test_a_whole_block_under_torch_autocast_and_recomputed() -> None:
    module, (x,) = block(torch.float32), make_inputs([(2, 24, HIDDEN)], dtype=torch.float32)
    compiled = copy.deepcopy(module)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return nc.checkpoint(block, x, use_reentrant=False)

    forward = torch.compile(lambda x: run(compiled, x), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        expected = step(module, [x], RECIPES["delayed"], lambda x: run(module, x))
        assert_same(step(compiled, [x], RECIPES["delayed"], forward), expected)
        assert all(one.dtype == torch.float32 for one in expected.values())


@pytest.mark.inductor
def test_a_whole_block_through_inductor() -> None:
    module, (x,) = block(), make_inputs([(2, 24, HIDDEN)])
    compiled = copy.deepcopy(module)
    forward = torch.compile(compiled, fullgraph=True)
    found, expected = step(compiled, [x], RECIPES["mxfp8"], forward), step(module, [x], RECIPES["mxfp8"])
    for name, one in found.items():
        error = (one - expected[name]).float().norm() / expected[name].float().norm()
        assert error < 0.05, f"{name} differs by {error}"


@pytest.mark.parametrize("name", ["none", "mxfp8"])
def test_a_whole_block_against_plain_modules(name: str) -> None:
    module, (x,) = block(), make_inputs([(2, 24, HIDDEN)])
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    norm1, qkv, out, norm2, fc1, fc2 = weights.values()

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        layer = nc.Linear(
            weight.shape[1], weight.shape[0], bias=False, params_dtype=torch.bfloat16, device=DEVICE
        )
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    def plain(x: Tensor) -> Tensor:
        h = x + linear(Attention()(linear(F.rms_norm(x, (HIDDEN,), norm1, 1e-5), qkv)), out)
        gate, value = linear(F.rms_norm(h, (HIDDEN,), norm2, 1e-5), fc1).chunk(2, dim=-1)
        return h + linear(F.silu(gate) * value, fc2)

    found = step(module, [x], RECIPES[name])
    with nc.autocast(enabled=name != "none", recipe=RECIPES[name]):
        expected = plain(x)
    grads = torch.autograd.grad(expected.float().square().sum(), [x, *weights.values()])
    references = {"out0": expected, "d input0": grads[0], **{f"d {k}": g for k, g in zip(weights, grads[1:])}}
    for label, reference in references.items():
        error = (found[label] - reference).float().norm() / reference.float().norm()
        assert error < (0.02 if name == "none" else 0.08), f"{label} differs by {error}"


def test_fused_and_unfused_agree() -> None:
    module, (x,) = block(), make_inputs([(2, 24, HIDDEN)])
    fused = step(module, [x], RECIPES["mxfp8"])
    with unfused():
        alone = step(module, [x], RECIPES["mxfp8"])
    for name, one in fused.items():
        error = (one - alone[name]).float().norm() / alone[name].float().norm()
        assert error < 0.02, f"{name} differs by {error}"
