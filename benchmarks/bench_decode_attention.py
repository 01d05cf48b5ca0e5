"""Attention of one query per sequence to a KV cache, beside PyTorch's ``scaled_dot_product_attention``.

PyTorch's gets the queries of a group as rows, and a mask that was computed before; it reads the whole cache. Both are
replayed as CUDA graphs, over caches that are together larger than the GPU's. ``TB/s`` is of the keys and values that
the queries see. Before anything is timed, the kernel must equal the reference within its tolerance.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, captured, parser, report_on_gpu
from torch import Tensor

from narrowcast import reference
from narrowcast.functional import decode_attention

# sequences, heads, heads of keys and values, head dim, tokens that the cache has room for, and that it has
CASES = (
    (1, 32, 8, 64, 1024, 520), (64, 32, 8, 64, 1024, 520), (256, 32, 8, 64, 1024, 520), (1, 32, 8, 128, 4096, 4000),
    (8, 32, 8, 128, 4096, 3000), (64, 32, 8, 128, 2048, 2000), (1, 32, 8, 128, 32768, 30000),
    (16, 32, 32, 128, 2048, 1500), (1, 32, 32, 64, 1024, 100), (64, 64, 1, 128, 1024, 800),
)  # fmt: skip
CALLS = 24  # of a graph


def inputs(case: tuple[int, ...], device: str = "cuda") -> tuple[Any, ...]:
    batch, heads, groups, dim, room, tokens = case
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    q = torch.randn(batch, heads, dim, **like)
    k, v = (torch.randn(batch, room, groups, dim, **like) for _ in range(2))
    one = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return q, k, v, one, one * tokens, None, dim**-0.5, -1


def by_pytorch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    rows = q.unflatten(1, (k.shape[2], -1))
    return F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), mask)


def gate(case: tuple[int, ...]) -> None:
    """Compare with the reference.

    Raises:
        RuntimeError: they differ.
    """
    given = inputs(case)
    made, wanted = decode_attention(*given), reference.decode_attention.attend(*given)
    if (made.float() - wanted.float()).abs().max() > 2**-7 * wanted.abs().max():
        raise RuntimeError(f"{case} differs from the reference")


def time_us(calls: list[Callable[[], object]], repeats: int) -> float:
    replay, times = captured(lambda: [calls[i % len(calls)]() for i in range(CALLS)]), []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times[2:])


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    for case in CASES[: chosen.shapes]:
        if not chosen.skip_gate:
            gate(case)
        batch, heads, groups, dim, room, tokens = case
        read = 4 * batch * tokens * groups * dim
        sets = [inputs(case) for _ in range(max(2, min(16, 2**28 // (read + 1))))]
        mask = (torch.arange(room, device="cuda") < tokens).expand(batch, 1, 1, room)
        contenders: dict[str, list[Any]] = {
            "torch": [partial(by_pytorch, *given[:3], mask) for given in sets],
            "narrowcast": [partial(decode_attention, *given) for given in sets],
        }
        times = {name: time_us(calls, chosen.repeats) for name, calls in contenders.items()}
        for name, us in times.items():
            row: Row = {"sequences": batch, "heads": heads, "groups": groups, "head dim": dim, "room": room}
            row |= {
                "tokens": tokens,
                "contender": name,
                "us": round(us, 2),
                "TB/s": round(read / us / 1e6, 3),
            }
            rows.append({**row, "share": round(us / times["torch"], 3)})
        print(*rows[-2:], sep="\n", flush=True)
    return rows


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=7)
    report_on_gpu("decode_attention", measure, options.parse_args())


if __name__ == "__main__":
    main()
