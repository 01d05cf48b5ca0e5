"""A mixture from router to sum as operators: every cast and its bytes, each way, and which codes are made twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc

EXPERTS, TOKENS, TOPK, WIDTH, INNER = 4, 48, 2, 128, 256
BLOCK = nc.Float8BlockQuantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1)
EVERYWHERE = {"quantizer": BLOCK, "combine_quantizer": BLOCK, "grad_quantizer": BLOCK}
WEIGHTS = "grouped_quantize_weights"


class Casts(TorchDispatchMode):
    """The operators of narrowcast that quantize or decode: names, and the tensors that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Tensor]]] = []
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().rpartition("::")[2]
        if func.namespace == "narrowcast" and "quantize" in name:
            self.calls.append((name, [out] if isinstance(out, Tensor) else out))
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return out

    def counts(self) -> Counter[str]:
        return Counter(name for name, _ in self.calls)

    def bytes_beside_operands(self) -> int:
        return sum(
            one.numel() * one.element_size()
            for name, out in self.calls
            if not name.startswith("grouped")
            for one in out
        )


def flow(options: dict[str, Any]) -> tuple[Casts, Casts]:
    """The casts of a forward and of its backward."""
    torch.manual_seed(0)
    on_cpu: dict[str, Any] = {"bias": False, "device": "cpu", "dtype": torch.bfloat16}
    router = nc.MoERouter(WIDTH, EXPERTS, TOPK, device="cpu")
    experts = nc.ops.Sequential(
        nc.ops.GroupedLinear(EXPERTS, WIDTH, 2 * INNER, **on_cpu),
        nc.ops.ScaledSwiGLU(),
        nc.ops.GroupedLinear(EXPERTS, INNER, WIDTH, **on_cpu),
    )
    dispatch = nc.distributed.MoEDispatch(EXPERTS, capacity=TOKENS * TOPK, **options)
    x = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_(True)

    def run(rows: Tensor, splits: Tensor) -> Tensor:
        return experts(rows, splits, rows.new_ones(len(rows)), splits)

    with nc.autocast(recipe=nc.recipe.Float8BlockScaling()):
        with Casts() as forward:
            probs, routing_map, _ = router(x)
            y = dispatch(x, probs, routing_map, TOKENS * TOPK, run)
        with Casts() as backward:
            y.sum().backward()
    return forward, backward


@pytest.mark.parametrize(
    ("options", "there", "back"),
    [({"quantizer": BLOCK}, 1, 0), (EVERYWHERE, 2, 2), ({"quantizer": None}, 0, 0)],
)
def test_casts_of_a_mixture(options: dict[str, Any], there: int, back: int) -> None:
    """Each operand of a GEMM is quantized once, in one pass for both directions; a wire encodes and decodes once."""
    forward, backward = flow(options)
    wires = {"quantize": there, "dequantize": there} if there else {}
    assert forward.counts() == Counter({"grouped_quantize": 2, WEIGHTS: 2, **wires})
    wires = {"quantize": back, "dequantize": back} if back else {}
    assert backward.counts() == Counter({"grouped_quantize": 2, **wires})
    assert forward.reads == backward.reads == 0


def test_bytes_of_casts() -> None:
    """A wire writes codes of what is sent, and rows of what has come: tokens once, whatever their experts."""
    row = WIDTH + WIDTH // 128 * 4  # codes and scales
    forward, backward = flow({"quantizer": BLOCK})
    assert forward.bytes_beside_operands() == TOKENS * row + TOKENS * TOPK * WIDTH * 2
    assert backward.bytes_beside_operands() == 0


def test_the_first_layer_loses_nothing_of_what_came() -> None:
    """Scales are powers of two: quantizing decoded rows again, in blocks of a row, changes no value."""
    rows = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    came = BLOCK.quantize(rows).dequantize()
    assert not torch.equal(came, rows)
    assert torch.equal(BLOCK.quantize(came).dequantize(), came)
