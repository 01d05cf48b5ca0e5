"""Tokens to their experts and back: copying, adding up with weights, and the gradient of that, two experts per token.

`bytes` is per element of the tokens: copying reads a token once and writes it twice. The maps are those of eight
experts, by index (two columns) or by mask (eight columns, of which two are there).
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from harness import HIDDEN, Row, compare, compiled, parser, report_on_gpu
from torch import Tensor

from narrowcast import functional, reference
from narrowcast.moe.rows import row_map_of_indices, row_map_of_mask

EXPERTS, TOPK = 8, 2
BYTES = {"spread": 6.0, "collect": 6.0, "collect, mask": 6.0, "collect backward": 10.0}
Arguments = tuple[Tensor, ...]


def routed(shape: tuple[int, int], device: str = "cpu") -> Arguments:
    """Tokens, the experts' rows, both row maps, positions, weights, weights of the mask."""
    tokens, width = shape
    scores = torch.rand(tokens, EXPERTS, device=device)
    indices = scores.topk(TOPK, dim=-1)[1].sort(dim=-1)[0].to(torch.int32)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, indices.long(), True)
    by_index, by_mask = row_map_of_indices(indices), row_map_of_mask(mask)
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    rows = torch.randn(tokens * TOPK, width, dtype=torch.bfloat16, device=device)
    positions = functional.moe_positions(by_index, tokens * TOPK)
    return x, rows, by_index, by_mask, positions, scores.gather(1, indices.long()), scores


def kernel_table(moe: Any) -> dict[str, Any]:
    """``moe``: the operators, or the reference."""
    spread, collect, backward = moe
    runs = {
        "spread": lambda x, rows, index, mask, positions, w, wm: [spread(x, positions, TOPK)],
        "collect": lambda x, rows, index, mask, positions, w, wm: [collect(rows, index, w)],
        "collect, mask": lambda x, rows, index, mask, positions, w, wm: [collect(rows, mask, wm)],
        "collect backward": lambda x, rows, index, mask, positions, w, wm: backward(x, rows, positions, w),
    }
    return {name: (run, BYTES[name]) for name, run in runs.items()}


def expression_table() -> dict[str, Any]:
    """The same in PyTorch; a mask has no form without atomics."""

    def backward(x: Tensor, rows: Tensor, positions: Tensor, w: Tensor) -> list[Tensor]:
        grad = x[positions // TOPK]
        weighted = (w.flatten()[positions].unsqueeze(1) * grad.float()).to(rows.dtype)
        return [weighted, (grad.float() * rows.float()).sum(1)]

    runs = {
        "spread": lambda x, rows, index, mask, positions, w, wm: [x[positions // TOPK]],
        "collect": lambda x, rows, index, mask, positions, w, wm: [
            (rows[index].float() * w.unsqueeze(-1)).sum(1).to(rows.dtype)
        ],
        "collect backward": lambda x, rows, index, mask, positions, w, wm: backward(x, rows, positions, w),
    }
    return {name: (run, BYTES[name]) for name, run in runs.items()}


OPERATORS = (functional.moe_spread, functional.moe_collect, functional.moe_collect_backward)
REFERENCE = (reference.moe.spread, reference.moe.collect, reference.moe.collect_backward)


def measure(chosen: Namespace) -> list[Row]:
    peers = {f"torch: {name}": case for name, case in expression_table().items()}
    if not chosen.skip_compile:
        peers |= compiled(expression_table())
    return compare(chosen, HIDDEN, routed, kernel_table(OPERATORS), kernel_table(REFERENCE), peers)


def main() -> None:
    report_on_gpu("moe", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
