"""The reference of the cross entropy against PyTorch's, with parts of a vocabulary, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from narrowcast.reference import cross_entropy

ROWS, COLUMNS = 5, 12


def logits() -> torch.Tensor:
    return 3 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


TARGET = torch.tensor([0, COLUMNS - 1, 5, 7, 1])


def test_statistics_give_the_loss_of_pytorch():
    x = logits()
    lse, at_target, total = cross_entropy.statistics(x, TARGET)
    torch.testing.assert_close(lse - at_target, F.cross_entropy(x, TARGET, reduction="none"))
    torch.testing.assert_close(total, x.sum(1))


def test_a_target_that_is_not_here_counts_as_zero():
    x = logits()
    target = torch.tensor([-1, COLUMNS, 0, COLUMNS - 1, -COLUMNS])
    assert cross_entropy.statistics(x, target)[1].tolist() == [0.0, 0.0, x[2, 0], x[3, -1], 0.0]
    nothing = cross_entropy.statistics(x[:, :0], target)
    assert nothing[0].tolist() == [-torch.inf] * ROWS and not nothing[1:].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_that_of_pytorch(dtype, smoothing):
    x, grad = logits().to(dtype), torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0])
    leaf = x.float().clone().requires_grad_()
    F.cross_entropy(leaf, TARGET, reduction="none", label_smoothing=smoothing).backward(grad)
    lse = cross_entropy.statistics(x, TARGET)[0]
    arguments = x, TARGET, lse, grad, 1 - smoothing, smoothing / COLUMNS
    before = x.clone()
    ours = cross_entropy.gradient(*arguments)
    assert ours.dtype == dtype and ours.is_contiguous() and torch.equal(x, before)
    torch.testing.assert_close(
        ours.float(), leaf.grad, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
    )
    over = cross_entropy.gradient(*arguments, in_place=True)
    assert over is x and torch.equal(x, ours)


def test_a_row_without_gradient_gets_zeros_whatever_it_holds():
    x = torch.full((2, 3), torch.nan)
    zeros = cross_entropy.gradient(x, torch.tensor([0, 1]), torch.zeros(2), torch.zeros(2), 1.0, 0.0)
    assert torch.equal(zeros, torch.zeros(2, 3))


@pytest.mark.parametrize(
    "x, target, message",
    [
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2), "got torch.float64"),
        (torch.zeros(2, 3, 1), torch.zeros(2), r"got \(2, 3, 1\) and \(2,\)"),
        (torch.zeros(2, 3), torch.zeros(3), r"got \(2, 3\) and \(3,\)"),
    ],
)
def test_refused(x, target, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy.statistics(x, target)
    rows = torch.ones(x.shape[0])
    with pytest.raises(ValueError, match=message):
        cross_entropy.gradient(x, target, rows, rows, 1.0, 0.0)
