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
IN_CODES = {**EVERYWHERE, "deliver_codes": True}
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
    [
        ({"quantizer": BLOCK}, {"quantize": 1, "dequantize": 1}, {}),
        ({"quantizer": BLOCK, "deliver_codes": True}, {"quantize": 1}, {}),
        (EVERYWHERE, {"quantize": 2, "dequantize": 1}, {"quantize": 2, "dequantize": 1}),
        (IN_CODES, {"quantize": 2}, {"quantize": 2}),
        ({"quantizer": None}, {}, {}),
    ],
)
def test_casts_of_a_mixture(options: dict[str, Any], there: dict[str, int], back: dict[str, int]) -> None:
    """Each operand of a GEMM is quantized once, in one pass for both directions, from the codes where these are
    delivered; a wire encodes once; sums decode what they add.
    """
    forward, backward = flow(options)
    codes = options.get("deliver_codes", False)
    rows = {"grouped_quantize": 1, "grouped_quantize_coded": 1} if codes else {"grouped_quantize": 2}
    assert forward.counts() == Counter({**rows, WEIGHTS: 2, **there})
    rows = {"grouped_quantize": 1, "grouped_quantize_coded": 1} if codes and back else {"grouped_quantize": 2}
    assert backward.counts() == Counter({**rows, **back})
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


MX = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=False)
RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": nc.recipe.DelayedScaling(),
    "current": nc.recipe.Float8CurrentScaling(),
    "block": nc.recipe.Float8BlockScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(),
    "dequantized": nc.recipe.Float8BlockScaling(backward_override="dequantized"),
    "high_precision": nc.recipe.MXFP8BlockScaling(backward_override="high_precision"),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("wire", [BLOCK, MX], ids=["block", "mxfp8"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_change_no_bit(recipe: str, wire: nc.Quantizer) -> None:
    """Whether layers and a function between them get codes or what these decode to."""
    results = []
    for deliver in (False, True):
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": "cpu", "params_dtype": torch.bfloat16}
        up, down = (
            nc.GroupedLinear(EXPERTS, WIDTH, INNER, **options),
            nc.GroupedLinear(EXPERTS, INNER, WIDTH, **options),
        )
        for layer in (up, down):
            nc.set_recipe(layer, RECIPES[recipe])
        quantizers = {"quantizer": wire, "combine_quantizer": wire, "grad_quantizer": wire}
        dispatch = nc.distributed.MoEDispatch(EXPERTS, **quantizers, deliver_codes=deliver)
        x = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_(True)
        logits = torch.randn(TOKENS, EXPERTS).requires_grad_(True)
        probs, routing_map = nc.fused_topk_with_score_function(logits, TOPK)
        seen = []

        def experts(rows: Tensor, splits: Tensor, up: Any = up, down: Any = down, seen: Any = seen) -> Tensor:
            seen.append(type(rows))
            return down(torch.relu(up(rows, splits)), splits)

        y = dispatch(x, probs, routing_map, TOKENS * TOPK, experts)
        assert issubclass(seen[0], nc.QuantizedTensor) == deliver
        leaves = x, logits, *up.parameters(), *down.parameters()
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for plain, coded in zip(*results, strict=True):
        assert torch.equal(plain, coded)


def test_layers_take_codes_of_rows_alone() -> None:
    rows = torch.randn(TOKENS, WIDTH).bfloat16()
    layer = nc.GroupedLinear(1, WIDTH, INNER, device="cpu", params_dtype=torch.bfloat16)
    tiles = nc.Float8BlockQuantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=2)
    with pytest.raises(TypeError, match="in MXFP8 or in blocks of 128 of a row"):
        layer(tiles.quantize(rows), [TOKENS])
    with pytest.raises(ValueError, match="last dim"):
        layer(BLOCK.quantize(rows[:, :64]), [TOKENS])
    assert torch.equal(
        layer(BLOCK.quantize(rows), [TOKENS]), layer(BLOCK.quantize(rows).dequantize(), [TOKENS])
    )
