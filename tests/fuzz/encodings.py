"""Every quantizing kernel against the reference, byte for byte, on any values; on a CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E2M1, E2M3, E3M2, E4M3, E5M2

from .draw import Draw
from .runner import Skip

SPECIAL = (float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 65504.0, 3.38e38)


def case(draw: Draw) -> dict[str, float]:
    if not kernels.AVAILABLE:
        raise Skip("Triton is not installed")
    largest = 80 if draw.device == "cpu" else 300
    rows, columns = draw.size("rows", largest), draw.size("columns", largest)
    dtype = draw.dtype()
    x = draw.values("x", (rows, columns), dtype).cpu().contiguous()
    if draw.chance("not finite", 0.5):
        for _ in range(draw.random.randint(1, 6)):
            x.view(-1)[draw.random.randrange(x.numel())] = draw.random.choice(SPECIAL)
    module, options = draw.pick("format", (_current, _given, _block, _mx, _nvfp4))(draw)
    directions = draw.pick("directions", ((True, True), (True, False), (False, True)))
    options |= dict(zip(("rowwise", "columnwise"), directions))
    draw.note("options", options)
    source = x.to(draw.device)
    if draw.chance("strided", 0.2):
        source = source.t().contiguous().t()
    name = options.pop("function", "quantize")
    actual, amax = _run(getattr(getattr(kernels, module), name), source, options)
    expected, expected_amax = _run(getattr(getattr(reference, module), name), x, options)
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip([*actual, *amax], [*expected, *expected_amax], strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, f"buffer {index}"
        different = int((_bytes(a) != _bytes(b)).sum())
        assert not different, f"{different} bytes of buffer {index} {tuple(b.shape)} differ"
    assert torch.equal(source.cpu().nan_to_num(), x.nan_to_num()), "the input changed"
    return {}


def _run(
    function: Callable[..., list[Tensor]], x: Tensor, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The buffers, and the amax where one is collected."""
    given = {
        name: value.to(x.device, copy=True) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    amax = [given["amax"]] if "amax" in given else []
    return function(x, **given), amax


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def _current(draw: Draw) -> tuple[str, dict[str, Any]]:
    return "float8", {
        "function": "quantize_current",
        "fmt": draw.random.choice((E4M3, E5M2)),
        "power_2": draw.random.random() < 0.5,
        "epsilon": draw.random.choice((0.0, 0.0, 1e-3)),
    }


def _given(draw: Draw) -> tuple[str, dict[str, Any]]:
    scale = torch.tensor([2.0 ** draw.random.uniform(-12, 12)])
    return "float8", {"fmt": draw.random.choice((E4M3, E5M2)), "scale": scale, "amax": torch.tensor([1e-3])}


def _block(draw: Draw) -> tuple[str, dict[str, Any]]:
    return "float8_block", {
        "fmt": draw.random.choice((E4M3, E5M2)),
        "block_dim": draw.random.choice((1, 2)),
        "power_2": draw.random.random() < 0.5,
        "epsilon": draw.random.choice((0.0, 0.0, 1e-3)),
    }


def _mx(draw: Draw) -> tuple[str, dict[str, Any]]:
    return "mx", {
        "fmt": draw.random.choice((E4M3, E5M2, E2M3, E3M2, E2M1)),
        "two_d": draw.random.random() < 0.4,
    }


def _nvfp4(draw: Draw) -> tuple[str, dict[str, Any]]:
    choice: dict[str, Any] = draw.random.choice(
        (
            {},
            {"two_d": True},
            {"rht": True},
            {"rht": True, "random_signs": False},
            {"row_scaled": True},
            {"four_over_six": True},
            {"four_over_six": True, "two_d": True, "error_mode": "MSE"},
            {"four_over_six": True, "row_scaled": True, "e4m3_max": 256},
            {"seed": torch.tensor([draw.random.getrandbits(62)])},
            {"seed": torch.tensor([draw.random.getrandbits(62)]), "rht": True},
        )
    )
    return "nvfp4", dict(choice)
