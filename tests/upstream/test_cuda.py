"""The short ways to devices, streams, memory and GEMMs: there, and without each the public way gives the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from narrowcast.upstream import cuda
from narrowcast.upstream.private import ENTRIES, Absent, _resolve

BUILT = torch.backends.cuda.is_built()
NAMES = {
    "torch._C._cuda_getDevice": BUILT,
    "torch._C._cuda_getCurrentRawStream": BUILT,
    "torch._C._dynamo.guards._empty_strided_cuda": BUILT,
    "torch._C._dynamo.guards._reinterpret_tensor": True,
    "torch._scaled_mm": True,
    "torch._scaled_mm_v2": True,
}


@pytest.mark.parametrize("name", [name for name, there in NAMES.items() if there])
def test_contract(name: str) -> None:
    assert callable(_resolve(name)), name
    assert ENTRIES[name].falls_back


def test_contract_operators() -> None:
    name = "torch._ops.OpOverload._op"
    aten = torch.ops.aten
    assert cuda.binding_of(aten.neg.default) is aten.neg.default._op, name
    assert cuda.binding_of(aten._scaled_mm.default) is torch._scaled_mm
    assert cuda.binding_of(aten._scaled_mm_v2.default) is torch._scaled_mm_v2
    assert name in ENTRIES


def test_without_the_operators_function_its_object_is_called() -> None:
    class Operator:
        def __call__(self) -> int:
            return 3

    assert cuda.binding_of(Operator())() == 3


def test_the_public_way_to_a_part() -> None:
    x = torch.arange(24, dtype=torch.float32)[2:]
    for way in (cuda.part_of, cuda._as_strided):
        part = way(x, (2, 3), (4, 1), 5)
        assert part.equal(x.as_strided((2, 3), (4, 1), 7)) and part.data_ptr() == x.data_ptr() + 20
        assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("bias", [False, True])
def test_the_public_way_to_a_product(bias: bool) -> None:
    """On CPUs torch multiplies FP8 with one scale, by both its entries."""
    a = torch.randn(32, 48).to(torch.float8_e4m3fn)
    b = torch.randn(64, 48).to(torch.float8_e4m3fn)
    scales = torch.tensor(0.5), torch.tensor(2.0)
    options = {
        "bias": torch.randn(64, dtype=torch.bfloat16) if bias else None,
        "out_dtype": torch.bfloat16,
        "use_fast_accum": False,
    }
    ways = (cuda.scaled_mm, cuda._scaled_mm)
    try:
        one, other = (way(a, b.t(), *scales, **options) for way in ways)
    except NotImplementedError:
        pytest.skip("this release multiplies FP8 on CPUs by its older entry alone")
    assert one.equal(other) and one.dtype == torch.bfloat16


def test_the_public_way_to_a_product_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no CPU multiplies: what reaches the operator."""
    reached = []
    monkeypatch.setattr(torch, "_scaled_mm_v2", lambda *arguments: reached.append(arguments))
    a, scale = torch.empty(4, 4), torch.ones(1)
    recipes = [F.ScalingType.BlockWise1x128.value], [F.ScalingType.BlockWise128x128.value]
    cuda._scaled_mm_by_recipe(a, a, [scale], recipes[0], [], [scale], recipes[1], [], None, torch.bfloat16)
    (given,) = reached
    assert given[:10] == (a, a, [scale], recipes[0], [], [scale], recipes[1], [], None, torch.bfloat16)
    assert not given[10] and given[11] is False


def test_nothing_here_raises() -> None:
    for value in vars(cuda).values():
        assert not isinstance(value, Absent)


def test_a_cpu_build_has_no_current_device() -> None:
    assert BUILT or cuda.current_device() == -1
