"""Element codecs as Triton device functions: fp8 and E2M1 encoding, E8M0 scales, byte packing across rows.

Every function takes ``EMULATE``. On a GPU it is False and the hardware conversions run; under Triton's interpreter it
is True and integer arithmetic takes their place, because the interpreter's own down-casts round wrongly. Both give the
codes of ``reference.codecs``, bit for bit.

Rows are packed before they are transposed: four codes of one column, from four consecutive rows, become one 32-bit
word. A tile of words is then transposed through shared memory as 32-bit elements, a quarter of the traffic of a tile
of bytes, and stored 16 bytes per thread.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_float32(x, EMULATE: tl.constexpr):
    """Widen bf16, fp16 or fp32 to fp32, exactly."""
    if EMULATE and x.dtype == tl.bfloat16:
        # The interpreter's widening loses bf16 subnormals.
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def magnitude(x, EMULATE: tl.constexpr):
    """|x| as fp32 for a maximum that ignores NaN: on a GPU the maximum itself does, the interpreter's does not.

    Given bf16 or fp16 values that only one maximum uses, the compiler takes maxima of pairs: the sign goes before the
    widening. Given fp32 values it takes the absolute value inside the maximum.
    """
    if EMULATE:
        wide = to_float32(x, EMULATE)
        return tl.where(wide == wide, tl.abs(wide), 0.0)
    return tl.abs(x).to(tl.float32)


@triton.jit
def _fp8_code_emulated(x, E5M2: tl.constexpr):
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    if E5M2:
        DROP: tl.constexpr = 21  # fp32 mantissa bits that go away
        REBIAS: tl.constexpr = (127 - 15) << 2
        MIN_NORMAL: tl.constexpr = (127 - 14) << 23
        SUBNORMAL_ULP_ADDER: tl.constexpr = 128.0  # its ulp is the format's smallest subnormal
        MAX_CODE: tl.constexpr = 0x7B
    else:
        DROP: tl.constexpr = 20
        REBIAS: tl.constexpr = (127 - 7) << 3
        MIN_NORMAL: tl.constexpr = (127 - 6) << 23
        SUBNORMAL_ULP_ADDER: tl.constexpr = 16384.0
        MAX_CODE: tl.constexpr = 0x7E
    HALF: tl.constexpr = (1 << (DROP - 1)) - 1
    rounded = (size + HALF + ((size >> DROP) & 1)) >> DROP
    normal = tl.maximum(rounded, REBIAS) - REBIAS
    sum_ = tl.abs(x) + SUBNORMAL_ULP_ADDER
    subnormal = sum_.to(tl.uint32, bitcast=True) & 0x7FFFFF
    code = tl.minimum(tl.where(size < MIN_NORMAL, subnormal, normal), MAX_CODE)
    code = tl.where(size > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.uint8)


@triton.jit
def fp8_code(x, E5M2: tl.constexpr, EMULATE: tl.constexpr):
    """Codes of fp32 ``x``, nearest even; beyond the largest finite value, infinities included, it saturates."""
    if EMULATE:
        return _fp8_code_emulated(x, E5M2)
    # satfinite clamps, so no separate clamp is spent; four conversions fill one 32-bit register.
    if E5M2:
        ASM: tl.constexpr = """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
        }"""
    else:
        ASM: tl.constexpr = """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
        }"""
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def pack_codes(c0, c1, c2, c3, EMULATE: tl.constexpr):
    """One word per element position: byte ``j`` is the code at that position of ``c<j>``."""
    if EMULATE:
        low = c0.to(tl.uint32) | (c1.to(tl.uint32) << 8)
        return low | (c2.to(tl.uint32) << 16) | (c3.to(tl.uint32) << 24)
    # A 4x4 byte transposition in registers: four codes per input register, four words out.
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $4, $5, 0x5140;
            prmt.b32 b, $6, $7, 0x5140;
            prmt.b32 c, $4, $5, 0x7362;
            prmt.b32 d, $6, $7, 0x7362;
            prmt.b32 $0, a, b, 0x5410;
            prmt.b32 $1, a, b, 0x7632;
            prmt.b32 $2, c, d, 0x5410;
            prmt.b32 $3, c, d, 0x7632;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [c0, c1, c2, c3],
        dtype=tl.uint32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def fp8_word(x0, x1, x2, x3, E5M2: tl.constexpr, EMULATE: tl.constexpr):
    """``pack_codes`` of the codes of four fp32 tensors, for callers that need the word alone."""
    if EMULATE:
        c0 = _fp8_code_emulated(x0, E5M2)
        c1 = _fp8_code_emulated(x1, E5M2)
        c2 = _fp8_code_emulated(x2, E5M2)
        c3 = _fp8_code_emulated(x3, E5M2)
        return pack_codes(c0, c1, c2, c3, EMULATE)
    if E5M2:
        ASM: tl.constexpr = """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
        }"""
    else:
        ASM: tl.constexpr = """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
        }"""
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def decode_e4m3(code):
    """fp32 value of an E4M3 code 0..0x7E given as uint8: moved into place as a tiny fp32, scaled up exactly."""
    return (code.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def round_to_bfloat16(x, EMULATE: tl.constexpr):
    """fp32 ``x`` rounded to nearest even bf16, as fp32."""
    if EMULATE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def fp4_code(x, random, STOCHASTIC: tl.constexpr, EMULATE: tl.constexpr):
    """E2M1 codes 0..15 of fp32 ``x`` as uint32: nearest even, saturating at 6, NaN gives +6.

    The spacing of codes is half of ``power``, the power of two below the magnitude, at least 1. Nearest: the sum with
    ``power * (1.5 * 2**22 + 1)`` has that spacing as its ulp, so its mantissa counts steps, and the exponent of
    ``power``, in half steps, counts the codes below the binade; the added 1 makes their offsets cancel modulo 16.

    Args:
        random: integers 0..255 as uint32, used if ``STOCHASTIC``: round up where ``random / 256`` of the spacing,
            added to the magnitude, reaches the next code.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 6.0)
    power = tl.maximum(size.to(tl.uint32, bitcast=True) & 0x7F800000, 0x3F800000)
    if STOCHASTIC:
        step = (power - (9 << 23)).to(tl.float32, bitcast=True)  # the spacing / 256
        raised = size + random.to(tl.float32) * step
        # From 1 on, the exponent and the first mantissa bit count codes (1 is code 2); below are only 0 and 0.5.
        code = tl.where(raised < 1.0, tl.where(raised < 0.5, 0, 1), (raised.to(tl.uint32, bitcast=True) >> 22) - 252)
        code = code.to(tl.uint32)
    else:
        total = tl.fma(power.to(tl.float32, bitcast=True), 6291457.0, size)  # the product is exact
        code = (total.to(tl.uint32, bitcast=True) + (power >> 22)) & 7
    code = code | ((bits >> 28) & 8)
    if EMULATE:
        return tl.where(x == x, code, 7)
    return code  # a multiplication on a GPU never returns a NaN with its sign set
