"""Attention in a fixed order of keys: close to the reference, and the same bits whatever else is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from narrowcast import kernels
from narrowcast.reference import batch_invariant_attention

from .conftest import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
kernel: Any = kernels.batch_invariant_attention

reference: Any = batch_invariant_attention

SCALE = 0.2
# batch, heads, heads of keys, queries, keys, head dims; the window, which counts from the last query and key
CASES = [
    ((2, 4, 2, 37, 37, 32, 16), (-1, 0)),
    ((1, 2, 2, 5, 150, 24, 40), (-1, -1)),
    ((1, 4, 1, 40, 110, 16, 16), (9, 0)),
    ((1, 1, 1, 70, 70, 128, 128), (-1, 3)),
]


def operands(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Tensors of bshd, as layers give them."""
    b, h, g, s_q, s_kv, d, d_v = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = (b, s_q, h, d), (b, s_kv, g, d), (b, s_kv, g, d_v)
    return [torch.randn(s, generator=generator).to(device, dtype).transpose(1, 2) for s in shapes]


def pairs(left: int, right: int, shift: int, s_q: int, s_kv: int, device: torch.device) -> Tensor:
    distance = torch.arange(s_kv, device=device) - torch.arange(s_q, device=device)[:, None] - shift
    return ((distance > right) & (right >= 0)) | ((distance < -left) & (left >= 0))


@pytest.mark.parametrize(("sizes", "window"), CASES)
def test_output_and_gradients(sizes: tuple[int, ...], window: Any, device: torch.device) -> None:
    q, k, v = operands(sizes, device)
    s_q, s_kv = q.shape[2], k.shape[2]
    shift = s_kv - s_q
    out, lse, top = kernel.attention(q, k, v, None, SCALE, *window, shift)
    wide: Any = [x.float() for x in (q, k, v)]
    expected, exact_lse, exact_top = reference.attention(*wide, None, SCALE, *window, shift)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)  # weights and result are bf16
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=2**-8)
    torch.testing.assert_close(top, exact_top, rtol=1e-4, atol=1e-4)
    hidden = pairs(*window, shift, s_q, s_kv, device)[None, None]
    for one, other in zip((out, lse, top), kernel.attention(q, k, v, hidden, SCALE, -1, -1, 0)):
        assert torch.equal(one, other), "a tensor of pairs says the same"

    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    exact = reference.attention_backward(
        grad.float(), *wide, expected, exact_lse, None, SCALE, *window, shift
    )
    sides: Any
    for mask, sides in ((None, (*window, shift)), (hidden, (-1, -1, 0))):
        made = kernel.attention_backward(grad, q, k, v, out, lse, mask, SCALE, *sides)
        for one, other in zip(made, exact):
            assert one.dtype == q.dtype and (one.float() - other).norm() < 0.01 * other.norm()


def test_a_query_has_its_bits_alone(device: torch.device) -> None:
    """And with fewer keys after those that it sees, in another batch, and without the other heads."""
    q, k, v = operands((2, 4, 2, 70, 70, 16, 16), device)
    whole = kernel.attention(q, k, v, None, SCALE, -1, 0, 0)[0]
    for at in (0, 33, 69):
        last: Any = q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1]
        assert torch.equal(kernel.attention(*last, None, SCALE, -1, 0, at)[0], whole[:, :, at : at + 1])
    one: Any = (x[1:, part] for x, part in ((q, slice(2, 4)), (k, slice(1, 2)), (v, slice(1, 2))))
    assert torch.equal(kernel.attention(*one, None, SCALE, -1, 0, 0)[0], whole[1:, 2:4])


def test_what_nobody_sees_may_be_anything(device: torch.device) -> None:
    q, k, v = operands((1, 1, 1, 3, 80, 16, 16), device, torch.float16)
    hidden = torch.zeros(1, 1, 3, 80, dtype=torch.bool, device=device)
    hidden[..., 70:] = True
    hidden[:, :, 1] = True
    expected = kernel.attention(q, k[:, :, :70], v[:, :, :70], hidden[..., :70], SCALE, -1, -1, 0)
    for x in (k, v):
        x[:, :, 70:] = float("nan")
    made = kernel.attention(q, k, v, hidden, SCALE, -1, -1, 0)
    assert all(torch.equal(one, other) for one, other in zip(made, expected))
    assert not bool(made[0][:, :, 1].any()) and made[2][0, 0, 1].item() == float("-inf")


def test_empty_and_refused(device: torch.device) -> None:
    q, k, v = operands((1, 2, 1, 0, 5, 16, 16), device)
    assert kernel.attention(q, k, v, None, SCALE, -1, -1, 0)[0].shape == (1, 2, 0, 16)
    q, k, v = operands((1, 2, 1, 3, 0, 16, 16), device)
    assert torch.equal(kernel.attention(q, k, v, None, SCALE, -1, -1, 0)[0], torch.zeros_like(q))
    with pytest.raises(ValueError, match=r"v is torch\.float32; give bf16 or fp16"):
        kernel.attention(q, k, v.float(), None, SCALE, -1, -1, 0)
    with pytest.raises(ValueError, match="q has head dim 130; the kernel takes at most 128"):
        kernel.attention(*operands((1, 1, 1, 3, 3, 130, 16), device), None, SCALE, -1, -1, 0)
