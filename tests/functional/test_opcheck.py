"""The contracts of every operator: opcheck, outputs that alias nothing, fakes that tell the truth.

An operator without a function in ``FAMILIES`` fails here. To add one, write a generator that takes a sample input and
yields argument tuples, and decorate it with the operator's name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from quantizers.catalog import E4M3, ONE_OF_EACH, USAGES, VARIANTS
from reference.checks import awkward_layouts
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

import narrowcast as nc
from narrowcast import functional
from narrowcast.functional.wgrad_store import WeightGradStore
from narrowcast.moe.rows import kept, row_map_of_mask
from narrowcast.quantizers import DelayedFloat8Quantizer, Float8CurrentScalingQuantizer
from narrowcast.tensors import grouped_layout
from narrowcast.testing import aliased

Arguments = tuple[Any, ...]
Family = Callable[[Tensor], Iterator[Arguments]]

SHAPES = [(33, 50), (2, 3, 50), (1, 16), (16, 1), (0, 32), (130, 136)]
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor")
AOT_UTILITIES = ("test_aot_dispatch_static", "test_aot_dispatch_dynamic")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FAMILIES: dict[str, Family] = {}


def family(*names: str) -> Callable[[Family], Family]:
    """The decorated function yields arguments for the operators of these names."""

    def register(cases: Family) -> Family:
        FAMILIES.update(dict.fromkeys(names, cases))
        return cases

    return register


def seed_for(quantizer: nc.Quantizer, x: Tensor) -> Tensor | None:
    return torch.tensor([7], device=x.device) if quantizer._is_stochastic() else None


@family("quantize", "quantize_operand")
def quantize_cases(x: Tensor) -> Iterator[Arguments]:
    for quantizer in VARIANTS.values():
        for usage in USAGES.values():
            yield x, quantizer.with_usage(*usage), seed_for(quantizer, x)
    for tail in delayed_tail(x):
        yield x, *tail


@family("quantize_keeping_amax")
def quantize_keeping_amax_cases(x: Tensor) -> Iterator[Arguments]:
    for usage in USAGES.values():
        yield x, VARIANTS["current"].with_usage(*usage)


@family("quantize_rounded")
def quantize_rounded_cases(x: Tensor) -> Iterator[Arguments]:
    for quantizer in VARIANTS.values():
        yield x, torch.bfloat16, quantizer, seed_for(quantizer, x)
    for tail in delayed_tail(x):
        yield x, torch.float16, *tail


@family("quantize_dbias")
def quantize_dbias_cases(x: Tensor) -> Iterator[Arguments]:
    for quantizer in VARIANTS.values():
        yield x, quantizer, seed_for(quantizer, x)
    for tail in delayed_tail(x):
        yield x, *tail


def delayed_tail(x: Tensor, groups: int = 1) -> Iterator[Arguments]:
    """A delayed quantizer, no seed, and the state of three kinds of tensors.

    The write to amax is not declared, which opcheck would report: here it changes nothing, the amax being high already.
    """
    for rowwise, columnwise in USAGES.values():
        quantizer = DelayedFloat8Quantizer(E4M3, 1, rowwise=rowwise, columnwise=columnwise)
        scale, amax = torch.ones(3 * groups, device=x.device), torch.full((3 * groups,), 1e4, device=x.device)
        yield quantizer, None, scale, amax
    yield quantizer, None, scale, None


@family("dequantize")
def dequantize_cases(x: Tensor) -> Iterator[Arguments]:
    for quantizer in VARIANTS.values():
        storage = storage_of(quantizer, x)
        yield storage.rowwise_operand(), quantizer, False, torch.float32, list(x.shape)
        yield storage.columnwise_operand(), quantizer, True, torch.bfloat16, list(x.shape)


@family("transpose_codes")
def transpose_codes_cases(x: Tensor) -> Iterator[Arguments]:
    codes = x.view(torch.int16).to(torch.uint8)
    yield (codes,)
    yield codes, x


@family("swizzle_scales", "unswizzle_scales")
def swizzle_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, columns in ((128, 4), (256, 12)):
        yield (torch.randint(0, 256, (rows, columns), device=x.device).to(torch.uint8),)


@family("add_product")
def add_product_cases(x: Tensor) -> Iterator[Arguments]:
    matrix = x.flatten(0, -2)
    for base in (matrix, matrix.float()):
        yield [base], x.new_ones(matrix.shape[0], 4), x.new_ones(4, matrix.shape[1]).t()
        yield [base, base + 1], x.new_ones(matrix.shape[0], 2), x.new_ones(matrix.shape[1], 2)


@family("encode_int8_rows")
def encode_int8_rows_cases(x: Tensor) -> Iterator[Arguments]:
    yield (x,)


@family("decode_int8_rows")
def decode_int8_rows_cases(x: Tensor) -> Iterator[Arguments]:
    codes, scales = functional.encode_int8_rows(x)
    yield codes, scales, x.dtype


@family("thin_products")
def thin_products_cases(x: Tensor) -> Iterator[Arguments]:
    wide = x.flatten(0, -2)
    right, left = x.new_ones(4, wide.shape[1]).t(), x.new_ones(wide.shape[0], 4)
    yield wide, right, left


@family("pad_rows")
def pad_rows_cases(x: Tensor) -> Iterator[Arguments]:
    for matrix, splits in group_rows(x):
        yield matrix, splits, 16, matrix.shape[0] + 16 * splits.numel()


@family("unpad_rows")
def unpad_rows_cases(x: Tensor) -> Iterator[Arguments]:
    for matrix, splits in group_rows(x):
        rows = matrix.shape[0] + 16 * splits.numel()
        yield matrix.new_zeros(rows, matrix.shape[1]), splits, 16, matrix.shape[0]


def row_map_of(tokens: int, device: torch.device) -> Tensor:
    """Tokens go to one, two or none of three experts."""
    mask = torch.arange(tokens * 3).view(tokens, 3) % 4 < 2
    mask[1::5] = False
    return row_map_of_mask(mask).to(device)


@family("moe_positions")
def moe_positions_cases(x: Tensor) -> Iterator[Arguments]:
    rows = x.flatten(0, -2).shape[0]
    yield row_map_of(rows, x.device), rows


@family("moe_departures")
def moe_departures_cases(x: Tensor) -> Iterator[Arguments]:
    tokens = x.flatten(0, -2).shape[0]
    chosen = torch.arange(4 * tokens, device=x.device).view(tokens, 4) % 3 < 2
    yield chosen, 2, tokens + 3, 3 * tokens
    yield chosen.int(), 1, 2 * tokens, tokens


@family("moe_arrivals")
def moe_arrivals_cases(x: Tensor) -> Iterator[Arguments]:
    received = torch.tensor([[3, 0, 5], [1, 2, 0]], device=x.device)
    yield received, 9, 24, 18, 4
    yield received, 0, 11, 11, 1


@family("moe_spread")
def moe_spread_cases(x: Tensor) -> Iterator[Arguments]:
    matrix = x.flatten(0, -2)
    row_map = row_map_of(matrix.shape[0], x.device)
    yield matrix, functional.moe_positions(row_map, 2 * matrix.shape[0]), 3


@family("moe_collect")
def moe_collect_cases(x: Tensor) -> Iterator[Arguments]:
    rows = x.flatten(0, -2)
    row_map = kept(row_map_of(rows.shape[0], x.device), rows.shape[0])
    yield rows, row_map, None
    yield rows, row_map, torch.rand(row_map.shape, device=x.device)


@family("moe_collect_backward")
def moe_collect_backward_cases(x: Tensor) -> Iterator[Arguments]:
    rows = x.flatten(0, -2)
    row_map = kept(row_map_of(rows.shape[0], x.device), rows.shape[0])
    weights = torch.rand(row_map.shape, device=x.device)
    positions = functional.moe_positions(row_map, rows.shape[0])
    yield torch.ones_like(rows), rows, positions, weights
    codes, scales = coded_rows_of(rows)
    yield torch.ones_like(rows), codes, positions, weights, scales


def coded_rows_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of E4M3 in blocks of 128, as they travel."""
    blocks = -(-rows.shape[1] // 128)
    return rows.to(torch.float8_e4m3fn).view(torch.uint8), rows.new_full(
        (rows.shape[0], blocks), 0.5, dtype=torch.float32
    )


@family("moe_collect_coded")
def moe_collect_coded_cases(x: Tensor) -> Iterator[Arguments]:
    rows = x.flatten(0, -2)
    row_map = kept(row_map_of(rows.shape[0], x.device), rows.shape[0])
    for weights in (None, torch.rand(row_map.shape, device=x.device)):
        yield *coded_rows_of(rows), False, row_map, weights, torch.bfloat16


def group_rows(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of ``x`` and the sizes of three groups of them, one group empty."""
    matrix = x.flatten(0, -2)
    first = matrix.shape[0] // 3
    yield matrix, torch.tensor([first, 0, matrix.shape[0] - first], device=x.device)


Tail = Callable[[Tensor], Iterator[Arguments]]


def no_tail(x: Tensor) -> Iterator[Arguments]:
    yield ()


def quantizer_tail(x: Tensor) -> Iterator[Arguments]:
    """What a fused operator takes after its own arguments: a quantizer and a seed."""
    for quantizer in (*ONE_OF_EACH.values(), VARIANTS["nvfp4 stochastic"]):
        yield quantizer, seed_for(quantizer, x)
    yield from delayed_tail(x)


def act_inputs(x: Tensor, backward: bool) -> Iterator[Arguments]:
    for activation in ("gelu", "situ_glu") if x.shape[-1] % 2 == 0 else ("gelu",):
        grad = x[..., : x.shape[-1] // 2] if activation == "situ_glu" else x
        yield (grad, x, activation) if backward else (x, activation)


@family("act")
def act_cases(x: Tensor) -> Iterator[Arguments]:
    yield from act_inputs(x, backward=False)


@family("act_backward")
def act_backward_cases(x: Tensor) -> Iterator[Arguments]:
    yield from act_inputs(x, backward=True)


@family("act_quantize")
def act_quantize_cases(x: Tensor) -> Iterator[Arguments]:
    for inputs in act_inputs(x, backward=False):
        for quantizer, *state in quantizer_tail(x):
            yield *inputs, quantizer, [], *state
        yield *inputs, quantizer, [3.0, 2.0] if inputs[-1] == "situ_glu" else [], *state


@family("act_backward_quantize")
def act_backward_quantize_cases(x: Tensor) -> Iterator[Arguments]:
    for index, inputs in enumerate(act_inputs(x, backward=True)):
        for quantizer, *state in quantizer_tail(x):
            yield *inputs, quantizer, [], index == 0, *state
        yield *inputs, ONE_OF_EACH["current"]


@family("scaled_act")
def scaled_act_cases(x: Tensor) -> Iterator[Arguments]:
    for _, *tail in scaled_act_backward_cases(x):
        yield tuple(tail)


@family("scaled_act_backward")
def scaled_act_backward_cases(x: Tensor) -> Iterator[Arguments]:
    scale = torch.rand(x.shape[:-1], device=x.device)
    yield x, x, scale, "srelu"
    if x.shape[-1] % 2 == 0:
        grad = x[..., : x.shape[-1] // 2]
        yield grad, x, scale, "swiglu"
        yield grad, x, scale.bfloat16(), "situ_glu", [3.0, 2.0]


def rotary_tables(x: Tensor, dim: int) -> list[Tensor]:
    angles = torch.rand(max(x.numel(), 1), dim // 2 * 2, device=x.device)
    return [angles.cos(), angles.sin()]


def one_head(x: Tensor) -> Tensor:
    return x.flatten(0, -2)[None, :, None]


@family("rotate")
def rotate_cases(x: Tensor) -> Iterator[Arguments]:
    rows = one_head(x)
    positions = torch.zeros(1, rows.shape[1], dtype=torch.int64, device=x.device)
    if x.shape[-1] > 1:
        yield rows, *rotary_tables(x, x.shape[-1]), None, False, False, False
        yield rows, *rotary_tables(x, x.shape[-1] - 1), positions, False, True, True


@family("rotate_qkv")
def rotate_qkv_cases(x: Tensor) -> Iterator[Arguments]:
    if x.shape[-1] > 1:
        widths = [2 * x.shape[-1], x.shape[-1], x.shape[-1]]
        yield (
            torch.cat([one_head(x)] * 4, -1),
            rotary_tables(x, x.shape[-1]) * 2,
            None,
            False,
            False,
            widths,
            True,
        )


@family("rotate_qkv_backward")
def rotate_qkv_backward_cases(x: Tensor) -> Iterator[Arguments]:
    k = one_head(x)
    if x.shape[-1] > 1:
        yield [torch.cat((k, k), 2), k, k + 1], rotary_tables(x, x.shape[-1]) * 2, None, False, True, False


def norm_family(name: str, tail: Tail) -> None:
    @family(name)
    def cases(x: Tensor) -> Iterator[Arguments]:
        weight = torch.ones(x.shape[-1], device=x.device)
        for end in tail(x):
            yield x, None, weight, None, 1e-5, "RMSNorm", False, *end
            yield x, x.clone(), weight, weight.clone(), 1e-5, "LayerNorm", True, *end


def norm_backward_family(name: str, tail: Tail) -> None:
    @family(name)
    def cases(x: Tensor) -> Iterator[Arguments]:
        weight = torch.ones(x.shape[-1], device=x.device)
        rstd = torch.ones(x.numel() // x.shape[-1], device=x.device)
        for end in tail(x):
            yield x.clone(), x, weight, rstd.new_empty(0), rstd, False, None, *end
            yield x.clone(), x, weight, torch.zeros_like(rstd), rstd, True, x.clone(), *end


for suffix, tail in (("", no_tail), ("_quantize", quantizer_tail)):
    norm_family(f"norm{suffix}", tail)
    norm_backward_family(f"norm_backward{suffix}", tail)


@family("cross_entropy_statistics")
def cross_entropy_statistics_cases(x: Tensor) -> Iterator[Arguments]:
    rows = x.flatten(0, -2)
    yield rows, torch.arange(rows.shape[0], device=x.device) - 1


@family("cross_entropy_gradient")
def cross_entropy_gradient_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, target in cross_entropy_statistics_cases(x):
        yield rows, target, rows.logsumexp(1).float(), target.float(), 0.1, 50


@family("cross_entropy_gradient_quantize")
def cross_entropy_gradient_quantize_cases(x: Tensor) -> Iterator[Arguments]:
    for inputs in cross_entropy_gradient_cases(x):
        for index, (quantizer, *state) in enumerate(quantizer_tail(x)):
            yield *inputs, quantizer, index % 2 == 0, *state


@family("linear_cross_entropy_statistics")
def linear_cross_entropy_statistics_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, target in cross_entropy_statistics_cases(x):
        weight = x.new_ones(24, x.shape[-1])
        yield rows, weight, None, target, 7, True
        yield rows, weight, x.new_ones(24), target, 0, False


@family("linear_cross_entropy_gradients")
def linear_cross_entropy_gradients_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, weight, bias, target, chunk, in_order in linear_cross_entropy_statistics_cases(x):
        tail = (target.float(), target.float(), 0.1, chunk)
        yield rows, weight, bias, target, *tail, [True, True, bias is not None], in_order
        yield rows, weight, bias, target, *tail, [False, True, False], in_order


@family("draw_seed")
def draw_seed_cases(x: Tensor) -> Iterator[Arguments]:
    yield (x,)


@family("calibrate_")
def calibrate_cases(x: Tensor) -> Iterator[Arguments]:
    yield x, None, torch.zeros(2, device=x.device)
    rows = x.flatten(0, -2)
    splits = torch.tensor([1, 0, max(rows.shape[0] - 2, 0)], device=x.device)
    yield rows, splits, torch.full((6,), 9.0, device=x.device)


@family("amax_to_share")
def amax_to_share_cases(x: Tensor) -> Iterator[Arguments]:
    for name in ("current", "nvfp4"):
        yield x, VARIANTS[name], seed_for(VARIANTS[name], x)


@family("observe")
def observe_cases(x: Tensor) -> Iterator[Arguments]:
    current = VARIANTS["current"].with_usage(rowwise=True, columnwise=False)
    for rowwise in (current, DelayedFloat8Quantizer(E4M3, 1, rowwise=True, columnwise=False)):
        scale, into = torch.full((3,), 2.0, device=x.device), torch.zeros(7, device=x.device)
        functional.observe(x, rowwise, scale, into, x)  # the write is not declared: let it change nothing
        yield x, rowwise, scale, into, x.flatten()[:3]


@family("observe_groups")
def observe_groups_cases(x: Tensor) -> Iterator[Arguments]:
    rows = x.numel() // max(x.shape[-1], 1)
    splits = torch.tensor([rows // 2, 0, rows - rows // 2], device=x.device)
    current = VARIANTS["current"].with_usage(rowwise=True, columnwise=False)
    for rowwise in (current, DelayedFloat8Quantizer(E4M3, 1, rowwise=True, columnwise=False)):
        scale, into = torch.full((9,), 2.0, device=x.device), torch.zeros(7, device=x.device)
        functional.observe_groups(x, splits, rowwise, scale, into, x)  # as of observe
        yield x, splits, rowwise, scale, into, x.flatten()[:3]


@family("join_weights")
def join_weights_cases(x: Tensor) -> Iterator[Arguments]:
    rows = x.flatten(0, -2)
    for name in ("current", "mxfp8", "nvfp4"):
        quantizer = VARIANTS[name]
        layout = grouped_layout(quantizer._storage_name)
        for columnwise in (False, True):
            made = [quantizer.quantize(own) for own in (rows, 2 * rows)]
            own = [m.columnwise_operand() if columnwise else m.rowwise_operand() for m in made]
            buffers = [buffer for same in zip(*own) for buffer in same]
            yield buffers, quantizer, layout, columnwise, 2, *rows.shape, x.dtype


@family("grouped_quantize_keeping_amax")
def grouped_quantize_keeping_amax_cases(x: Tensor) -> Iterator[Arguments]:
    rows, quantizer = x.flatten(0, -2), VARIANTS["current"]
    yield [rows, 2 * rows], quantizer
    yield [torch.stack([rows, rows])], quantizer


@family("splits_on_device")
def splits_on_device_cases(x: Tensor) -> Iterator[Arguments]:
    yield x, [3, 0, 20]


@family("renew_delayed_scaling")
def renew_delayed_scaling_cases(x: Tensor) -> Iterator[Arguments]:
    for algorithm in ("max", "most_recent"):
        scales = [torch.ones(n, device=x.device) for n in (3, 1, 3)]
        histories = [torch.rand(5, n, device=x.device) for n in (3, 1, 3)]
        amaxes = [torch.rand(n, device=x.device) for n in (3, 1, 3)]
        yield scales, histories, amaxes, [448.0, 57344.0] * 3, [0] * 3, [algorithm] * 3


@family("adam_")
def adam_cases(x: Tensor) -> Iterator[Arguments]:
    options = [0.9, 0.95], 1e-8, 0.1, True, True, False
    for dtype, beside in ((x.dtype, None), (torch.float32, x.dtype), (torch.bfloat16, torch.int16)):
        kept = [[torch.zeros_like(x, dtype=dtype), x.new_zeros(3, dtype=dtype)] for _ in range(3)]
        others = [[] if beside is None else [torch.zeros_like(w, dtype=beside) for w in kept[0]], []]
        grads = [x, x.new_ones(3)]
        yield kept[0], grads, *kept[1:], *others, None, None, None, None, 1e-3, 2, *options
        stored = [torch.ones((), device=x.device) for _ in range(4)]
        yield kept[0], grads, *kept[1:], *others, *stored, 0.0, 0, *options
        codes = [torch.zeros_like(w, dtype=torch.uint8) for w in kept[0]]
        ranges = [x.new_zeros((1, -(-w.numel() // 128), 2), dtype=torch.float32) for w in kept[0]]
        yield kept[0], grads, codes, kept[2], others[0], ranges, *stored, 0.0, 0, *options
        if beside is None and dtype == torch.bfloat16:
            yield kept[0], grads, *kept[1:], *others, *stored, 0.0, 0, *options[:-1], True


@family("adam_quantize_")
def adam_quantize_cases(x: Tensor) -> Iterator[Arguments]:
    x = x.contiguous()  # as the operator takes its tensors
    options = [0.9, 0.95], 1e-8, 0.1, True, True
    for quantizer in (
        Float8CurrentScalingQuantizer(E4M3),
        nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    ):
        for beside in ([], [torch.zeros_like(x, dtype=torch.bfloat16)]):
            kept = [[torch.zeros_like(x)] for _ in range(3)]
            described = quantizer._describe_buffers(tuple(x.shape), x.dtype).values()
            buffers = [x.new_zeros(shape, dtype=dtype) for shape, dtype in described]
            stored = torch.ones((), device=x.device)
            yield (
                kept[0],
                [x],
                *kept[1:],
                beside,
                buffers,
                quantizer,
                stored,
                stored,
                0.0,
                0,
                *options,
            )


@family("gemm")
def gemm_cases(x: Tensor) -> Iterator[Arguments]:
    bias = torch.randn(24, device=x.device)
    for index, (kind, left, right, sizes) in enumerate(products(x)):
        dtype = (torch.bfloat16, torch.float32, torch.float16)[index % 3]
        for added in (None, bias) if kind == "fprop" else (None,):
            yield kind, *left, *right, added, dtype, *sizes, False, x.is_cuda


@family("gemm_with_product")
def gemm_with_product_cases(x: Tensor) -> Iterator[Arguments]:
    for kind, left, left_quantizer, right, right_quantizer, added, dtype, rows, columns, *how in gemm_cases(
        x
    ):
        if added is None and kind != "wgrad":
            thin = x.new_ones(rows, 2), x.new_ones(2, columns).t()
            yield kind, left, left_quantizer, right, right_quantizer, *thin, dtype, rows, columns, *how


@family("gemm_few_rows")
def gemm_few_rows_cases(x: Tensor) -> Iterator[Arguments]:
    matrix, bias = x.flatten(0, -2), torch.randn(24, device=x.device)
    tiles = nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False)
    scaled = DelayedFloat8Quantizer(E4M3, 1), torch.tensor([1.0, 2.0], device=x.device)
    pairs: list[Any] = [
        (VARIANTS["current"], VARIANTS["current"], None),
        (scaled[0], VARIANTS["current"], scaled[1]),
        (VARIANTS["block 1d"], tiles, None),
    ]
    if not x.is_cuda:
        pairs.append((VARIANTS["mxfp8"], VARIANTS["mxfp8"], None))
    for left, right, scale in pairs:
        weight = storage_of(right, x.new_ones(24, x.shape[-1])).rowwise_operand()
        for added, dtype in ((None, torch.bfloat16), (bias, torch.float32)):
            yield matrix, left.with_usage(True, False), weight, right, added, dtype, 24, scale, False


@family("decode_attention")
def decode_attention_cases(x: Tensor) -> Iterator[Arguments]:
    q, k = (torch.randn(size, device=x.device).bfloat16() for size in ((2, 6, 16), (2, 40, 3, 16)))
    v, sink = torch.randn(2, 40, 3, 24, device=x.device).bfloat16(), torch.randn(6, device=x.device)
    lengths = [torch.tensor(each, dtype=torch.int32, device=x.device) for each in ([0, 1, 2], [0, 7, 47])]
    yield q, k, v, *lengths, None, 0.25, -1
    yield q, k, v, *lengths, sink, 0.25, 8


@family("gemm_batch_invariant")
def gemm_batch_invariant_cases(x: Tensor) -> Iterator[Arguments]:
    for *operands, _, _ in gemm_cases(x):
        if operands[0] == "fprop":
            yield *operands, 8, 1


@family("matmul_batch_invariant")
def matmul_batch_invariant_cases(x: Tensor) -> Iterator[Arguments]:
    yield x, x + 1


@family("attention_batch_invariant")
def attention_batch_invariant_cases(x: Tensor) -> Iterator[Arguments]:
    q, k, v = (
        torch.randn(2, heads, 7, size, device=x.device).bfloat16()
        for heads, size in ((4, 16), (2, 16), (2, 24))
    )
    yield q, k, v, None, 0.25, -1, 0, 0
    yield q, k, v, torch.rand(2, 1, 7, 7, device=x.device) < 0.3, 0.25, -1, -1, 0


@family("attention_batch_invariant_backward")
def attention_batch_invariant_backward_cases(x: Tensor) -> Iterator[Arguments]:
    for q, k, v, *how in attention_batch_invariant_cases(x):
        out, lse, _ = nc.functional.attention_batch_invariant(q, k, v, *how)
        yield out + 1, q, k, v, out, lse, *how


@family("mix_batch_invariant")
def mix_batch_invariant_cases(x: Tensor) -> Iterator[Arguments]:
    yield x.float().abs(), x.mT.contiguous()


@family("softmax_batch_invariant")
def softmax_batch_invariant_cases(x: Tensor) -> Iterator[Arguments]:
    yield (x.float(),)


@family("running_backward")
def running_backward_cases(x: Tensor) -> Iterator[Arguments]:
    yield (torch.full((), -1, dtype=torch.int64),)


@family("begin_main_grad_")
def begin_main_grad_cases(x: Tensor) -> Iterator[Arguments]:
    outer = torch.full((), -1, dtype=torch.int64)
    yield torch.ones(5, 7, device=x.device), torch.ones(5, 7, device=x.device), outer


@family("gemm_accumulate_")
def gemm_accumulate_cases(x: Tensor) -> Iterator[Arguments]:
    for index, (kind, left, right, (rows, columns)) in enumerate(products(x)):
        out = torch.randn(rows, columns + 3, device=x.device)[:, 1:-2]
        yield kind, out.bfloat16() if index % 2 else out, *left, *right, False, x.is_cuda


def storage_of(quantizer: nc.Quantizer, x: Tensor) -> nc.QuantizedTensorStorage:
    return quantizer.replace(internal=True).quantize(x)


def products(x: Tensor) -> Iterator[tuple[str, Any, Any, tuple[int, int]]]:
    """A layer's products in every format: (kind, left, right, sizes); an operand is (buffers, quantizer)."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    for quantizer in (*ONE_OF_EACH.values(), VARIANTS["block fp32 scales"], VARIANTS["nvfp4 row-scaled"]):
        input_, weight, grad = (
            storage_of(quantizer, t)
            for t in (x, x.new_ones(24, columns), x.new_full((*x.shape[:-1], 24), 0.5))
        )
        rowwise = [(t.rowwise_operand(), quantizer) for t in (input_, weight, grad)]
        columnwise = [(t.columnwise_operand(), quantizer) for t in (input_, weight, grad)]
        yield "fprop", rowwise[0], rowwise[1], (rows, 24)
        yield "dgrad", rowwise[2], columnwise[1], (rows, columns)
        yield "wgrad", columnwise[2], columnwise[0], (24, columns)


@family("grouped_quantize")
def grouped_quantize_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, splits in group_rows(x):
        for quantizer in (*ONE_OF_EACH.values(), VARIANTS["nvfp4 stochastic"]):
            yield rows, splits, quantizer, grouped_layout(quantizer._storage_name), seed_for(quantizer, x)
        for quantizer, *state in delayed_tail(x, splits.numel()):
            yield rows, splits, quantizer, "tensor", *state


@family("grouped_act_quantize")
def grouped_act_quantize_cases(x: Tensor) -> Iterator[Arguments]:
    for grad, rows, splits, *tail in grouped_act_backward_quantize_cases(x):
        assert grad.shape[0] == rows.shape[0]
        yield rows, splits, *tail


@family("grouped_act_backward_quantize")
def grouped_act_backward_quantize_cases(x: Tensor) -> Iterator[Arguments]:
    for grad, splits in group_rows(x):
        rows = torch.cat([grad, grad - 1], -1)
        for quantizer in ONE_OF_EACH.values():
            layout = grouped_layout(quantizer._storage_name)
            yield grad, rows, splits, "swiglu", quantizer, layout, [], seed_for(quantizer, x)
        for quantizer, *state in delayed_tail(x, splits.numel()):
            yield grad, rows, splits, "swiglu", quantizer, "tensor", [], *state


@family("grouped_quantize_coded")
def grouped_quantize_coded_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, splits in group_rows(x):
        for quantizer in ONE_OF_EACH.values():
            layout = grouped_layout(quantizer._storage_name)
            yield (
                *coded_rows_of(rows),
                False,
                splits,
                quantizer,
                layout,
                torch.bfloat16,
                seed_for(quantizer, x),
            )


@family("grouped_quantize_weights")
def grouped_quantize_weights_cases(x: Tensor) -> Iterator[Arguments]:
    matrix = x.flatten(0, -2)
    for weights in ([matrix, matrix + 1], [torch.stack([matrix, matrix, matrix])]):
        for quantizer in (*ONE_OF_EACH.values(), VARIANTS["nvfp4 stochastic"]):
            yield weights, quantizer, grouped_layout(quantizer._storage_name), seed_for(quantizer, x)
    for quantizer, *state in delayed_tail(x, 2):
        yield [matrix, matrix + 1], quantizer, "tensor", *state


@family("grouped_column_sum")
def grouped_column_sum_cases(x: Tensor) -> Iterator[Arguments]:
    yield from group_rows(x)


@family("grouped_gemm")
def grouped_gemm_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, splits in group_rows(x):
        weights = x.new_ones(3, 24, rows.shape[1])
        tail = (rows.shape[0], 24, rows.shape[1], False, x.is_cuda)
        for quantizer in ONE_OF_EACH.values():
            layout_ = grouped_layout(quantizer._storage_name)
            made = [
                functional.grouped_quantize(rows, splits, quantizer, layout_),
                functional.grouped_quantize_weights([weights], quantizer, layout_),
                functional.grouped_quantize(rows.new_ones(rows.shape[0], 24), splits, quantizer, layout_),
            ]
            for kind, *sides in (
                ("fprop", (0, False), (1, False)), ("dgrad", (2, False), (1, True)), ("wgrad", (2, True), (0, True)),
            ):  # fmt: skip
                operands = []
                for index, columnwise in sides:
                    operand = functional.operand_of(made[index], layout_, columnwise)
                    operands += [operand, quantizer, layout_, x.dtype]
                biases = [x.new_ones(24) for _ in range(3)] if kind == "fprop" else []
                yield kind, *operands, splits, biases, torch.float32, *tail


@family("grouped_mm")
def grouped_mm_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, splits in group_rows(x):
        weights = [x.new_ones(24, rows.shape[1]) for _ in range(3)]
        yield "fprop", rows, weights, splits, [x.new_ones(24) for _ in range(3)], False, x.dtype
        yield "dgrad", rows.new_ones(rows.shape[0], 24), [torch.stack(weights)], splits, [], False, x.dtype
        yield "wgrad", rows.new_ones(rows.shape[0], 24), [rows], splits, [], True, x.dtype
        yield "wgrad", rows.new_ones(rows.shape[0], 24), [rows], splits, [], False, torch.float32


@family("grouped_gemm_batch_invariant")
def grouped_gemm_batch_invariant_cases(x: Tensor) -> Iterator[Arguments]:
    for *operands, _, _ in grouped_gemm_cases(x):
        if operands[0] == "fprop":
            yield *operands, 8


@family("grouped_mm_batch_invariant")
def grouped_mm_batch_invariant_cases(x: Tensor) -> Iterator[Arguments]:
    for kind, *operands, _, dtype in grouped_mm_cases(x):
        if kind == "fprop":
            yield *operands, dtype, 8


@family("grouped_dequantize")
def grouped_dequantize_cases(x: Tensor) -> Iterator[Arguments]:
    for rows, splits in group_rows(x):
        for quantizer in ONE_OF_EACH.values():
            layout_ = grouped_layout(quantizer._storage_name)
            made = functional.grouped_quantize(rows, splits, quantizer, layout_)
            operand = functional.operand_of(made, layout_, False)
            yield operand, quantizer, layout_, splits, x.dtype, list(rows.shape)


@family("kept_weight")
def kept_weight_cases(x: Tensor) -> Iterator[Arguments]:
    yield [x], x.new_ones(3), True
    yield [x, x + 1], x.new_ones(5, 2).t(), False


STORE = WeightGradStore()


@family("defer_wgrad")
def defer_wgrad_cases(x: Tensor) -> Iterator[Arguments]:
    for quantizer in ONE_OF_EACH.values():
        operand = storage_of(quantizer, x).columnwise_operand()
        for grad_bias, groups in ((None, []), (x.new_ones(3), [torch.tensor([2, 3]), x.new_empty(5, 0)])):
            yield STORE.key, operand, quantizer, operand, quantizer, grad_bias, False, False, True, groups


def operator(name: str) -> Any:
    return getattr(torch.ops.narrowcast, name).default


def test_every_operator_has_cases() -> None:
    for module in pkgutil.iter_modules(functional.__path__, "narrowcast.functional."):
        importlib.import_module(module.name)
    registered = {
        name.removeprefix("narrowcast::").partition(".")[0]  # the overloads with texts are the same operators
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("narrowcast::")
    }
    assert registered == set(FAMILIES), "an operator without cases, or cases without an operator"


def traces(op: Any, arguments: Arguments) -> bool:
    """Whether opcheck can trace the operator with them: opaque quantizers too, with one exception.

    Functionalizing a mutating operator, torch before 2.13 wraps each argument that is callable, as quantizers are, and
    then meets its own wrapper where the schema wants the quantizer.
    """
    wrapped = op._schema.is_mutable and any(callable(argument) for argument in arguments)
    old = TorchVersion(torch.__version__) < "2.13"
    return not (wrapped and old)


def sample(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape).bfloat16().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_opcheck(name: str, device: str) -> None:
    """With the first arguments of every combination of types: the test below tries all."""
    op = operator(name)
    x = awkward_layouts(sample((33, 50), device))["transposed"]
    tried: set[tuple[type, ...]] = set()
    for arguments in FAMILIES[name](x):
        types = tuple(map(type, arguments))
        if types not in tried:
            utilities = UTILITIES + AOT_UTILITIES if traces(op, arguments) else UTILITIES
            torch.library.opcheck(op, arguments, test_utils=utilities)
        tried.add(types)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_fresh_and_as_the_fake_says(name: str, shape: tuple[int, ...], device: str) -> None:
    """As it lies in memory, and with one of the awkward layouts; the shapes have all of them."""
    op = operator(name)
    x = sample(shape, device)
    awkward = [*awkward_layouts(x).values()]
    for view in (x, awkward[SHAPES.index(shape) % len(awkward)]):
        for arguments in FAMILIES[name](view):
            inputs = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
            outputs = pytree.tree_leaves(op(*arguments))
            outputs = [leaf for leaf in outputs if leaf is not None]
            assert not aliased(outputs, inputs), arguments
            with FakeTensorMode() as mode:
                faked = pytree.tree_map_only(Tensor, mode.from_tensor, arguments)
                fakes = [leaf for leaf in pytree.tree_leaves(op(*faked)) if leaf is not None]
            assert [layout(t) for t in outputs] == [layout(t) for t in fakes], arguments


def layout(x: Tensor) -> tuple[Any, ...]:
    """What compiled code relies on; the stride of a dim that is never stepped along is not part of it."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]
    return tuple(x.shape), x.dtype, strides, x.storage_offset(), x.device
