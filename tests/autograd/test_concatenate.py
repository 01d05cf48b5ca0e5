"""Several parameters as one: the memory they share where they lie behind one another, else a copy."""

from __future__ import annotations

import pytest
import torch

from narrowcast.autograd import concatenate


def parts_of(adjacent: bool) -> list[torch.Tensor]:
    whole = torch.arange(24.0).view(6, 4)
    return [part if adjacent else part.clone() for part in whole.split([1, 3, 2])]


@pytest.mark.parametrize("adjacent", [True, False])
def test_values_and_gradients_are_those_of_cat(adjacent: bool) -> None:
    ours, theirs = ([part.requires_grad_() for part in parts_of(adjacent)] for _ in range(2))
    joined, expected = concatenate(ours), torch.cat(theirs)
    assert torch.equal(joined, expected)
    assert (joined.data_ptr() == ours[0].data_ptr()) is adjacent
    for result in (joined, expected):
        (result * torch.arange(24.0).view(6, 4)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs))  # type: ignore[arg-type]


def test_parts_in_another_order_are_copied() -> None:
    parts = parts_of(True)[::-1]
    assert torch.equal(concatenate(parts), torch.cat(parts))


def test_a_graph_copies() -> None:
    parts = [part.requires_grad_() for part in parts_of(True)]
    joined = torch.compile(concatenate, fullgraph=True, backend="aot_eager")(parts)
    assert torch.equal(joined, torch.cat(parts)) and joined.data_ptr() != parts[0].data_ptr()
