"""Formats as data: frozen records of element formats, scale formats and tensor layouts, and shared constants.

Three records describe a tensor format. An :class:`ElementFormat` says what a code means. A :class:`ScaleFormat` says
what a scale byte means. A :class:`Layout` says which buffers a quantized tensor consists of, how large each is for a
matrix [M, K], and how they are read back; storages, tensors, ``TensorProto``, the operators' fakes and the decoding of
GEMM operands all read that one record.

Nothing here computes on tensors; the algorithms in ``reference`` and ``kernels`` read these records, so a
format's published values are written down once.
"""

import enum
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal


class Members(enum.EnumMeta):
    """The class of enumerations whose error about a wrong member lists the members."""

    if not TYPE_CHECKING:  # type checkers take a class with it to have every name

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):  # asked for by tools
                raise AttributeError(f"{cls.__name__} has no attribute {name!r:.60}")
            if name in cls.__members__:  # Python 3.10 and 3.11 find members here
                return cls.__members__[name]
            names = ", ".join(cls.__members__)
            raise AttributeError(f"{cls.__name__} has no member {name!r:.60}; use one of {names}")


class DType(enum.IntEnum, metaclass=Members):
    """Element types a quantized tensor can name; the integers are what value keys and checkpoints store."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10
    kFloat6E2M3 = 11
    kFloat6E3M2 = 12

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"{value!r:.60} is no DType; use one of {', '.join(member.name for member in cls)}")


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

    ``name``, ``bits``, ``bias`` and ``max_reciprocal`` follow from the arguments: the lowercase name used in messages
    and file names, the storage bits of one code, the exponent bias, and ``RN(1 / max)`` in fp32. They are stored, for
    traced code to read constants.

    Args:
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the stored mantissa field.
        max: the largest finite magnitude; encoders saturate to it.
        dtype: the ``DType`` member naming this format.
        torch_dtype: the name of the torch dtype with the same codes, None where torch has none per element.
        nan_codes: the codes that decode to NaN.
        has_infinity: whether the format has codes for infinities (no encoder here produces them).
    """

    exponent_bits: int
    mantissa_bits: int
    max: float
    dtype: DType
    torch_dtype: str | None = None
    nan_codes: tuple[int, ...] = ()
    has_infinity: bool = False
    name: str = field(init=False)
    bits: int = field(init=False)
    bias: int = field(init=False)
    max_reciprocal: float = field(init=False)

    def __post_init__(self) -> None:
        derived = {
            "name": f"e{self.exponent_bits}m{self.mantissa_bits}",
            "bits": 1 + self.exponent_bits + self.mantissa_bits,
            "bias": 2 ** (self.exponent_bits - 1) - 1,
            "max_reciprocal": round_to_float32(1.0 / self.max),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


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
    exponent_bits=4,
    mantissa_bits=3,
    max=448.0,
    dtype=DType.kFloat8E4M3,
    torch_dtype="float8_e4m3fn",
    nan_codes=(0x7F, 0xFF),
)
E5M2 = ElementFormat(
    exponent_bits=5,
    mantissa_bits=2,
    max=57344.0,
    dtype=DType.kFloat8E5M2,
    torch_dtype="float8_e5m2",
    nan_codes=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
    has_infinity=True,
)
E2M1 = ElementFormat(exponent_bits=2, mantissa_bits=1, max=6.0, dtype=DType.kFloat4E2M1)
E2M3 = ElementFormat(exponent_bits=2, mantissa_bits=3, max=7.5, dtype=DType.kFloat6E2M3)
E3M2 = ElementFormat(exponent_bits=3, mantissa_bits=2, max=28.0, dtype=DType.kFloat6E3M2)
E8M0 = ScaleFormat(name="e8m0", bits=8, bias=127, max_code=254, nan_code=255)

FLOAT8_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}
ELEMENT_FORMATS: dict[DType, ElementFormat] = {fmt.dtype: fmt for fmt in (E4M3, E5M2, E2M1, E2M3, E3M2)}

