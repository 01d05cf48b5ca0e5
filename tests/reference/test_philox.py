"""Philox: the published known answers, and the byte order of a block's sixteen random bytes."""

import pytest
import torch

from narrowcast.reference import philox

# counter, key, output: the known-answer tests published with the generator
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def seed_of(key: tuple[int, int], device: torch.device) -> torch.Tensor:
    value = key[0] | key[1] << 32
    return torch.tensor([value - (1 << 64) if value >= 1 << 63 else value], device=device)


def scalar_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """The generator in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...], device: torch.device
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word], device=device) for word in counter)
    words = philox.philox4x32_(seed_of(key, device), c0, c1, c2, c3)
    assert [word.item() for word in words] == list(expected)


def test_many_counters_equal_the_scalar_generator(device: torch.device) -> None:
    blocks = torch.tensor([[0, 1, 2**31], [2**32 - 1, 2**32, 2**40 + 17]], device=device)
    key = (0x12345678, 0x9ABCDEF0)
    words = philox.random_words(seed_of(key, device), blocks, stream=1)
    for index, block in enumerate(blocks.flatten().tolist()):
        expected = scalar_philox((block & 0xFFFFFFFF, block >> 32, 1, 0), key)
        assert [int(word.flatten()[index]) & 0xFFFFFFFF for word in words] == expected
    assert all(word.dtype == torch.int32 and word.shape == (2, 3) for word in words)


def test_bytes_are_uniform_and_streams_differ() -> None:
    seed = torch.tensor([5])
    blocks = torch.arange(1 << 14)
    streams = [
        torch.stack(philox.random_words(seed, blocks, stream), -1).view(torch.uint8) for stream in (0, 1)
    ]
    counts = torch.bincount(streams[0].flatten().long(), minlength=256).double()
    expected = counts.sum() / 256
    assert ((counts - expected).square() / expected).sum() < 340  # chi-square, 255 degrees of freedom
    equal = (streams[0] == streams[1]).double().mean().item()
    assert equal == pytest.approx(1 / 256, rel=0.1)


def test_no_blocks() -> None:
    words = philox.random_words(torch.tensor([1]), torch.empty(3, 0, dtype=torch.int64), 0)
    assert [word.shape for word in words] == [(3, 0)] * 4


def test_a_seed_for_every_row_draws_what_it_draws_alone() -> None:
    blocks, seeds = torch.arange(12).view(3, 4), torch.tensor([[5], [-6], [2**40 + 7]])
    found = philox.random_words(seeds, blocks, 2)
    for row in range(3):
        for ours, theirs in zip(found, philox.random_words(seeds[row], blocks[row], 2), strict=True):
            assert torch.equal(ours[row], theirs)
