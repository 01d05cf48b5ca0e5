"""The decoders of every format under the names that ``kernels.dequantize`` gives them."""

from .float8 import dequantize as float8
from .float8 import dequantize_transpose as float8_transpose
from .float8_block import dequantize_columnwise as float8_block_columnwise
from .float8_block import dequantize_rowwise as float8_block_rowwise
from .float8_rows import dequantize as float8_rows
from .mx import dequantize_columnwise as mxfp8_columnwise
from .mx import dequantize_packed_columnwise as mx_packed_columnwise
from .mx import dequantize_packed_rowwise as mx_packed_rowwise
from .mx import dequantize_rowwise as mxfp8_rowwise
from .nvfp4 import decode_block_scaled as nvfp4_block_scaled
from .nvfp4 import dequantize_columnwise as nvfp4_columnwise
from .nvfp4 import dequantize_rowwise as nvfp4_rowwise

__all__ = [
    "float8",
    "float8_block_columnwise",
    "float8_block_rowwise",
    "float8_rows",
    "float8_transpose",
    "mx_packed_columnwise",
    "mx_packed_rowwise",
    "mxfp8_columnwise",
    "mxfp8_rowwise",
    "nvfp4_block_scaled",
    "nvfp4_columnwise",
    "nvfp4_rowwise",
]
