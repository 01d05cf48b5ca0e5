"""Two processes share a linear layer, or only their rows: against one process, and compiled against eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from ranks import run_ranks
from recipes import RECIPES
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import narrowcast as nc
from narrowcast import ops
from narrowcast.dynamo import to_tensor_proto
from narrowcast.recipe import linear_plan
from narrowcast.testing import assert_close

from .basic.contract import check_split_forward

WORLD, SECONDS = 2, 240
ROWS, K, N = 8, 64, 96
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

NAMES = ("none", "delayed", "current", "mxfp8", "nvfp4")
BARE = "row without bias"  # sums by itself; with a bias, an operation of its own does
MODES = [(mode, sequence) for mode in ("column", "row", BARE) for sequence in (False, True)]
COMPILED = [
    ("none", "row", True),
    ("current", "row", False),
    ("none", BARE, True),
    ("delayed", "column", True),
]
Results = dict[str, Tensor]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def half(tensor: Tensor, rank: int, dim: int) -> Tensor:
    return tensor.chunk(WORLD, dim)[rank].contiguous()


def make_layer(rank: int, mode: str, sequence: bool, group: Any = None) -> ops.Linear:
    """The share of a rank in the layer of :func:`whole`."""
    layer = ops.Linear(
        K,
        N,
        bias=mode != BARE,
        device="cpu",
        tensor_parallel_mode=mode.split()[0],
        tensor_parallel_group=group,
        sequence_parallel=sequence,
    )
    with torch.no_grad():
        layer.weight.copy_(half(draw(N, K, seed=1), rank, 0 if mode == "column" else 1))
        if layer.bias is not None:
            layer.bias.copy_(half(column_bias(), rank, 0) if mode == "column" else row_bias(rank))
    return layer


def column_bias() -> Tensor:
    return draw(N, seed=2)


def row_bias(rank: int) -> Tensor:
    """The bias that a rank adds to its own product."""
    return draw(N, seed=20 + rank)


def whole(mode: str) -> ops.Linear:
    layer = ops.Linear(K, N, bias=mode != BARE, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(draw(N, K, seed=1))
        if layer.bias is not None:
            layer.bias.copy_(column_bias() if mode == "column" else sum(map(row_bias, range(WORLD))))
    return layer


def operands(rank: int, mode: str, sequence: bool, seed: int) -> tuple[Tensor, Tensor]:
    """This rank's input and gradient of the output."""
    x, dy = draw(ROWS, K, seed=3 + seed), draw(ROWS, N, seed=5 + seed)
    rows = (lambda t: half(t, rank, 0)) if sequence else (lambda t: t)
    if mode == "column":
        return rows(x), half(dy, rank, 1)
    return half(x, rank, 1), rows(dy)


def train(layer: ops.Linear, forward: Any, x: Tensor, dy: Tensor, recipe: Any) -> Results:
    torch.manual_seed(7)
    x = x.requires_grad_(True)
    with nc.autocast(enabled=recipe is not None, recipe=recipe):
        y = forward(x)
    wanted = {"dx": x, "dw": layer.weight} | ({} if layer.bias is None else {"db": layer.bias})
    return {"y": y.detach()} | dict(zip(wanted, torch.autograd.grad(y, (*wanted.values(),), dy), strict=True))


def two_steps(
    rank: int, mode: str, sequence: bool, recipe: Any, compiled: bool, group: Any = None
) -> Results:
    """What the second step gives, when delayed scaling has scales."""
    layer = make_layer(rank, mode, sequence, group)
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else layer
    for seed in (0, 1):
        results = train(layer, forward, *operands(rank, mode, sequence, seed), recipe)
        nc.reduce_delayed_scaling(layer, group)
        nc.renew_delayed_scaling(layer)
    return results


def run_collectives(rank: int, compiled: bool) -> dict[str, Tensor]:
    collectives = ops.AllGather(), ops.AllReduce(), ops.ReduceScatter()

    def run(x: Tensor) -> list[Tensor]:
        return [op(x) for op in collectives]

    forward = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    x = draw(4, 3, seed=rank).requires_grad_(True)
    results: dict[str, Tensor] = {}
    for name, y in zip(("gather", "reduce", "scatter"), forward(x), strict=True):
        grad = draw(*y.shape, seed=10 + rank)
        (results[f"d {name}"],) = torch.autograd.grad(y, x, grad, retain_graph=True)
        results[name] = y.detach()
    return results


