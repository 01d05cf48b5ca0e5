"""Casts of tensors of which nothing was seen: with the scale of their own amax, found by the launch that casts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor

from narrowcast import kernels, reference
from narrowcast.formats import E4M3, E5M2, ElementFormat

from .checks import make

Cast = Callable[[Any, Tensor, Tensor, torch.device], list[Tensor]]
"""From numerics, scales and amaxes to buffers."""

UNSEEN = -224.0


def check(cast: Cast, device: torch.device, known: Tensor, times: int = 2) -> list[Tensor]:
    """Compare kernels with the reference; no cast writes to scales."""
    scale, amax = known.to(device), torch.full_like(known, 1e-3)
    raised = amax.to(device)
    wanted = cast(reference, known, amax, torch.device("cpu"))
    for _ in range(times):
        for found, buffer in zip(cast(kernels, scale, raised, device), wanted, strict=True):
            assert_bitwise(found, buffer)
        assert_bitwise(raised, amax, "amax")
        assert_bitwise(scale, known, "scale")
    return wanted


@pytest.mark.parametrize("kind", ["normal", "special", "zeros", "tiny"])
@pytest.mark.parametrize(
    "shape", [(1,), (33, 17), (130, 190), (3, 5, 7), (0, 8), (9000,), (128, 128)], ids=str
)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.covering(1)
def test_tensors(shape: tuple[int, ...], kind: str, fmt: ElementFormat, device: torch.device) -> None:
    x = make(kind, shape, torch.bfloat16) if 0 not in shape else torch.zeros(shape)
    for columnwise in (False, True):

        def cast(numerics: Any, scale: Tensor, amax: Tensor, device: torch.device) -> list[Tensor]:
            options = {"rowwise": True, "columnwise": columnwise, "amax": amax[1:2], "unseen": UNSEEN}
            return numerics.float8.quantize(x.to(device), scale[1:2], fmt, **options)

        check(cast, device, torch.tensor([3.0, 0.0, 0.0]))


@pytest.mark.parametrize("shape", [(33, 17), (1,)], ids=str)
def test_scales_that_were_told(shape: tuple[int, ...], device: torch.device) -> None:
    x = make("normal", shape, torch.bfloat16)

    def cast(numerics: Any, scale: Tensor, amax: Tensor, device: torch.device) -> list[Tensor]:
        options = {"rowwise": True, "columnwise": True, "amax": amax[:1], "unseen": 5.0}
        return numerics.float8.quantize(x.to(device), scale[:1], E4M3, **options)

    for known in (0.0, 2.0):
        wanted = check(cast, device, torch.tensor([known, 0.0]))
        assert wanted[-1].item() == 1 / torch.tensor(known or 5.0)


@pytest.mark.parametrize("shape", [(5, 6), (34, 66)], ids=str)
@pytest.mark.parametrize("source", ["swiglu", "swiglu backward", "gelu", "RMSNorm"])
@pytest.mark.covering(1)
def test_sources(source: str, shape: tuple[int, int], device: torch.device) -> None:
    name, backward = source.split()[0], source.endswith("backward")
    gated = name == "swiglu"
    x = make("normal", (shape[0], shape[1] * (1 + gated)), torch.bfloat16)
    grad, weight = make("normal", shape, torch.bfloat16, 1), make("normal", shape[1:], torch.bfloat16, 2)

    def cast(numerics: Any, scale: Tensor, amax: Tensor, device: torch.device) -> list[Tensor]:
        if name == "RMSNorm":
            options = {"eps": 1e-5, "normalization": name, "zero_centered_gamma": False, "wanted": "source"}
            made = numerics.fused_producers.normalized(
                x.to(device), None, weight.to(device), None, **options
            )[0]
        elif backward:
            made = numerics.fused_producers.activation_backward(grad.to(device), x.to(device), name)
        else:
            made = numerics.fused_producers.activation(x.to(device), name)
        options = {"rowwise": True, "columnwise": True, "amax": amax[:1], "unseen": UNSEEN}
        return numerics.float8.quantize(made, scale[:1], E4M3, **options)

    check(cast, device, torch.zeros(2))


@pytest.mark.parametrize("how", ["rows", "swiglu", "swiglu backward"])
@pytest.mark.parametrize("splits", [[5, 0, 33], [0, 0, 0], [70], [20, 10, 3]], ids=str)
@pytest.mark.covering(1)
def test_groups(how: str, splits: list[int], device: torch.device) -> None:
    """Some scales are known, and some groups have no rows."""
    T, K, groups = sum(splits) + 2, 24, len(splits)
    x, grad = make("normal", (T, 2 * K), torch.bfloat16), make("normal", (T, K), torch.bfloat16, 1)

    def cast(unseen: float, numerics: Any, scale: Tensor, amax: Tensor, device: torch.device) -> list[Tensor]:
        made, room, own = x.to(device), numerics.grouped_quantize, slice(groups, 2 * groups)
        if how != "rows":
            room, arguments = numerics.grouped_gated, (made, "swiglu")
            backward = how.endswith("backward")
            producers = numerics.fused_producers
            make_source = producers.activation_backward if backward else producers.activation
            made = make_source(*((grad.to(device),) if backward else ()), *arguments)
        options = {"rowwise": True, "columnwise": True, "alignment": 16, "amax": amax[own], "unseen": unseen}
        return room.quantize(made, torch.tensor(splits, device=device), scale[own], E5M2, **options)

    for first, unseen in ((0.0, UNSEEN), (3.0, UNSEEN), (3.0, 5.0)):
        known = torch.zeros(3 * groups)
        known[groups] = first
        wanted = check(partial(cast, unseen), device, known)
        assert wanted[-1][[count == 0 for count in splits]].eq(1.0).all() or first


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 66, 130)], ids=str)
def test_batches(shape: tuple[int, int, int], device: torch.device) -> None:
    x, groups = make("normal", shape, torch.float32), shape[0]

    def cast(unseen: float, numerics: Any, scale: Tensor, amax: Tensor, device: torch.device) -> list[Tensor]:
        options = {
            "rowwise": True,
            "columnwise": True,
            "alignment": 16,
            "amax": amax[:groups],
            "unseen": unseen,
        }
        return numerics.grouped_quantize.quantize(x.to(device), None, scale[:groups], E4M3, **options)

    for unseen in (UNSEEN, 5.0):
        check(partial(cast, unseen), device, torch.tensor([2.0] + [0.0] * (3 * groups - 1)))


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_in_one_kernel(rows: int, device: torch.device) -> None:
    x, weight = make("normal", (rows, 160), torch.bfloat16), make("normal", (24, 160), torch.bfloat16, 1)
    codes, inverse = reference.float8.quantize_current(
        weight, E4M3, power_2=False, epsilon=0.0, rowwise=True, columnwise=False
    )
    given = x.to(device), codes.to(device), inverse.to(device), None, torch.bfloat16
    slot = {"scaling": "given", "scale": torch.tensor([0.0, 0.0, 5.0], device=device)}
    found = kernels.few_rows.matmul(*given, **slot, slot=1, unseen=-448.0)
    assert_bitwise(found, kernels.few_rows.matmul(*given, scaling="current"))
    told = kernels.few_rows.matmul(*given, **slot, slot=1, unseen=5.0)
    assert_bitwise(told, kernels.few_rows.matmul(*given, **slot, slot=2))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 14336), (1000, 777)], ids=str)
def test_many_programs_at_once(shape: tuple[int, int]) -> None:
    """More than run at once; in a replayed graph, too."""
    x = torch.randn(shape, device="cuda").bfloat16()
    scale, both = torch.zeros(1, device="cuda"), {"rowwise": True, "columnwise": True}
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.float8.quantize(x, scale, E4M3, unseen=-448.0, **both)
    for power in range(10):
        x.copy_(torch.randn(shape, device="cuda") * 4**power)
        wanted = kernels.float8.quantize_current(x, E4M3, power_2=False, epsilon=0.0, **both)
        graph.replay()
        for buffers in (captured, kernels.float8.quantize(x, scale, E4M3, unseen=-448.0, **both)):
            assert all(map(torch.equal, buffers, wanted))
