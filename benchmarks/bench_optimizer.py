"""Steps of AdamW on the parameters of four 8B blocks with embedding and head, against a device copy and PyTorch's.

Bytes are those that a step must move: gradients read, parameters and state read and written.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Row, parser, report_on_gpu, time_in_turns
from torch import Tensor, nn

from narrowcast.optimizers import FusedAdam

BF16, FP32 = torch.bfloat16, torch.float32
H, FFN, VOCABULARY, LAYERS = 4096, 14336, 32000, 4
BLOCK = [(H,), (H * 3 // 2, H), (H, H), (H,), (2 * FFN, H), (H, FFN)]
SHAPES = [(VOCABULARY, H), *LAYERS * BLOCK, (H,), (VOCABULARY, H)]
LIKE_TORCH = {"lr": 1e-5, "weight_decay": 0.01}
IN_BF16 = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
MASTER = {"master_weights": True}

Optimizers = dict[str, tuple[torch.dtype, Callable[[list[Any]], torch.optim.Optimizer]]]


def optimizers(compiled: bool) -> Optimizers:
    """Of a contender's name the dtype of parameters and gradients, and what makes it."""

    def ours(**options: Any) -> Callable[[list[Any]], torch.optim.Optimizer]:
        return lambda p: FusedAdam(p, **LIKE_TORCH, **options)

    made: Optimizers = {}
    for name, dtype, options in (("bf16", BF16, IN_BF16), ("fp32", FP32, {})):
        made[f"torch fused, {name}"] = dtype, lambda p: torch.optim.AdamW(p, **LIKE_TORCH, fused=True)
        made[f"torch foreach, {name}"] = dtype, lambda p: torch.optim.AdamW(p, **LIKE_TORCH, foreach=True)
        made[f"FusedAdam, {name}"] = dtype, ours(**options)
    made["FusedAdam, bf16 with fp32 masters"] = BF16, ours(**MASTER)
    made["FusedAdam, bf16 with remainders"] = BF16, ours(**MASTER, store_param_remainders=True)
    if compiled and importlib.util.find_spec("torchao"):
        from torchao.optim import AdamW8bit

        made["torchao AdamW8bit, bf16"] = BF16, lambda p: AdamW8bit(p, **LIKE_TORCH)
    return made


def tensors(dtype: torch.dtype, device: str, shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Parameters with gradients."""
    made = [nn.Parameter(torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def stored(state: Any) -> Iterator[Tensor]:
    """The tensors of an optimizer's state, of which a quantized one is several."""
    for x in state.values():
        if isinstance(x, Tensor):
            names = x.__tensor_flatten__()[0] if hasattr(x, "__tensor_flatten__") else ()  # type: ignore[attr-defined]
            yield from (getattr(x, name) for name in names) if names else (x,)


def bytes_of_step(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    kept = sum(x.nbytes for p in params for x in stored(optimizer.state[p]))
    masters = [p for p in params if optimizer.state[p].get("master_param", p).dtype == FP32 != p.dtype]
    unread = sum(p.nbytes for p in masters)  # the master weight is read in its place
    return 2 * kept + sum(3 * p.nbytes for p in params) - unread


def measure(
    options: argparse.Namespace, device: str = "cuda", shapes: list[tuple[int, ...]] = SHAPES
) -> list[Row]:
    rows: list[Row] = []
    params = {dtype: tensors(dtype, device, shapes) for dtype in (BF16, FP32)}
    source = torch.empty(sum(math.prod(shape) for shape in shapes), dtype=FP32, device=device)
    copy, runs, sizes = torch.empty_like(source), {}, {}
    runs["copy"], sizes["copy"] = lambda: copy.copy_(source), 2 * source.nbytes
    for name, (dtype, make) in optimizers(not options.skip_compile).items():
        if options.only in name:
            optimizer = make(params[dtype])
            optimizer.step()
            runs[name], sizes[name] = optimizer.step, bytes_of_step(params[dtype], optimizer)
    times = time_in_turns(runs, [()], options.repeats, device=device, launches=2)
    rate = {name: sizes[name] / statistics.median(us) / 1e6 for name, us in times.items()}
    for name, us in times.items():
        begin = time.perf_counter()
        runs[name]()
        host = time.perf_counter() - begin
        if device == "cuda":
            torch.cuda.synchronize()
        rows.append(
            {
                "contender": name,
                "ms": statistics.median(us) / 1e3,
                "bytes_per_parameter": sizes[name] / source.numel(),
                "tb_per_s": rate[name],
                "share": rate[name] / rate["copy"],
                "host_ms": host * 1e3,
            }
        )
    return rows


def main() -> None:
    report_on_gpu("optimizer", measure, parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