def run_functional(rank: int, mode: str, sequence: bool) -> bool:
    """Whether the functional form does what the layer does, and its fakes tell what it returns."""
    bare = mode if mode == "column" else BARE
    layer, (x, dy) = make_layer(rank, bare, sequence).basic_ops[0], operands(rank, mode, sequence, 0)
    plan: Any = linear_plan(RECIPES["mxfp8"], "", True, True, module_type="linear")
    split = {"tensor_parallel_mode": mode, "sequence_parallel": sequence, "with_quantized_compute": True}
    for kind in ("input", "weight"):
        split[f"{kind}_quantizer"] = getattr(plan, kind).quantizer
    weight = layer.weight.detach()
    results = layer._functional_forward(x, weight, **split)
    described = layer._functional_forward_fake(to_tensor_proto(x), to_tensor_proto(weight), **split)
    split["grad_output_quantizer"] = plan.grad_output.quantizer
    grads = layer._functional_backward(dy, *results[1:], **split)
    saved = [to_tensor_proto(tensor) for tensor in results[1:]]
    described += layer._functional_backward_fake(to_tensor_proto(dy), *saved, **split)
    x = x.clone().requires_grad_(True)
    with nc.autocast(recipe=RECIPES["mxfp8"]):
        y = layer(x)
    expected = torch.autograd.grad(y, (x, layer.weight), dy)
    same = [torch.equal(a, b) for a, b in zip((results[0], *grads), (y, *expected), strict=True)]
    return all(same) and [to_tensor_proto(tensor) for tensor in (*results, *grads)] == list(described)


