"""Processes share the modules, or only their rows: 2 and 4 of them against one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from ranks import run_ranks
from recipes import RECIPES
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import narrowcast as nc
from narrowcast.functional import replay
from narrowcast.testing import assert_close, relative_error
from narrowcast.testing.tolerances import TOLERANCES

WORLD, SECONDS = 4, 240
ROWS, BATCH = 128, 2  # of one process: shares of so many rows are gathered as bytes in every format
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
NAMES = ("none", "delayed", "current", "mxfp8", "block", "nvfp4")
BLOCKS = ("mxfp8", "block")
RECIPES = {
    **RECIPES,
    "powers": nc.recipe.Float8CurrentScaling(use_power_2_scales=True),
    "square inputs": nc.recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "square gradients": nc.recipe.Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2),
    "dequantized": nc.recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "high_precision": nc.recipe.MXFP8BlockScaling(backward_override="high_precision"),
}
OVERRIDES = ("dequantized", "high_precision")
Results = dict[str, Tensor]


SPLIT: dict[str, dict[str, int]] = {
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "norm": {"weight": 0, "bias": 0},
    "mlp": {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1},
}
"""Along which dim a parameter is split; the others are whole."""


class Case(NamedTuple):
    """A layer that ``size`` processes share. ``kind``: "column", "row", "norm" or "mlp"."""

    kind: str
    sequence: bool
    size: int
    recipe: str
    rows: int = ROWS
    compiled: bool = False

    @property
    def features(self) -> int:
        return 128 * self.size


CASES = [
    *[Case(kind, True, size, name) for kind in ("column", "row") for size in (2, 4) for name in NAMES],
    *[Case(kind, False, 2, name) for kind in ("column", "row") for name in NAMES],
    *[Case(kind, True, 2, name, rows=8) for kind in ("column", "row") for name in (*BLOCKS, "nvfp4")],
    *[Case(kind, True, 2, name) for kind in ("norm", "mlp") for name in NAMES],
    *[Case(kind, sequence, 2, "powers") for kind in SPLIT for sequence in (False, True)],
    *[Case(kind, True, 2, name) for kind in SPLIT for name in OVERRIDES],
    *[Case(kind, True, 2, "dequantized", rows=8) for kind in ("column", "norm")],
    Case("mlp", True, 4, "block"),
    Case("column", True, 2, "square inputs"),
    Case("row", True, 2, "square gradients"),
    Case("norm", True, 2, "mxfp8", rows=8),
]
COMPILED = [
    Case("column", True, 2, "current", compiled=True),
    Case("row", True, 2, "mxfp8", compiled=True),
    Case("norm", True, 2, "delayed", compiled=True),
    Case("mlp", True, 2, "block", compiled=True),
]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def share(tensor: Tensor, rank: int, size: int, dim: int) -> Tensor:
    return tensor.chunk(size, dim)[rank].contiguous()


def build(case: Case, group: Any = None, **options: Any) -> Any:
    """The layer of a case, or with a group a process's part of it, of other parameters."""
    features = case.features
    if group is not None:
        options = {"tp_group": group, "sequence_parallel": case.sequence, **options}
    if case.kind in ("column", "row"):
        mode = {} if group is None else {"parallel_mode": case.kind}
        return nc.Linear(features, features, device="cpu", **mode, **options)
    if case.kind == "norm":
        mode = {} if group is None else {"parallel_mode": "column"}
        return nc.LayerNormLinear(features, features, device="cpu", **mode, **options)
    return nc.LayerNormMLP(
        features, features, device="cpu", set_parallel_mode=True, activation="swiglu", **options
    )


def parts(case: Case, name: str, value: Tensor, rank: int) -> Tensor:
    """A process's part of a parameter, or of its gradient."""
    dim = SPLIT[case.kind].get(name)
    if dim is None:
        return value
    if case.kind == "mlp" and name.startswith("fc1"):  # its share of the gates, and of what they let through
        halves = value.chunk(2)
        return torch.cat([share(half, rank, case.size, 0) for half in halves])
    return share(value, rank, case.size, dim)


@torch.no_grad()
def fill(case: Case, layer: Any, rank: int | None) -> None:
    whole = build(case)
    for index, (name, parameter) in enumerate(whole.named_parameters()):
        value = draw(*parameter.shape, seed=10 + index) * (0.1 if parameter.dim() == 2 else 1.0)
        getattr(layer, name).copy_(value if rank is None else parts(case, name, value, rank))


