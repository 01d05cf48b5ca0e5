"""FP8 rows and groups by the rules of training and engines: the kernel against the reference, byte for byte."""

from __future__ import annotations

import functools

import pytest
import torch

from narrowcast import kernels
from narrowcast.formats import E4M3, E5M2
from narrowcast.reference import float8_rows as reference

from .checks import DTYPES, compare, make

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numpy

KINDS = ("normal", "special", "tiny", "huge", "ties", "zeros")
SHAPES = [(1, 7), (7, 1), (33, 130), (3, 5, 128), (2, 5000), (65, 300), (0, 8), (8, 0)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", reference.RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_reference(shape: tuple[int, ...], rule: str, device: torch.device) -> None:
    if rule == "triton" and device.type == "cuda":
        pytest.skip("its divisions are a GPU's own; test_divisions_of_a_gpu")
    at = SHAPES.index(shape)
    bounds = ((0, 1, 0.0, 0.0), (128, 4, 1e-10, 0.0), (128, 4, 0.0, 1.0 / (448 * 512)))
    for i, (group, alignment, epsilon, smallest) in enumerate(bounds):
        kind, dtype = KINDS[(at + i) % len(KINDS)], DTYPES[(at + i) % 3]
        options = {"fmt": E5M2 if dtype == torch.float16 else E4M3, "rule": rule, "epsilon": epsilon}
        smallest = 0.0 if rule in reference.TRAINING_RULES else smallest
        options |= {"smallest": smallest, "group": group, "alignment": alignment}
        compare(
            functools.partial(kernels.float8_rows.quantize, **options),
            functools.partial(reference.quantize, **options),
            make(kind, shape, dtype),
            device,
            f"{rule}, groups of {group}, {kind}",
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_beside_each_other_in_memory(dtype: torch.dtype, device: torch.device) -> None:
    """Columns of a matrix, which are read where they lie."""
    for shape, group in (((130, 33), 0), ((300, 70), 128), ((5, 1), 0)):
        x = make("normal", shape, dtype).to(device).t()
        options = {"fmt": E4M3, "rule": "divide", "group": group}
        made, expected = (kernels.float8_rows.quantize(one, **options) for one in (x, x.contiguous()))
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(made, expected))


@pytest.mark.parametrize("rule", reference.TRAINING_RULES)
@pytest.mark.parametrize("shape", [(7, 33), (0, 8), (8, 0), (130, 7), (2, 33, 131), (128, 128)], ids=str)
def test_both_directions_equal_the_reference(shape: tuple[int, ...], rule: str, device: torch.device) -> None:
    for i, kind in enumerate(KINDS):
        dtype = DTYPES[i % 3]
        options = {"fmt": E5M2 if dtype == torch.float16 else E4M3, "rule": rule, "epsilon": 1e-12 * (i % 2)}
        compare(
            functools.partial(kernels.float8_rows.quantize_both, **options),
            functools.partial(reference.quantize_both, **options),
            make(kind, shape, dtype),
            device,
            f"{rule}, {kind}",
        )


@pytest.mark.gpu
def test_divisions_of_a_gpu() -> None:
    """Within two units of the last place: codes differ from the reference's where a value lies between two."""
    x = make("normal", (129, 1024), torch.bfloat16).cuda()
    options = {"rule": "triton", "smallest": 1e-12, "group": 128, "alignment": 4}
    codes, scale = kernels.float8_rows.quantize(x, E4M3, **options)
    expected, exact = reference.quantize(x, E4M3, **options)
    torch.testing.assert_close(scale, exact, rtol=2**-22, atol=0)
    apart = (codes.int() - expected.int()).abs()
    assert apart.max() <= 1 and apart.float().mean() < 0.01
