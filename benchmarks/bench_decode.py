"""Decoding with a KV cache: 16 ``TransformerLayer``s of the 1B shape, one token of each sequence a step.

Our layers in bf16 are compared with the same whose weights were made FP8 once. A step is compiled and replayed as a
CUDA graph: that of ``mode="reduce-overhead"``, before which the host checks all layers, or with ``--how captured`` one
that this script captures, so that a step is the cache's bookkeeping and a replay. In bf16 it runs twice: with
attention by ``scaled_dot_product_attention``, with which ``share_of_bf16`` compares, and with the kernel for one query
that the recipes take, too (``share_of_same``). ``ms`` includes the host's time, ``host_ms`` is what it takes to issue a
step, ``kernels_ms`` what the kernels of a step take together.
``--profile`` prints those kernels. ``--only`` chooses contenders by how their names begin: "decode 1, delayed".
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
from bench_transformer import BF16, ONE_B, RECIPES, angles, fresh, layer, timed
from harness import Row, captured, parser, print_account, report_on_gpu
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.attention import core
from narrowcast_tools.bench.account import profiled

PLAIN, SAME = "bf16, PyTorch's attention", "narrowcast bf16"
CONTENDERS = (PLAIN, SAME, "current", "delayed", "block-scaled")
SEQUENCES = (1, 64)
LAYERS, PROMPT, LONGEST = 16, 512, 1024


def decoding(name: str, sequences: int, how: str, device: str = "cuda") -> tuple[Callable[[], object], int]:
    """Return a contender's step behind a prompt, and the number of its parameters."""
    torch.manual_seed(0)
    recipe = RECIPES.get(name)
    with nc.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        layers = nn.ModuleList(layer(ONE_B, number, device) for number in range(1, LAYERS + 1)).eval()
    nc.set_recipe(layers, recipe)
    positions = angles(ONE_B, LONGEST + 1, device)
    params = nc.InferenceParams(sequences, LONGEST, device=device)

    def forward(x: Tensor) -> Tensor:
        for own in layers:
            x = own(
                x, rotary_pos_emb=positions, inference_params=params, self_attn_mask_type="padding_causal"
            )
        return x

    params.pre_step(OrderedDict((index, PROMPT) for index in range(sequences)))
    forward(torch.randn(sequences, PROMPT, ONE_B[0], dtype=BF16, device=device))
    token = torch.randn(sequences, 1, ONE_B[0], dtype=BF16, device=device)
    mode = "reduce-overhead" if how == "compiled" else "default"
    compiled = torch.compile(forward, fullgraph=True, mode=mode)
    run: Callable[[], object] = partial(compiled, token)
    if how == "captured":
        params.pre_step(OrderedDict((index, 1) for index in range(sequences)))
        run = captured(run)

    def step() -> object:
        params.pre_step(OrderedDict((index, 1) for index in range(sequences)))
        torch.compiler.cudagraph_mark_step_begin()
        return run()

    return step, sum(parameter.numel() for parameter in layers.parameters())


@torch.inference_mode()
def measured(name: str, sequences: int, chosen: argparse.Namespace) -> Row:
    fresh()
    with mock.patch.object(core, "MOST_HEADS", 0) if name == PLAIN else nullcontext():
        return _measured(name, sequences, chosen)


def _measured(name: str, sequences: int, chosen: argparse.Namespace) -> Row:
    step, parameters = decoding(name, sequences, chosen.how)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    seconds = timed(step, min(chosen.repeats, 12), each=10)
    began = time.perf_counter()
    for _ in range(10):
        step()
    host = (time.perf_counter() - began) / 10
    torch.cuda.synchronize()
    row: Row = {
        "contender": f"decode {sequences}, {name}",
        "how": chosen.how,
        "ms": seconds * 1e3,
        "host_ms": host * 1e3,
    }
    row["kernels_ms"] = sum(kernel.ms for kernel in profiled(step))
    if chosen.profile:
        print_account(str(row["contender"]), step, seconds * 1e3, chosen.most)
    row |= {"tokens_per_second": sequences / seconds, "parameters": parameters}
    return row | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def measure(chosen: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for sequences in SEQUENCES:
        for name in CONTENDERS:
            if f"decode {sequences}, {name}".startswith(chosen.only):
                rows.append(measured(name, sequences, chosen))
                print(rows[-1], flush=True)
    times = {str(row["contender"]): float(str(row["ms"])) for row in rows}
    for row in rows:
        which = str(row["contender"]).partition(", ")[0]
        for column, base in (("share_of_bf16", PLAIN), ("share_of_same", SAME)):
            if f"{which}, {base}" in times:
                row[column] = float(str(row["ms"])) / times[f"{which}, {base}"]
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--how", choices=("compiled", "captured"), default="compiled")
    options.add_argument("--profile", action="store_true", help="print the kernels of a step")
    options.add_argument("--most", type=int, default=16, help="kernels to print")
    report_on_gpu("decode", measure, options.parse_args())


if __name__ == "__main__":
    main()
