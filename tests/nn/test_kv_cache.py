"""A KV cache gives what recomputing everything gives, whatever sequences come and go, contiguous and in pages."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recipes import DEVICE
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import narrowcast as nc
from narrowcast.testing import assert_close

H, HEADS, GROUPS, LONGEST = 32, 4, 2, 12
SCENARIO: list[dict[str, int]] = [
    {"a": 4, "b": 2},  # prompts of different lengths
    {"a": 1, "b": 1},
    {"b": 1, "c": 3},  # a goes, b moves up, c comes
    {"c": 1, "b": 1},  # another order
    {"d": 2, "c": 2, "b": 1, "a": 3},  # as many as there can be; a comes back and begins anew
    {"a": 1, "d": 0, "c": 2, "b": 1},  # nothing new of d
]


class Stack(nn.Module):
    """Two layers with a rotary embedding, called with a KV cache or without."""

    def __init__(self, fmt: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nc.TransformerLayer(
                H, 48, HEADS, num_gqa_groups=GROUPS, layer_number=i + 1, attn_input_format=fmt, device=DEVICE,
                self_attn_mask_type="padding_causal", init_method=wide, params_dtype=dtype, **options,
            )
            for i in range(2)
        )  # fmt: skip
        self.register_buffer("angles", nc.RotaryPositionEmbedding(H // HEADS, rotary_base=50.0).to(DEVICE)(LONGEST + 4))
        self.eval()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, **options)
        return x


def wide(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, std=0.3)


def tokens_of(sequence: str) -> Tensor:
    """(LONGEST, H), the same for a name in every test."""
    return torch.randn(LONGEST, H, generator=torch.Generator().manual_seed(ord(sequence)))


def whole(model: Stack) -> dict[str, Tensor]:
    """(LONGEST, H) of each sequence, without a cache."""
    found = {}
    for name in "abcd":
        x = in_format([tokens_of(name)], model.layers[0].attn_input_format, LONGEST)
        cu = torch.tensor([0, LONGEST], dtype=torch.int32, device=DEVICE)
        found[name] = model(x, cu_seqlens_q=cu, cu_seqlens_kv=cu).reshape(LONGEST, H).clone()
    return found


def in_format(rows: list[Tensor], fmt: str, width: int, fill: float = 0.0) -> Tensor:
    """Tokens of the sequences of a batch, padded to ``width`` or packed."""
    if fmt == "thd":
        return torch.cat([*rows, torch.full((2, H), fill)]).to(DEVICE) if fill else torch.cat(rows).to(DEVICE)
    padded = torch.stack([torch.cat((row, torch.full((width - len(row), H), fill))) for row in rows])
    return (padded if fmt == "bshd" else padded.transpose(0, 1)).to(DEVICE)


def of_sequences(out: Tensor, counts: list[int], fmt: str) -> list[Tensor]:
    if fmt == "thd":
        return list(out[: sum(counts)].split(counts))
    rows = out if fmt == "bshd" else out.transpose(0, 1)
    return [row[:count] for row, count in zip(rows, counts)]


def run(
    model: Stack,
    params: nc.InferenceParams,
    steps: list[dict[str, int]],
    forward: Callable[..., Tensor] | None = None,
) -> Iterator[tuple[str, slice, Tensor]]:
    """The outputs of the new tokens: sequence, their places in it, (tokens, H)."""
    fmt, done = model.layers[0].attn_input_format, dict.fromkeys("abcd", 0)
    for step in steps:
        done = {name: done[name] if name in step and name in params.sequences else 0 for name in done}
        params.pre_step(OrderedDict(step))
        rows = [tokens_of(name)[done[name] : done[name] + new] for name, new in step.items()]
        x = in_format(rows, fmt, max(step.values()) + 1, fill=3.0)  # padding is no zero
        out = (model if forward is None else forward)(x, inference_params=params)
        for (name, new), own in zip(step.items(), of_sequences(out, list(step.values()), fmt)):
            yield name, slice(done[name], done[name] + new), own.clone()
            done[name] += new


def cache(fmt: str, paged: bool, **options: Any) -> nc.InferenceParams:
    if paged:  # a page less than all sequences at full length would need
        options |= {"is_paged": True, "page_size": 3, "total_num_pages": 13}
    if fmt == "thd":
        options["max_ctx_len"] = 6
    return nc.InferenceParams(4, LONGEST, qkv_format=fmt, device=DEVICE, **options)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
@torch.inference_mode()
def test_a_cache_equals_recomputation(fmt: str, paged: bool) -> None:
    model = Stack(fmt)
    expected, params = whole(model), cache(fmt, paged)
    for _ in range(2):  # and once more after a reset
        for name, places, own in run(model, params, SCENARIO):
            assert_close(own, expected[name][places], "fp32_layer") if len(own) else None
        params.reset()


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@torch.no_grad()
def test_compiled_decoding_equals_eager_in_one_graph(paged: bool) -> None:
    """Nine steps of one token, sequences moving up among them: one graph, without any part outside."""
    model = Stack("bshd", qk_norm_type="RMSNorm")
    steps = [{"a": 3, "b": 5, "c": 2}, *[{"a": 1, "b": 1, "c": 1}] * 4, {"a": 0, "b": 1, "d": 1}]
    steps += [{"b": 1, "a": 1, "d": 1}]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    theirs = [own for _, _, own in run(model, cache("bshd", paged), steps)]
    params = cache("bshd", paged)
    ours = [own for _, _, own in run(model, params, steps[:1])]
    with torch._dynamo.config.patch(error_on_recompile=False):
        state = iter(run_on(model, params, steps[1:], compiled))
        ours += [own for _, _, own in state]
    assert counter.frame_count == 1
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def run_on(
    model: Stack, params: nc.InferenceParams, steps: list[dict[str, int]], forward: Callable[..., Tensor]
) -> Iterator[tuple[str, slice, Tensor]]:
    """As ``run``, of sequences that are in the cache already."""
    for step in steps:
        before = {name: params.sequences.get(name, 0) for name in step}
        params.pre_step(step)
        rows = [tokens_of(name)[before[name] : before[name] + new] for name, new in step.items()]
        x = in_format(rows, model.layers[0].attn_input_format, 2, fill=3.0)
        out = forward(x, inference_params=params)
        for (name, new), own in zip(step.items(), of_sequences(out, list(step.values()), "bshd")):
            yield name, slice(before[name], before[name] + new), own.clone()