def operands(case: Case, step: int) -> tuple[Tensor, Tensor]:
    shape = (case.rows * case.size // BATCH, BATCH, case.features)
    x = draw(*shape, seed=100 + step)
    x[: shape[0] // case.size] *= 8  # the amax of a share is not that of the whole
    return x, draw(*shape, seed=200 + step)


def split_operands(case: Case, rank: int, step: int) -> tuple[Tensor, Tensor]:
    x, dy = operands(case, step)
    if case.sequence and case.kind != "row":
        x = share(x, rank, case.size, 0)
    if case.sequence and case.kind in ("row", "mlp"):
        dy = share(dy, rank, case.size, 0)
    if case.kind == "row":
        x = share(x, rank, case.size, 2)
    if case.kind in ("column", "norm"):
        dy = share(dy, rank, case.size, 2)
    return x, dy


def train(case: Case, layer: Any, ops: Callable[[int], tuple[Tensor, Tensor]], group: Any = None) -> Results:
    """What the second step gives, when delayed scaling has scales."""
    torch._dynamo.reset()
    forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if case.compiled else layer
    for step in (0, 1):
        torch.manual_seed(7)
        x, dy = ops(step)
        x = x.clone().requires_grad_(True)
        with nc.autocast(enabled=RECIPES[case.recipe] is not None, recipe=RECIPES[case.recipe]):
            y = forward(x)
        parameters = dict(layer.named_parameters())
        dx, *grads = torch.autograd.grad(y, (x, *parameters.values()), dy)
        if group is not None:
            nc.reduce_delayed_scaling(layer, group)
        nc.renew_delayed_scaling(layer)
    return {"y": y.detach(), "dx": dx, **dict(zip(parameters, grads, strict=True))}


def run_split(case: Case, groups: dict[int, Any]) -> Results:
    rank = dist.get_rank() % case.size
    layer = build(case, groups[case.size])
    fill(case, layer, rank)
    return train(case, layer, lambda step: split_operands(case, rank, step), groups[case.size])


# -- what else the processes try ---------------------------------------------------------------------------------------


def graphs(group: Any, name: str) -> tuple[list[int], int]:
    """(gathers of data in the graphs of forward and backward, elements of the largest tensor saved between them)."""
    gathers: list[int] = []
    saved: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        gathers.append(sum("all_gather" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    case = Case("column", True, 2, name)
    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    layer = build(case, group, bias=False)
    x, dy = split_operands(case, dist.get_rank(group), 0)
    forward = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with nc.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = forward(x.requires_grad_(True))
        y.backward(dy)
    return gathers, max(saved)


def marks(group: Any) -> dict[str, Any]:
    layers = {
        "column": build(Case("column", True, 2, ""), group),
        "row": build(Case("row", True, 2, ""), group),
        "norm": build(Case("norm", True, 2, ""), group),
        "mlp": build(Case("mlp", True, 2, ""), group),
    }
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    return {
        f"{kind}.{name}": [getattr(parameter, attribute, None) for attribute in names]
        for kind, layer in layers.items()
        for name, parameter in layer.named_parameters()
    }


class Tracker:
    """Other numbers for every process, and the default ones untouched."""

    def __init__(self) -> None:
        self.forks: list[str] = []

    @contextlib.contextmanager
    def fork(self, name: str = "own") -> Iterator[None]:
        self.forks.append(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(dist.get_rank())
            yield


TRACKER = Tracker()


def tracker() -> Tracker:
    return TRACKER


def elsewhere(group: Any, options: dict[str, Any]) -> bool:
    """Whether weight gradients that do not go autograd's way are those that do."""
    case = Case("column", True, 2, "current")
    x, dy = split_operands(case, dist.get_rank(group), 0)
    grads = []
    for chosen in ({}, options):
        layer = build(case, group, **chosen)
        fill(case, layer, dist.get_rank(group))
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        with nc.autocast(recipe=RECIPES["current"]):
            layer(x).backward(dy)
        layer.backward_dw()
        grads.append(layer.weight.main_grad if layer.weight.grad is None else layer.weight.grad)
    return torch.equal(*grads)


def replayed(group: Any) -> dict[str, tuple[bool, set[str]]]:
    """By kind, whether a layer that is replayed computes what one does that runs itself, and what each stage became."""
    found, rank = {}, dist.get_rank(group)
    for kind, name in (("column", "current"), ("row", "delayed"), ("norm", "mxfp8"), ("mlp", "nvfp4")):
        case, results = Case(kind, True, 2, name), []
        for enabled in (False, True):
            replay._known.clear()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(replay, "ON_CPU", True)
                patched.setattr(replay, "ENABLED", enabled)
                layer = build(case, group)
                fill(case, layer, rank)
                results.append([])
                for step in range(4):
                    x, dy = split_operands(case, rank, step)
                    torch.manual_seed(step)
                    with nc.autocast(recipe=RECIPES[name]):
                        y = layer(x.requires_grad_(True))
                    results[-1] += [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)]
        kinds = {"stage" if value is key[0] else "recording" for key, value in replay._known.items()}
        found[kind] = (all(map(torch.equal, *results)), kinds)
    replay._known.clear()
    return found


def others(group: Any) -> dict[str, Any]:
    """Groups that come later, copies, options of the norm's output, checkpoints, initialisation, errors."""
    found: dict[str, Any] = {}
    case, rank = Case("mlp", True, 2, "current"), dist.get_rank(group)
    expected = run_split(case, {2: group})
    layer = build(case, group, checkpoint=True)
    fill(case, layer, rank)
    found["checkpoint"] = train(case, layer, lambda step: split_operands(case, rank, step))
    found["expected"] = expected
    for key, options in {
        "main_grad": {"fuse_wgrad_accumulation": True},
        "delayed": {"delay_wgrad_compute": True},
        "original": {"save_original_input": True},
    }.items():
        found[key] = elsewhere(group, options)
    later = build(case, None, tp_size=2, sequence_parallel=True)
    fill(case, later, rank)
    try:
        later(torch.randn(4, 2, 256))
    except RuntimeError as error:
        found["no group"] = str(error)
    later.set_tensor_parallel_group(group)
    found["later"] = train(case, copy.deepcopy(later), lambda step: split_operands(case, rank, step))
    case = Case("norm", True, 2, "mxfp8")
    layer = build(case, group, return_layernorm_output_gathered=True)
    x, dy = split_operands(case, rank, 0)
    with nc.autocast(recipe=RECIPES["mxfp8"]):
        out, normalized = layer(x.requires_grad_(True))
    (alone,) = torch.autograd.grad(out, x, dy, retain_graph=True)
    both = torch.autograd.grad((out, normalized), x, (dy, torch.ones_like(normalized)))[0]
    found["gathered"] = (tuple(normalized.shape), bool((alone != both).any()))
    found["replayed"] = replayed(group)
    grouped = nc.GroupedLinear(2, 8, 8, bias=False, device="cpu", tp_group=group, parallel_mode="column")
    grouped.set_tensor_parallel_group(group)
    found["grouped"] = (grouped.tp_size, tuple(grouped.weight0.shape))
    torch.manual_seed(3)
    drawn = build(Case("column", True, 2, ""), group, get_rng_state_tracker=tracker, rng_tracker_name="model")
    found["drawn"], found["forks"], found["next"] = drawn.weight.detach(), TRACKER.forks, torch.rand(1)
    for key, attempt in {
        "size": lambda: nc.Linear(8, 8, tp_group=group, tp_size=4),
        "features": lambda: nc.Linear(9, 8, tp_group=group, parallel_mode="row"),
        "later": lambda: later.set_tensor_parallel_group(dist.group.WORLD),
        "rows": lambda: nc.Linear(
            8, 8, device="cpu", tp_group=group, parallel_mode="row", sequence_parallel=True
        )(torch.zeros(3, 4)),
        "norm": lambda: nc.LayerNormLinear(8, 8, tp_group=group, parallel_mode="row"),
    }.items():
        try:
            attempt()
        except ValueError as error:
            found["error", key] = str(error)
    return found


def transformer(group: Any) -> dict[str, float]:
    """How far a split TransformerLayer, with QKV in one weight and in three, is from the whole one."""
    rank, found = dist.get_rank(group), {}
    x, dy = draw(2 * ROWS, BATCH, 64, seed=1), draw(2 * ROWS, BATCH, 64, seed=2)
    for fused in (True, False):
        options: dict[str, Any] = {"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        options |= {"fuse_qkv_params": fused, "set_parallel_mode": True, "device": "cpu"}
        whole = nc.TransformerLayer(64, 128, 4, **options)
        layer = nc.TransformerLayer(64, 128, 4, tp_group=group, tp_size=2, sequence_parallel=True, **options)
        theirs = dict(whole.named_parameters())
        with torch.no_grad():
            for index, (name, parameter) in enumerate(layer.named_parameters()):
                value = theirs[name].copy_(draw(*theirs[name].shape, seed=index) * 0.1)
                dims = [dim for dim in range(value.dim()) if value.shape[dim] != parameter.shape[dim]]
                parameter.copy_(share(value, rank, 2, dims[0]) if dims else value)
        own = share(x, rank, 2, 0).requires_grad_(True)
        all_rows = x.clone().requires_grad_(True)
        with nc.autocast(recipe=RECIPES["mxfp8"]):
            y, expected = layer(own), whole(all_rows)
        (dx,) = torch.autograd.grad(y, own, share(dy, rank, 2, 0))
        (whole_dx,) = torch.autograd.grad(expected, all_rows, dy)
        found[f"y {fused}"] = relative_error(y.detach(), share(expected.detach(), rank, 2, 0))
        found[f"dx {fused}"] = relative_error(dx, share(whole_dx, rank, 2, 0))
    return found


def work(rank: int) -> Any:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
    results: dict[Any, Any] = {}
    for case in (*CASES, *COMPILED):
        if case.size == WORLD or (rank < 2) == (CASES.index(case._replace(compiled=False)) % 2 == 0):
            results[case] = run_split(case, groups)
    if rank < 2:
        results["graphs"] = {name: graphs(groups[2], name) for name in ("none", "current", "mxfp8")}
    else:
        results["marks"], results["others"] = marks(groups[2]), others(groups[2])
        results["transformer"] = transformer(groups[2])
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    torch.serialization.add_safe_globals([Case])
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), WORLD, SECONDS)


def joined(case: Case, found: list[Results]) -> Results:
    """What one process has, from what ``size`` have."""
    whole: Results = {}
    columns = {"y": case.kind in ("column", "norm"), "dx": case.kind == "row"}
    for name in found[0]:
        values = [results[name] for results in found]
        if name in columns:
            if columns[name] or case.sequence:
                whole[name] = torch.cat(values, 2 if columns[name] else 0)
                continue
        elif name in SPLIT[case.kind]:
            if case.kind == "mlp" and name.startswith("fc1"):
                halves = [value.chunk(2) for value in values]
                whole[name] = torch.cat([half[side] for side in (0, 1) for half in halves])
            else:
                whole[name] = torch.cat(values, SPLIT[case.kind][name])
            continue
        elif case.sequence:  # each process has the sum over its rows
            whole[name] = torch.stack(values).sum(0)
            continue
        assert all(torch.equal(value, values[0]) for value in values), name
        whole[name] = values[0]
    return whole


def of_case(ranks: list[dict[Any, Any]], case: Case) -> list[Results]:
    found = [results[case] for results in ranks if case in results]
    assert len(found) == case.size
    return found


# With scales that are powers of two, only what is lost below the smallest FP8 number depends on them.
ENTRIES = {"none": "fp32_sum_order", "nvfp4": "fp4_other_scales", "powers": "fp8_flips"}
ENTRIES |= dict.fromkeys(OVERRIDES, "fp8_flips")
# Where every product has the operands of one process, and sums them over the same rows and columns.
SAME_PRODUCTS = {"column": ("y", "weight"), "row": ("dx", "weight"), "norm": ("y", "weight"), "mlp": ()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_is_the_whole_layer(ranks: list[Any], case: Case) -> None:
    ours, layer = joined(case, of_case(ranks, case)), build(case)
    fill(case, layer, None)
    expected = train(case, layer, lambda step: operands(case, step))
    entry = ENTRIES.get(case.recipe, "fp8_other_scales")
    assert ours.keys() == expected.keys()
    for key in expected:
        assert ours[key].shape == expected[key].shape, key
        same = case.recipe in BLOCKS and key in SAME_PRODUCTS[case.kind] and case.rows == ROWS
        assert_close(ours[key], expected[key], "fp32_sum_order" if same else entry)


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: "-".join(map(str, case)))
def test_compiled(ranks: list[Any], case: Case) -> None:
    eager = of_case(ranks, case._replace(compiled=False))
    for ours, theirs in zip(of_case(ranks, case), eager, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) and theirs[key].any() for key in theirs)


def test_what_was_gathered_is_not_saved(ranks: list[Any]) -> None:
    """The backward gathers again, and nothing between the two has the rows of all processes."""
    for found in (ranks[0]["graphs"], ranks[1]["graphs"]):
        share = ROWS * 256
        assert found["none"] == ([1, 1], max(share, 128 * 256))
        assert found["current"] == ([1, 1], max(share, 128 * 256))
        assert found["mxfp8"] == ([2, 2], max(share, 128 * 256))  # data and scales


def test_a_transformer_layer_is_the_whole_one(ranks: list[Any]) -> None:
    for found in (ranks[2]["transformer"], ranks[3]["transformer"]):
        assert found.keys() == {"y True", "dx True", "y False", "dx False"}
        assert max(found.values()) <= TOLERANCES["fp8_flips"].relative


def test_parameters_tell_how_they_are_split(ranks: list[Any]) -> None:
    found = ranks[2]["marks"]
    rows, columns, whole = [True, 0, 1, None], [True, 1, 1, None], [None, None, None, True]
    assert found == {
        "column.weight": rows,
        "column.bias": rows,
        "row.weight": columns,
        "row.bias": whole,
        "norm.layer_norm_weight": whole,
        "norm.layer_norm_bias": whole,
        "norm.weight": rows,
        "norm.bias": rows,
        "mlp.layer_norm_weight": whole,
        "mlp.layer_norm_bias": whole,
        "mlp.fc1_weight": rows,
        "mlp.fc1_bias": rows,
        "mlp.fc2_weight": columns,
        "mlp.fc2_bias": whole,
    }


def test_checkpoints_copies_and_groups_that_come_later(ranks: list[Any]) -> None:
    for rank in (2, 3):
        found = ranks[rank]["others"]
        for key in ("checkpoint", "later"):
            for name, value in found["expected"].items():
                assert torch.equal(found[key][name], value), (key, name)
        assert "made with tp_size=2 and no tp_group; call set_tensor_parallel_group" in found["no group"]
        assert found["gathered"] == ((ROWS, BATCH, 256), True)
        assert found["grouped"] == (2, (4, 8))
        assert found["main_grad"] and found["delayed"] and found["original"]


def test_split_layers_are_replayed(ranks: list[Any]) -> None:
    for rank in (2, 3):
        for kind, (equal, kinds) in ranks[rank]["others"]["replayed"].items():
            assert equal and kinds == {"recording"}, kind


def test_parts_are_drawn_in_the_trackers_fork(ranks: list[Any]) -> None:
    first, second = ranks[2]["others"], ranks[3]["others"]
    assert first["forks"] == ["model"]
    assert not torch.equal(first["drawn"], second["drawn"])
    assert torch.equal(first["next"], second["next"])


def test_what_cannot_be_split(ranks: list[Any]) -> None:
    found = ranks[2]["others"]
    assert found["error", "size"].startswith("tp_size is 4, and tp_group has 2 processes")
    assert found["error", "features"].startswith("in_features=9 does not divide among tp_size=2 processes")
    assert found["error", "later"].startswith(
        "tp_group is of 4 processes, and the layer was made for tp_size=2"
    )
    assert found["error", "rows"].startswith(
        "the first dim of shape (3, 8) does not divide among 2 processes"
    )
    assert found["error", "norm"].startswith(
        "parallel_mode='row' splits the columns that the norm needs whole"
    )


def test_one_process_communicates_nothing() -> None:
    targets: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    layer = nc.LayerNormMLP(32, 64, device="cpu", set_parallel_mode=True, sequence_parallel=True, tp_size=1)
    forward = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))
    with nc.autocast(recipe=RECIPES["current"]):
        forward(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert targets and not any("c10d" in target for target in targets)
    assert not hasattr(layer.fc1_weight, "tensor_model_parallel")
