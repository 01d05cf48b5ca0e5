"""``ShardReceipt``: its table."""

from __future__ import annotations

from narrowcast.distributed.shard_receipt import ShardedParameter, ShardReceipt


def test_the_table() -> None:
    """Names and shapes in columns as wide as the widest; a model of a single byte has its share, too."""
    parameters = (
        ShardedParameter("block.weight", (8, 16), "", 128, 256),
        ShardedParameter("b", (1024, 2048), "why", 1_000_000, 1_000_000),
    )
    assert str(ShardReceipt(parameters, 2)).splitlines() == [
        "block.weight       8x16  quantized",
        "b             1024x2048  why",
        "1.0 MB per gather, 1.00 of 1.0 MB, over 2 ranks",
    ]
    one = ShardedParameter("w", (1,), "why", 1, 1)
    assert "1.00 of" in str(ShardReceipt((one,), 1))
    assert str(ShardReceipt((), 1)) == "0.0 MB per gather, 0.00 of 0.0 MB, over 1 ranks"
