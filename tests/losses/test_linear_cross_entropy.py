"""``linear_cross_entropy`` against torch's linear and cross_entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy, linear

import narrowcast as nc
from narrowcast.testing import assert_close

from .largest import Largest

OPTIONS = {
    "plain": {},
    "smooth": {"label_smoothing": 0.2},
    "sum": {"reduction": "sum"},
    "tokens": {"reduction": "none", "label_smoothing": 0.1, "ignore_index": 4},
}
TOKENS, WIDTH, CLASSES = (3, 7), 16, 50


def operands(dtype: torch.dtype, device: Any = "cpu") -> dict[str, Tensor]:
    made = {
        "hidden": torch.randn(*TOKENS, WIDTH),
        "weight": torch.randn(CLASSES, WIDTH) / 2,
        "bias": torch.randn(CLASSES),
    }
    made = {name: tensor.to(device, dtype).requires_grad_() for name, tensor in made.items()}
    target = torch.randint(0, CLASSES, TOKENS)
    target[0, :2] = torch.tensor([4, -100])
    return {**made, "target": target.to(device)}


def targets(target: Tensor, options: dict[str, Any]) -> Tensor:
    return torch.where(target == -100, options.get("ignore_index", -100), target)


def reference(given: dict[str, Tensor], with_bias: bool, options: dict[str, Any]) -> list[Tensor]:
    exact = {name: given[name].detach().double().requires_grad_() for name in ("hidden", "weight", "bias")}
    logits = linear(exact["hidden"], exact["weight"], exact["bias"] if with_bias else None)
    target = targets(given["target"], options)
    loss = cross_entropy(logits.view(-1, CLASSES), target.view(-1), **options)
    names = ("hidden", "weight", "bias")[: 2 + with_bias]
    return [loss, *torch.autograd.grad(weighted(loss), [exact[name] for name in names])]


def weighted(loss: Tensor) -> Tensor:
    return (loss.view(-1) * torch.arange(1, loss.numel() + 1, device=loss.device) / 7).sum()


def run(
    given: dict[str, Tensor],
    with_bias: bool,
    options: dict[str, Any],
    chunk: int | None,
    backend: str | None = None,
) -> list[Tensor]:
    loss_of = nc.linear_cross_entropy
    if backend:
        loss_of = torch.compile(loss_of, fullgraph=True, backend=backend)
    target = targets(given["target"], options)
    bias = given["bias"] if with_bias else None
    loss = loss_of(given["hidden"], given["weight"], target, bias, chunk_size=chunk, **options)
    names = ("hidden", "weight", "bias")[: 2 + with_bias]
    return [loss, *torch.autograd.grad(weighted(loss), [given[name] for name in names])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_torch(name: str, with_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    given, options = operands(dtype, device), OPTIONS[name]
    expected = reference(given, with_bias, options)
    entry = "fp32_sum_order" if dtype == torch.float32 else "bf16_output"
    for chunk in (None, 16, CLASSES):
        made = run(given, with_bias, options, chunk)
        assert made[0].dtype == torch.float32 and made[1].dtype == dtype
        for ours, theirs in zip(made, expected, strict=True):
            assert_close(ours.view(-1), theirs.view(-1), entry)
    compiled = run(given, with_bias, options, 16, "aot_eager")
    for ours, eager in zip(compiled, run(given, with_bias, options, 16), strict=True):
        assert torch.equal(ours, eager)


def test_the_logits_are_never_whole() -> None:
    """No tensor that forward or backward makes has as many numbers as the logits."""

    from narrowcast.functional import cross_entropy as operators

    hidden, weight = torch.randn(64, 8), torch.randn(4096, 8)
    target = torch.randint(0, 4096, (64,))
    with Largest() as seen:  # the implementations themselves: operators are opaque to a mode
        lse = operators._linear_statistics(hidden, weight, None, target, 512)[0]
        wanted = [True, True, False]
        operators._linear_gradients(hidden, weight, None, target, lse, lse, 0.0, 512, wanted)
    assert seen.numbers == max(64 * 512, weight.numel())


def test_frozen_operands_and_a_dynamic_length() -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    loss_of = torch.compile(nc.linear_cross_entropy, fullgraph=True, dynamic=True, backend=graphs)
    weight = torch.randn(CLASSES, WIDTH)
    counts = []
    for tokens in (5, 6, 9):
        hidden = torch.randn(tokens, WIDTH, requires_grad=True)
        loss_of(hidden, weight, torch.zeros(tokens, dtype=torch.long)).backward()
        assert hidden.grad is not None
        counts.append(graphs.frame_count)  # the first may be 2: the compiler starts over once, for a float
    assert counts[0] == counts[-1]
    weight.requires_grad_()
    nc.linear_cross_entropy(torch.randn(5, WIDTH), weight, torch.arange(5)).backward()
    assert weight.grad is not None


def test_all_ignored() -> None:
    given = operands(torch.float32)
    loss = nc.linear_cross_entropy(given["hidden"], given["weight"], torch.full(TOKENS, -100))
    loss.backward()
    assert loss == 0 and not given["weight"].grad.any()


def test_autocast_and_a_quantized_weight() -> None:
    given = operands(torch.float32)
    half = operands(torch.bfloat16)
    half = {name: given[name].detach().to(half[name].dtype) for name in given}
    with torch.autocast("cpu", torch.bfloat16):
        loss = nc.linear_cross_entropy(given["hidden"], given["weight"], given["target"])
    assert torch.equal(loss, nc.linear_cross_entropy(half["hidden"], half["weight"], given["target"]))
    loss.backward()
    assert given["weight"].grad.dtype == torch.float32
    with nc.quantized_model_init(recipe=nc.recipe.Float8CurrentScaling()):
        head = nc.Linear(WIDTH, 48, bias=False, device="cpu")
    target = given["target"] % 48
    loss = nc.linear_cross_entropy(given["hidden"], head.weight, target)
    loss.backward()
    assert head.weight.grad is not None
    plain = head.weight.detach().dequantize()
    assert torch.equal(loss, nc.linear_cross_entropy(given["hidden"], plain, target))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reduction": "average"}, "reduction is 'average'"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"weight": torch.zeros(5, 3)}, r"weight \(5, 3\) do not multiply"),
        ({"weight": torch.zeros(50, 16, dtype=torch.bfloat16)}, "weight has dtype torch.bfloat16"),
        ({"bias": torch.zeros(3)}, r"bias has shape \(3,\); use \(50,\)"),
        ({"target": torch.zeros(3, dtype=torch.long)}, r"target has shape \(3,\), but hidden \(3, 7, 16\)"),
        ({"target": torch.full((3, 7), 50)}, "target 50 is out of range"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    given = {name: tensor for name, tensor in operands(torch.float32).items() if name != "bias"}
    with pytest.raises(ValueError, match=message):
        nc.linear_cross_entropy(**{**given, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_memory(compiled: bool) -> None:
    """As the docstring says: a chunk of logits, gradients, and fp32 of the size of hidden."""
    tokens, width, classes = 8192, 2048, 128256
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, classes, (tokens,), device="cuda")
    loss_of = torch.compile(nc.linear_cross_entropy, fullgraph=True) if compiled else nc.linear_cross_entropy
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(hidden, weight, target).backward()
        taken = torch.cuda.max_memory_allocated() - before
    chunk = 2**27 * 2
    assert taken < 1.1 * (2 * chunk + weight.nbytes + 4 * hidden.nbytes)
    assert taken < 0.6 * tokens * classes * 2, "less than the logits alone"