def gathers(rank: int) -> list[int]:
    """How often the graphs of forward and backward gather, with the partitioner that Inductor uses."""
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(sum("all_gather" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    layer = make_layer(rank, "column", True)
    forward = torch.compile(layer, fullgraph=True, backend=backend)
    train(layer, forward, *operands(rank, "column", True, 0), RECIPES["current"])
    return counts


def made_of(group: Any) -> list[Any]:
    """Of row layers with a bias: their operations and shapes, and whether their weights are drawn as without one."""
    found: list[Any] = []
    for sequence in (False, True):
        split = {"device": "cpu", "tensor_parallel_mode": "row", "tensor_parallel_group": group}
        drawn = []
        for make in (ops.Linear, ops.BasicLinear):
            torch.manual_seed(3)
            drawn.append(make(K, N, sequence_parallel=sequence, **split))
        layer, bare = drawn
        same = [torch.equal(layer.weight, bare.weight)]
        for each in drawn:
            torch.manual_seed(4)
            each.reset_parameters()
        same.append(torch.equal(layer.weight, bare.weight))
        shapes = {key: tuple(value.shape) for key, value in layer.state_dict().items()}
        names = [type(op).__name__ for op in layer.basic_ops]
        found.append((names, shapes, layer.extra_repr(), same, layer.basic_ops[0].extra_repr()))
    return found


def errors(rank: int) -> dict[str, str]:
    """Messages of what cannot be split."""
    attempts = {
        "out": lambda: ops.BasicLinear(K, N + 1, tensor_parallel_mode="column", device="cpu"),
        "in": lambda: ops.BasicLinear(K + 1, N, tensor_parallel_mode="row", device="cpu"),
        "in, with a bias": lambda: ops.Linear(K + 1, N, tensor_parallel_mode="row", device="cpu"),
        "rows": lambda: ops.ReduceScatter()(torch.zeros(3, 2)),
        "quantized": lambda: make_layer(rank, "column", True)(
            nc.Float8CurrentScalingQuantizer(nc.DType.kFloat8E4M3).quantize(torch.zeros(4, K))
        ),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (ValueError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def work(rank: int) -> Any:
    group, alone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(WORLD)][rank]
    results: dict[Any, Any] = {"errors": errors(rank)}
    for mode, sequence in MODES:
        for name in NAMES:
            results[name, mode, sequence] = two_steps(rank, mode, sequence, RECIPES[name], False)
        if mode != BARE:
            results["functional", mode, sequence] = run_functional(rank, mode, sequence)
    results["gathers"] = gathers(rank)
    for name, mode, sequence in COMPILED:
        torch._dynamo.reset()
        compiled = two_steps(rank, mode, sequence, RECIPES[name], True)
        results[name, mode, sequence, "compiled"] = compiled
    results["group"] = two_steps(rank, "row", True, None, False, group)
    copied = copy.deepcopy(make_layer(rank, "row", True, group))
    results["copied"] = train(copied, copied, *operands(rank, "row", True, 1), None)["y"]
    single = ops.BasicLinear(K, N, tensor_parallel_mode="row", tensor_parallel_group=alone, device="cpu")
    results["made"] = made_of(group)
    results["alone"] = (single.tensor_parallel_mode, tuple(single.weight.shape))
    for compiled in (False, True):
        torch._dynamo.reset()
        results["collectives", compiled] = run_collectives(rank, compiled)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(work, folder, WORLD, SECONDS)


def assembled(parts: list[Results], mode: str, sequence: bool) -> Results:
    """What one process has, from what two have."""
    joined = {}
    split: dict[str, int | None]
    if mode == "column":
        split = {"y": 1, "dx": 0 if sequence else None, "dw": 0, "db": 0}
    else:
        split = {
            "y": 0 if sequence else None,
            "dx": 1,
            "dw": 1,
            "db": None,
        }  # all rows' for every process's bias
    for name in parts[0]:
        a, b = (part[name] for part in parts)
        dim = split[name]
        if dim is None:
            assert torch.equal(a, b), f"{name} differs between the processes"
            joined[name] = a
        else:
            joined[name] = torch.cat([a, b], dim)
    return joined


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("mode", "sequence"), MODES)
def test_is_the_whole_layer(ranks: list[Any], name: str, mode: str, sequence: bool) -> None:
    ours = assembled([rank[name, mode, sequence] for rank in ranks], mode, sequence)
    layer = whole(mode)
    for seed in (0, 1):
        x, dy = draw(ROWS, K, seed=3 + seed), draw(ROWS, N, seed=5 + seed)
        expected = train(layer, layer, x, dy, RECIPES[name])
        nc.renew_delayed_scaling(layer)
    entry = {"none": "fp32_sum_order", "nvfp4": "fp4_layer"}.get(name, "fp8_layer")
    assert ours.keys() == expected.keys()
    for key in expected:
        assert ours[key].shape == expected[key].shape, key
        assert_close(ours[key], expected[key], entry)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nvfp4"])  # rounds gradients at random
@pytest.mark.parametrize("mode", ["column", "row", BARE])
def test_sequence_parallel_only_moves_rows(ranks: list[Any], name: str, mode: str) -> None:
    """Gathered first and quantized then, so nothing depends on who had which rows."""
    split, kept = ([rank[name, mode, flag] for rank in ranks] for flag in (True, False))
    ours, theirs = assembled(split, mode, True), assembled(kept, mode, False)
    for key in theirs:
        assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize(("name", "mode", "sequence"), COMPILED)
def test_compiled(ranks: list[Any], name: str, mode: str, sequence: bool) -> None:
    for rank in ranks:
        ours, theirs = rank[name, mode, sequence, "compiled"], rank[name, mode, sequence]
        assert all(torch.equal(ours[key], theirs[key]) and theirs[key].any() for key in theirs)


@pytest.mark.parametrize(("mode", "sequence"), [case for case in MODES if case[0] != BARE])
def test_functional_form(ranks: list[Any], mode: str, sequence: bool) -> None:
    assert all(rank["functional", mode, sequence] for rank in ranks)


def test_gathered_rows_are_not_saved(ranks: list[Any]) -> None:
    """The backward gathers again: the compiler does not keep what the forward gathered."""
    assert all(rank["gathers"] == [1, 1] for rank in ranks)


def test_groups(ranks: list[Any]) -> None:
    for rank in ranks:
        expected = rank["none", "row", True]
        assert all(torch.equal(rank["group"][key], expected[key]) for key in expected)
        assert torch.equal(rank["copied"], expected["y"])
        assert rank["alone"] == (None, (N, K))


def test_a_row_layer_sums_what_has_its_bias(ranks: list[Any]) -> None:
    shapes = {"basic_ops.0.weight": (N, K // WORLD), "basic_ops.1.bias": (N,)}
    sizes, local = (
        f"in_features={K}, out_features={N}, bias=True",
        f"in_features={K // WORLD}, out_features={N}",
    )
    for rank in ranks:
        for found, collective in zip(rank["made"], ("AllReduce", "ReduceScatter"), strict=True):
            names = ["BasicLinear", "Bias", collective]
            assert found == (names, shapes, sizes, [True, True], local)


@pytest.mark.parametrize("compiled", [False, True])
def test_collectives(ranks: list[Any], compiled: bool) -> None:
    xs = [draw(4, 3, seed=rank) for rank in range(WORLD)]
    grads = {n: [draw(n, 3, seed=10 + rank) for rank in range(WORLD)] for n in (2, 4, 8)}
    for rank in range(WORLD):
        found = ranks[rank]["collectives", compiled]
        assert torch.equal(found["gather"], torch.cat(xs))
        assert torch.equal(found["d gather"], half(sum(grads[8]), rank, 0))
        assert torch.equal(found["reduce"], sum(xs))
        assert torch.equal(found["d reduce"], grads[4][rank])
        assert torch.equal(found["scatter"], half(sum(xs), rank, 0))
        assert torch.equal(found["d scatter"], torch.cat(grads[2]))


def test_what_cannot_be_split(ranks: list[Any]) -> None:
    for rank in ranks:
        found = rank["errors"]
        assert found["out"].startswith("ValueError: out_features=97 does not divide among 2 processes")
        assert found["in"].startswith("ValueError: in_features=65 does not divide among 2 processes")
        assert found["in, with a bias"] == found["in"]
        assert found["rows"].startswith("ValueError: the first dim of shape (3, 2) does not divide")
        assert found["quantized"].startswith(
            "TypeError: the input of a sequence-parallel 'column' layer is quantized"
        )


def test_one_process_needs_no_group() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    for op in (ops.AllGather(), ops.AllReduce(), ops.ReduceScatter()):
        check_split_forward(op, x.detach())
        y = op(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        assert y is not x and torch.equal(y, x) and torch.equal(dx, 2 * x)
    layer = ops.Linear(K, N, device="cpu", tensor_parallel_mode="column", sequence_parallel=True)
    assert layer.basic_ops[0].tensor_parallel_mode is None and tuple(layer.weight.shape) == (N, K)
    layer = ops.Linear(K, N, device="cpu", tensor_parallel_mode="row", sequence_parallel=True)
    assert len(layer.basic_ops) == 2 and tuple(layer.weight.shape) == (N, K)
