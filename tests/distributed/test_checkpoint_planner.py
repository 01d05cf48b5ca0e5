"""The checksum by which ranks compare what they save."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowcast.distributed.checkpoint_planner import _COLUMNS, _ROWS, _SMALL, _checksum

SIZES = {"small": 4 * 1023, "large": 3 * 8 * _COLUMNS * _ROWS + 8 * 5 + 3}  # bytes


@pytest.fixture(params=SIZES)
def words(request: pytest.FixtureRequest) -> Tensor:
    size = SIZES[request.param]
    assert (size <= _SMALL) == (request.param == "small")
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_any_bit_counts(words: Tensor) -> None:
    wanted = _checksum(words)
    assert _checksum(words.clone()) == wanted
    places = [0, 7, 8, len(words) // 2, len(words) - 9, len(words) - 1]
    for place in places:
        for bit in (1, 128):
            other = words.clone()
            other[place] ^= bit
            assert _checksum(other) != wanted, (place, bit)


@pytest.mark.parametrize("apart", [8, 8 * _COLUMNS, 8 * _COLUMNS * _ROWS, 8 * (_COLUMNS + 1), 16])
@pytest.mark.parametrize("bit", [1, 128])
def test_bits_that_change_places_count(apart: int, bit: int) -> None:
    words = torch.zeros(SIZES["large"], dtype=torch.uint8)
    first, second = words.clone(), words.clone()
    first[7] = second[7 + apart] = bit
    assert len({_checksum(one) for one in (words, first, second, first + second)}) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_all_signs_count(dtype: torch.dtype) -> None:
    values = torch.ones(2048, 2048, dtype=dtype)
    assert _checksum(values) != _checksum(-values)
    if dtype.is_complex:
        values = torch.full((2048, 2048), 1 + 1j, dtype=dtype)
        assert _checksum(values) != _checksum(values.conj().resolve_conj())


@pytest.mark.parametrize("offset", [1, 2, 8])
def test_views_count_as_their_values(offset: int) -> None:
    values = torch.randn(1 << 17, dtype=torch.float32)
    view = values[offset:]
    assert _checksum(view) == _checksum(view.clone())
    assert _checksum(values.view(512, 256).t()) == _checksum(values.view(512, 256).t().contiguous())
    assert _checksum(values[:0]) == _checksum(values[:0].clone()) != _checksum(values[:1])
