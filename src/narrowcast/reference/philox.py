"""Philox 4x32-10, the counter-based generator that Triton also uses, in integer tensor operations.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). A counter and a
key give 128 random bits and nothing is carried from call to call, so any element's bits can be had on any
device.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32_(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """Return four random 32-bit words per counter.

    Args:
        seed: int64 [1], or broadcastable to the counters; its low and high 32 bits are the key.
        c0, c1, c2, c3: words of the counter, low first: int64 0..2**32 - 1 of one shape; overwritten.

    Raises:
        RuntimeError: the shapes differ.

    Numerics:
        Four int64 tensors with values 0..2**32 - 1, in the order of the generator's output words.
    """
    seed = seed.reshape(()) if seed.dim() == 1 else seed
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    product0, product1 = torch.empty_like(c0), torch.empty_like(c2)
    for _ in range(_ROUNDS):
        # int64 products wrap, which leaves both 32-bit halves right. Bits above a word are cleared once per
        # round: the words that are only combined by xor may carry them along.
        torch.mul(c0, _MULTIPLIERS[0], out=product0)
        torch.mul(c2, _MULTIPLIERS[1], out=product1)
        torch.bitwise_right_shift(product1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(key0).bitwise_and_(
            _WORD
        )
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(key1).bitwise_and_(
            _WORD
        )
        # The products become the new words, and the old words the buffers of the next products.
        c1, c3, product0, product1 = product1, product0, c3, c1
        key0, key1 = (key0 + _KEY_STEPS[0]) & _WORD, (key1 + _KEY_STEPS[1]) & _WORD
    return [c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)]


def random_words(seed: Tensor, blocks: Tensor, stream: int) -> list[Tensor]:
    """Return sixteen random bytes per block, as four 32-bit words.

    Args:
        seed: int64 [1], or broadcastable to ``blocks``.
        blocks: int64 >= 0, the index of each block, any shape.
        stream: 0..2**32 - 1; different streams are independent.

    Numerics:
        Four int32 tensors (the words' bit patterns) of the shape of ``blocks``, from the counter (low word of
        the index, high word, stream, 0). Byte ``i`` of a block is byte ``i % 4``, lowest first, of word ``i
        // 4``.
    """
    words = philox4x32_(
        seed, blocks & _WORD, blocks >> 32, torch.full_like(blocks, stream), torch.zeros_like(blocks)
    )
    return [word.to(torch.int32) for word in words]
