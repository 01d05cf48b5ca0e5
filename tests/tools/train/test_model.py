"""The decoder: shapes, causality, and that all its products run through narrowcast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast_tools.train.config import ModelConfig
from narrowcast_tools.train.model import Decoder, next_token_loss, rope_tables, rotate

SHAPE = ModelConfig(dim=48, layers=2, heads=4, kv_heads=2, hidden=80)


def decoder(shape: ModelConfig = SHAPE, seq_len: int = 12) -> Decoder:
    torch.manual_seed(0)
    return Decoder(shape, seq_len)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 7), (3, 12)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shapes(batch: int, length: int, kv_heads: int) -> None:
    model = decoder(replace(SHAPE, kv_heads=kv_heads))
    assert model(torch.zeros(batch, length, dtype=torch.int64)).shape == (batch, length, 256)


def test_a_position_sees_itself_and_the_past_only() -> None:
    model = decoder()
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).any(dim=-1).all()


def test_order_matters() -> None:
    model = decoder()
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1])


def test_rotation_keeps_length_and_depends_on_distance() -> None:
    cos, sin = rope_tables(16, 8)
    q, k = torch.randn(8), torch.randn(8)
    rows_q = rotate(q.expand(1, 1, 16, 8), cos, sin)[0, 0]
    rows_k = rotate(k.expand(1, 1, 16, 8), cos, sin)[0, 0]
    torch.testing.assert_close(rows_q.norm(dim=-1), q.norm().expand(16))
    scores = rows_q @ rows_k.T
    for distance in (0, 3, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_blocks_run_in_one_pass_what_they_name_apart() -> None:
    """Names of parameters are those of separate layers, also where a recipe joins these."""
    model = Decoder(SHAPE, 12, dtype=torch.bfloat16)
    block = {name.removeprefix("blocks.1.") for name, _ in model.named_parameters() if "blocks.1." in name}
    layers = "attention.qkv", "attention.proj", "feed_forward.gate_up", "feed_forward.down"
    assert block == {f"{name}.weight" for name in ("attention_norm", "feed_forward_norm", *layers)}
    nc.set_recipe(model, {"blocks": "current"})
    tokens = torch.randint(256, (2, 11))
    joined = next_token_loss(model, tokens, tokens)
    for layer in model.blocks.modules():
        layer.register_forward_hook(lambda *_: None)  # which calls layers one by one
    apart = next_token_loss(model, tokens, tokens)
    assert abs(joined - apart) < 2e-3 * apart
    assert (_programs(joined), _programs(apart)) == (4, 0)


def _programs(loss: torch.Tensor) -> int:
    """Return how many layers of a graph compute more than one thing."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return sum(node.name().startswith("ProgramFunction") for node in seen)


def test_grouped_heads_equal_repeated_heads() -> None:
    """Two query heads per key-value head give what full attention gives with each key-value head repeated."""
    grouped, full = decoder(), decoder(replace(SHAPE, kv_heads=SHAPE.heads))
    state = grouped.state_dict()
    head_dim = SHAPE.dim // SHAPE.heads
    for i in range(SHAPE.layers):
        name = f"blocks.{i}.attention.qkv.weight"
        q, k, v = state[name].split([SHAPE.dim, 2 * head_dim, 2 * head_dim])
        repeated = [t.unflatten(0, (2, head_dim)).repeat_interleave(2, dim=0).flatten(0, 1) for t in (k, v)]
        state[name] = torch.cat([q, *repeated])
    full.load_state_dict(state)
    tokens = torch.randint(256, (2, 12))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_every_linear_layer_is_narrowcasts() -> None:
    model = decoder()
    linears = {name for name, module in model.named_modules() if isinstance(module, nc.Linear)}
    parts = ("attention.qkv", "attention.proj", "feed_forward.gate_up", "feed_forward.down")
    assert linears == {"head", *(f"blocks.{i}.{part}" for i in range(2) for part in parts)}
    matrices = {name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim == 2}
    assert matrices == linears | {"embedding"}
    plain = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    assert not plain


def test_tied_embeddings_share_one_tensor() -> None:
    tied = decoder(replace(SHAPE, tie_embeddings=True))
    assert tied.head.weight is tied.embedding.weight
    untied = sum(p.numel() for p in decoder().parameters())
    assert sum(p.numel() for p in tied.parameters()) == untied - 256 * SHAPE.dim


def test_a_new_model_knows_nothing() -> None:
    tokens = torch.randint(256, (2, 12))
    loss = next_token_loss(decoder(), tokens, tokens.roll(-1, 1))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(5.545, abs=0.15)  # log 256


def test_all_parameters_get_gradients() -> None:
    model = decoder()
    tokens = torch.randint(256, (2, 12))
    next_token_loss(model, tokens, tokens.roll(-1, 1)).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without
