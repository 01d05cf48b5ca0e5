"""Element and scale codecs: fp32 values to and from E4M3, E5M2, E2M3, E3M2, E2M1 and E8M0 codes.

Every encoder rounds to nearest, ties to even, and saturates: finite overflow and infinities become the
largest finite value. Codes are uint8; a code of fewer bits uses the low ones until codes are packed.

Functions ending in an underscore use their argument as scratch space, like PyTorch's in-place methods.
"""

import torch
from torch import Tensor

from ..formats import E2M1, E4M3, E5M2, E8M0, ElementFormat

_FLOAT32_EXPONENT_MASK = 0x7F800000
_FLOAT32_MANTISSA_BITS = 23


def float8_dtype(fmt: ElementFormat) -> torch.dtype:
    """Return the torch dtype whose bytes are the codes of ``fmt``.

    Args:
        fmt: E4M3 or E5M2.

    Raises:
        ValueError: the format has no one-byte torch dtype.
    """
    if fmt.torch_dtype is None:
        raise ValueError(f"{fmt.name} has no one-byte torch dtype; use E4M3 or E5M2")
    return getattr(torch, fmt.torch_dtype)


def encode_float8(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Encode fp32 values as one FP8 code each.

    Args:
        x: fp32, any shape.
        fmt: E4M3 or E5M2.

    Raises:
        ValueError: the format has no one-byte torch dtype.

    Numerics:
        Clamp to ``+-fmt.max``, then round to nearest even; the sign of zero is kept and NaN becomes 0x7F.
    """
    return _clamped_to_float8(x.clamp(-fmt.max, fmt.max), fmt)


def encode_float8_(x: Tensor, fmt: ElementFormat) -> Tensor:
    """Return ``encode_float8`` that overwrites ``x``."""
    return _clamped_to_float8(x.clamp_(-fmt.max, fmt.max), fmt)


def _clamped_to_float8(x: Tensor, fmt: ElementFormat) -> Tensor:
    # Clamped before, since releases differ: above the largest value a CPU's cast to E4M3 saturates from PyTorch 2.12 on
    # and gives NaN in 2.11; one to E5M2 gives infinity.
    codes = x.to(float8_dtype(fmt)).view(torch.uint8)
    # The cast keeps the sign of a NaN, which differs between processors; 0xFF is cleared to 0x7F with byte
    # arithmetic, several times cheaper on a CPU than a masked write. Only NaN can carry into the top bit.
    keep = codes.bitwise_and(0x7F).add_(1).bitwise_and_(0x80).bitwise_not_()
    return codes.bitwise_and_(keep)


def decode_float8(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Decode FP8 codes to fp32, exactly.

    Args:
        codes: uint8, any shape.
        fmt: E4M3 or E5M2.

    Raises:
        ValueError: the format is neither E4M3 nor E5M2.

    Numerics:
        Both formats are widened through fp16 by moving bits, which a CPU does many times faster than a cast
        from its FP8 dtypes. E5M2 is the upper byte of fp16; E4M3 is fp16 times 2**8 once the exponent bias is
        mended.
    """
    if fmt is E5M2:
        return codes.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
    if fmt is not E4M3:
        raise ValueError(f"{fmt.name} is not an FP8 format; use E4M3 or E5M2")
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    # NaN alone carries into the top exponent bit, which turns it into an fp16 NaN.
    bits.bitwise_or_((bits + 0x80).bitwise_and_(0x4000))
    return bits.view(torch.float16).float().mul_(256.0)


def encode_subbyte_(x: Tensor, fmt: ElementFormat, scratch: Tensor | None = None) -> Tensor:
    """Encode fp32 values as one code of fewer than eight bits per byte.

    Args:
        x: fp32, any shape, contiguous; overwritten.
        fmt: E2M3, E3M2 or E2M1.
        scratch: int32 of the same shape, overwritten; None to allocate it.

    Raises:
        ValueError: the format fills a byte.

    Numerics:
        Round to nearest even on the values of the format, subnormals included, saturating at ``fmt.max``; the sign
        of zero is kept. These formats have no NaN: NaN becomes ``+fmt.max``, the code with all bits but the sign.
    """
    bits, scratch, sign = _sign_and_magnitude_(x, fmt, scratch)
    mantissa, min_exponent = fmt.mantissa_bits, 128 - fmt.bias
    # Adding 1.5 * 2**23 * step rounds to a multiple of step in the low mantissa bits, where step is the spacing of the
    # codes: 2**-mantissa_bits of the power of two below the magnitude, which is at least the smallest normal.
    anchor = torch.bitwise_and(bits, _FLOAT32_EXPONENT_MASK, out=scratch).clamp_(min=min_exponent << 23)
    anchor.add_((23 - mantissa << 23) | 0x400000)
    x.add_(anchor.view(torch.float32))
    # The sum's low bits count steps; its exponent, in steps, counts the codes below the binade. Both land in the low
    # byte, offset by what the anchor of the smallest normal has there.
    offset = (min_exponent + 23 - mantissa << mantissa) | (1 << mantissa - 1)
    return (
        bits.add_(anchor.bitwise_right_shift_(23 - mantissa))
        .to(torch.uint8)
        .sub_(offset & 0xFF)
        .bitwise_or_(sign)
    )


def encode_float4_stochastic_(x: Tensor, random: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Encode fp32 values as E2M1 codes, rounding away from zero with the probability of the distance.

    Args:
        x: fp32, any shape, contiguous; overwritten.
        random: fp32 of the same shape, integers 0..255; overwritten.
        scratch: int32 of the same shape, overwritten; None to allocate it.

    Raises:
        RuntimeError: the shapes differ.

    Numerics:
        uint8 codes, one per byte. With ``a = min(|x|, 6)`` and ``step`` the spacing of codes at ``a``: ``RN(a
        + random / 256 * step)``, rounded down to a code. Values that are codes stay; the sign is kept; NaN
        becomes +6.
    """
    bits, scratch, sign = _sign_and_magnitude_(x, E2M1, scratch)
    # The step is half the power of two below the magnitude, at least 0.5; here it is divided by 256 as well.
    step = torch.bitwise_and(bits, _FLOAT32_EXPONENT_MASK, out=scratch).clamp_(min=127 << 23).sub_(9 << 23)
    x.add_(random.mul_(step.view(torch.float32)))
    # From 1 upwards the exponent and first mantissa bit count codes (1.0 is code 2); below, there are only 0
    # and 0.5.
    code = torch.bitwise_right_shift(bits, 22, out=scratch).sub_(252)
    below_one = random.view(torch.int32).copy_(x.mul_(2.0).clamp_(max=1.0))
    return torch.maximum(code, below_one, out=code).to(torch.uint8).bitwise_or_(sign)


def _sign_and_magnitude_(
    x: Tensor, fmt: ElementFormat, scratch: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn ``x`` into its magnitude, at most ``fmt.max``; returns its bits, the scratch and the codes' sign bits."""
    _check_subbyte(fmt)
    bits = x.nan_to_num_(nan=fmt.max, posinf=fmt.max, neginf=-fmt.max).view(torch.int32)
    scratch = torch.empty_like(bits) if scratch is None else scratch
    sign = torch.bitwise_right_shift(bits, 32 - fmt.bits, out=scratch).bitwise_and_(1 << fmt.bits - 1)
    sign = sign.to(torch.uint8)
    x.abs_().clamp_(max=fmt.max)
    return bits, scratch, sign


def _check_subbyte(fmt: ElementFormat) -> None:
    if fmt.bits >= 8:
        raise ValueError(f"{fmt.name} fills a byte; use E2M3, E3M2 or E2M1")


def decode_subbyte(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Decode codes of fewer than eight bits (one per byte) to fp32, exactly.

    Args:
        codes: uint8, any shape.
        fmt: E2M3, E3M2 or E2M1.

    Raises:
        ValueError: the format fills a byte.

    Numerics:
        The code is moved into an fp16 of exponent bias 15 and multiplied by a power of two to mend the bias.
    """
    _check_subbyte(fmt)
    sign_bit = 1 << fmt.bits - 1
    bits = codes.to(torch.int16)
    sign = bits.bitwise_and(sign_bit).bitwise_left_shift_(16 - fmt.bits)
    bits.bitwise_and_(sign_bit - 1).bitwise_left_shift_(10 - fmt.mantissa_bits).bitwise_or_(sign)
    return bits.view(torch.float16).float().mul_(float(1 << 15 - fmt.bias))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of four or six bits along the last dimension.

    Args:
        codes: uint8 codes below ``2**bits``, shape (..., n); n is even for 4 bits and a multiple of 4 for 6.
        bits: 4 or 6.

    Raises:
        ValueError: another n, or other bits.

    Numerics:
        Shape (..., n * bits / 8): a little-endian stream of bits, in which element ``i`` fills the bits from
        ``bits * i`` on. So of 4 bits, the even element is the low nibble of a byte; of 6 bits, elements ``c0 .. c3``
        fill three bytes ``c0 | c1 << 6``, ``c1 >> 2 | c2 << 4``, ``c2 >> 4 | c3 << 2``, each modulo 256.
    """
    unit = _codes_per_unit(bits)
    if codes.shape[-1] % unit:
        raise ValueError(
            f"cannot pack {codes.shape[-1]} codes of {bits} bits: the last dimension must be a multiple of {unit}"
        )
    shape = (*codes.shape[:-1], codes.shape[-1] * bits // 8)
    if bits == 4:
        # One little-endian 16-bit word holds a pair, so that packing is a shift and a narrowing.
        pairs = codes.flatten().view(torch.int16)
        return pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8).view(shape)
    # Likewise, a 32-bit word holds four codes; six bits move from each to the one below.
    words = codes.flatten().view(torch.int32)
    low = words.bitwise_and(0x00FF00FF).bitwise_or_(words.bitwise_right_shift(2).bitwise_and_(0x0FC00FC0))
    word = low.bitwise_and(0xFFF).bitwise_or_(low.bitwise_right_shift_(4).bitwise_and_(0xFFF000))
    return word.view(torch.uint8).view(-1, 4)[:, :3].contiguous().view(shape)


def unpack_codes(data: Tensor, bits: int) -> Tensor:
    """Unpack bytes into codes of four or six bits along the last dimension.

    Args:
        data: uint8, shape (..., n * bits / 8).
        bits: 4 or 6.

    Raises:
        ValueError: other bits, or a last dimension that is no whole number of packed units.

    Numerics:
        uint8 codes, shape (..., n), in the order of ``pack_codes``.
    """
    _codes_per_unit(bits)
    if bits == 6 and data.shape[-1] % 3:
        raise ValueError(f"cannot unpack {data.shape[-1]} bytes of 6-bit codes: four codes fill three bytes")
    shape = (*data.shape[:-1], data.shape[-1] * 8 // bits)
    if bits == 4:
        pairs = data.flatten().to(torch.int16)
        high = pairs.bitwise_and(0xF0).bitwise_left_shift_(4)
        return pairs.bitwise_and_(0x0F).bitwise_or_(high).view(torch.uint8).view(shape)
    first, second, third = data.reshape(-1, 3).to(torch.int32).unbind(1)
    word = second.bitwise_left_shift(8).bitwise_or_(third.bitwise_left_shift(16)).bitwise_or_(first)
    shifts = torch.arange(0, 24, 6, dtype=torch.int32, device=data.device)
    return word.unsqueeze(1).bitwise_right_shift(shifts).bitwise_and_(0x3F).to(torch.uint8).view(shape)


def _codes_per_unit(bits: int) -> int:
    """Return codes that together fill whole bytes."""
    if bits not in (4, 6):
        raise ValueError(f"cannot pack codes of {bits} bits; use 4 or 6")
    return 2 if bits == 4 else 4


def encode_e8m0(v: Tensor) -> Tensor:
    """Encode non-negative fp32 values as the smallest power of two not below them.

    Args:
        v: fp32 >= 0, any shape.

    Numerics:
        From bits, never through log2: exponent field plus one if any mantissa bit is set; zero and subnormals
        up to 2**-127 give 0, larger subnormals 1, infinity and everything above 2**127 give 254, NaN gives
        255.
    """
    bits = v.contiguous().view(torch.int32)
    # A normal number rounds up on any mantissa bit, a subnormal is above 2**-127 only beyond 0x400000.
    carry = bits.ge(0x00800000).to(torch.int32).mul_(0x400000).add_(0x3FFFFF)
    codes = carry.add_(bits).bitwise_right_shift_(_FLOAT32_MANTISSA_BITS).clamp_(max=E8M0.max_code)
    return codes.masked_fill_(v.isnan(), E8M0.nan_code).to(torch.uint8)


def decode_e8m0(b: Tensor) -> Tensor:
    """Decode E8M0 codes to fp32 powers of two, exactly.

    Args:
        b: uint8, any shape.

    Numerics:
        ``2**(b - 127)``; code 0 is the subnormal 2**-127 and code 255 is NaN.
    """
    return _power_of_two(b.to(torch.int32))


def reciprocal_e8m0(b: Tensor) -> Tensor:
    """Return the factor that encodes elements under an E8M0 scale, exactly.

    Args:
        b: uint8, any shape.

    Numerics:
        ``2**(127 - b)``; code 254 gives the subnormal 2**-127 and code 255 NaN.
    """
    exponent = b.to(torch.int32)
    return _power_of_two(torch.where(exponent == E8M0.nan_code, exponent, E8M0.max_code - exponent))


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    bits = biased_exponent.bitwise_left_shift(_FLOAT32_MANTISSA_BITS)
    # An exponent field of 0 means 2**-127 here, which fp32 can only write as a subnormal; 255 means NaN, not
    # inf.
    bits.masked_fill_(biased_exponent == 0, 0x00400000)
    bits.masked_fill_(biased_exponent == E8M0.nan_code, 0x7FC00000)
    return bits.view(torch.float32)
