"""Shards of a quantized matrix, without processes: rows apart from each other, and gathered again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantizers.catalog import VARIANTS, assert_same_buffers, quantize
from reference.checks import normal

from narrowcast.tensors import sharding

BF16 = torch.bfloat16
SHARDABLE = ["current", "mxfp8", "mxfp8 2d", "block", "mxfp6", "mxfp4"]
SHAPES = [(256, 128), (256, 512), (512, 384), (1024, 32)]
each = pytest.mark.parametrize("name", SHARDABLE)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each
def test_gathered_shards_are_the_tensor(name: str, shape: tuple[int, int], ranks: int) -> None:
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


@each
def test_only_rows_are_split_into_shards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor: Any = quantize(VARIANTS[name], normal((256, 256), BF16))
    monkeypatch.setattr(sharding, "sharding_caller", lambda: "FSDP2")
    shards = torch.split(tensor, 128)
    assert [type(shard) for shard in shards] == [type(tensor)] * 2
    for shard, expected in zip(shards, tensor._shards_of(128)):
        assert_same_buffers(shard, expected)
    with pytest.raises(RuntimeError, match="its 256 rows are not equal shards"):
        torch.split(tensor, 100)
    columns = torch.split(tensor, 100, dim=1)  # whichever they are
    assert [tuple(part.shape) for part in columns] == [(256, 100), (256, 100), (256, 56)]
    values = torch.cat([part.clone() if hasattr(part, "_held") else part.dequantize() for part in columns], 1)
    assert torch.equal(values, tensor.dequantize())
