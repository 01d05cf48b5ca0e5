"""``ShardedWeight`` and ``WeightGather``: what a rank gives, and the whole weight around what arrives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from recipes import QUANTIZED

from narrowcast.distributed.sharded_weight import ShardedWeight, WeightGather
from narrowcast.layers.parameters import weight_quantizer
from narrowcast.quantizers import DelayedFloat8Quantizer, Quantizer

FP32 = torch.float32


def gather_of(recipe: str) -> WeightGather:
    """As ``shard`` makes it."""
    described: Any = weight_quantizer(QUANTIZED[recipe], "", "linear")
    rowwise: Quantizer = described.with_usage(rowwise=True, columnwise=False)
    if recipe == "mxfp8":
        both = described.with_usage(rowwise=True, columnwise=True)
        return WeightGather(rowwise, both, False, described.with_usage(rowwise=False, columnwise=True))
    if recipe == "current":
        return WeightGather(DelayedFloat8Quantizer(described.dtype, 0, columnwise=False), rowwise, True)
    return WeightGather(rowwise, rowwise, False)


def test_a_gather_begins_with_rows_and_keeps_nothing() -> None:
    gather = gather_of("block")
    assert gather.columns_arrived is gather.keeps is gather.written is False


def test_bytes_of_a_gather() -> None:
    """Codes and the scales of blocks, each in its own width, of every member; no scale of the whole tensor."""
    for recipe, scaled in (("block", False), ("mxfp8", False), ("current", True)):
        gather = gather_of(recipe)
        if scaled:
            gather.scale, gather.kept = torch.ones(1), torch.ones(1)
        buffers = gather.encode(torch.randn(256, 384), FP32, False)
        moved = sum(buffer.nbytes for buffer in buffers[: len(buffers) - scaled])
        assert gather.bytes((256, 384)) == moved
        gather.members = 3
        assert gather.bytes((3, 256, 384)) == 3 * moved


def test_what_compilers_ask_of_it() -> None:
    gather = gather_of("block")
    weight = ShardedWeight(torch.arange(4.0).view(2, 2), gather)
    assert "ShardedWeight(tensor([[0., 1." in repr(weight) and "gathered with Float8Block" in repr(weight)
    names, context = weight.__tensor_flatten__()
    again = ShardedWeight.__tensor_unflatten__(
        {name: getattr(weight, name) for name in names}, context, weight.shape, weight.stride()
    )
    assert isinstance(again, ShardedWeight) and again._gather is gather and again._shard is weight._shard
    assert ShardedWeight.__metadata_guard__(gather, copy.deepcopy(gather)) is True
    assert ShardedWeight.__metadata_guard__(gather, gather_of("mxfp8")) is False


def test_columns_of_what_arrives_again() -> None:
    """Where the layer's backward makes none, they are made of the codes, each time in the memory of the first."""
    gather = gather_of("current")
    gather.makes_columns = True
    first, second = torch.randn(32, 48), torch.randn(32, 48)
    weight = ShardedWeight(first, gather)

    def arrives(values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        gather.scale, gather.kept = torch.tensor([scale]), torch.tensor([1 / scale])
        codes, kept = gather.encode(values, FP32, False)
        return codes, kept

    codes, kept = arrives(first, 2.0)
    out, inner = weight.fsdp_post_all_gather((codes,), (False, [kept]), FP32)
    columns = inner[0]
    new, kept = arrives(second, 4.0)
    codes.copy_(new)  # FSDP2 has gathered into the memory of the first time
    assert weight.fsdp_post_all_gather((codes,), (False, [kept]), FP32, out=out) is None
    assert out.columnwise_operand()[0].data_ptr() == columns.data_ptr()
    assert torch.equal(columns, new.t())
    decoded = new.view(torch.float8_e4m3fn).float() / 4
    assert torch.equal(out.dequantize(), decoded)
    assert torch.equal(out.columnwise_operand()[1], kept)


def test_only_the_direction_that_arrived_has_memory() -> None:
    """Reading rows after a backward's gather, or columns after a forward's, must fail."""
    gather = gather_of("mxfp8")
    values = torch.randn(64, 96)
    weight = ShardedWeight(values, gather)
    rows = gather.encode(values, FP32, False)
    out, _ = weight.fsdp_post_all_gather(tuple(rows), (False, []), FP32)
    held = [buffer for buffer in out.get_data_tensors() if buffer is not None]
    assert [buffer.untyped_storage().size() > 0 for buffer in held] == [True, True, False, False]
    assert gather.columns_arrived is False

    columns = gather.encode(values, FP32, True)
    for buffer in held[2:]:  # FSDP2 allocates what its gather fills
        buffer.untyped_storage().resize_(buffer.nbytes)
    weight.fsdp_post_all_gather(tuple(columns), (True, []), FP32, out=out)
    assert [buffer.untyped_storage().size() > 0 for buffer in held] == [False, False, True, True]
    assert all(map(torch.equal, held[2:], columns)) and gather.columns_arrived is True

    held[0].untyped_storage().resize_(held[0].nbytes)
    held[1].untyped_storage().resize_(held[1].nbytes)
    weight.fsdp_post_all_gather(tuple(rows), (False, []), FP32, out=out)
    assert [buffer.untyped_storage().size() > 0 for buffer in held] == [True, True, False, False]


@pytest.mark.parametrize("written", [False, True])
def test_a_weight_without_a_scale_of_its_values_is_not_given(written: bool) -> None:
    gather = gather_of("current")
    gather.scale, gather.written = (torch.ones(1) if written else None), written
    with pytest.raises(RuntimeError, match="has no scale yet: call the model"):
        gather.encode(torch.ones(4, 4), FP32, False)
