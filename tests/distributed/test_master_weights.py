"""Shards of master weights written into quantized weights: together, the bytes of quantizing the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quantizers.catalog import E4M3, assert_same_buffers
from reference.checks import normal
from torch import Tensor

import narrowcast as nc
from narrowcast.distributed import (
    cast_master_weights_to_fp8,
    master_weights,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from narrowcast.tensors import local

from .ranks_checks import alone_among

SHAPE = (160, 96)
CUTS = (0, 100, 5002, SHAPE[0] * SHAPE[1])  # within rows and blocks
QUANTIZERS: dict[str, Callable[[], Any]] = {
    "current": lambda: nc.Float8CurrentScalingQuantizer(E4M3),
    "powers of two": lambda: nc.Float8CurrentScalingQuantizer(
        E4M3, force_pow_2_scales=True, amax_epsilon=0.1
    ),
    "delayed": lambda: nc.Float8Quantizer(
        torch.full((1,), 3.0, dtype=torch.float32), torch.zeros(1, dtype=torch.float32), E4M3
    ),
    "tiles": lambda: nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda: nc.MXFP8Quantizer(E4M3),
    "mxfp8 tiles": lambda: nc.MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4": lambda: nc.NVFP4Quantizer(with_2d_quantization=True),
}


def weight_of(name: str, columnwise: bool = True) -> Any:
    quantizer = QUANTIZERS[name]().with_usage(columnwise=columnwise)
    return torch.nn.Parameter(quantizer.quantize(3 * normal(SHAPE, torch.bfloat16, seed=1)))


def gather(weights: list[Any], per_byte: int) -> None:
    """Every rank's own codes into all: what the all-gather does."""
    for name in {*weights[0]._ROWWISE_BUFFERS[:1], *weights[0]._COLUMNWISE_BUFFERS[:1]}:
        if any(getattr(weight, name) is None for weight in weights):
            continue
        parts = [
            getattr(weight, name).view(-1)[begin // per_byte : end // per_byte].clone()
            for weight, begin, end in zip(weights, CUTS, CUTS[1:])
        ]
        for weight in weights:
            getattr(weight, name).view(-1).copy_(torch.cat(parts))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_shards_make_up_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    master = normal(SHAPE, torch.float32)
    expected = QUANTIZERS[name]().quantize(master.bfloat16())
    ranks = list(zip(CUTS, CUTS[1:]))
    found: list[list[Tensor]] = []
    monkeypatch.setattr(master_weights, "_reduce", lambda own, group: found.append(list(own)) or own)
    shards = [master.view(-1)[begin:end] for begin, end in ranks]
    for (begin, _), shard in zip(ranks, shards):
        quantize_master_weights([weight_of(name)], [shard], [begin])
    agreed = [torch.stack(same).amax(0) for same in zip(*found)]
    monkeypatch.setattr(master_weights, "_reduce", lambda own, group: list(agreed))
    weights = [weight_of(name) for _ in ranks]
    for weight, (begin, _), shard in zip(weights, ranks, shards):
        quantize_master_weights([weight], [shard], [begin])
    without = weight_of(name)
    quantize_master_weights([without], [None], [None])
    assert torch.equal(without.rowwise_operand()[1], expected.rowwise_operand()[1])  # scales are complete
    gather(weights, 2 if name == "nvfp4" else 1)
    post_all_gather_processing(weights)
    for weight in weights:
        assert_same_buffers(weight.detach(), expected)
        assert weight._get_quantizer().get_usages() == {"rowwise": True, "columnwise": True}
    if name == "delayed":
        weights[0]._quantizer.amax.zero_()
        quantize_master_weights(weights[:1], [None], [None])  # the magnitude that others found
        assert weights[0]._quantizer.amax == master.bfloat16().abs().max()


@pytest.mark.parametrize("tile", [(128, 128), (1, 32), (32, 1), (16, 16)])
@pytest.mark.parametrize("shape", [(7, 5), (160, 96), (33, 70)])
def test_the_first_element_of_others(tile: tuple[int, int], shape: tuple[int, int]) -> None:
    whole = shape[0] * shape[1]
    index = torch.arange(whole).view(shape)
    for shard in (range(0), range(whole), range(3, 4), range(whole // 3 + 1, whole - 2), range(whole - 1)):
        theirs = torch.where((index < shard.start) | (index >= shard.stop), index, whole)
        expected = [[int(part.min()) for part in rows.split(tile[1], 1)] for rows in theirs.split(tile[0], 0)]
        found = master_weights._first_of_others(shape, shard, tile, torch.device("cpu"))
        assert found.tolist() == expected


def test_the_first_element_of_others_in_large_weights() -> None:
    """Indices that fp32 does not hold, as in every weight of more than 2**24 elements."""
    shape, begin, end = (1 << 12, (1 << 14) + 1), (1 << 25) + 3, (1 << 25) + 9
    found = master_weights._first_of_others(shape, range(begin, end), (128, 128), torch.device("cpu"))
    rows, columns = torch.arange(0, shape[0], 128), torch.arange(0, shape[1], 128)
    expected = rows.unsqueeze(1) * shape[1] + columns
    row, column = begin // shape[1], begin % shape[1]
    assert found.shape == (32, 129) and torch.equal(found, expected) and (row % 128 or column % 128)
    found = master_weights._first_of_others(shape, range(end), (128, 128), torch.device("cpu"))
    assert found[row // 128, column // 128] == end and found[-1, -1] == expected[-1, -1]


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_codes_elsewhere(name: str) -> None:
    """Of sharded weights: the codes go where they are wanted."""
    master, whole = normal(SHAPE, torch.float32), SHAPE[0] * SHAPE[1]
    weight, expected = weight_of(name), QUANTIZERS[name]().quantize(master.bfloat16())
    before = weight.rowwise_operand()[0].clone()
    into = [torch.zeros(whole, dtype=torch.uint8) for _ in range(2)]
    given: Any = into if name == "mxfp8" else into[0]
    quantize_master_weights([weight], [master], [0], None, [given])
    assert torch.equal(into[0], expected.rowwise_operand()[0].view(-1))
    assert torch.equal(weight.rowwise_operand()[0], before)
    if name == "mxfp8":
        assert torch.equal(into[1], expected.columnwise_operand()[0].view(-1))


def test_with_a_group() -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weights = [weight_of("current"), weight_of("tiles", columnwise=False)]
        master = normal(SHAPE, torch.float32)
        weights[0]._high_precision_init_val = master
        cast_master_weights_to_fp8(weights, [master, master.view(-1)], [0, 0], dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert_same_buffers(weights[0].detach(), QUANTIZERS["current"]().quantize(master.bfloat16()))
    assert weights[0].get_high_precision_init_val() is None
    assert not weights[1].get_usages()["columnwise"]


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_fsdp2_shards(rank: int) -> None:
    """Each rank has its own rows, counted behind those of the ranks before it."""
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    from torch.distributed.tensor import DTensor, Shard

    master = normal(SHAPE, torch.float32)
    given: Any = QUANTIZERS["mxfp8"]().quantize(3 * normal(SHAPE, torch.bfloat16, seed=1))
    with alone_among(2, rank) as mesh:
        weight = DTensor.from_local(given, mesh, [Shard(0)], run_check=False)
        own = local(weight)
        own._high_precision_init_val = master
        first = rank * own.numel()
        for start in (first + 1, own.numel() - first):
            with pytest.raises(ValueError, match=f"give its {own.numel()} elements and {first}, and no"):
                quantize_master_weights([weight], [master], [start])
        quantize_master_weights([weight], [master], [first])
    assert_same_buffers(own, QUANTIZERS["mxfp8"]().quantize(master.bfloat16()))
    assert own.get_high_precision_init_val() is None


def test_a_part_of_square_tiles_writes_both_directions() -> None:
    """The column-wise codes of this rank's elements are there before any gather."""
    master, weight = normal(SHAPE, torch.float32), weight_of("mxfp8 tiles")
    quantize_master_weights([weight], [master[:96]], [0])
    expected = QUANTIZERS["mxfp8 tiles"]().quantize(master.bfloat16())
    for name in (*weight._ROWWISE_BUFFERS[:1], *weight._COLUMNWISE_BUFFERS[:1]):
        assert torch.equal(getattr(weight, name)[:96], getattr(expected, name)[:96])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_replaced_raw_data(name: str) -> None:
    weight = weight_of(name)
    values, codes = weight.dequantize(), weight.rowwise_operand()[0]
    arena = torch.zeros(codes.numel() + 7, dtype=torch.uint8)
    replace_raw_data(weight, arena[7:])
    assert torch.equal(weight.dequantize(), values)
    assert weight.rowwise_operand()[0].data_ptr() == arena[7:].data_ptr()
    with pytest.raises(ValueError, match="new_raw_data is torch.uint8 .*elements on cpu"):
        replace_raw_data(weight, arena[8:])
    with pytest.raises(TypeError, match="new_raw_data is None, of type NoneType; give a tensor"):
        replace_raw_data(weight, None)  # type: ignore[arg-type]


def test_refusals() -> None:
    weight, master = weight_of("current"), normal(SHAPE, torch.float32)
    with pytest.raises(TypeError, match="quantize_master_weights got a Tensor"):
        quantize_master_weights([master], [master], [0])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="got 1 model_weights, 2 master_weights"):
        quantize_master_weights([weight], [master, None], [0])
    with pytest.raises(ValueError, match="start_offset=8 does not lie in a weight of 15360"):
        quantize_master_weights([weight], [master], [8])
    with pytest.raises(ValueError, match="give both or neither"):
        quantize_master_weights([weight], [master], [None])
    for options in ({"with_rht": True, "with_2d_quantization": True}, {"nvfp4_use_4over6": True}, {}):
        other: Any = nc.NVFP4Quantizer(**options).quantize(master.bfloat16())
        with pytest.raises(ValueError, match="cannot write shards of an NVFP4Tensor"):
            quantize_master_weights([other], [master], [0])
    with pytest.raises(ValueError, match="begins or ends within a byte"):
        quantize_master_weights([weight_of("nvfp4")], [master.view(-1)[:32]], [3])
    blocks: Any = nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=1)
    with pytest.raises(RuntimeError, match="cannot make column-wise data"):
        post_all_gather_processing(blocks.quantize(master))
    post_all_gather_processing(master)  # type: ignore[arg-type]
