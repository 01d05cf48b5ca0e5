"""Element and scale codecs: fp32 values to and from E4M3, E5M2, E2M1 and E8M0 codes.

Every encoder rounds to nearest, ties to even, and saturates: finite overflow and infinities become the
largest finite value. Codes are uint8; an E2M1 code uses the low four bits until two are packed into one byte.

Functions ending in an underscore use their argument as scratch space, like PyTorch's in-place methods.
"""

import torch
from torch import Tensor

from ..formats import E4M3, E5M2, E8M0, ElementFormat

_FLOAT32_EXPONENT_MASK = 0x7F800000
_FLOAT32_MANTISSA_BITS = 23


def float8_dtype(fmt: ElementFormat) -> torch.dtype:
    """The torch dtype whose bytes are the codes of ``fmt``.

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
    """``encode_float8`` that overwrites ``x``."""
    return _clamped_to_float8(x.clamp_(-fmt.max, fmt.max), fmt)


def _clamped_to_float8(x: Tensor, fmt: ElementFormat) -> Tensor:
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


def encode_float4(x: Tensor) -> Tensor:
    """Encode fp32 values as one E2M1 code (0..15) per byte.

    Args:
        x: fp32, any shape.

    Raises:
        Nothing of its own.

    Numerics:
        Round to nearest even on the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, saturating at 6; the sign of zero
        is kept (code 8 is -0) and NaN becomes +6 (code 7).
    """
    return encode_float4_(x.clone(memory_format=torch.contiguous_format))


def encode_float4_(x: Tensor, scratch: Tensor | None = None) -> Tensor:
    """``encode_float4`` that overwrites ``x`` and, where given, an int32 ``scratch`` of its shape."""
    bits, scratch, sign = _float4_sign_and_magnitude_(x, scratch)
    # Adding 1.5 * 2**23 * step rounds to a multiple of step in the low mantissa bits, where step is 0.5 below
    # 2, 1 below 4 and 2 from there on: half the power of two below the magnitude, at least 0.5.
    anchor = torch.bitwise_and(bits, _FLOAT32_EXPONENT_MASK, out=scratch).clamp_(min=127 << 23)
    anchor.add_((22 << 23) | 0x400000)
    x.add_(anchor.view(torch.float32))
    # The sum's low bits count steps; its exponent, in half steps, counts the codes below the binade. Both
    # land in the low byte, offset by the anchor's own exponent field (149 * 2 + 1 = 43 modulo 256).
    return bits.add_(anchor.bitwise_right_shift_(22)).to(torch.uint8).sub_(43).bitwise_or_(sign)


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
    bits, scratch, sign = _float4_sign_and_magnitude_(x, scratch)
    # The step is half the power of two below the magnitude, at least 0.5; here it is divided by 256 as well.
    step = torch.bitwise_and(bits, _FLOAT32_EXPONENT_MASK, out=scratch).clamp_(min=127 << 23).sub_(9 << 23)
    x.add_(random.mul_(step.view(torch.float32)))
    # From 1 upwards the exponent and first mantissa bit count codes (1.0 is code 2); below, there are only 0
    # and 0.5.
    code = torch.bitwise_right_shift(bits, 22, out=scratch).sub_(252)
    below_one = random.view(torch.int32).copy_(x.mul_(2.0).clamp_(max=1.0))
    return torch.maximum(code, below_one, out=code).to(torch.uint8).bitwise_or_(sign)


def _float4_sign_and_magnitude_(x: Tensor, scratch: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Turn ``x`` into its magnitude, at most 6; returns its bits, the scratch and the E2M1 sign bits."""
    bits = x.nan_to_num_(nan=6.0, posinf=6.0, neginf=-6.0).view(torch.int32)
    scratch = torch.empty_like(bits) if scratch is None else scratch
    sign = torch.bitwise_right_shift(bits, 28, out=scratch).bitwise_and_(8).to(torch.uint8)
    x.abs_().clamp_(max=6.0)
    return bits, scratch, sign


def decode_float4(codes: Tensor) -> Tensor:
    """Decode E2M1 codes (0..15, one per byte) to fp32, exactly.

    Args:
        codes: uint8, any shape.

    Raises:
        Nothing of its own.

    Numerics:
        The code is moved into an fp16 of exponent bias 15 and multiplied by 2**14 to mend the bias of 1.
    """
    bits = codes.to(torch.int16)
    sign = bits.bitwise_and(8).bitwise_left_shift_(12)
    bits.bitwise_and_(7).bitwise_left_shift_(9).bitwise_or_(sign)
    return bits.view(torch.float16).float().mul_(16384.0)


def pack_float4(codes: Tensor) -> Tensor:
    """Pack pairs of E2M1 codes along the last dimension.

    Args:
        codes: uint8 codes 0..15, shape (..., 2 * n).

    Raises:
        ValueError: the last dimension is odd.

    Numerics:
        Shape (..., n); element ``2i`` is the low nibble and ``2i + 1`` the high nibble of byte ``i``.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack an odd number of FP4 codes: the last dimension is {codes.shape[-1]}")
    # One little-endian 16-bit word holds a pair, so that packing is a shift and a narrowing.
    pairs = codes.flatten().view(torch.int16)
    data = pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)
    return data.view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_float4(data: Tensor) -> Tensor:
    """Unpack bytes into pairs of E2M1 codes along the last dimension.

    Args:
        data: uint8, shape (..., n).

    Raises:
        Nothing of its own.

    Numerics:
        uint8 codes 0..15, shape (..., 2 * n), in the order of ``pack_float4``.
    """
    pairs = data.flatten().to(torch.int16)
    high = pairs.bitwise_and(0xF0).bitwise_left_shift_(4)
    codes = pairs.bitwise_and_(0x0F).bitwise_or_(high).view(torch.uint8)
    return codes.view(*data.shape[:-1], 2 * data.shape[-1])


def encode_e8m0(v: Tensor) -> Tensor:
    """Encode non-negative fp32 values as the smallest power of two not below them.

    Args:
        v: fp32 >= 0, any shape.

    Raises:
        Nothing of its own.

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

    Raises:
        Nothing of its own.

    Numerics:
        ``2**(b - 127)``; code 0 is the subnormal 2**-127 and code 255 is NaN.
    """
    return _power_of_two(b.to(torch.int32))


def reciprocal_e8m0(b: Tensor) -> Tensor:
    """The factor that encodes elements under an E8M0 scale, exactly.

    Args:
        b: uint8, any shape.

    Raises:
        Nothing of its own.

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