FLT_MAX = float.fromhex("0x1.FFFFFEp127")
BF16_MAX = float.fromhex("0x1.FEp127")
FP16_MAX = 65504.0

MX_BLOCK = 32
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


NVFP4_EXCLUSIONS = (
    ("row_scaled", "two_d"),
    ("row_scaled", "rht"),
    ("row_scaled", "stochastic rounding"),
    ("four_over_six", "rht"),
    ("four_over_six", "stochastic rounding"),
)
"""Options that NVFP4 does not define together, by the names that the numerics give them."""


def check_nvfp4(error_mode: str, chosen: tuple[str, ...]) -> None:
    """Check the options of NVFP4.

    Args:
        error_mode: what 4-over-6 chooses by.
        chosen: names of those options that are on.
    Raises:
        ValueError: two that exclude each other, or an unknown mode.
    """
    for first, second in NVFP4_EXCLUSIONS:
        if first in chosen and second in chosen:
            raise ValueError(f"NVFP4 cannot combine {first} with {second}; turn one of them off")
    if error_mode not in ("MAE", "MSE"):
        raise ValueError(f"unknown 4-over-6 error mode {error_mode!r:.60}; use 'MAE' or 'MSE'")


def cdiv(a: int, b: int) -> int:
    """Return ceil division of non-negative integers (symbolic sizes allowed)."""
    return (a + b - 1) // b


def round_up(a: int, multiple: int) -> int:
    """Return ``a`` rounded up to a multiple of ``multiple`` (symbolic sizes allowed)."""
    return (a + multiple - 1) // multiple * multiple


def padded_rows(rows: int, groups: int, alignment: int) -> int:
    """Return rows that groups padded to whole alignments can need, whatever their splits.

    Args:
        rows: T, of all groups together.
        groups: G.
        alignment: rows that every padded group is a multiple of.

    Numerics:
        ``round_up(T + G * (alignment - 1), alignment)``.
    """
    return round_up(rows + groups * (alignment - 1), alignment)


@dataclass(frozen=True)
class Extent:
    """One dim of a buffer as a rule: ``round_up(cdiv(size, group), multiple) * bits / 8``.

    Args:
        size: which size it follows: "M", "K", "1" (always one), or "lead" (the leading dims of the tensor as they are).
        group: elements of the matrix that share one entry, as for scales.
        multiple: what the number of entries is padded to.
        bits: storage bits of one entry, 8 for a byte.
    """

    size: Literal["lead", "M", "K", "1"]
    group: int = 1
    multiple: int = 1
    bits: int = 8

    def of(self, size: int) -> int:
        """Return entries of the buffer's dim for a matrix that has ``size`` in it (symbolic sizes allowed)."""
        if self.group > 1:
            size = cdiv(size, self.group)
        if self.multiple > 1:
            size = round_up(size, self.multiple)
        return size if self.bits == 8 else size * self.bits // 8

    def undo(self, entries: int) -> int:
        """Return the size, padding included, after that many entries of packed codes."""
        return entries if self.bits == 8 else entries * 8 // self.bits


Direction = Literal["rowwise", "columnwise", "both"]


