"""Two ranks with half of the experts each, against one process with all of them, and compiled against eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference.checks import assert_bitwise
from torch import Tensor

import narrowcast as nc
from narrowcast.distributed import moe_exchange
from narrowcast.testing import assert_close, relative_error

WORLD, SECONDS = 2, 240
EXPERTS, TOPK, WIDTH = 4, 2, 128
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

MX = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3)
BLOCK = nc.Float8BlockQuantizer(nc.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)
# the experts round E4M3 with scales of powers of two to themselves
COARSE = nc.MXFP8Quantizer(nc.DType.kFloat8E5M2)
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"quantizer": None},
    "exact mxfp8": {"quantizer": MX, "align_size": 16},
    "exact block": {"quantizer": BLOCK},
    "fixed": {"quantizer": None, "capacity": 24},
    "fixed mxfp8": {"quantizer": MX, "capacity": 30, "align_size": 16},
}
PARTED: dict[str, dict[str, Any]] = {
    "exact": {"align_size": 16},
    "fixed": {"capacity": 30, "align_size": 16},
    "dropped": {"capacity": 10},
}
IN_ROWS = nc.recipe.NVFP4BlockScaling(
    row_scaled_activation=True,
    backward_override="high_precision",
    disable_rht=True,
    disable_stochastic_rounding=True,
)
EVERYWHERE = {"quantizer": MX, "combine_quantizer": MX, "grad_quantizer": MX}
PLAIN = dict.fromkeys(EVERYWHERE)
# one wire at a time, and which of the results it changes
WIRES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "dispatch": ({"quantizer": COARSE}, {"y", "dlogits", "dweights"}),
    "combine": ({"combine_quantizer": COARSE}, {"y", "dlogits"}),
    "dispatch_grad": ({"grad_quantizer": COARSE, "combine_grad_quantizer": None}, {"dx"}),
    "combine_grad": ({"combine_grad_quantizer": COARSE}, {"dx", "dweights"}),
}
# tokens of each rank, and the experts that nobody goes to
LOADS: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "even": ((12, 12), ()),
    "uneven": ((12, 7), (1,)),
    "no tokens": ((12, 0), ()),
    "idle": ((9, 9), (2, 3)),
    "busy": ((12, 12), (0, 1)),
}
EAGER, COMPILED = ("even", "uneven", "no tokens", "idle"), ("even", "busy")
Results = dict[str, Tensor]


def draw(load: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tokens, logits and gradients of the results, by rank."""
    tokens, idle = LOADS[load]
    generator = torch.Generator().manual_seed(len(load))
    everything = [torch.randn(sum(tokens), n, generator=generator) for n in (WIDTH, EXPERTS, WIDTH)]
    for expert in idle:
        everything[1][:, expert] = -100.0
    x, logits, grad = (tensor.split(tokens) for tensor in everything)
    return list(x), list(logits), list(grad)


def experts_of(first: int, count: int) -> nc.GroupedLinear:
    layer = nc.GroupedLinear(
        count, WIDTH, WIDTH, bias=False, device="cpu", recipe=nc.recipe.Float8BlockScaling()
    )
    weights = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / 8
    with torch.no_grad():
        for number in range(count):
            getattr(layer, f"weight{number}").copy_(weights[first + number])
    return layer


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Any) -> Tensor:
        return x if quantizer is None or not len(x) else quantizer.quantize(x).dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def results_of(y: Tensor, x: Tensor, logits: Tensor, experts: nc.GroupedLinear, grad: Tensor) -> Results:
    dx, dlogits, *dweights = torch.autograd.grad(y, (x, logits, *experts.parameters()), grad)
    return {"y": y.detach(), "dx": dx, "dlogits": dlogits, "dweights": torch.stack(dweights)}


