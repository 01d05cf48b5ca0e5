"""Formats as data: frozen records of the element and scale formats, and the constants the quantizers share.

Nothing here computes on tensors; the algorithms in ``reference`` and ``kernels`` read these records, so a
format's published values are written down once.
"""

import enum
import math
import struct
from dataclasses import dataclass


class DType(enum.IntEnum):
    """Element types a quantized tensor can name; the integers are what value keys and checkpoints store."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


def round_to_float32(value: float) -> float:
    """Round a Python float to the nearest fp32 value.

    Args:
        value: any finite float within fp32 range.

    Raises:
        OverflowError: the magnitude exceeds the fp32 maximum.

    Numerics:
        Round to nearest, ties to even; the result is the fp32 value widened back to a Python float.
    """
    return struct.unpack("<f", struct.pack("<f", value))[0]


@dataclass(frozen=True)
class ElementFormat:
    """A signed floating-point element format: one sign bit, ``exponent_bits``, ``mantissa_bits``, subnormals.

    Args:
        name: the lowercase name used in messages and file names.
        bits: storage bits of one code.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the stored mantissa field.
        bias: exponent bias.
        max: the largest finite magnitude; encoders saturate to it.
        max_reciprocal: ``RN(1 / max)`` in fp32, stored so that traced code reads a constant.
        has_infinity: whether the format has codes for infinities (no encoder here produces them).
        nan_codes: the codes that decode to NaN.
        torch_dtype: the name of the torch dtype with the same codes, None where torch has none per element.
        dtype: the ``DType`` member naming this format.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_reciprocal: float
    has_infinity: bool
    nan_codes: tuple[int, ...]
    torch_dtype: str | None
    dtype: DType

    @property
    def min_normal(self) -> float:
        """The smallest normal magnitude, ``2**(1 - bias)``."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def min_subnormal(self) -> float:
        """The smallest non-zero magnitude, ``2**(1 - bias - mantissa_bits)``."""
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)


@dataclass(frozen=True)
class ScaleFormat:
    """An exponent-only scale format: code ``b`` means ``2**(b - bias)``.

    Args:
        name: the lowercase name.
        bits: storage bits of one code.
        bias: exponent bias.
        max_code: the largest code that is a number; encoders saturate to it.
        nan_code: the code that decodes to NaN.
    """

    name: str
    bits: int
    bias: int
    max_code: int
    nan_code: int


E4M3 = ElementFormat(
    name="e4m3",
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max=448.0,
    max_reciprocal=round_to_float32(1.0 / 448.0),
    has_infinity=False,
    nan_codes=(0x7F, 0xFF),
    torch_dtype="float8_e4m3fn",
    dtype=DType.kFloat8E4M3,
)
E5M2 = ElementFormat(
    name="e5m2",
    bits=8,
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max=57344.0,
    max_reciprocal=round_to_float32(1.0 / 57344.0),
    has_infinity=True,
    nan_codes=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
    torch_dtype="float8_e5m2",
    dtype=DType.kFloat8E5M2,
)
E2M1 = ElementFormat(
    name="e2m1",
    bits=4,
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    max=6.0,
    max_reciprocal=round_to_float32(1.0 / 6.0),
    has_infinity=False,
    nan_codes=(),
    torch_dtype=None,
    dtype=DType.kFloat4E2M1,
)
E8M0 = ScaleFormat(name="e8m0", bits=8, bias=127, max_code=254, nan_code=255)

ELEMENT_FORMATS: dict[DType, ElementFormat] = {fmt.dtype: fmt for fmt in (E4M3, E5M2, E2M1)}

FLT_MAX = float.fromhex("0x1.FFFFFEp127")
BF16_MAX = float.fromhex("0x1.FEp127")
FP16_MAX = 65504.0

MXFP8_BLOCK = 32
FLOAT8_BLOCK = 128
NVFP4_BLOCK = 16

# Scale buffers of the block-scaled tensor-core formats are padded to whole tiles of this many rows and
# columns.
SCALE_TILE_ROWS = 128
SCALE_TILE_COLUMNS = 4
# FP8 block scales are padded along one dimension so that every row of scales starts 16-byte aligned.
FLOAT8_BLOCK_SCALE_ALIGNMENT = 4

# Sign pattern of the random Hadamard transform: bit i set means that row i of the rotation is negated.
RHT_SIGN_MASK = 0xD7E8


def cdiv(a: int, b: int) -> int:
    """Ceil division of non-negative integers (symbolic sizes allowed)."""
    return (a + b - 1) // b


def round_up(a: int, multiple: int) -> int:
    """``a`` rounded up to a multiple of ``multiple`` (symbolic sizes allowed)."""
    return (a + multiple - 1) // multiple * multiple
