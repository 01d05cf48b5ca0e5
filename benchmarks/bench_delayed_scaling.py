"""The step of delayed scaling: amax histories rolled and scales renewed, for all modules of a model at once.

A linear layer has three tensors per step (input, weight, gradient), a history of 1024 amaxes each. The operator is
compared with PyTorch written out per module, eager and compiled. So little data moves that the time is that of
launching, on the host as on the device: both are in it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, parser, report, spread, time_in_turns
from torch import Tensor

from narrowcast import reference
from narrowcast.formats import E4M3
from narrowcast.functional import renew_delayed_scaling

MODULES = (32, 256)
TENSORS_PER_MODULE = 4
HISTORY = 1024
State = tuple[list[Tensor], list[Tensor], list[Tensor]]


def fused(scales: list[Tensor], histories: list[Tensor], amaxes: list[Tensor]) -> None:
    count = len(scales)
    renew_delayed_scaling(scales, histories, amaxes, [E4M3.max] * 2 * count, [0] * count, ["max"] * count)


def loop(scales: list[Tensor], histories: list[Tensor], amaxes: list[Tensor]) -> None:
    """The rule as a training script would write it: the maximum of the history, a roll, a cleared first row."""
    for scale, history, collected in zip(scales, histories, amaxes):
        history[0].copy_(collected)
        collected.zero_()
        amax = history.amax(0)
        scale.copy_(torch.where((amax > 0) & amax.isfinite(), E4M3.max / amax, scale))
        history.copy_(history.roll(-1, 0))
        history[0].zero_()


def state(modules: int, device: str) -> State:
    scales = [torch.ones(TENSORS_PER_MODULE, device=device) for _ in range(modules)]
    histories = [torch.rand(HISTORY, TENSORS_PER_MODULE, device=device) + 0.5 for _ in range(modules)]
    amaxes = [torch.rand(TENSORS_PER_MODULE, device=device) + 0.5 for _ in range(modules)]
    return scales, histories, amaxes


def check(device: str) -> None:
    """Both contenders give the reference's scales and histories; the loop's division rounds twice."""
    for run, tolerance in ((fused, 0.0), (loop, 1e-6)):
        scales, histories, amaxes = state(4, device)
        expected = [
            reference.delayed.update(
                scale.cpu(),
                torch.cat([amax[None], history[1:]]).cpu(),
                fp8_max=E4M3.max,
                margin=0,
                algo="max",
            )
            for scale, history, amax in zip(scales, histories, amaxes)
        ]
        run(scales, histories, amaxes)
        for scale, history, (new_scale, new_history) in zip(scales, histories, expected):
            torch.testing.assert_close(scale.cpu(), new_scale, rtol=tolerance, atol=0.0)
            torch.testing.assert_close(history.cpu(), new_history, rtol=0.0, atol=0.0)


def measure(chosen: Namespace) -> list[Row]:
    rows: list[Row] = []
    for modules in MODULES[: chosen.shapes]:
        torch._dynamo.reset()
        contenders: dict[str, Callable[..., Any]] = {"delayed scaling update": fused, "torch: loop": loop}
        # A loop over hundreds of modules takes the compiler minutes.
        if not chosen.skip_compile and modules <= MODULES[0]:
            contenders["torch.compile: loop"] = torch.compile(loop, fullgraph=True, dynamic=False)
        # Each contender keeps its own state, whose histories therefore stay alike in kind.
        inputs = [state(modules, chosen.device)]
        times = time_in_turns(
            contenders, inputs, chosen.repeats, device=chosen.device, launches=1, queued=False
        )
        own = spread(times["delayed scaling update"], "us")
        for name, measured in times.items():
            microseconds = spread(measured, "us")
            ratio = float(str(microseconds["p50_us"])) / float(str(own["p50_us"]))
            rows.append(
                {"modules": modules, "contender": name, **microseconds, "times_ours": round(ratio, 2)}
            )
    return rows


def main() -> None:
    chosen = parser(__doc__).parse_args()
    torch.manual_seed(0)
    if not chosen.skip_gate:
        check(chosen.device)
    report("delayed_scaling", measure(chosen), chosen)


if __name__ == "__main__":
    main()
