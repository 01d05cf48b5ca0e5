"""``parallel_cross_entropy`` against ``torch.nn.functional.cross_entropy``, whole and split over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy

import narrowcast as nc
from narrowcast.testing import assert_close

CASES = {"plain": {}, "smooth": {"label_smoothing": 0.1}, "ignores": {"ignore_idx": 3}}
WORLD, SECONDS = 2, 120


def operands(dtype: torch.dtype, lead: tuple[int, ...] = (3, 5), columns: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn(*lead, columns, generator=generator)).to(dtype)
    target = torch.randint(0, columns, lead, generator=generator)
    target.view(-1)[1] = 3
    target.view(-1)[2] = -100
    return logits, target


def reference(logits: Tensor, target: Tensor, reduce: bool, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Loss and gradient of torch's, from the logits in fp32."""
    x = logits.detach().float().requires_grad_()
    ignored = options.get("ignore_idx", -100)
    target = torch.where(target == -100, ignored, target).view(-1)
    loss = cross_entropy(
        x.view(-1, x.shape[-1]),
        target,
        reduction="mean" if reduce else "none",
        label_smoothing=options.get("label_smoothing", 0.0),
        ignore_index=ignored,
    )
    weights = torch.ones(()) if reduce else torch.arange(loss.numel()) / 7
    loss.backward(weights.to(loss.device))
    assert x.grad is not None
    return loss.detach(), x.grad


def run(
    logits: Tensor, target: Tensor, reduce: bool, options: dict[str, Any], backend: str | None = None
) -> tuple[Tensor, Tensor]:
    x = logits.detach().clone().requires_grad_()
    target = torch.where(target == -100, options.get("ignore_idx", -100), target)

    def loss_of(x: Tensor, target: Tensor) -> Tensor:
        return nc.parallel_cross_entropy(x, target, reduce_loss=reduce, **options)

    if backend:
        loss_of = torch.compile(loss_of, fullgraph=True, backend=backend)
    loss = loss_of(x, target)
    weights = torch.ones((), device=x.device)
    if not reduce:
        weights = (torch.arange(loss.numel(), device=x.device) / 7).view(loss.shape)
    loss.backward(weights)
    assert x.grad is not None
    assert torch.equal(x, logits), "the input is never modified"
    return loss.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", [False, True], ids=["tokens", "mean"])
@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case: str, reduce: bool, dtype: torch.dtype, device: torch.device) -> None:
    logits, target = (tensor.to(device) for tensor in operands(dtype))
    loss, grad = run(logits, target, reduce, CASES[case])
    expected, expected_grad = reference(logits, target, reduce, CASES[case])
    assert loss.dtype == torch.float32 and grad.dtype == dtype
    assert loss.shape == (() if reduce else target.shape)
    assert_close(loss.view(-1), expected.view(-1), "fp32_sum_order")
    entry = "fp32_sum_order" if dtype == torch.float32 else "bf16_output"
    assert_close(grad.view_as(expected_grad), expected_grad, entry)
    compiled, compiled_grad = run(logits, target, reduce, CASES[case], "aot_eager")
    assert torch.equal(compiled, loss) and torch.equal(compiled_grad, grad)


