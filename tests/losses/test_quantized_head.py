"""``linear_cross_entropy(recipe=)`` against a low-precision linear layer, whose logits are whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from recipes import QUANTIZED, kinds
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc
from narrowcast.losses import quantized_head
from narrowcast.testing import assert_close

from .largest import Largest

WIDTH, CLASSES = 48, 300
STATELESS = [name for name in QUANTIZED if name != "delayed"]
NEAREST = [name for name in STATELESS if name != "nvfp4"]  # nvfp4 rounds gradients stochastically


def operands(tokens: int = 37, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    made = {
        "hidden": torch.randn(tokens, WIDTH, generator=generator),
        "weight": torch.randn(CLASSES, WIDTH, generator=generator) / 4,
        "bias": torch.randn(CLASSES, generator=generator),
    }
    target = torch.randint(0, CLASSES, (tokens,), generator=generator)
    target[: tokens // 8] = -100
    return {**{name: x.to(dtype).requires_grad_() for name, x in made.items()}, "target": target}


def by_the_layer(given: dict[str, Tensor], recipe: nc.recipe.Recipe, with_bias: bool) -> list[Tensor]:
    """Loss and gradients of a linear layer under the recipe, one for all classes."""
    layer = nc.Linear(
        WIDTH, CLASSES, bias=with_bias, params_dtype=given["weight"].dtype, recipe=recipe, device="cpu"
    )
    with torch.no_grad():
        layer.weight.copy_(given["weight"])
        if with_bias:
            layer.bias.copy_(given["bias"])
    loss = nc.parallel_cross_entropy(layer(given["hidden"]), given["target"], 0.1, reduce_loss=True)
    leaves = [given["hidden"], layer.weight, *([layer.bias] if with_bias else [])]
    return [loss, *torch.autograd.grad(loss, leaves)]


def by_the_loss(
    given: dict[str, Tensor], recipe: Any, with_bias: bool, chunk: int | None, call: Any = None
) -> list[Tensor]:
    bias = given["bias"] if with_bias else None
    call = call or nc.linear_cross_entropy
    loss = call(
        given["hidden"],
        given["weight"],
        given["target"],
        bias,
        label_smoothing=0.1,
        chunk_size=chunk,
        recipe=recipe,
    )
    leaves = [given[name] for name in ("hidden", "weight", "bias")[: 2 + with_bias]]
    return [loss, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", NEAREST)
def test_one_chunk_is_a_linear_layer(name: str, with_bias: bool, dtype: torch.dtype) -> None:
    given = operands(dtype=dtype)
    made = by_the_loss(given, QUANTIZED[name], with_bias, None)
    for ours, layers in zip(made, by_the_layer(given, QUANTIZED[name], with_bias), strict=True):
        assert torch.equal(ours, layers)


@pytest.mark.parametrize("name", NEAREST)
def test_chunks_are_layers_of_their_own(name: str) -> None:
    """Loss and gradients of 128 classes at a time are close to those of all."""
    given = operands()
    whole, chunks = (by_the_loss(given, QUANTIZED[name], True, chunk) for chunk in (None, 100))
    assert_close(chunks[0], whole[0], "training_loss")
    for part, all_of_it in zip(chunks[1:], whole[1:], strict=True):
        assert (part - all_of_it).float().norm() < 0.06 * all_of_it.float().norm()
    frozen = {**given, "hidden": given["hidden"].detach()}
    loss = nc.linear_cross_entropy(
        frozen["hidden"],
        given["weight"],
        given["target"],
        given["bias"],
        label_smoothing=0.1,
        chunk_size=128,
        recipe=QUANTIZED[name],
    )
    assert torch.equal(loss, chunks[0])
    assert torch.equal(torch.autograd.grad(loss, given["weight"])[0], chunks[2])


@pytest.mark.parametrize("chunk, products", [(CLASSES, 1), (128, 6)])
def test_the_logits_of_a_single_chunk_are_computed_once(
    chunk: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = mock.Mock(side_effect=quantized_head.fprop)
    monkeypatch.setattr(quantized_head, "fprop", counted)
    by_the_loss(operands(), QUANTIZED["current"], False, chunk)
    assert counted.call_count == products


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", STATELESS)
def test_few_tokens(name: str, tokens: int) -> None:
    given = operands(tokens)
    loss, *gradients = by_the_loss(given, name if name != "custom" else QUANTIZED[name], True, 128)
    assert torch.isfinite(loss)
    for gradient, leaf in zip(gradients, ("hidden", "weight", "bias"), strict=True):
        assert gradient.shape == given[leaf].shape and gradient.isfinite().all()
        assert bool(gradient.any()) == bool(tokens)


@pytest.mark.parametrize("chunk", [128, CLASSES])
@pytest.mark.parametrize("name", kinds(NEAREST))
def test_compiled(name: str, chunk: int) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    call = torch.compile(nc.linear_cross_entropy, fullgraph=True, backend=graphs)
    given = operands()
    eager = by_the_loss(given, QUANTIZED[name], True, chunk)
    for ours, expected in zip(by_the_loss(given, QUANTIZED[name], True, chunk, call), eager, strict=True):
        assert torch.equal(ours, expected)
    assert graphs.frame_count == 1


def test_a_tied_weight_gets_both_gradients() -> None:
    given, tokens = operands(16), torch.arange(16)
    weight = given["weight"]

    def gradient(embedding: Tensor, head: Tensor) -> Tensor:
        hidden = torch.nn.functional.embedding(tokens, embedding)
        nc.linear_cross_entropy(hidden, head, given["target"], recipe="current").backward()
        return weight.grad

    tied = gradient(weight, weight).clone()
    weight.grad = None
    alone = gradient(weight, weight.detach()).clone()
    weight.grad = None
    assert_close(tied, alone + gradient(weight.detach(), weight), "bf16_output")


def test_the_backward_runs_again_and_no_gradient_saves_nothing() -> None:
    given = operands()
    loss = nc.linear_cross_entropy(given["hidden"], given["weight"], given["target"], recipe="current")
    first = torch.autograd.grad(loss, [given["hidden"], given["weight"]], retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, [given["hidden"], given["weight"]]), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        again = nc.linear_cross_entropy(given["hidden"], given["weight"], given["target"], recipe="current")
    assert not again.requires_grad and torch.equal(again, loss)


def test_the_logits_are_never_whole() -> None:
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    with Largest() as seen:
        nc.linear_cross_entropy(
            hidden, weight, torch.randint(0, 4096, (64,)), chunk_size=512, recipe="current"
        ).backward()
    assert seen.numbers == max(64 * 512, weight.numel())


@pytest.mark.parametrize(
    "recipe, error, message",
    [
        ("delayed", ValueError, "whose scales are state of a layer.*use 'current' or 'block'"),
        (
            nc.recipe.Float8CurrentScaling(backward_override="high_precision"),
            ValueError,
            "leave backward_override out",
        ),
        ("currant", ValueError, "the nearest: 'current'"),
        (3, TypeError, "recipe is 3, of type int"),
        (
            nc.recipe.CustomRecipe(
                qfactory=lambda role: nc.NVFP4Quantizer(stochastic_rounding=role.tensor_type == "weight")
            ),
            ValueError,
            "rounds weights stochastically",
        ),
    ],
)
def test_refused_recipes(recipe: Any, error: type[Exception], message: str) -> None:
    given = operands()
    with pytest.raises(error, match=message):
        nc.linear_cross_entropy(given["hidden"], given["weight"], given["target"], recipe=recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["current", "block"])
def test_on_a_gpu(name: str, compiled: bool) -> None:
    """Equals the CPU up to the order of sums, in less memory than the logits."""
    call = torch.compile(nc.linear_cross_entropy, fullgraph=True) if compiled else nc.linear_cross_entropy
    given = operands(256)
    moved = {key: x.detach().cuda().requires_grad_(x.requires_grad) for key, x in given.items()}
    on_gpu = by_the_loss(moved, name, False, 128, call)
    for ours, expected in zip(on_gpu, by_the_loss(given, name, False, 128), strict=True):
        assert (ours.cpu() - expected).float().norm() <= 0.02 * expected.float().norm()
    tokens, classes = 4096, 64000
    hidden = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, classes, (tokens,), device="cuda")
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(hidden, weight, target, chunk_size=8192, recipe=name).backward()
        taken = torch.cuda.max_memory_allocated() - before
    assert taken < 0.8 * tokens * classes * 2 + 2 * weight.nbytes
