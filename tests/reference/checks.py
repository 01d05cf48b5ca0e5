"""What the tests of the numerics share: bitwise comparison, aliasing, awkward inputs."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowcast.formats import ElementFormat
from narrowcast.reference import codecs

try:
    import hypothesis
    from hypothesis import strategies
except ImportError:
    hypothesis = None

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RAGGED_SHAPES = [
    (1, 1),
    (1, 7),
    (7, 1),
    (33, 15),
    (1, 1000),
    (1000, 3),
    (130, 136),
    (2, 3, 50),
    (3, 1, 1, 17),
]
EMPTY_SHAPES = [(0, 32), (32, 0), (0, 0), (2, 0, 16), (0, 7), (7, 0)]


def encode_subbyte(x: Tensor, fmt: ElementFormat) -> Tensor:
    """The reference's codes of fp32 values, which it overwrites."""
    return codecs.encode_subbyte_(x.clone(memory_format=torch.contiguous_format), fmt)


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal dtype, shape and bytes: -0 and +0 differ and a NaN equals only itself."""
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    differing = as_bytes(actual) != as_bytes(expected)
    assert not differing.any(), f"{what}: {int(differing.sum())} bytes differ"


def as_bytes(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8)


def assert_fresh(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Every output is contiguous and owns its memory."""
    pointers = [t.untyped_storage().data_ptr() for t in (*outputs, *inputs) if t.numel() > 0]
    assert len(pointers) == len(set(pointers)), "an output aliases another tensor"
    for output in outputs:
        assert output.is_contiguous()
        assert output.untyped_storage().nbytes() == output.numel() * output.element_size()


def normal(shape: Sequence[int], dtype: torch.dtype, seed: int = 0, std: float = 1.0) -> Tensor:
    """Reproducible normal values."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * std).to(dtype)


def awkward_layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values with other strides: transposed memory, every other column, an offset, a repeated row."""
    doubled = torch.stack((x, torch.full_like(x, 9.0)), dim=-1).flatten(-2)
    shifted = torch.cat((torch.zeros_like(x[..., :1]), x), dim=-1)
    return {
        "transposed": x.transpose(0, -1).contiguous().transpose(0, -1),
        "strided": doubled[..., ::2],
        "offset": shifted[..., 1:],
    }


def pad_to(x: Tensor, multiple: int) -> Tensor:
    """The matrix behind ``x``, zero-padded to multiples in both dimensions."""
    matrix = x.reshape(-1, x.shape[-1])
    rows, columns = -matrix.shape[0] % multiple, -matrix.shape[1] % multiple
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows))


def floats32(*, non_negative: bool = False) -> Callable[[Any], Any]:
    """Give a test random fp32 vectors ``values``: bit patterns of all kinds next to hypothesis's favourite floats."""
    if hypothesis is None:
        return pytest.mark.skip(reason="needs hypothesis")
    top = (1 << 31 if non_negative else 1 << 32) - 1
    patterns = strategies.integers(0, top).map(lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0])
    smallest = 0.0 if non_negative else None
    element = strategies.one_of(
        strategies.floats(min_value=smallest, width=32, allow_nan=not non_negative), patterns
    )
    values = strategies.lists(element, min_size=1, max_size=64).map(torch.tensor)

    def decorate(test: Any) -> Any:
        settings = hypothesis.settings(
            max_examples=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
        )
        return settings(hypothesis.given(values=values)(test))

    return decorate