def share(rank: int, load: str, forward: Any, dtype: torch.dtype = torch.float32) -> Results:
    x, logits, grad = (parts[rank] for parts in draw(load))
    x, logits, grad = x.to(dtype).requires_grad_(True), logits.requires_grad_(True), grad.to(dtype)
    experts = experts_of(rank * EXPERTS // WORLD, EXPERTS // WORLD).to(dtype)
    probs, routing = nc.fused_topk_with_score_function(logits, TOPK)
    y = forward(x, probs, routing, len(x) * TOPK, experts)
    return results_of(y, x, logits, experts, grad)


def whole(load: str, quantizer: Any, recipe: Any = None, dtype: torch.dtype = torch.float32) -> Results:
    x, logits, grad = (torch.cat(parts) for parts in draw(load))
    x, logits, grad = x.to(dtype).requires_grad_(True), logits.requires_grad_(True), grad.to(dtype)
    experts = experts_of(0, EXPERTS).to(dtype)
    if recipe is not None:
        nc.set_recipe(experts, recipe)
    probs, routing = nc.fused_topk_with_score_function(logits, TOPK)
    rows, row_map = nc.moe_permute(x, routing, len(x) * TOPK)
    y = nc.moe_unpermute(experts(StraightThrough.apply(rows, quantizer), routing.sum(0)), row_map, probs)
    return results_of(y, x, logits, experts, grad)


def in_parts(layer: nc.distributed.MoEDispatch) -> Any:
    """What a layer does, from its public parts."""

    def forward(x: Tensor, probs: Tensor, routing: Tensor, rows: int, experts: Any) -> Tensor:
        copies, row_map = nc.moe_permute(x, routing, rows)
        arrived, splits, route = layer.dispatch(copies, routing.sum(0))
        return nc.moe_unpermute(layer.combine(experts(arrived, splits), route), row_map, probs)

    return forward


def bytes_sent(rank: int, options: dict[str, Any]) -> list[int]:
    """Bytes of rows that leave this rank: to the experts, back, and their gradients in the order of the backward."""
    sent: list[int] = []
    send = moe_exchange.all_to_all_op

    def count(x: Tensor, *arguments: Any) -> Tensor:
        sent.append(x.numel())
        return send(x, *arguments)

    def begin(*arguments: Any) -> Any:
        sent.append(-1)  # where a wire begins
        return depart(*arguments)

    depart = moe_exchange.depart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_exchange, "all_to_all_op", count)
        patch.setattr(moe_exchange, "depart", begin)
        share(rank, "even", nc.distributed.MoEDispatch(EXPERTS, **options), torch.bfloat16)
    begins = [place for place, size in enumerate(sent) if size < 0]
    return [sum(sent[begin + 1 : end]) for begin, end in zip(begins, [*begins[1:], len(sent)], strict=True)]