@dataclass(frozen=True)
class Buffer:
    """One buffer of a quantized tensor.

    Args:
        attribute: its name on the storage.
        argument: its name in the storage's constructor.
        direction: the direction that it belongs to; a buffer of "both" exists where either does.
        dtype: name of its torch dtype; "" for that of the tensor.
        shape: rules of its dims; none if another format decides.
    """

    attribute: str
    argument: str
    direction: Direction
    dtype: str
    shape: tuple[Extent, ...] = ()

    def of_direction(self, columnwise: bool) -> bool:
        """Return whether the operand of that direction reads it."""
        return self.direction in ("both", "columnwise" if columnwise else "rowwise")

    def of_usage(self, rowwise: bool, columnwise: bool) -> bool:
        """Return whether a tensor with these directions has this buffer."""
        return (rowwise and self.of_direction(False)) or (columnwise and self.of_direction(True))

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the buffer for a tensor of ``shape`` (symbolic sizes allowed)."""
        rows, shape = 1, shape or (1,)  # a number is a row of one
        for size in shape[:-1]:
            rows = rows * size
        sizes: list[int] = []
        for extent in self.shape:
            if extent.size == "lead":
                sizes += shape[:-1]
            else:
                sizes.append(extent.of({"M": rows, "K": shape[-1], "1": 1}[extent.size]))
        return tuple(sizes)

    def part(self, first: int, count: int, of_columns: bool) -> tuple[int, int, int, int] | None:
        """Return where some rows, or columns, of a matrix lie in the buffer of the whole.

        Args:
            first, count: which rows, or with ``of_columns`` which columns.
        Returns:
            (dim, first entry, entries, entries of the part's own buffer, which are more where that is padded); dim -1
            where all of the buffer belongs to the part; None if the part begins or ends within a block.
        """
        mine = ("K",) if of_columns else ("M", "lead")
        for dim, extent in enumerate(self.shape):
            if extent.size not in mine:
                continue
            border = extent.group if extent.bits == 8 else extent.multiple
            if first % border:
                return None
            # packed codes are whole blocks, whose last one is no zeros after the end where it was rotated
            entries = extent.of(count) if extent.bits < 8 else cdiv(count, extent.group)
            return dim, first // extent.group * extent.bits // 8, entries, extent.of(count)
        return -1, 0, 0, 0

    def logical_shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor whose data have these ``sizes``; packed data tell it up to their padding."""
        first, last = self.shape
        if first.size == "K":  # transposed: the leading dims follow
            lead = sizes[1:] if last.size == "lead" else (last.undo(sizes[1]),)
            return (*lead, first.undo(sizes[0]))
        return (*sizes[:-1], last.undo(sizes[-1]))


@dataclass(frozen=True)
class Layout:
    """The buffers of a quantized tensor of one format, and how to read them.

    Args:
        buffers: in the order of flattening; of each direction, data come first and their scales second.
        minimum_rank: the fewest dims that a tensor to quantize has.
        scale_group: (rows, columns) of the elements that share a scale row-wise; (0, 0) for one scale of the tensor.
        decoders: functions of ``reference.dequantize`` and ``kernels.dequantize``, row-wise and column-wise, that give
            the values in the logical orientation.
        native: how the tensor cores' GEMM scales an operand, in the words of ``functional.NativeOperand``; "" where no
            GPU's GEMM takes the format.
        grouped: how groups lie in the buffers of grouped operators: "tensor", "padded", or "split", each by itself.
    """

    buffers: tuple[Buffer, ...] = ()
    minimum_rank: int = 1
    scale_group: tuple[int, int] = (0, 0)
    decoders: tuple[str, str] = ("", "")
    native: str = ""
    grouped: Literal["tensor", "padded", "split"] = "split"

    def attributes(self, columnwise: bool) -> tuple[str, ...]:
        """Return attributes that make up the operand of one direction, data first."""
        return tuple(buffer.attribute for buffer in self.buffers if buffer.of_direction(columnwise))

    @property
    def joins(self) -> tuple[str, str]:
        """How this format's buffers of tensors with some of the rows each make up those of the whole, by direction.

        A letter for each buffer: "r", rows go below rows; "c", beside each other; "s", all are the same, as long as the
        amax of the whole is after them. Empty where they do not make it up.
        """
        if any("K" in [e.size for e in b.shape] and len(b.shape) == 1 for b in self.buffers):
            return "", ""  # an amax of every column
        sides = [[b for b in self.buffers if b.of_direction(columnwise)] for columnwise in (False, True)]
        return _joined(sides[0]), _joined(sides[1])

    @property
    def joined_rows(self) -> int:
        """Return the number of rows in whose multiples parts make up the whole: blocks and their padding end there."""
        extents = [extent for buffer in self.buffers for extent in buffer.shape if extent.size == "M"]
        return max(
            [1, *[extent.group * extent.multiple for extent in extents]]
        )  # PyTorch 2.13 traces no default=

    def describe(
        self, shape: tuple[int, ...], rowwise: bool, columnwise: bool
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype name of every buffer of a tensor, by attribute, in the order of flattening.

        Args:
            shape: of the tensor, rank at least ``minimum_rank``; symbolic sizes allowed.
            rowwise, columnwise: its directions.
        """
        return {
            buffer.attribute: (buffer.sizes(shape), buffer.dtype)
            for buffer in self.buffers
            if buffer.of_usage(rowwise, columnwise)
        }


def _joined(buffers: list[Buffer]) -> str:
    letters = ""
    for buffer in buffers:
        of_rows = [dim for dim, extent in enumerate(buffer.shape) if extent.size in ("lead", "M")]
        if not buffer.shape:
            return ""
        letters += "s" if not of_rows else "rc"[of_rows[0]]
    return letters


_LEAD, _M, _K, _ONE = Extent("lead"), Extent("M"), Extent("K"), Extent("1")
_LOGICAL, _TRANSPOSED = (_LEAD, _K), (_K, _LEAD)


def _one_direction_each(
    data: tuple[tuple[Extent, ...], tuple[Extent, ...]],
    scales: tuple[tuple[Extent, ...], tuple[Extent, ...]],
    scale_dtype: str = "uint8",
) -> tuple[Buffer, ...]:
    """Return data and scales of each direction, shapes given row-wise first, for block-scaled formats."""
    sides: tuple[Direction, Direction] = ("rowwise", "columnwise")
    return tuple(
        buffer
        for side, of_data, of_scales in zip(sides, data, scales)
        for buffer in (
            Buffer(f"_{side}_data", f"{side}_data", side, "uint8", of_data),
            Buffer(f"_{side}_scale_inv", f"{side}_scale_inv", side, scale_dtype, of_scales),
        )
    )


def _packed(bits: int, block: int) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
    """Return sub-byte data: packed along the contraction, zero-padded to whole blocks, column-wise transposed."""
    return (_LEAD, Extent("K", 1, block, bits)), (_K, Extent("M", 1, block, bits))


def _tensor_core_scales(outer: Literal["M", "K"], inner: Literal["M", "K"], block: int) -> tuple[Extent, ...]:
    """Return scales in the tiles of block-scaled tensor cores: a row per operand row, a column per block."""
    return Extent(outer, 1, SCALE_TILE_ROWS), Extent(inner, block, SCALE_TILE_COLUMNS)


FLOAT8 = Layout(
    minimum_rank=0,
    buffers=(
        Buffer("_data", "data", "rowwise", "uint8", _LOGICAL),
        Buffer("_transpose", "data_transpose", "columnwise", "uint8", _TRANSPOSED),
        Buffer("_scale_inv", "fp8_scale_inv", "both", "float32", (_ONE,)),
    ),
    decoders=("float8", "float8_transpose"),
    native="tensor",
    grouped="tensor",
)
FLOAT8_ROWS = Layout(
    buffers=_one_direction_each((_LOGICAL, _TRANSPOSED), ((_M,), (_K,)), "float32"),
    minimum_rank=2,
    scale_group=(1, 0),
)
FLOAT8_BLOCK_1D = Layout(
    buffers=_one_direction_each(
        (_LOGICAL, _TRANSPOSED),
        (
            (Extent("K", FLOAT8_BLOCK), Extent("M", 1, FLOAT8_BLOCK_SCALE_ALIGNMENT)),
            (Extent("M", FLOAT8_BLOCK), Extent("K", 1, FLOAT8_BLOCK_SCALE_ALIGNMENT)),
        ),
        "float32",
    ),
    minimum_rank=0,
    scale_group=(1, FLOAT8_BLOCK),
    decoders=("float8_block_rowwise", "float8_block_columnwise"),
    native="1x128",
    grouped="padded",
)
FLOAT8_BLOCK_2D = replace(
    FLOAT8_BLOCK_1D,
    buffers=_one_direction_each(
        (_LOGICAL, _TRANSPOSED),
        (
            (Extent("M", FLOAT8_BLOCK), Extent("K", FLOAT8_BLOCK, FLOAT8_BLOCK_SCALE_ALIGNMENT)),
            (Extent("K", FLOAT8_BLOCK), Extent("M", FLOAT8_BLOCK, FLOAT8_BLOCK_SCALE_ALIGNMENT)),
        ),
        "float32",
    ),
    scale_group=(FLOAT8_BLOCK, FLOAT8_BLOCK),
    native="128x128",
)
MXFP8 = Layout(
    buffers=_one_direction_each(
        # column-wise data keep the logical orientation, so their scales lie the other way round
        (_LOGICAL, _LOGICAL),
        (
            _tensor_core_scales("M", "K", MX_BLOCK),
            (Extent("M", MX_BLOCK, SCALE_TILE_COLUMNS), Extent("K", 1, SCALE_TILE_ROWS)),
        ),
    ),
    minimum_rank=2,
    scale_group=(1, MX_BLOCK),
    decoders=("mxfp8_rowwise", "mxfp8_columnwise"),
    native="1x32",
    grouped="padded",
)
MXFP6 = Layout(
    buffers=_one_direction_each(
        _packed(6, MX_BLOCK),
        (_tensor_core_scales("M", "K", MX_BLOCK), _tensor_core_scales("K", "M", MX_BLOCK)),
    ),
    minimum_rank=2,
    scale_group=(1, MX_BLOCK),
    decoders=("mx_packed_rowwise", "mx_packed_columnwise"),
    grouped="padded",
)
MXFP4 = replace(
    MXFP6,
    buffers=_one_direction_each(
        _packed(4, MX_BLOCK),
        (_tensor_core_scales("M", "K", MX_BLOCK), _tensor_core_scales("K", "M", MX_BLOCK)),
    ),
)
MX_LAYOUTS = {8: MXFP8, 6: MXFP6, 4: MXFP4}
"""By bits of an element."""
NVFP4 = Layout(
    buffers=(
        *_one_direction_each(
            _packed(4, NVFP4_BLOCK),
            (_tensor_core_scales("M", "K", NVFP4_BLOCK), _tensor_core_scales("K", "M", NVFP4_BLOCK)),
        ),
        Buffer("_amax_rowwise", "amax_rowwise", "rowwise", "float32", (_ONE,)),
        Buffer("_amax_columnwise", "amax_columnwise", "columnwise", "float32", (_ONE,)),
    ),
    minimum_rank=2,
    scale_group=(1, NVFP4_BLOCK),
    decoders=("nvfp4_rowwise", "nvfp4_columnwise"),
    native="1x16",
)
NVFP4_ROW_SCALED = replace(
    NVFP4,
    buffers=(
        *NVFP4.buffers[:-2],
        Buffer("_amax_rowwise", "amax_rowwise", "rowwise", "float32", (_M,)),
        Buffer("_amax_columnwise", "amax_columnwise", "columnwise", "float32", (_K,)),
    ),
    native="",  # the GEMM takes one scale of a tensor above those of blocks
)
IDENTITY = Layout(buffers=(Buffer("_hp_data", "hp_data", "both", "", _LOGICAL),), native="plain")
# Three buffers per direction, in the order of that direction's own format; those it lacks hold no elements.
HYBRID = Layout(
    buffers=tuple(
        Buffer(f"_{side}_{index}", f"{side}_{index}", side, "")
        for side in ("rowwise", "columnwise")
        for index in range(3)
    )
)