def test_one_graph_for_all_lengths(device: torch.device) -> None:
    graphs = CompileCounterWithBackend("aot_eager")
    loss_of = torch.compile(nc.parallel_cross_entropy, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for length in (5, 6, 9):
        logits, target = operands(torch.float32, (2, length))
        loss_of(logits.to(device).requires_grad_(), target.to(device)).sum().backward()
        counts.append(graphs.frame_count)  # the first may be 2: the compiler starts over once, for a float
    assert counts[0] == counts[-1]


def test_all_ignored_and_no_tokens() -> None:
    logits = torch.randn(4, 6, requires_grad=True)
    loss = nc.parallel_cross_entropy(logits, torch.full((4,), -100), reduce_loss=True)
    loss.backward()
    assert loss == 0 and logits.grad is not None and not logits.grad.any()
    assert nc.parallel_cross_entropy(logits[:0], torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_backward_twice_and_second_order() -> None:
    logits, target = operands(torch.float32)
    logits.requires_grad_()
    loss = nc.parallel_cross_entropy(logits, target, reduce_loss=True)
    loss.backward(retain_graph=True)
    assert logits.grad is not None
    first = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * first)
    (grad,) = torch.autograd.grad(
        nc.parallel_cross_entropy(logits, target, 0.0, True), logits, create_graph=True
    )
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_a_target_that_is_no_class() -> None:
    logits, target = operands(torch.float32)
    target[0, 0] = 24
    with pytest.raises(ValueError, match="target 24 is out of range: use 0 to 23"):
        nc.parallel_cross_entropy(logits, target)
    compiled = torch.compile(nc.parallel_cross_entropy, fullgraph=True, backend="aot_eager")
    logits.requires_grad_()
    loss = compiled(logits, target)  # nothing is read there: it shows in the result
    loss[0, 0].backward()
    assert loss[0, 0].isnan() and not loss[1:].isnan().any()
    assert logits.grad is not None and logits.grad[0, 0].isnan().all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target": torch.zeros(3, 4, dtype=torch.long)}, r"target has shape \(3, 4\), but inp \(3, 5, 24\)"),
        ({"target": torch.zeros(3, 5)}, "target has dtype torch.float32"),
        ({"inp": torch.zeros(3, 5, 24, dtype=torch.float64)}, "torch.float64"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    logits, target = operands(torch.float32)
    with pytest.raises(ValueError, match=message):
        nc.parallel_cross_entropy(**{"inp": logits, "target": target, **change})


def test_a_group_that_is_none() -> None:
    with pytest.raises(TypeError, match="process_group is an int"):
        nc.parallel_cross_entropy(*operands(torch.float32), dist_process_group=3)


def work(rank: int) -> Any:
    results = {}
    group = dist.new_group([0, 1])
    for case, options in CASES.items():
        compiled = ((True, "aot_eager"),) if case == "smooth" else ()
        for reduce, backend in ((False, None), (True, None), *compiled):
            logits, target = operands(torch.float32)
            shard = logits[..., 12 * rank : 12 * (rank + 1)].contiguous()
            with_group = {**options, "dist_process_group": group}
            results[case, reduce, backend] = run(shard, target, reduce, with_group, backend)
    return results


def test_split_over_two_processes(tmp_path: Path) -> None:
    parts = run_ranks(work, tmp_path, WORLD, SECONDS)
    logits, target = operands(torch.float32)
    for case, reduce, backend in parts[0]:
        expected, expected_grad = reference(logits, target, reduce, CASES[case])
        grad = torch.cat([part[case, reduce, backend][1] for part in parts], -1)
        for part in parts:
            assert_close(part[case, reduce, backend][0].view(-1), expected.view(-1), "fp32_sum_order")
        assert_close(grad.view_as(expected_grad), expected_grad, "fp32_sum_order")


@pytest.mark.gpu
def test_capturable() -> None:
    logits, target = (tensor.cuda() for tensor in operands(torch.bfloat16))
    logits.requires_grad_()
    for _ in range(2):
        nc.parallel_cross_entropy(logits, target, reduce_loss=True).backward()
    logits.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = nc.parallel_cross_entropy(logits, target, reduce_loss=True)
        loss.backward()
    graph.replay()
    assert_close(loss.view(1), reference(logits, target, True, {})[0].view(1), "fp32_sum_order")


@pytest.mark.gpu
def test_memory_is_logits_and_gradient() -> None:
    logits = torch.randn(4096, 32000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 32000, (4096,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nc.parallel_cross_entropy(logits, target, reduce_loss=True).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * logits.nbytes
