"""The operators of the library. Nothing outside this room registers one."""

from .activation import (
    act,
    act_backward,
    act_backward_quantize,
    act_quantize,
)
from .adam import adam_, adam_quantize_
from .batch_invariant import (
    attention_batch_invariant,
    attention_is_one_operator,
    gemm_batch_invariant,
    matmul_batch_invariant,
    mix_batch_invariant,
    softmax_batch_invariant,
)
from .counting import GemmCall, element_of, gemm_call, half_of
from .cross_entropy import (
    columns_at_once,
    cross_entropy_gradient,
    cross_entropy_gradient_quantize,
    cross_entropy_statistics,
    joined_statistics,
    linear_cross_entropy_gradients,
    linear_cross_entropy_statistics,
)
from .decode_attention import decode_attention
from .delayed_scaling import (
    calibrate_,
    renew_delayed_scaling,
)
from .few_rows import gemm_few_rows
from .gemm import gemm, gemm_accumulate_
from .grouped_activation import grouped_act_backward_quantize, grouped_act_quantize
from .grouped_gemm import (
    grouped_dequantize,
    grouped_gemm,
    grouped_gemm_batch_invariant,
    grouped_mm,
    grouped_mm_batch_invariant,
)
from .grouped_padding import pad_rows, unpad_rows
from .grouped_quantize import (
    are_adjacent,
    empty_weights,
    grouped_column_sum,
    grouped_quantize,
    grouped_quantize_coded,
    grouped_quantize_keeping_amax,
    grouped_quantize_weights,
    join_weights,
    operand_of,
    splits_on_device,
)
from .int8_rows import decode_int8_rows, encode_int8_rows
from .kept_weights import WeightsNote, are_unchanged, note_weights, note_written, use_kept
from .low_rank_products import add_product, gemm_with_product, multiplies_with_product, thin_products
from .main_grad import NOT_RECOMPUTED, begin_main_grad_, running_backward
from .moe import moe_collect, moe_collect_backward, moe_collect_coded, moe_positions, moe_spread
from .moe_places import moe_arrivals, moe_departures
from .norm import (
    norm,
    norm_backward,
    norm_backward_quantize,
    norm_quantize,
)
from .observe import OBSERVED, observe, observe_groups
from .product import product
from .quantize import (
    amax_to_share,
    dequantize,
    draw_seed,
    quantize,
    quantize_dbias,
    quantize_keeping_amax,
    quantize_operand,
    quantize_rounded,
)
from .quantizer_value import BufferTable, GemmOperand, NativeOperand, Prologue, QuantizerValue
from .replay import Metadata, replay_of
from .rope import rotate, rotate_qkv, rotate_qkv_backward
from .routes import taking_apart
from .scaled_activation import scaled_act, scaled_act_backward
from .swizzle import swizzle_scales, unswizzle_scales
from .transpose import transpose_codes
