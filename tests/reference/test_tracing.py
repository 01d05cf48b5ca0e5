"""The numerics under FakeTensor and under dynamic shapes: no data-dependent control flow, shapes as in eager."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowcast.formats import E4M3
from narrowcast.reference import delayed, float8, float8_block, mx, nvfp4

from .checks import assert_bitwise, normal

SEED = torch.tensor([9])
QUANTIZE: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "current": lambda x: float8.quantize_current(
        x, E4M3, power_2=True, epsilon=0.0, rowwise=True, columnwise=True
    ),
    "mxfp8": lambda x: mx.quantize(x, E4M3, rowwise=True, columnwise=True),
    "mxfp8 2d": lambda x: mx.quantize(x, E4M3, rowwise=True, columnwise=True, two_d=True),
    "block 1d": lambda x: float8_block.quantize(
        x, E4M3, rowwise=True, columnwise=True, block_dim=1, power_2=True, epsilon=0.0
    ),
    "block 2d": lambda x: float8_block.quantize(
        x, E4M3, rowwise=True, columnwise=True, block_dim=2, power_2=True, epsilon=0.0
    ),
    "nvfp4": lambda x: nvfp4.quantize(x, rowwise=True, columnwise=True, rht=True),
    "nvfp4 2d": lambda x: nvfp4.quantize(x, rowwise=True, columnwise=True, two_d=True),
    "nvfp4 4over6": lambda x: nvfp4.quantize(x, rowwise=True, columnwise=True, four_over_six=True),
    "nvfp4 stochastic": lambda x: nvfp4.quantize(
        x, rowwise=True, columnwise=True, seed=torch.full((1,), 9, device=x.device)
    ),
}


@pytest.mark.parametrize("quantize", QUANTIZE.values(), ids=QUANTIZE.keys())
@pytest.mark.parametrize("shape", [(32, 64), (33, 50), (2, 3, 7)])
def test_fake_tensors_get_the_shapes_of_real_ones(
    quantize: Callable[[Tensor], list[Tensor]], shape: tuple[int, ...]
) -> None:
    expected = quantize(normal(shape, torch.bfloat16))
    with FakeTensorMode():
        outputs = quantize(torch.empty(shape, dtype=torch.bfloat16))
    for fake, real in zip(outputs, expected, strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_fake_updates() -> None:
    with FakeTensorMode():
        scale, history = delayed.update(torch.ones(3), torch.zeros(4, 3), fp8_max=448.0, margin=0, algo="max")
    assert scale.shape == (3,)
    assert history.shape == (4, 3)


@pytest.mark.parametrize(
    ("name", "dynamic", "rows"),
    [("current", True, (64, 96, 33)), ("mxfp8", False, (33,)), ("block 2d", False, (33,))],
)
def test_traced_equals_eager(name: str, dynamic: bool, rows: tuple[int, ...]) -> None:
    compiled = torch.compile(QUANTIZE[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for m in rows:
        x = normal((m, 160), torch.bfloat16)
        for actual, expected in zip(compiled(x), QUANTIZE[name](x), strict=True):
            assert_bitwise(actual, expected)
