"""The record of a parameter across ranks: on 4 ranks its parts make up the whole, whatever split it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from convert.models import Mixture
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.distributed import MoEDispatch, describe_parameter, describe_parameters

from .ranks_checks import of_all, run_checks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
WORLD, HIDDEN, FFN, EXPERTS = 4, 24, 56, 8


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def fill(model: nn.Module, whole: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Give every parameter of a whole model other values, or each rank's parts those of the whole."""
    values = {}
    for name, record in describe_parameters(model).items():
        values[record.name] = numbered(record.shape) if whole is None else whole[record.name]
        with torch.no_grad():
            for part in record.parts:
                box = values[record.name]
                for dim, (begin, length) in enumerate(zip(part.offset, part.shape)):
                    box = box.narrow(dim, begin, length)
                part.of(record.values()).copy_(box)
        assert record.layer is model.get_submodule(name.rpartition(".")[0])
    return values


def transformer(tp_group: Any = None, **options: Any) -> nn.Module:
    return nc.TransformerLayer(
        HIDDEN, FFN, 4, num_gqa_groups=4, tp_group=tp_group, set_parallel_mode=True, activation="swiglu",
        softmax_type="learnable", params_dtype=torch.float32, device="cpu", **options,
    )  # fmt: skip


def operations(group: Any = None) -> nn.Module:
    return nc.ops.Sequential(
        nc.ops.Linear(
            HIDDEN, FFN, device="cpu", tensor_parallel_mode=group and "column", tensor_parallel_group=group
        ),
        nc.ops.Linear(
            FFN, HIDDEN, device="cpu", tensor_parallel_mode=group and "row", tensor_parallel_group=group
        ),
    )


def grouped(experts: int, single: bool, **options: Any) -> nc.GroupedLinear:
    return nc.GroupedLinear(
        experts, HIDDEN, FFN, bias=False, device="cpu", single_grouped_parameter=single, **options
    )


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return nc.convert(nn.Sequential(Mixture(nn.Linear(32, 4, bias=False), "stacked")), "mxfp8")


def shared_by(model: nn.Module) -> Any:
    """For each parameter its whole, as the ranks have it, and what the record says of it."""
    return {
        one.name: (
            one.whole(),
            one.stored,
            one.gathered,
            one.replicated,
            [(split.by, split.ranks) for split in one.splits],
            [tuple(part) for part in one.parts],
        )
        for one in describe_parameters(model).values()
    }


def described(make: Any, spread: Any) -> Any:
    """A whole model's values and the record of a spread one that was given its parts of them."""
    whole = fill(make())
    model = spread()
    fill(model, whole)
    return whole, shared_by(model)