class Noted(torch.autograd.Function):
    """A tensor passed on, there and back, with a note of when."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[str]) -> Tensor:
        ctx.notes = notes
        notes.append("shared")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.notes.append("shared backward")
        return grad, None


def beside_a_shared_expert(rank: int, options: dict[str, Any]) -> tuple[Results, Results, list[str], Results]:
    """With a shared expert inside and added afterwards, what happened in which order, and in a graph."""
    layer, notes = nc.distributed.MoEDispatch(EXPERTS, **options), []
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7)) / 8

    def shared(x: Tensor) -> Tensor:
        return torch.tanh(x) @ weight

    def noted(x: Tensor) -> Tensor:
        return shared(Noted.apply(x, notes))

    def inside(*arguments: Any) -> Tensor:
        return layer(*arguments, shared=noted)

    def in_graph(*arguments: Any) -> Tensor:
        return torch.compile(layer, fullgraph=True, backend="aot_eager")(*arguments, shared=shared)

    after = share(rank, "uneven", lambda x, *rest: layer(x, *rest) + shared(x))
    send, wait = moe_exchange.all_to_all_op, moe_exchange.wait_op
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_exchange, "all_to_all_op", lambda *given: (notes.append("start"), send(*given))[1])
        patch.setattr(moe_exchange, "wait_op", lambda *given: (notes.append("wait"), wait(*given))[1])
        ours = share(rank, "uneven", inside)
    return ours, after, notes, share(rank, "uneven", in_graph)


def in_rows(rank: int) -> Results:
    """With experts in row-scaled NVFP4."""
    layer = nc.distributed.MoEDispatch(EXPERTS, capacity=24, align_size=16)

    def forward(*given: Any) -> Tensor:
        nc.set_recipe(given[-1], IN_ROWS)
        return layer(*given)

    return share(rank, "uneven", forward, torch.bfloat16)


def compiled(rank: int, options: dict[str, Any]) -> tuple[list[Results], int]:
    """Several routings through one graph, and how many graphs there were."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = nc.distributed.MoEDispatch(EXPERTS, **options)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = [share(rank, load, forward) for load in COMPILED]
    return results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def work(rank: int) -> Any:
    results: dict[Any, Any] = {}
    for name, options in OPTIONS.items():
        layer = nc.distributed.MoEDispatch(EXPERTS, **options)
        for load in EAGER:
            results[name, load] = share(rank, load, layer)
    for name in ("exact mxfp8", "fixed mxfp8"):
        layer = nc.distributed.MoEDispatch(EXPERTS, **OPTIONS[name])
        eager = [share(rank, load, layer) for load in COMPILED]
        results["compiled", name] = (eager, *compiled(rank, OPTIONS[name]))
    layer = nc.distributed.MoEDispatch(EXPERTS, group=dist.new_group([0, 1]), **EVERYWHERE)
    results["everywhere"] = share(rank, "even", layer)
    results["plain"] = share(rank, "even", nc.distributed.MoEDispatch(EXPERTS, **PLAIN))
    for name, (options, _) in WIRES.items():
        results["wire", name] = share(
            rank, "even", nc.distributed.MoEDispatch(EXPERTS, **{**PLAIN, **options})
        )
    results["shared"] = beside_a_shared_expert(rank, {"capacity": 24, **EVERYWHERE})
    results["rows"] = in_rows(rank)
    results["bytes"] = [
        bytes_sent(rank, {**one, "capacity": capacity})
        for capacity in (None, 24)
        for one in (PLAIN, EVERYWHERE, dict.fromkeys(PLAIN, BLOCK))
    ]
    layer = nc.distributed.MoEDispatch(EXPERTS, quantizer=None, capacity=10)
    results["dropped"] = share(rank, "even", layer)
    for name, options in PARTED.items():
        layer = nc.distributed.MoEDispatch(EXPERTS, **options)
        results["parts", name] = share(rank, "uneven", layer), share(rank, "uneven", in_parts(layer))
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), WORLD, SECONDS)


def joined(parts: list[Results]) -> Results:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize("load", EAGER)
@pytest.mark.parametrize("name", OPTIONS)
def test_is_one_process(ranks: list[Any], name: str, load: str) -> None:
    """The experts get the same rows in the same order, each quantized by itself: the same bits."""
    ours, theirs = joined([rank[name, load] for rank in ranks]), whole(load, OPTIONS[name]["quantizer"])
    for key in theirs:
        if "align_size" in OPTIONS[name]:  # a CPU's GEMM of another number of rows may add in another order
            assert_close(ours[key], theirs[key], "fp32_sum_order")
        else:
            assert_bitwise(ours[key], theirs[key], key)


