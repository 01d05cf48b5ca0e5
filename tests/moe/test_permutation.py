"""Tokens grouped by expert and back: against loops, forward and gradients, compiled and eager, with quantized rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.checks import assert_bitwise
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.testing import assert_close

TOKENS, EXPERTS, TOPK, WIDTH = 13, 5, 2, 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draw(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts (none goes to expert 3) and what each is worth."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores[:, 3] = -1.0
    indices = scores.topk(TOPK, dim=-1)[1].to(torch.int32)
    return x, indices, torch.rand(TOKENS, EXPERTS, generator=generator)


def mask_of(indices: Tensor) -> Tensor:
    shape = (indices.shape[0], EXPERTS)
    return torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter(1, indices.long(), True)


def copies(indices: Tensor) -> list[tuple[int, int]]:
    """(token, expert) of every row, by expert and then by token."""
    pairs = [(token, int(expert)) for token, row in enumerate(indices) for expert in row]
    return sorted(pairs, key=lambda pair: (pair[1], pair[0]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["mask", "int mask", "index"])
def test_rows_are_grouped_by_expert(kind: str, device: str) -> None:
    x, indices, _ = draw()
    routing = {"mask": mask_of(indices), "int mask": mask_of(indices).int(), "index": indices}[kind]
    map_type = "index" if kind == "index" else "mask"
    out, row_map = nc.moe_permute(
        x.to(device), routing.to(device), -1 if kind == "index" else TOKENS * TOPK, map_type=map_type
    )
    assert_bitwise(out.cpu(), x[[token for token, _ in copies(indices)]])
    assert_bitwise(nc.moe_unpermute(out, row_map, map_type=map_type).cpu(), x + x)


def test_too_few_and_too_many_rows() -> None:
    x, indices, _ = draw()
    mask = mask_of(indices)
    whole, row_map = nc.moe_permute(x, mask, TOKENS * TOPK + 7)
    assert not whole[TOKENS * TOPK :].any()
    few, few_map = nc.moe_permute(x, mask, 4)
    assert_bitwise(few, whole[:4])
    assert int((few_map >= 0).sum()) == 4 and int((row_map >= 0).sum()) == TOKENS * TOPK
    assert few_map.min() == -1
    dropped = indices.clone()
    dropped[2] = -1  # a token that goes nowhere
    rows, index_map = nc.moe_permute(x, dropped, map_type="index")
    assert rows.shape[0] == TOKENS * TOPK and not rows[-TOPK:].any()
    assert not nc.moe_unpermute(rows, index_map, map_type="index")[2].any()


def weighted(x: Tensor, probs: Tensor, indices: Tensor) -> Tensor:
    """What experts that multiply by 1, 2, 3 ... make of the tokens, each weighted."""
    mask = mask_of(indices)
    factors = torch.arange(1, EXPERTS + 1)
    return x * (probs * mask * factors).sum(1, keepdim=True)


def through_experts(rows: Tensor, ends: list[int]) -> Tensor:
    row = torch.arange(rows.shape[0])
    expert = torch.bucketize(row, torch.tensor(ends), right=True)
    return rows * (expert + 1).unsqueeze(1)


@pytest.mark.parametrize("merge", ["before", "after"])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients(merge: str, padded: bool) -> None:
    """Of tokens and probabilities, weighted before the experts (permuted probabilities) or after."""
    x, indices, probs = draw()
    mask, tokens = mask_of(indices), mask_of(indices).sum(0)
    x, probs = x.requires_grad_(True), probs.requires_grad_(True)
    if padded:
        rows, row_probs, row_map, offsets, target = nc.moe_permute_and_pad_with_probs(
            x, probs, mask, tokens, 8
        )
        assert target.tolist() == [-(-n // 8) * 8 for n in tokens.tolist()] and offsets is not None
    else:
        rows, row_probs, row_map = nc.moe_permute_with_probs(x, probs, mask, TOKENS * TOPK)
        offsets, target = None, tokens
    ends = target.cumsum(0).tolist()
    assert rows.shape[0] == ends[-1] == row_probs.shape[0]
    y = through_experts(rows * row_probs.unsqueeze(1) if merge == "before" else rows, ends)
    y = nc.moe_unpermute(y, row_map, probs if merge == "after" else None, pad_offsets=offsets)
    expected = weighted(x, probs, indices)
    grad = torch.randn(y.shape)
    assert_close(y, expected, "fp32_sum_order")
    ours, theirs = (torch.autograd.grad(out, (x, probs), grad) for out in (y, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, "fp32_sum_order")


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant: bool) -> None:
    """Which hands out every saved tensor once."""
    x, indices, probs = draw()
    x, probs, mask = x.requires_grad_(True), probs.requires_grad_(True), mask_of(indices)

    def mixture(x: Tensor, probs: Tensor) -> Tensor:
        rows, row_map = nc.moe_permute(x, mask, TOKENS * TOPK)
        return nc.moe_unpermute(through_experts(rows, mask.sum(0).cumsum(0).tolist()), row_map, probs)

    for run in (mixture, lambda *given: checkpoint(mixture, *given, use_reentrant=reentrant)):
        y = run(x, probs)
        y.square().sum().backward()
        found = y, x.grad, probs.grad
        x.grad = probs.grad = None
        if run is mixture:
            expected = found
    assert all(map(torch.equal, found, expected))


def test_padding_is_zero_and_none_where_nothing_is_missing() -> None:
    x, indices, probs = draw()
    mask, tokens = mask_of(indices), mask_of(indices).sum(0)
    rows, row_probs, _, offsets, target = nc.moe_permute_and_pad_with_probs(x, probs, mask, tokens, 16)
    start = 0
    for count, size in zip(tokens.tolist(), target.tolist(), strict=True):
        assert rows[start : start + count].any(1).all() and not rows[start + count : start + size].any()
        assert not row_probs[start + count : start + size].any()
        start += size
    assert offsets is not None and offsets.dtype == torch.int32
    plain = nc.moe_permute_and_pad_with_probs(x, probs, mask, tokens, 1)
    assert plain[3] is None
    options = {"tokens_per_expert": tokens.tolist(), "align_size": 1}
    assert nc.moe_permute_and_pad_with_probs(x, probs, mask, **options)[3] is None
    assert nc.moe_permute_and_pad_with_probs(x, probs, mask, **options, num_out_tokens=200)[3] is not None
    assert_bitwise(plain[0], nc.moe_permute(x, mask, TOKENS * TOPK)[0])
    listed = nc.moe_permute_and_pad_with_probs(x, probs, mask, tokens.tolist(), 16)
    assert_bitwise(listed[0], rows)
    fixed = nc.moe_permute_and_pad_with_probs(x, probs, mask, tokens, 16, num_out_tokens=200)
    assert fixed[0].shape[0] == 200 and not fixed[0][rows.shape[0] :].any()
    assert_bitwise(fixed[0][: rows.shape[0]], rows)
    cut = nc.moe_permute_and_pad_with_probs(x, probs, mask, tokens, 16, num_out_tokens=20)
    assert nc.moe_unpermute(cut[0], cut[2], pad_offsets=cut[3]).isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    """One graph for every routing; the padded rows are as many as the splits on the device say."""
    torch._dynamo.reset()

    def layer(x: Tensor, probs: Tensor, mask: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        rows, row_probs, row_map, offsets, _ = nc.moe_permute_and_pad_with_probs(
            x, probs, mask, mask.sum(0), 8
        )
        padded = nc.moe_unpermute(rows * row_probs.unsqueeze(1), row_map, probs, pad_offsets=offsets)
        fixed, fixed_map = nc.moe_permute(x, mask, x.shape[0] * TOPK)
        by_index, index_map = nc.moe_permute(fixed[: x.shape[0]], indices, map_type="index")
        return (
            padded,
            nc.moe_unpermute(fixed, fixed_map),
            nc.moe_unpermute(by_index, index_map, map_type="index"),
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic or None)
    torch._dynamo.utils.counters.clear()
    for seed in (0, 1, 2):
        x, indices, probs = draw(seed)
        results = []
        for run in (layer, compiled):
            x, probs = (t.detach().clone().requires_grad_(True) for t in (x, probs))
            out = run(x, probs, mask_of(indices), indices)
            results.append([*out, *torch.autograd.grad(sum(o.square().sum() for o in out), (x, probs))])
        for ours, theirs in zip(*results, strict=True):
            assert_bitwise(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.inductor
def test_inductor_orders_what_it_fuses() -> None:
    """Several routings in one graph, with a number of rows that the graph does not know."""
    torch._dynamo.reset()

    def layer(logits: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        probs, mask = nc.fused_topk_with_score_function(
            logits, 2, False, 2, 1, 1.5, "sigmoid", torch.zeros(8)
        )
        packed = nc.fused_topk_with_score_function(logits, 2, routing_map_format="bitmap_u8")[1]
        place = torch.empty(x.shape[0], 2, dtype=torch.int32)
        indices = nc.fused_topk_with_score_function(logits, 2, topk_indices=place)[1]
        rows, row_probs, row_map, offsets, _ = nc.moe_permute_and_pad_with_probs(
            x, probs, mask, mask.sum(0), 16
        )
        y = nc.moe_unpermute(rows * row_probs.unsqueeze(1), row_map, probs, pad_offsets=offsets)
        rows, row_map = nc.moe_permute(x, indices, map_type="index")
        rows = nc.moe_sort_chunks_by_index(rows, mask.sum(0), torch.arange(7, -1, -1))
        return y + nc.moe_unpermute(rows, row_map, map_type="index"), packed

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        generator = torch.Generator().manual_seed(0)
        logits, x = (torch.randn(24, n, generator=generator).requires_grad_(True) for n in (8, 32))
        y, packed = run(logits, x)
        results.append([y, packed, *torch.autograd.grad(y.square().sum(), (logits, x))])
    assert torch.equal(results[0][1], results[1][1])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, "fp32_sum_order")


QUANTIZERS: dict[str, Any] = {
    "tensor": nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3),
    "mxfp8": nc.MXFP8Quantizer(nc.DType.kFloat8E4M3),
    "block": nc.Float8BlockQuantizer(
        nc.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
    "nvfp4": nc.NVFP4Quantizer(rowwise=True, columnwise=False),
}


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("internal", [False, True])
def test_quantized_rows_keep_their_format(name: str, internal: bool) -> None:
    x, indices, probs = draw(dtype=torch.bfloat16)
    x = x.repeat(1, 3)
    quantizer = QUANTIZERS[name].replace(internal=internal)
    quantized, mask = quantizer.quantize(x), mask_of(indices)
    out, row_map = nc.moe_permute(quantized, mask, TOKENS * TOPK)
    assert type(out) is type(quantized) and out.get_usages() == {"rowwise": True, "columnwise": False}
    expected = nc.moe_permute(quantized.dequantize(), mask, TOKENS * TOPK)[0]
    assert_bitwise(out.dequantize(), expected)
    padded = nc.moe_permute_and_pad_with_probs(quantized, probs, mask, mask.sum(0), 16)[0]
    again = nc.moe_permute_and_pad_with_probs(quantized.dequantize(), probs, mask, mask.sum(0), 16)[0]
    assert_bitwise(padded.dequantize(), again)
    sorted_ = nc.moe_sort_chunks_by_index(out, [6, 20], [1, 0])
    assert_bitwise(sorted_.dequantize(), torch.cat([expected[6:], expected[:6]]))
    with pytest.raises(TypeError, match="adds rows up"):
        nc.moe_unpermute(out, row_map)


def test_gradient_of_a_quantized_input() -> None:
    x, indices, _ = draw(dtype=torch.bfloat16)
    quantized = QUANTIZERS["tensor"].quantize(x).requires_grad_(True)
    out, _ = nc.moe_permute(quantized, mask_of(indices), TOKENS * TOPK)
    (grad,) = torch.autograd.grad(out.sum(), quantized)
    assert_bitwise(grad, torch.full_like(x, TOPK))


def test_quantized_rows_that_cannot_be_moved() -> None:
    x, indices, _ = draw(dtype=torch.bfloat16)
    mask = mask_of(indices)
    tiles = nc.Float8BlockQuantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=2)
    with pytest.raises(TypeError, match="no scales of their own"):
        nc.moe_permute(tiles.quantize(x), mask, TOKENS * TOPK)
    quantized = QUANTIZERS["mxfp8"].quantize(x)
    compiled = torch.compile(lambda q: nc.moe_permute(q, mask, 4)[0], fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="quantize its result"):
        compiled(quantized)


def test_second_derivatives_are_refused() -> None:
    x, indices, _ = draw()
    out, row_map = nc.moe_permute(x.requires_grad_(True), mask_of(indices), TOKENS * TOPK)
    (grad,) = torch.autograd.grad(nc.moe_unpermute(out.square(), row_map).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_bad_arguments() -> None:
    x, indices, probs = draw()
    mask, tokens = mask_of(indices), mask_of(indices).sum(0)
    out, row_map = nc.moe_permute(x, mask, 26)
    attempts = {
        "map_type is 'bits'": lambda: nc.moe_permute(x, mask, 26, map_type="bits"),
        "num_out_tokens is 0": lambda: nc.moe_permute(x, mask, 0),
        "num_out_tokens is (-1)": lambda: nc.moe_permute(x, mask),
        "num_out_tokens is -1": lambda: nc.moe_permute_with_probs(x, probs, mask),
        "torch.int64": lambda: nc.moe_permute(x, indices.long(), map_type="index"),
        "torch.float32": lambda: nc.moe_permute(x, probs, 26),
        "pass \\(13, E\\)": lambda: nc.moe_permute(x, mask[:5], 26),
        "pass tokens": lambda: nc.moe_permute(x[0], mask, 26),
        "probabilities": lambda: nc.moe_permute_with_probs(x, probs[:, :2], mask, 26),
        "align_size is 0": lambda: nc.moe_permute_and_pad_with_probs(x, probs, mask, tokens, 0),
        "tokens_per_expert is None": lambda: nc.moe_permute_and_pad_with_probs(x, probs, mask, None, 8),  # type: ignore[arg-type]
        "num_out_tokens is -3": lambda: nc.moe_permute_and_pad_with_probs(
            x, probs, mask, tokens, 8, num_out_tokens=-3
        ),
        "both probs and": lambda: nc.moe_unpermute(out, row_map, probs, probs=probs),
        "restore_shape": lambda: nc.moe_unpermute(out, row_map, restore_shape=(7, WIDTH)),
        "pad_offsets": lambda: nc.moe_unpermute(out, row_map, pad_offsets=tokens[:2].int()),
        "row_id_map": lambda: nc.moe_unpermute(out, row_map.long()),
    }
    for message, attempt in attempts.items():
        with pytest.raises(ValueError, match=message):
            attempt()
    rows: Any = out.tolist()
    no_tensors = {
        "inp": (
            lambda: nc.moe_permute(rows, mask, 26),
            lambda: nc.moe_unpermute(rows, row_map),
        ),
        "pad_offsets": (lambda: nc.moe_unpermute(out, row_map, pad_offsets=[0, 0]),),  # type: ignore[arg-type]
    }
    for label, calls in no_tensors.items():
        for call in calls:
            with pytest.raises(TypeError, match=rf"(?s){label} is .*, of type list; give a tensor"):
                call()
    with pytest.warns(DeprecationWarning, match="merging_probs"):
        old = nc.moe_unpermute(out, row_map, probs=probs)
    assert_bitwise(old, nc.moe_unpermute(out, row_map, probs))
    shaped = nc.moe_unpermute(out, row_map, restore_shape=(1, TOKENS, WIDTH))
    assert shaped.shape == (1, TOKENS, WIDTH)


@pytest.mark.gpu
def test_nothing_is_read_back() -> None:
    x, indices, probs = (t.cuda() for t in draw(dtype=torch.bfloat16))
    x, probs, mask = x.requires_grad_(True), probs.requires_grad_(True), mask_of(indices)

    def step() -> list[Tensor]:
        rows, row_probs, row_map, offsets, _ = nc.moe_permute_and_pad_with_probs(
            x, probs, mask, mask.sum(0), 16, num_out_tokens=128
        )
        y = nc.moe_unpermute(rows * row_probs.unsqueeze(1).bfloat16(), row_map, probs, pad_offsets=offsets)
        other, other_map = nc.moe_permute(x, indices, map_type="index")
        other = nc.moe_sort_chunks_by_index(other, mask.sum(0), torch.arange(4, -1, -1, device="cuda"))
        y = y + nc.moe_unpermute(other, other_map, map_type="index")
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, probs))]

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(again, expected, strict=True):
        assert_bitwise(ours, theirs)
