"""Shards of a quantized matrix, without processes: rows apart from each other, and gathered again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantizers.catalog import VARIANTS, assert_same_buffers, quantize
from recipes import E4M3, E5M2
from reference.checks import normal

import narrowcast as nc
from narrowcast.tensors import sharding

BF16 = torch.bfloat16
SHARDABLE = ["current", "mxfp8", "mxfp8 2d", "block", "mxfp6", "mxfp4"]
SHAPES = [(256, 128), (256, 512), (512, 384), (1024, 32)]
each = pytest.mark.parametrize("name", SHARDABLE)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each
def test_gathered_shards_are_the_tensor(name: str, shape: tuple[int, int], ranks: int) -> None:
    assert_gathers(name, shape, ranks)


@pytest.mark.parametrize("shape", [(64, 96), (192, 160)], ids=str)
@pytest.mark.parametrize("name", [name for name in SHARDABLE if name.startswith("mx")])
def test_scales_of_small_shards_are_padded_and_those_of_the_whole_are_not(
    name: str, shape: tuple[int, int]
) -> None:
    assert_gathers(name, shape, 2)


def assert_gathers(name: str, shape: tuple[int, int], ranks: int) -> None:
    tensor: Any = quantize(VARIANTS[name], normal(shape, BF16))
    rows = shape[0] // ranks
    shards = tensor._shards_of(rows)
    values = tensor.dequantize().split(rows)
    assert len(shards) == ranks
    for shard, part in zip(shards, values, strict=True):
        assert torch.equal(shard.dequantize(), part)
    mesh = SimpleNamespace(size=lambda: ranks)
    sent = [shard.fsdp_pre_all_gather(mesh, tensor.shape, None, None, None) for shard in shards]
    gathered = tuple(torch.cat(parts) for parts in zip(*[given for given, _ in sent], strict=True))
    whole, _ = shards[0].fsdp_post_all_gather(gathered, sent[0][1], BF16)
    assert whole.dtype == BF16
    assert_same_buffers(whole, tensor._rows_alone())


def hybrid(row: nc.Quantizer, column: nc.Quantizer) -> nc.HybridQuantizer:
    return nc.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)


HOOKED = {
    **{name: VARIANTS[name] for name in ("current", "mxfp8", "block")},
    "current+current": hybrid(nc.Float8CurrentScalingQuantizer(E4M3), nc.Float8CurrentScalingQuantizer(E5M2)),
    "mxfp8+current": hybrid(nc.MXFP8Quantizer(E4M3), nc.Float8CurrentScalingQuantizer(E4M3)),
    "block+identity": hybrid(
        nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True), nc.IdentityQuantizer()
    ),
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_as_transformer_engine_calls_them(name: str) -> None:
    """By its keywords, without a mesh: the caller gathers; a second gather fills the tensor of the first."""
    tensor: Any = quantize(HOOKED[name], normal((256, 128), BF16))
    keywords = dict(
        mesh=None, orig_size=tensor.shape, contiguous_orig_stride=None, module=None, mp_policy=None
    )

    def gather(out: Any = None) -> Any:
        given, metadata = tensor.fsdp_pre_all_gather(**keywords)
        assert given and isinstance(metadata, tuple)
        assert all(type(part) is torch.Tensor for part in given)
        return tensor.fsdp_post_all_gather(
            tuple(part.clone() for part in given), metadata, tensor.dtype, out=out
        )[0]

    whole = gather()
    assert type(whole) is type(tensor) and whole.shape == tensor.shape and whole.dtype == tensor.dtype
    assert_same_buffers(whole, tensor)
    before = whole.dequantize()
    tensor.quantize_(100 * normal((256, 128), BF16, seed=1))
    assert torch.equal(whole.dequantize(), before)  # until the next gather
    assert gather(out=whole) is whole
    assert_same_buffers(whole, tensor)
    assert torch.equal(whole.dequantize(), tensor.dequantize())


@each
def test_only_rows_are_split_into_shards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor: Any = quantize(VARIANTS[name], normal((256, 256), BF16))
    monkeypatch.setattr(sharding, "sharding_caller", lambda: "FSDP2")
    shards = torch.split(tensor, 128)
    assert [type(shard) for shard in shards] == [type(tensor)] * 2
    for shard, expected in zip(shards, tensor._shards_of(128)):
        assert_same_buffers(shard, expected)
    with pytest.raises(
        RuntimeError, match="its 256 rows are not equal shards.*; convert with weights='plain', or build"
    ):
        torch.split(tensor, 100)
    columns = torch.split(tensor, 100, dim=1)  # whichever they are
    assert [tuple(part.shape) for part in columns] == [(256, 100), (256, 100), (256, 56)]
    values = torch.cat([part.clone() if hasattr(part, "_held") else part.dequantize() for part in columns], 1)
    assert torch.equal(values, tensor.dequantize())


@each
def test_what_is_made_of_a_shard_is_a_shard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor: Any = quantize(VARIANTS[name], normal((256, 256), BF16))
    monkeypatch.setattr(sharding, "current_sharding", lambda: (2, None, ()))
    with monkeypatch.context() as patched:
        patched.setattr(sharding, "sharding_caller", lambda: "FSDP2")
        shard = tensor.new_zeros((128, 256))
        with pytest.raises(RuntimeError, match=r"\[100, 256\] of its \[256, 256\] is no equal share of rows"):
            tensor.new_zeros((100, 256))
    assert type(shard) is type(tensor) and shard._is_shard and not tensor._is_shard
    with torch.no_grad():
        shard.copy_(tensor._shards_of(128)[1])
    assert torch.equal(shard.dequantize(), tensor.dequantize()[128:])
    assert torch.empty_like(shard)._is_shard and not torch.empty_like(tensor)._is_shard
    whole = torch.ops.aten.slice.Tensor(shard, 0, 0, 128)  # as FSDP2 takes padding away
    assert type(whole) is type(tensor) and torch.equal(whole.dequantize(), shard.dequantize())
    flat = shard.view(-1)
    assert type(flat) is type(tensor) and flat.shape == (128 * 256,)
    assert shard._quantized(shard.dequantize())._is_shard
    assert not shard._quantized(tensor.dequantize())._is_shard


@pytest.mark.parametrize("ranks", [1, 2])
@each
def test_a_shard_knows_its_ranks_where_they_must_agree(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor: Any = quantize(VARIANTS[name], normal((256, 256), BF16))
    told: list[str] = []
    modules = (SimpleNamespace(_takes_rows=told.append), SimpleNamespace())
    monkeypatch.setattr(sharding, "current_sharding", lambda: (ranks, "everyone", modules))
    shard = tensor._empty_shard([256 // ranks, 256])
    assert shard._shards == ("everyone" if name == "current" and ranks == 2 else None)
    turns = name in ("current", "mxfp8 2d", "block")
    assert told == [tensor._BARE_NAME] * turns
    assert shard._quantizer.columnwise_usage is not turns  # which follows from the rows
