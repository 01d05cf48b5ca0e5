"""Element codecs as Triton device functions: fp8 and E2M1 encoding, E8M0 scales, byte packing across rows.

On a GPU the hardware conversions run; under Triton's interpreter integer arithmetic takes their place, because the
interpreter's own down-casts round wrongly. Both give the codes of ``reference.codecs``, bit for bit. ``EMULATE``
chooses, once for the process: the compilers of kernels and of graphs read it like the other constants of this file.

Rows are packed before they are transposed: four codes of one column, from four consecutive rows, become one 32-bit
word. A tile of words is then transposed through shared memory as 32-bit elements, a quarter of the traffic of a tile
of bytes, and stored 16 bytes per thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import INTERPRETING

EMULATE = tl.constexpr(INTERPRETING)
"""Whether the kernels run in the interpreter, which lacks instructions of a GPU and rounds otherwise."""

# Four conversions fill one 32-bit register; satfinite clamps, so no separate clamp is spent. On one line, because the
# compiler of a graph copies it into a string.
_FOUR_TO_E4M3 = tl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
    "mov.b32 $0, {lo, hi}; }"
)
_FOUR_TO_E5M2 = tl.constexpr(_FOUR_TO_E4M3.value.replace("e4m3", "e5m2"))


@triton.jit
def to_float32(x):
    """Widen bf16, fp16 or fp32 to fp32, exactly."""
    if x.dtype == tl.bfloat16:
        if EMULATE:
            # The interpreter's widening loses bf16 subnormals.
            return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            # One instruction per element, from the register of a pair; the compiler takes two for the upper half.
            return tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
                "=&r,=r,r",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
    else:
        return x.to(tl.float32)


@triton.jit
def operand(x):
    """Return an operand of ``tl.dot``: bf16 in fp32 in the interpreter, which multiplies it as if it were integers."""
    if EMULATE:
        return to_float32(x)
    else:
        return x


@triton.jit
def to_float32_for(x, USE: tl.constexpr):
    """Return ``to_float32`` of a bf16 tensor that is widened for other uses, too, each with a name of its own.

    The compiler would take them for one, whose result stays in registers from the first use to the last, twice as wide.
    """
    if EMULATE or x.dtype != tl.bfloat16:
        return to_float32(x)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000; // " + USE,
            "=&r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def magnitude(x):
    """|x| as fp32 for a maximum that ignores NaN: on a GPU the maximum itself does, the interpreter's does not.

    A maximum over nothing but NaN is NaN on a GPU: take its maximum with 0 before using it.
    """
    if EMULATE:
        wide = to_float32(x)
        return tl.where(wide == wide, tl.abs(wide), 0.0)
    else:
        # The sign goes before the widening: the compiler then takes maxima of bf16 pairs.
        return tl.abs(x).to(tl.float32)


@triton.jit
def larger(a, b):
    """Return the larger magnitudes of two tensors, with any sign, in their dtype; NaN is ignored."""
    if EMULATE:
        return tl.maximum(magnitude(a), magnitude(b))
    elif a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif a.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "max.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.maximum(tl.abs(a), tl.abs(b))


@triton.jit
def at_most(x, limit):
    """Return the smaller of two, NaN where ``x`` is.

    Not Triton's minimum that keeps NaN: beside it, ptxas 12.9 of Triton 3.8 garbles FP8 codes on their way through
    shared memory (triton-lang/triton#11111).
    """
    return tl.where(x > limit, limit, x)


@triton.jit
def at_least(x, limit):
    """Return the larger of two, NaN where ``x`` is; see ``at_most``."""
    return tl.where(x < limit, limit, x)


@triton.jit
def larger_or_nan(a, b):
    """Return the larger of two fp32 magnitudes, NaN where either is: as integers, of which NaN is the largest."""
    largest = tl.maximum(a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True))
    return largest.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_of_four(x0, x1, x2, x3):
    """Return the largest of four magnitudes as fp32, under the rules of ``magnitude``."""
    low = larger(x0, x1)
    high = larger(x2, x3)
    return magnitude(larger(low, high))


@triton.jit
def magnitudes_of_tile(xs, ys, PAIRED: tl.constexpr):
    """Return the largest |x| of four interleaved rows, and if ``PAIRED`` of four more, by position; NaN ignored."""
    largest = magnitude_of_four(*xs)
    if PAIRED:
        largest = tl.maximum(largest, magnitude_of_four(*ys))
    return largest


@triton.jit
def reciprocal(x):
    """Return ``RN(1 / x)`` in fp32, subnormal results kept."""
    if EMULATE:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    else:
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def product(a, b):
    """Return ``RN(a * b)`` of fp32 that a sum may follow: no compiler contracts the two into a multiply-add.

    A launch of our own forbids contraction as an option; launched from a compiled graph, a kernel has no such option.
    """
    if EMULATE:
        return a * b
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def encode_by_bits(
    x,
    BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    """Return codes of fp32 ``x`` in integer arithmetic, for formats and machines without a conversion of their own.

    Nearest even; whatever is larger than the value of ``MAX_CODE`` becomes that code, with its sign; a NaN becomes
    ``NAN_CODE``. Returns uint32.
    """
    DROP: tl.constexpr = 23 - MANTISSA_BITS  # fp32 mantissa bits that go away
    REBIAS: tl.constexpr = (127 - BIAS) << MANTISSA_BITS
    MIN_NORMAL: tl.constexpr = (128 - BIAS) << 23
    SUBNORMAL_ULP_ADDER: tl.constexpr = 1 << (24 - BIAS - MANTISSA_BITS)  # its ulp is the smallest subnormal
    HALF: tl.constexpr = (1 << (DROP - 1)) - 1
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = (size + HALF + ((size >> DROP) & 1)) >> DROP
    normal = tl.maximum(rounded, REBIAS) - REBIAS
    sum_ = tl.abs(x) + SUBNORMAL_ULP_ADDER
    subnormal = sum_.to(tl.uint32, bitcast=True) & 0x7FFFFF
    code = tl.minimum(tl.where(size < MIN_NORMAL, subnormal, normal), MAX_CODE)
    return tl.where(size > 0x7F800000, NAN_CODE, code | ((bits >> 31) << (BITS - 1)))


@triton.jit
def _fp8_code_emulated(x, E5M2: tl.constexpr):
    if E5M2:
        return encode_by_bits(x, 8, 2, 15, 0x7B, 0x7F).to(tl.uint8)
    return encode_by_bits(x, 8, 3, 7, 0x7E, 0x7F).to(tl.uint8)


@triton.jit
def fp8_code(x, E5M2: tl.constexpr):
    """Return codes of fp32 ``x``, nearest even; beyond the largest finite value, infinities included, it saturates."""
    if EMULATE:
        return _fp8_code_emulated(x, E5M2)
    ASM: tl.constexpr = _FOUR_TO_E5M2 if E5M2 else _FOUR_TO_E4M3
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def scaled_float32(x, scale, CURRENT: tl.constexpr):
    """Return fp32 ``x * scale``, with NaN for an infinite ``x``, which ``fp8_code`` would turn into a number.

    ``CURRENT``: the scale is that of ``scale_from_amax``, so it is 0 where there is an infinity, whose product is NaN.
    Else what is added is 0 with the sign of the product, which leaves the product as it is, and NaN for an infinity.
    """
    wide = to_float32(x)
    if CURRENT:
        return wide * scale
    else:
        return tl.fma(wide, scale, wide * 0.0)


@triton.jit
def fp8_codes(xs, scale, E5M2: tl.constexpr, CURRENT: tl.constexpr):
    """Return codes of four tensors."""
    codes = ()
    for j in tl.static_range(4):
        codes = codes + (fp8_code(scaled_float32(xs[j], scale, CURRENT), E5M2),)
    return codes


@triton.jit
def pack_codes(c0, c1, c2, c3):
    """Return one word per element position: byte ``j`` is the code at that position of ``c<j>``."""
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
def fp8_word(x0, x1, x2, x3, E5M2: tl.constexpr):
    """Return ``pack_codes`` of the codes of four fp32 tensors, for callers that need the word alone."""
    if EMULATE:
        return pack_codes(*fp8_codes((x0, x1, x2, x3), 1.0, E5M2, True))
    ASM: tl.constexpr = _FOUR_TO_E5M2 if E5M2 else _FOUR_TO_E4M3
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def decode_e4m3(code):
    """Return fp32 value of an E4M3 code 0..0x7F given as uint8: moved into place as a tiny fp32, scaled up exactly."""
    value = (code.to(tl.uint32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where(code == 0x7F, float("nan"), value)


@triton.jit
def decode_subbyte(code, BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """Return fp32 values of codes of fewer than eight bits given as uint32; moved and scaled as in ``decode_e4m3``."""
    SIGN: tl.constexpr = 1 << (BITS - 1)
    UNBIAS: tl.constexpr = (254 - BIAS) << 23  # 2**(127 - BIAS)
    bits = ((code & (SIGN - 1)) << (23 - MANTISSA_BITS)) | ((code & SIGN) << (32 - BITS))
    return bits.to(tl.float32, bitcast=True) * tl.full(bits.shape, UNBIAS, tl.uint32).to(
        tl.float32, bitcast=True
    )


@triton.jit
def round_pair_to_bfloat16(a, b):
    """Return two fp32 tensors rounded to nearest even bf16, as fp32."""
    if EMULATE:
        first, second = round_to_dtype(a, tl.bfloat16), round_to_dtype(b, tl.bfloat16)
        return to_float32(first), to_float32(second)
    # The conversion of a pair has several times the rate of single conversions.
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xFFFF0000;
        }""",
        "=&r,=r,r,r",
        [a, b],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _round_to_float16_emulated(x):
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0xFFF + ((size >> 13) & 1)) >> 13) - (112 << 10)
    # From 0.5 on, the ulp of fp32 is the smallest subnormal of fp16.
    sum_ = tl.abs(x) + 0.5
    subnormal = sum_.to(tl.uint32, bitcast=True) - 0x3F000000
    code = tl.where(size < 0x38800000, subnormal, normal)
    code = tl.where(size >= 0x47800000, 0x7C00, code)
    code = code | ((bits >> 16) & 0x8000)
    return tl.where(x == x, code, 0x7FFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def round_to_dtype(x, DTYPE: tl.constexpr):
    """Round fp32 ``x`` to nearest even bf16, fp16 or fp32; a NaN becomes a GPU's one NaN, 0x7F and all ones."""
    if DTYPE == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    elif not EMULATE and DTYPE == tl.bfloat16:
        # The conversion of a pair has several times the rate of single conversions.
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif not EMULATE:
        # The compiler's own conversion would cancel against the widening of a NaN and keep its bits.
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    elif DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return _round_to_float16_emulated(x)


@triton.jit
def fp4_magnitude(x, random, STOCHASTIC: tl.constexpr):
    """Return E2M1 magnitude codes 0..7 of fp32 ``x`` in the low byte of uint32; what lies above that byte is
    unspecified.

    Nearest even, saturating at 6, NaN gives 6. The spacing of codes is half of ``power``, the power of two below the
    magnitude, at least 1. The sum with ``power * (1.5 * 2**22 + 1)`` has that spacing as its ulp, so its mantissa
    counts steps; the exponent of ``power``, in half steps, counts the codes below the binade; the added 1 makes the
    offsets of both cancel modulo 256.

    Args:
        random: integers 0..255 as uint32, used if ``STOCHASTIC``: round up where ``random / 256`` of the spacing,
            added to the magnitude, reaches the next code.
    """
    size = tl.minimum(tl.abs(x), 6.0)
    if EMULATE:
        size = tl.where(x == x, size, 6.0)  # as the minimum on a GPU has it
    power = tl.maximum((size.to(tl.int32, bitcast=True) & 0x7F800000), 0x3F800000)
    if STOCHASTIC:
        step = (power - (9 << 23)).to(tl.float32, bitcast=True)  # the spacing / 256
        raised = size + random.to(tl.float32) * step
        # From 1 on, the exponent and the first mantissa bit count codes (1 is code 2); below are only 0 and 0.5.
        counted = (raised.to(tl.int32, bitcast=True) >> 22) - 252
        return tl.maximum(counted, tl.where(raised < 0.5, 0, 1)).to(tl.uint32, bitcast=True)
    total = tl.fma(power.to(tl.float32, bitcast=True), 6291457.0, size)  # the product is exact
    return total.to(tl.uint32, bitcast=True) + (power.to(tl.uint32, bitcast=True) >> 22)


@triton.jit
def fp4_sign(x):
    """Return the bits of fp32 ``x`` as uint32 with the sign on top; no sign for NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    if EMULATE:
        return tl.where(x == x, bits, 0)
    return bits  # a product on a GPU never is a NaN with its sign set


@triton.jit
def pack_fp4(m0, m1, m2, m3, m4, m5, m6, m7, s0, s1, s2, s3, s4, s5, s6, s7):
    """Return eight codes in one word, element ``i`` in nibble ``i``, from ``fp4_magnitude`` and ``fp4_sign``."""
    if EMULATE:
        low = (m0 & 7) | ((m1 & 7) << 4) | ((m2 & 7) << 8) | ((m3 & 7) << 12)
        high = ((m4 & 7) << 16) | ((m5 & 7) << 20) | ((m6 & 7) << 24) | ((m7 & 7) << 28)
        top: tl.constexpr = 0x80000000
        low_sign = ((s0 & top) >> 28) | ((s1 & top) >> 24) | ((s2 & top) >> 20) | ((s3 & top) >> 16)
        high_sign = ((s4 & top) >> 12) | ((s5 & top) >> 8) | ((s6 & top) >> 4) | (s7 & top)
        return low | high | low_sign | high_sign
    # Bytes of even and of odd elements are gathered apart; a shift by 4 makes low nibbles of one, high of the other.
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, b, even, odd;
            prmt.b32 a, $1, $3, 0x0040;
            prmt.b32 b, $5, $7, 0x0040;
            prmt.b32 even, a, b, 0x5410;
            prmt.b32 a, $2, $4, 0x0040;
            prmt.b32 b, $6, $8, 0x0040;
            prmt.b32 odd, a, b, 0x5410;
            shl.b32 odd, odd, 4;
            or.b32 $0, even, odd;
            prmt.b32 a, $9, $11, 0x0073;
            prmt.b32 b, $13, $15, 0x0073;
            prmt.b32 even, a, b, 0x5410;
            prmt.b32 a, $10, $12, 0x0073;
            prmt.b32 b, $14, $16, 0x0073;
            prmt.b32 odd, a, b, 0x5410;
            shr.u32 even, even, 4;
            and.b32 even, even, 0x08080808;
            and.b32 odd, odd, 0x80808080;
            or.b32 $0, $0, even;
            or.b32 $0, $0, odd;
        }""",
        "=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [m0, m1, m2, m3, m4, m5, m6, m7, s0, s1, s2, s3, s4, s5, s6, s7],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def decode_fp8(code, E5M2: tl.constexpr):
    """Return fp32 values of uint8 codes, NaN and infinities included."""
    if E5M2:  # the upper byte of an fp16
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif EMULATE:
        sign = (code.to(tl.uint32) & 0x80) << 24
        return (decode_e4m3(code & 0x7F).to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def decode_fp4(code):
    """Return fp32 values of E2M1 codes 0..15 given as uint32."""
    return decode_subbyte(code, 4, 1, 1)


@triton.jit
def repeat_columns(values, TIMES: tl.constexpr):
    """[R, C] -> [R, C * TIMES], every column repeated."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    repeated = tl.broadcast_to(tl.expand_dims(values, 2), (ROWS, COLUMNS, TIMES))
    return tl.reshape(repeated, (ROWS, COLUMNS * TIMES))