def checks(folder: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    tp = mesh["tp"].get_group()

    def sharded(model: Any, over: Any, **options: Any) -> Any:
        fully_shard(model, mesh=over, **options)
        return model

    def tp_styles() -> Any:
        model = nn.Sequential(nc.Linear(HIDDEN, FFN, device="cpu"), nc.Linear(FFN, HIDDEN, device="cpu"))
        styles = {"0": nc.distributed.ColwiseParallel(), "1": nc.distributed.RowwiseParallel()}
        return sharded(parallelize_module(model, mesh["tp"], styles), mesh["dp"])

    def experts(single: bool, **options: Any) -> Any:
        dispatch = MoEDispatch(EXPERTS, dist.group.WORLD)
        return nn.ModuleDict(
            {"experts": dispatch.local_experts(grouped(EXPERTS // WORLD, single, **options))}
        )

    def listed() -> Any:
        own = nn.ModuleList(nc.Linear(HIDDEN, FFN, device="cpu") for _ in range(EXPERTS // WORLD))
        return nn.Sequential(MoEDispatch(EXPERTS).local_experts(own))

    def local_experts_over_tp() -> Any:
        dispatch = MoEDispatch(EXPERTS, mesh["dp"].get_group())
        own = grouped(EXPERTS // 2, True, tp_group=tp, parallel_mode="column")
        return nn.ModuleDict({"experts": dispatch.local_experts(own)})

    def converted() -> Any:
        model = mixture()
        nc.distributed.expert_parallel(model, line)
        return model

    def stored() -> Any:
        with nc.quantized_model_init(recipe=nc.recipe.Float8BlockScaling()):
            model = nn.Sequential(nc.Linear(128, 512, device="cpu"))
        return sharded(model, line)

    def gathers() -> Any:
        """Before, during and after the gather of a model with quantized gathers."""
        model = nn.Sequential(
            nc.Linear(HIDDEN, 32, device="cpu", recipe="current"), nc.Linear(32, HIDDEN, device="cpu")
        )
        nc.distributed.shard(model, line)
        seen = []
        model[0].register_forward_hook(lambda *_: seen.append(shared_by(model)))
        seen.append(shared_by(model))
        model(torch.randn(4, HIDDEN)).sum().backward()
        return [*seen, shared_by(model)]

    def unknown() -> list[str]:
        told = []
        partial = nn.Linear(4, 4, bias=False)
        placed = torch.distributed.tensor.DTensor.from_local(
            partial.weight.detach(), line, [torch.distributed.tensor.Partial()]
        )
        partial.weight = nn.Parameter(placed)
        marked = nn.Linear(4, 4, bias=False)
        marked.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        for model in (nc.Linear(8, 8, device="cpu", parallel_mode="row", tp_size=2), partial, marked):
            with pytest.raises(ValueError) as error:
                describe_parameters(model)
            told.append(str(error.value))
        return told

    def plain(single: bool) -> Any:
        return lambda: nn.ModuleDict({"experts": grouped(EXPERTS, single)})

    def layers() -> Any:
        return nn.Sequential(nc.Linear(HIDDEN, FFN, device="cpu"), nc.Linear(FFN, HIDDEN, device="cpu"))

    apart = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
    pairs: dict[str, tuple[Any, Any]] = {
        "tp": (transformer, lambda: transformer(tp)),
        "tp blocks": (lambda: transformer(**apart), lambda: transformer(tp, **apart)),
        "tp fsdp": (transformer, lambda: sharded(transformer(tp), mesh["dp"])),
        "tp blocks fsdp": (
            lambda: transformer(**apart),
            lambda: sharded(transformer(tp, **apart), mesh["dp"]),
        ),
        "operations": (operations, lambda: operations(tp)),
        "styles fsdp": (layers, tp_styles),
        "fsdp": (layers, lambda: sharded(layers(), line)),
        "hsdp": (layers, lambda: sharded(layers(), mesh)),
        "experts": (plain(False), lambda: experts(False)),
        "experts in one": (plain(True), lambda: experts(True)),
        "experts listed": (
            lambda: nn.Sequential(
                nn.ModuleList(nc.Linear(HIDDEN, FFN, device="cpu") for _ in range(EXPERTS))
            ),
            listed,
        ),
        "experts tp": (plain(True), local_experts_over_tp),
        "converted": (mixture, converted),
    }
    return {
        **{name: lambda pair=pair: described(*pair) for name, pair in pairs.items()},
        "stored": lambda: shared_by(stored()),
        "gathers": gathers,
        "unknown": unknown,
        "rank": lambda: rank,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_checks(checks, tmp_path_factory.mktemp("described"), WORLD)


CASES = [
    "tp", "tp blocks", "tp fsdp", "tp blocks fsdp", "operations", "styles fsdp", "fsdp", "hsdp", "experts",
    "experts in one", "experts listed", "experts tp", "converted",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_the_ranks_make_up_the_whole(case: str, ranks: list[dict[str, Any]]) -> None:
    found = of_all(ranks, case)
    whole = found[0][0]
    assert set(whole) == {name for _, records in found for name in records}
    for name, expected in whole.items():
        held = torch.zeros(expected.shape, dtype=torch.int)
        for _, records in found:
            if name in records:
                value, *_, parts = records[name]
                assert torch.equal(value, expected), name
                for _, offset, shape in parts:
                    held[tuple(slice(o, o + n) for o, n in zip(offset, shape))] += 1
        times = held.unique().tolist()
        assert len(times) == 1 and times[0] >= 1, (name, times)
        replicated = all(records[name][3] for _, records in found if name in records)
        assert (times[0] == WORLD) == replicated, name


def test_a_split_layer_has_shares_of_blocks(ranks: list[dict[str, Any]]) -> None:
    """The gates and the others of a gated block, and fused projections that are not interleaved."""
    for name, count in (("layernorm_mlp.fc1_weight", 2), ("self_attention.layernorm_qkv.weight", 3)):
        for _, records in of_all(ranks, "tp blocks"):
            assert len(records[name][5]) == count
    splits = of_all(ranks, "tp blocks fsdp")[0][1]["layernorm_mlp.fc1_weight"][4]
    assert splits == [("tensor", 2), ("mesh", 2)]


def test_stored_and_gathered_codes(ranks: list[dict[str, Any]]) -> None:
    for records in of_all(ranks, "stored"):
        value, stored, gathered, _, splits, parts = records["0.weight"]
        assert (stored, gathered, splits) == ("codes", False, [("mesh", 4)])
        assert value.shape == (512, 128) and parts[0][2] == (128, 128)
    for before, during, after in of_all(ranks, "gathers"):
        assert {name: one[1] for name, one in before.items()}["0.weight"] == "master"
        assert [seen["0.weight"][2] for seen in (before, during, after)] == [False, True, False]
        for name in before:
            assert torch.equal(before[name][0], during[name][0])
            assert before[name][5] == during[name][5] == after[name][5]


def test_a_split_that_is_not_known_is_refused(ranks: list[dict[str, Any]]) -> None:
    for told in of_all(ranks, "unknown"):
        assert "weight is split over 2 ranks whose group is not known; give its layer tp_group=" in told[0]
        assert "a sum still to be made" in told[1]
        assert "weight is marked tensor_model_parallel by other code" in told[2]


# -- one process -------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_whole_model() -> None:
    model = nn.Sequential(
        torch.compile(nc.Linear(8, 8, bias=False, device="cpu")), nn.Linear(8, 8, bias=False)
    )
    assert [one.name for one in describe_parameters(model).values()] == ["0.weight", "1.weight"]
    first = describe_parameter(model, "0._orig_mod.weight")
    assert first == describe_parameter(model, "0.weight") and first.replicated and first.shape == (8, 8)
    with pytest.raises(ValueError, match="the model has no parameter '2.weight'"):
        describe_parameter(model, "2.weight")


def test_a_moment_is_described_like_its_parameter() -> None:
    record = describe_parameter(nc.Linear(8, 4, device="cpu"), "weight")
    moment = torch.ones(4, 8)
    assert record.of(moment).parts == record.parts and record.of(moment).held is moment
    with pytest.raises(ValueError, match=r"a tensor of shape \(8,\) belongs to weight"):
        record.of(torch.ones(8))


def test_local_experts_are_counted() -> None:
    dispatch = MoEDispatch(EXPERTS)
    assert dispatch.local_experts(grouped(EXPERTS, True)).num_gemms == EXPERTS
    for wrong in (grouped(2, True), nn.Linear(4, 4)):
        with pytest.raises(ValueError, match=f"pass GroupedLinear layers of {EXPERTS} groups"):
            dispatch.local_experts(wrong)
