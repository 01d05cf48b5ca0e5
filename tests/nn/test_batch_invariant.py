"""The mode "batch-invariant": a row has the same bits alone, in every batch, and on one process or two."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from recipes import DEVICE, EMULATE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import narrowcast as nc
from narrowcast._determinism import BATCH_INVARIANT
from narrowcast.reference import batch_invariant as reference
from narrowcast.reference.batch_invariant import splits_of

BY_ROW = nc.recipe.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, emulate=EMULATE)
RECIPES = {
    "none": None,
    "block": nc.recipe.Float8BlockScaling(),
    "mxfp8": nc.recipe.MXFP8BlockScaling(emulate=EMULATE),
    "delayed": nc.recipe.DelayedScaling(),
    "nvfp4": BY_ROW,
}
SPLIT = ("none", "block", "mxfp8")  # under others a shard of a weight has an amax of its own
ROWS, BATCHES = 64, (1, 7, 64)


@pytest.fixture
def mode() -> Iterator[None]:
    nc.set_deterministic(BATCH_INVARIANT)
    yield
    nc.set_deterministic(None)


def layer(recipe: str, **options: Any) -> nc.TransformerLayer:
    """With state of delayed scaling from a step, and then frozen."""
    torch.manual_seed(0)
    formats = {"attn_input_format": "bshd", "self_attn_mask_type": "causal", **options}
    made = nc.TransformerLayer(
        136, 264, 4, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, **formats,
        recipe=RECIPES[recipe], device=DEVICE,
    )  # fmt: skip
    if recipe == "delayed":
        made(torch.randn(2, 3, 136, device=DEVICE)).sum().backward()
        nc.renew_delayed_scaling(made)
    return made.eval()


def batches(function: Any, x: Tensor) -> list[Tensor]:
    """The results of rows 5 to 12, from batches of 1, 7 and 64."""
    return [torch.cat([function(part) for part in x[5:12].split(1)]), function(x[5:12]), function(x)[5:12]]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("mode")
def test_rows_of_a_transformer_layer(recipe: str) -> None:
    made, x = layer(recipe), torch.randn(ROWS, 5, 136, device=DEVICE)
    with torch.no_grad():
        alone, few, many = batches(made, x)
        assert torch.equal(alone, many) and torch.equal(few, many)
        assert torch.equal(made(x[5:12, :3]), many[:, :3])  # later keys are not seen
    assert bool(many.isfinite().all())


@pytest.mark.parametrize("recipe", ["none", "block", "delayed"])
def test_compiled_rows(recipe: str) -> None:
    """Of a norm with a linear layer. A graph of the other mode is not run in this one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, x = (
        nc.LayerNormLinear(136, 50, recipe=RECIPES[recipe], device=DEVICE),
        torch.randn(ROWS, 136, device=DEVICE),
    )
    made(x).sum().backward()
    run = torch.compile(made.eval(), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        run(x)
        nc.set_deterministic(BATCH_INVARIANT)
        try:
            assert torch.equal(run(x)[5:12], made(x[5:12]))
        finally:
            nc.set_deterministic(None)


@pytest.mark.inductor
@pytest.mark.usefixtures("mode")
def test_rows_compiled_by_inductor() -> None:
    """Each number of rows is a graph of its own; what is between the layers computes row by row."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = nc.LayerNormMLP(136, 50, recipe=RECIPES["block"], device=DEVICE).eval()
    run = torch.compile(lambda x: torch.nn.functional.gelu(made(x) + x) * 2, fullgraph=True, dynamic=False)
    x = torch.randn(ROWS, 136, device=DEVICE)
    with torch.no_grad():
        many = run(x)
        assert torch.equal(run(x[5:6]), many[5:6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("mode")
def test_compiled_attention(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    attention = nc.DotProductAttention(
        2, 16, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    run = torch.compile(attention, fullgraph=True, backend="aot_eager")
    q, k, v = (torch.randn(3, 7, 2, 16, device=DEVICE, dtype=dtype).requires_grad_() for _ in range(3))
    out, expected = run(q, k, v), attention(q, k, v)
    assert torch.equal(out, expected) and torch.equal(expected[1:2], attention(q[1:2], k[1:2], v[1:2]))
    gradients = (torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (out, expected))
    assert all(torch.allclose(*pair) for pair in zip(*gradients))


@pytest.mark.parametrize("recipe", ["none", "block"])
@pytest.mark.usefixtures("mode")
def test_rows_of_operations(recipe: str) -> None:
    torch.manual_seed(0)
    made = nc.ops.Sequential(
        nc.ops.RMSNorm(136, device=DEVICE), nc.ops.Linear(136, 50, device=DEVICE), nc.ops.GELU()
    )
    with torch.no_grad(), nc.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
        alone, few, many = batches(made, torch.randn(ROWS, 136, device=DEVICE))
    assert torch.equal(alone, many) and torch.equal(few, many)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("mode")
def test_rows_of_a_router(dtype: torch.dtype) -> None:
    """As many rows and experts as a library's GEMM has kernels for; a token's experts and weights follow from it."""
    torch.manual_seed(0)
    router = nc.MoERouter(136, 64, 4, score_function="sigmoid", bias=True, device=DEVICE, dtype=dtype)
    x = torch.randn(256, 136, device=DEVICE, dtype=dtype)
    compiled = torch.compile(router, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        logits = nc.moe_router_logits(x, router.weight, router.bias)
        rows = torch.cat([nc.moe_router_logits(row, router.weight, router.bias) for row in x.split(1)])
        assert torch.equal(rows, logits)
        for run in (router, compiled):
            alone, few, many = batches(lambda part, run=run: torch.cat(run(part)[:2], 1), x)
            assert torch.equal(alone, many) and torch.equal(few, many)
    expected = torch.nn.functional.linear(x.float(), router.weight.float(), router.bias.float())
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)
    router(x.requires_grad_()).probs.square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0 and router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("mode")
def test_rows_of_groups(recipe: str) -> None:
    """A row of a group is that of a linear layer, whichever rows are in its group and the others."""
    torch.manual_seed(0)
    made: Any = nc.GroupedLinear(
        3, 136, 50, recipe=RECIPES[recipe], params_dtype=torch.bfloat16, device=DEVICE
    )
    x = torch.randn(ROWS, 136, device=DEVICE, dtype=torch.bfloat16)
    if recipe == "delayed":
        made(x, [20, 24, 20]).sum().backward()
        nc.renew_delayed_scaling(made)
    with torch.no_grad():
        many, few, alone = made.eval()(x, [20, 24, 20]), made(x[18:30], [2, 10, 0]), made(x[25:26], [0, 1, 0])
        assert torch.equal(many[18:30], few) and torch.equal(many[25:26], alone)
        one: Any = nc.Linear(
            136, 50, recipe=RECIPES[recipe], params_dtype=torch.bfloat16, device=DEVICE
        ).eval()
        one.weight.copy_(made.weight1)
        one.bias.copy_(made.bias1)
        assert recipe == "delayed" or torch.equal(one(x[20:44]), many[20:44])


@pytest.mark.parametrize("recipe", ["none", "block", "mxfp8", "nvfp4"])
@pytest.mark.usefixtures("mode")
def test_rows_of_a_head(recipe: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, 136, generator=generator), torch.randn(2100, 136, generator=generator)
    target = torch.randint(2100, (ROWS, 1), generator=generator)

    def loss(rows: Tensor) -> Tensor:
        where = rows[:, 136:].long()[:, 0]
        return nc.linear_cross_entropy(
            rows[:, :136], weight.to(DEVICE), where, reduction="none", recipe=RECIPES[recipe]
        )

    alone, few, many = batches(loss, torch.cat((hidden, target), 1).to(DEVICE))
    assert torch.equal(alone, many) and torch.equal(few, many)
    exact = torch.nn.functional.cross_entropy(hidden @ weight.t(), target[:, 0], reduction="none")[5:12]
    assert torch.allclose(many.cpu(), exact, rtol=1e-5) or recipe != "none"


@pytest.mark.usefixtures("mode")
def test_gradients_are_those_of_the_library() -> None:
    """To the order of sums, of every parameter and of the input."""
    found = []
    for mode in (BATCH_INVARIANT, None):
        nc.set_deterministic(mode)
        made = layer("none").train()
        x = torch.randn(3, 7, 136, generator=torch.Generator().manual_seed(1))
        x = x.to(DEVICE).requires_grad_()
        made(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in made.parameters())])
    for invariant, library in zip(*found, strict=True):
        assert torch.allclose(invariant, library, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("recipe", ["block", "delayed"])
@pytest.mark.usefixtures("mode")
def test_activations_saved_as_codes(recipe: str) -> None:
    """Leave the forward as it is; gradients are those without the mode, to what their codes round."""
    torch.manual_seed(0)
    kind = type(RECIPES[recipe])
    made = nc.LayerNormMLP(128, 256, recipe=kind(saved_activations="fp8"), device=DEVICE)
    other = nc.LayerNormMLP(128, 256, recipe=kind(), device=DEVICE)
    other.load_state_dict(made.state_dict(), strict=False)
    x = torch.randn(ROWS, 128, device=DEVICE).requires_grad_()
    out, expected = made(x), other(x)
    assert torch.equal(out, expected)
    ours, theirs = (torch.autograd.grad(each.square().sum(), x)[0] for each in (out, expected))
    assert (ours - theirs).norm() < 0.1 * theirs.norm() and bool(ours.any())
    with torch.no_grad():
        alone, few, many = batches(made.eval(), x)
    assert torch.equal(alone, many) and torch.equal(few, many)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
@pytest.mark.usefixtures("mode")
def test_rows_of_weights_in_four_bits(weights: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 64, device=DEVICE, dtype=torch.bfloat16))
    model.requires_grad_(False)
    made = nc.convert(model, RECIPES["block"], weights=weights)
    with torch.no_grad():
        alone, few, many = batches(made, torch.randn(ROWS, 128, device=DEVICE, dtype=torch.bfloat16))
    assert torch.equal(alone, many) and torch.equal(few, many)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("mode")
def test_a_cached_token_is_the_token_of_the_full_forward(dtype: torch.dtype) -> None:
    """A sampler with a KV cache, and a trainer without, compute the same bits."""
    attention = nc.DotProductAttention(
        4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1,
        attention_dropout=0.0,
    ).eval()  # fmt: skip
    q, k, v = (torch.randn(2, 9, heads, 16, device=DEVICE, dtype=dtype) for heads in (4, 2, 2))
    full = attention(q, k, v, attn_mask_type="causal")
    cache = nc.InferenceParams(2, 32, 2, 16, dtype, device=DEVICE)
    with torch.no_grad():
        steps = []
        for part in (slice(0, 6), slice(6, 7), slice(7, 9)):
            cache.pre_step({0: part.stop - part.start, 1: part.stop - part.start})
            steps.append(attention(q[:, part], k[:, part], v[:, part], inference_params=cache))
    assert torch.equal(torch.cat(steps, 1), full)


@pytest.mark.parametrize("mask", ["causal", "no_mask", "padding_causal", "causal_bottom_right", "arbitrary"])
@pytest.mark.usefixtures("mode")
def test_attention_in_bf16_is_close_to_fp32(mask: str) -> None:
    """With every kind of mask, a window and grouped heads: output and gradients, and rows alone."""
    attention = nc.DotProductAttention(
        4, 32, num_gqa_groups=2, qkv_format="bshd", attn_mask_type=mask, attention_dropout=0.0,
        window_size=(9, 0) if "causal" in mask else None,
    )  # fmt: skip
    keys = 21 if mask == "causal_bottom_right" else 17
    shapes = (2, 17, 4, 32), (2, keys, 2, 32), (2, keys, 2, 32)
    x: Any = [torch.randn(shape).to(DEVICE, torch.bfloat16) for shape in shapes]
    hidden = (
        torch.rand(2, 1, 17, 17) < 0.3 if mask == "arbitrary" else torch.arange(17).ge(13).view(1, 1, 1, 17)
    )
    masks = {"attention_mask": hidden.to(DEVICE)} if mask in ("arbitrary", "padding_causal") else {}
    if mask == "padding_causal":
        masks["attention_mask"] = masks["attention_mask"].expand(2, 1, 1, 17)
    made = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [one.to(dtype).requires_grad_() for one in x]
        out = attention(*inputs, **masks)
        made.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for narrow, wide in zip(*made):
        assert (narrow.float() - wide).norm() < 0.02 * wide.norm()
    one = {name: given[1:] for name, given in masks.items()}
    assert torch.equal(attention(*(part[1:] for part in x), **one), made[0][0][1:])


@pytest.mark.usefixtures("mode")
def test_refuses_what_depends_on_the_batch() -> None:
    x = torch.randn(4, 32, device=DEVICE)
    for recipe in (nc.recipe.Float8CurrentScaling(), nc.recipe.NVFP4BlockScaling()):
        with pytest.raises(ValueError, match="rows beside it; in the batch-invariant mode use Float8Block"):
            nc.Linear(32, 16, recipe=recipe, device=DEVICE)(x)
    square = nc.recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    with pytest.raises(ValueError, match="rows beside it"):
        nc.Linear(32, 16, recipe=square, device=DEVICE)(x)
    attention = nc.DotProductAttention(
        2, 16, qkv_format="thd", attn_mask_type="padding", attention_dropout=0.0
    )
    packed = torch.randn(4, 2, 16, device=DEVICE)
    lengths = torch.tensor([0, 1, 4], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="give sequences as bshd, padded at the end"):
        attention(packed, packed, packed, cu_seqlens_q=lengths, cu_seqlens_kv=lengths)


@pytest.mark.usefixtures("mode")
def test_compiles_under_an_autocast() -> None:
    x, linear = torch.randn(4, 32, device=DEVICE), nc.Linear(32, 16, device=DEVICE)
    with nc.autocast(recipe=nc.recipe.Float8BlockScaling()):
        assert torch.equal(torch.compile(linear, fullgraph=True, backend="aot_eager")(x), linear(x))
    with (
        nc.autocast(recipe=nc.recipe.Float8CurrentScaling()),
        pytest.raises(torch._dynamo.exc.Unsupported, match="rows beside it"),
    ):
        torch.compile(linear, fullgraph=True, backend="aot_eager")(x)


def test_refuses_another_mode() -> None:
    with pytest.raises(ValueError, match="use None or 'batch-invariant'"):
        nc.set_deterministic("batch")
    assert nc.get_deterministic() is None


# -- processes that share the layer ---------------------------------------------------------------------------------

IN, HIDDEN, OUT = 256, 512, 130


def mlp(recipe: str, device: str, group: Any = None) -> Any:
    """A norm with a feed-forward block; ``group``: shares it."""
    parallel = {} if group is None else {"tp_group": group, "tp_size": 2, "set_parallel_mode": True}
    made = nc.LayerNormMLP(
        IN, HIDDEN, recipe=RECIPES[recipe], params_dtype=torch.bfloat16, device=device, **parallel
    )
    return made.eval()


def row(recipe: str, device: str, group: Any = None, sequence: bool = False) -> Any:
    parallel = (
        {} if group is None else {"tp_group": group, "parallel_mode": "row", "sequence_parallel": sequence}
    )
    return nc.Linear(IN, OUT, recipe=RECIPES[recipe], device=device, **parallel).eval()


def load(made: Any, whole: Any, rank: int) -> None:
    """This process's part of each parameter."""
    for name, value in whole.state_dict().items():
        own = made.state_dict()[name]
        for dim in range(value.dim()):
            if own.shape[dim] != value.shape[dim]:
                value = value.chunk(2, dim)[rank]
        own.copy_(value)


def wholes(recipe: str, device: str) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    whole, other = mlp(recipe, device), row(recipe, device)
    x = torch.randn(ROWS, IN).to(device, torch.bfloat16)
    return whole, other, x


@torch.no_grad()
def on_a_rank(rank: int, device: str = "cpu") -> dict[str, list[Tensor]]:
    nc.set_deterministic(BATCH_INVARIANT)
    group, found = dist.group.WORLD, {}
    for recipe in SPLIT:
        whole, other, x = wholes(recipe, device)
        made = mlp(recipe, device, group)
        load(made, whole, rank)
        found[f"mlp {recipe}"] = batches(made, x)
        sharded = copy.deepcopy(whole)
        found[f"sharded {recipe}"] = batches(nc.distributed.shard(sharded, init_device_mesh(device, (2,))), x)
        for sequence in (False, True):
            part = row(recipe, device, group, sequence)
            load(part, other, rank)
            columns = x.float().chunk(2, 1)[rank]
            found[f"row {recipe} {sequence}"] = [part(columns)]
    torch._dynamo.reset()
    run = torch.compile(part, fullgraph=True, backend="aot_eager")  # row-parallel, of row shards
    found["compiled"] = [run(columns)]
    refused = nc.Linear(IN, OUT, recipe=BY_ROW, tp_group=group, parallel_mode="column", device=device)
    short = nc.Linear(96, OUT, tp_group=group, parallel_mode="row", device=device)
    for what, inp in ((refused, x.float()), (short, x.float()[:2, :48])):
        with pytest.raises(ValueError, match="in the batch-invariant mode use"):
            what(inp)
    return {name: [out.cpu() for out in outs] for name, outs in found.items()}


def check_ranks(ranks: list[dict[str, list[Tensor]]], device: str) -> None:
    """Compare the results of two processes with those of this one."""
    for recipe in SPLIT:
        whole, other, x = wholes(recipe, device)
        with torch.no_grad():
            expected, row_expected = whole(x).cpu(), other(x.float()).cpu()
        for rank, found in enumerate(ranks):
            for what in ("mlp", "sharded"):
                assert all(torch.equal(out, expected[5:12]) for out in found[f"{what} {recipe}"]), recipe
            assert torch.equal(found[f"row {recipe} False"][0], row_expected)
            assert torch.equal(found[f"row {recipe} True"][0], row_expected.chunk(2)[rank])
    assert all(torch.equal(found["compiled"][0], found["row mxfp8 True"][0]) for found in ranks)


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.usefixtures("mode")
def test_two_processes_compute_the_bits_of_one(tmp_path: Path) -> None:
    check_ranks(run_ranks(on_a_rank, tmp_path, 2, 120), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("mode")
def test_two_gpus_compute_the_bits_of_one(tmp_path: Path) -> None:
    """Through NCCL."""
    work = functools.partial(on_a_rank, device="cuda")
    check_ranks(run_ranks(work, tmp_path, 2, 120, "nccl"), "cuda")


@pytest.mark.parametrize("size", [256, 2048, 4096, 5632])
def test_processes_split_a_contraction_where_one_does(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    left, right = (torch.randn(3, size, generator=generator) for _ in range(2))
    for most in (2, 8):
        whole = reference.matmul(left, right, splits_of(size, most))
        for processes in (2, 4, 8):
            if processes <= most and size % (processes * 128) == 0:
                splits = splits_of(size // processes, most, processes)
                shares = zip(left.chunk(processes, 1), right.chunk(processes, 1))
                parts = [reference.matmul(a, b, splits) for a, b in shares]
                assert torch.equal(reference.sum_of_halves(parts), whole)
    with pytest.raises(ValueError, match="processes is 3; use 1, 2, 4 or 8"):
        nc.set_deterministic("batch-invariant", processes=3)


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_one_sum_of_a_whole_contraction(recipe: str) -> None:
    """On one process: another order of sums, and no plan of the other order is used."""
    torch.manual_seed(0)
    made = nc.Linear(1024, 70, recipe=RECIPES[recipe], device=DEVICE)
    x, found = torch.randn(ROWS, 1024, device=DEVICE), []
    try:
        for processes in (8, 1, 8):
            nc.set_deterministic(BATCH_INVARIANT, processes=processes)
            with torch.no_grad():
                alone, few, many = batches(made, x)
            assert torch.equal(alone, many) and torch.equal(few, many)
            found.append(many)
    finally:
        nc.set_deterministic(None)
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("mode")
def test_a_norm_before_a_layer_leaves_its_contraction_split_alike() -> None:
    torch.manual_seed(0)
    made = nc.LayerNormLinear(2048, 70, normalization="RMSNorm", recipe=RECIPES["block"], device=DEVICE)
    norm = nc.RMSNorm(2048, device=DEVICE)
    alone = nc.Linear(2048, 70, recipe=RECIPES["block"], device=DEVICE)
    alone.load_state_dict({"weight": made.weight, "bias": made.bias}, strict=False)
    x = torch.randn(ROWS, 2048, device=DEVICE)
    assert torch.equal(made(x), alone(norm(x)))


def test_a_contraction_is_split_into_whole_blocks() -> None:
    assert [splits_of(size) for size in (0, 64, 128, 256, 384, 1024, 1792, 14336)] == [1, 1, 1, 2, 1, 8, 2, 8]
