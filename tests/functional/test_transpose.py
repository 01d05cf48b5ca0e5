"""The operator that transposes codes, and the storages that use it."""

from __future__ import annotations

import pytest
import torch
from recipes import E4M3
from reference.checks import assert_bitwise, assert_fresh
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast import functional, reference

SHAPES = [(5,), (1, 9), (9, 1), (37, 50), (2, 3, 4), (0, 4), (4, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: tuple[int, ...]) -> None:
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    for x in (data, data.transpose(0, -1)):
        out = functional.transpose_codes(x)
        assert_bitwise(out, reference.float8.transpose(x))
        assert_fresh([out], [x])
        torch.library.opcheck(torch.ops.narrowcast.transpose_codes.default, (x,))


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 1, 5), (0, 2, 3), (2, 0, 3)], ids=str)
def test_matrices_of_a_stack(shape: tuple[int, ...]) -> None:
    data = torch.randint(0, 256, shape, dtype=torch.uint8)
    out = functional.transpose_codes(data, None, True)
    assert_bitwise(out, data.transpose(1, 2).contiguous())
    torch.library.opcheck(torch.ops.narrowcast.transpose_codes.default, (data, None, True))


def test_traced() -> None:
    compiled = torch.compile(functional.transpose_codes, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((4, 6), (7, 3)):
        data = torch.randint(0, 256, shape, dtype=torch.uint8)
        assert_bitwise(compiled(data), data.t().contiguous())


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "quantizer",
    [
        nc.Float8CurrentScalingQuantizer(E4M3),
        nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
    ],
    ids=["float8", "block_2d"],
)
def test_storages_make_a_missing_transpose_with_it(quantizer: nc.Quantizer) -> None:
    x: Tensor = torch.randn(40, 24)
    both = quantizer.replace(internal=True).quantize(x)
    storage = quantizer.replace(internal=True).with_usage(columnwise=False).quantize(x)
    with _Names() as names:
        storage.update_usage(columnwise_usage=True)
    assert "narrowcast.transpose_codes.default" in names.seen
    for a, b in zip(storage.columnwise_operand(), both.columnwise_operand(), strict=True):
        assert_bitwise(a, b)