@pytest.mark.parametrize("name", ["exact mxfp8", "fixed mxfp8"])
def test_compiled(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        eager, in_graph, graphs = rank["compiled", name]
        assert graphs == 1
        for ours, theirs in zip(in_graph, eager, strict=True):
            for key in theirs:
                assert_bitwise(ours[key], theirs[key], key)


def test_quantized_in_every_direction(ranks: list[Any]) -> None:
    ours, theirs = joined([rank["everywhere"] for rank in ranks]), whole("even", MX)
    assert not torch.equal(ours["y"], theirs["y"]) and not torch.equal(ours["dx"], theirs["dx"])
    for key in theirs:
        assert_close(ours[key], theirs[key], "fp8_layer")


def test_a_shared_expert_runs_while_rows_travel(ranks: list[Any]) -> None:
    """The bits of adding it afterwards; starts come before it and waits after it, there and back."""
    for rank in ranks:
        ours, after, notes, in_graph = rank["shared"]
        for key in after:
            assert_bitwise(ours[key], after[key], key)
            assert_bitwise(in_graph[key], after[key], key)
        counts, wire = ["start", "wait"], ["start", "start", "wait", "wait"]
        forward = [*counts, "start", "start", "shared", "wait", "wait", *wire]
        assert notes == [*forward, *wire, "start", "start", "shared backward", "wait", "wait"]


def test_experts_in_row_scaled_nvfp4_are_one_process(ranks: list[Any]) -> None:
    ours, theirs = joined([rank["rows"] for rank in ranks]), whole("uneven", MX, IN_ROWS, torch.bfloat16)
    for key in theirs:
        assert_bitwise(ours[key], theirs[key], key)


@pytest.mark.parametrize("name", WIRES)
def test_one_wire_is_quantized(ranks: list[Any], name: str) -> None:
    """It changes what depends on it, by what E5M2 loses, and nothing else."""
    for rank in ranks:
        for key, plain in rank["plain"].items():
            ours = rank["wire", name][key]
            assert torch.equal(ours, plain) != (key in WIRES[name][1]), key
            assert relative_error(ours, plain) < 0.2, key  # gradients of logits are differences


def test_every_wire_carries_half_the_bytes(ranks: list[Any]) -> None:
    for rank in ranks:
        exact, fixed = rank["bytes"][:3], rank["bytes"][3:]
        for plain, *quantized in (exact, fixed):
            assert len(plain) == 4 and all(plain)
            for sent in quantized:
                assert all(ours <= 0.53 * theirs for ours, theirs in zip(sent, plain, strict=True))


@pytest.mark.parametrize("quantizer", [MX, BLOCK], ids=["mxfp8", "block"])
def test_results_are_summed_after_decoding(quantizer: Any) -> None:
    """bf16 holds what is decoded, exactly; the sum over a token's experts is in fp32, rounded once."""
    layer = nc.distributed.MoEDispatch(EXPERTS, quantizer=None, combine_quantizer=quantizer)
    x, logits, _ = (parts[0] for parts in draw("even"))
    x = x.bfloat16()
    probs, routing = nc.fused_topk_with_score_function(logits, TOPK)
    rows, row_map = nc.moe_permute(x, routing, len(x) * TOPK)
    decoded = quantizer.quantize(rows).dequantize(dtype=torch.float32)
    ours = layer(x, probs, routing, len(x) * TOPK, lambda rows, splits: rows)
    assert_bitwise(ours, nc.moe_unpermute(decoded, row_map, probs).bfloat16())


def test_receipt() -> None:
    rows = torch.randn(37, 2 * WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
    layer = nc.distributed.MoEDispatch(EXPERTS, combine_quantizer=BLOCK, combine_grad_quantizer=MX)
    dispatch, combine, dispatch_grad, combine_grad = layer.receipt(rows).wires
    decoded = MX.quantize(rows).dequantize()
    expected = (decoded.float() - rows.float()).norm() / rows.float().norm()
    assert dispatch.error == combine_grad.error == pytest.approx(float(expected))
    assert (dispatch.bytes_per_row, combine.bytes_per_row) == (264, 264) and dispatch.plain_bytes == 512
    assert dispatch.share <= 0.53 and combine.share <= 0.53 and 0.02 < combine.error < 0.04
    assert (dispatch_grad.bytes_per_row, dispatch_grad.error, dispatch_grad.format) == (512, 0.0, "bfloat16")
    assert str(layer.receipt(rows)).splitlines()[2].split()[1:4] == ["MXFP8Quantizer", "264", "0.516"]
    with pytest.raises(ValueError, match="at least one row"):
        layer.receipt(rows[:0])


def test_rows_that_do_not_fit_are_dropped(ranks: list[Any]) -> None:
    ours, theirs = joined([rank["dropped"] for rank in ranks]), whole("even", None)
    kept = (ours["y"] == theirs["y"]).all(1)
    assert ours["y"].isfinite().all() and ours["dx"].isfinite().all() and ours["dweights"].isfinite().all()
    assert 0 < int(kept.sum()) < len(kept)


@pytest.mark.parametrize("name", PARTED)
def test_is_its_parts(ranks: list[Any], name: str) -> None:
    """Tokens quantized before they are copied, and added up where they arrive: the same bits."""
    for rank in ranks:
        whole, parts = rank["parts", name]
        for key in parts:
            assert_bitwise(whole[key], parts[key], key)


def test_one_process_needs_no_group() -> None:
    layer = nc.distributed.MoEDispatch(EXPERTS)
    assert layer.num_local_experts == EXPERTS and "capacity=None" in repr(layer)
    x, logits, _ = (parts[0] for parts in draw("even"))
    probs, routing = nc.fused_topk_with_score_function(logits, TOPK)
    rows, row_map = nc.moe_permute(x, routing, len(x) * TOPK)
    experts = experts_of(0, EXPERTS)
    expected = experts(MX.quantize(rows).dequantize(), routing.sum(0))
    ours = layer(x, probs, routing, len(x) * TOPK, experts)
    assert_bitwise(ours.detach(), nc.moe_unpermute(expected, row_map, probs).detach())


def step_on_gpu(layer: nc.distributed.MoEDispatch, rank: int, recipe: nc.recipe.Recipe) -> Any:
    """A function that trains nothing but computes everything, from what is in ``x`` and ``logits``."""
    experts = experts_of(rank * layer.num_local_experts, layer.num_local_experts)
    nc.set_recipe(experts.to(device="cuda", dtype=torch.bfloat16), recipe)
    x, logits, grad = (parts[rank].cuda() for parts in draw("even"))
    x, grad = x.bfloat16().requires_grad_(True), grad.bfloat16()
    logits.requires_grad_(True)

    def step() -> Results:
        probs, routing = nc.fused_topk_with_score_function(logits, TOPK)
        y = layer(x, probs, routing, len(x) * TOPK, experts)
        return results_of(y, x, logits, experts, grad)

    return step


def without_the_host(step: Any) -> tuple[Results, Results, Results]:
    """The results of a first call, of one that may not wait for the device, and of a replayed graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        third = step()
    graph.replay()
    torch.cuda.synchronize()
    return first, second, third


RECIPES_ON_GPU = [nc.recipe.Float8CurrentScaling(), nc.recipe.Float8BlockScaling()]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES_ON_GPU, ids=repr)
def test_fixed_capacity_needs_no_host(recipe: nc.recipe.Recipe) -> None:
    layer = nc.distributed.MoEDispatch(EXPERTS, capacity=24, align_size=16)
    first, *others = without_the_host(step_on_gpu(layer, 0, recipe))
    exact = nc.distributed.MoEDispatch(EXPERTS, align_size=16)
    for results in others:
        for key in first:
            assert_bitwise(results[key], first[key], key)
    results = step_on_gpu(exact, 0, recipe)()
    for key in first:
        assert_close(results[key], first[key], "fp8_flips")


def work_on_gpus(rank: int) -> Any:
    results = {}
    for name, capacity in (("exact", None), ("fixed", 24)):
        layer = nc.distributed.MoEDispatch(EXPERTS, capacity=capacity, align_size=16)
        step = step_on_gpu(layer, rank, RECIPES_ON_GPU[0])
        runs = (step(),) if capacity is None else without_the_host(step)
        results[name] = [{key: value.cpu() for key, value in run.items()} for run in runs]
    return results


@pytest.mark.gpu
def test_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    for rank in run_ranks(work_on_gpus, tmp_path, WORLD, SECONDS, "nccl"):
        (exact,) = rank["exact"]
        for fixed in rank["fixed"]:
            for key in exact:
                assert_close(fixed[key], exact[key], "fp8_flips")


def test_bad_arguments() -> None:
    layer, rows = nc.distributed.MoEDispatch(EXPERTS), torch.randn(6, WIDTH)
    with pytest.raises(ValueError, match="there are 6"):
        layer.dispatch(rows, torch.tensor([1, 2, 1, 1]))
    with pytest.raises(ValueError, match="pass integers"):
        layer.dispatch(rows, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="pass \\(R, K\\)"):
        layer.dispatch(rows[0], torch.tensor([1, 2, 1, 2]))
    with pytest.raises(ValueError, match="num_experts is 0"):
        nc.distributed.MoEDispatch(0)
    with pytest.raises(ValueError, match="capacity is -1"):
        nc.distributed.MoEDispatch(4, capacity=-1)
    shared = nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3)
    for given, message in ((shared, "do not travel alone"), ("mxfp8", "pass a quantizer")):
        with pytest.raises(TypeError, match=message):
            nc.distributed.MoEDispatch(4, quantizer=given)
