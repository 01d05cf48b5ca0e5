"""Checkpoints saved on 1, 2 and 4 ranks in one layout and loaded on others: equal to the bit, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.distributed import (
    MoEDispatch,
    clip_grad_norm_,
    describe_parameters,
    load_checkpoint,
    save_checkpoint,
)

from .ranks_checks import of_all, run_checks
from .test_described import EXPERTS, HIDDEN, fill, grouped, mixture, operations, transformer

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed"),
    pytest.mark.slow,
]
LAYOUTS = (
    "fsdp",
    "hsdp",
    "tp",
    "tp fsdp",
    "operations",
    "experts",
    "experts in one",
    "experts delayed",
    "pipeline",
    "converted",
)

NORMS = (2.0, float("inf"))


def groups_of(mesh: Any, ranks: int) -> tuple[Any, Any]:
    """The group that splits layers, and the dim of the mesh that shards them beside it."""
    return (mesh["tp"].get_group(), mesh["dp"]) if ranks == 4 else (dist.group.WORLD, None)


def make(layout: str, mesh: Any = None) -> nn.Module:
    """The model of a layout on as many ranks as there are; whole without a mesh."""
    ranks = 1 if mesh is None else mesh.size()
    torch.manual_seed(0)
    if layout.startswith("experts"):
        options = {"recipe": nc.recipe.DelayedScaling()} if "delayed" in layout else {}
        own = grouped(EXPERTS // ranks, layout == "experts in one", **options)
        own = own if mesh is None else MoEDispatch(EXPERTS).local_experts(own)
        return nn.ModuleDict({"norm": nc.LayerNorm(HIDDEN, device="cpu"), "experts": own})
    if layout == "pipeline":
        layers = {f"{number}": nc.Linear(HIDDEN, HIDDEN, device="cpu") for number in range(4)}
        rank = 0 if mesh is None else dist.get_rank()
        return nn.ModuleDict(dict([*layers.items()][rank * 4 // ranks : (rank + 1) * 4 // ranks]))
    if layout == "converted":
        model = mixture()
        if mesh is not None:
            nc.distributed.expert_parallel(model, mesh._flatten() if mesh.ndim > 1 else mesh)
        return model
    if layout in ("fsdp", "hsdp"):
        return sharded(transformer(), 0 if mesh is None else ranks, layout == "hsdp")
    tp, over = (None, None) if mesh is None else groups_of(mesh, ranks)
    model = operations(tp) if layout == "operations" else transformer(tp)
    if "fsdp" in layout and over is not None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=over)
    return model


def sharded(model: nn.Module, ranks: int, replicas: bool) -> nn.Module:
    """The model under FSDP2 of so many ranks, or of replicas in two halves of them; whole without ranks."""
    if ranks:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = ((2, ranks // 2), ("replicate", "shard")) if replicas else ((ranks,), ("shard",))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model


def filled(layout: str, mesh: Any = None) -> tuple[nn.Module, Any]:
    """The model with its parts of one model's values, and an optimizer with moments that follow from them."""
    model = make(layout, mesh)
    whole = fill(make(layout))
    fill(model, whole)
    optimizer = optimizer_of(model)
    for record in describe_parameters(model).values():
        record.parameter.grad = (record.parameter.detach() * 0.01).cos()
    optimizer.step()
    for record in describe_parameters(model, buffers=True).values():
        if record.attribute.endswith(("scale", "amax_history", "amax")):
            state = torch.arange(float(torch.Size(record.shape).numel())).view(record.shape)
            for part in record.parts:
                own = state[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape))]
                part.of(record.held).copy_(own)
    return model, optimizer


def optimizer_of(model: nn.Module) -> Any:
    norms = [one for name, one in model.named_parameters() if "norm" in name]
    others = [one for name, one in model.named_parameters() if "norm" not in name]
    groups = [{"params": others}, {"params": norms, "lr": 0.5}]
    return torch.optim.AdamW(groups[: 2 if norms else 1], lr=1e-2)


def contents(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Everything that a checkpoint holds, whole, by its name in the whole model."""
    found = {}
    for record in describe_parameters(model, buffers=True).values():
        found[record.name] = record.whole().clone()
        for name, value in optimizer.state.get(record.parameter, {}).items():
            found[f"{record.name}/{name}"] = record.of(value).whole() if value.dim() else value
    for number, group in enumerate(optimizer.param_groups):
        found[f"lr {number}"] = torch.tensor(group["lr"])
    return found


def clipped(layout: str, mesh: Any = None, most: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The norm of gradients that follow from one model's values, and what is left of them after clipping, whole."""
    model, _ = filled(layout, mesh)
    stages = dist.group.WORLD if mesh is not None and layout == "pipeline" else None
    norm = clip_grad_norm_(model, 3.0, most, pipeline=stages)
    records = describe_parameters(model).values()
    return norm, {one.name: one.of(one.parameter.grad).whole().clone() for one in records}


def loaded(layout: str, path: Path, mesh: Any = None) -> dict[str, Tensor]:
    model = make(layout, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_of(model)
    load_checkpoint(path, model, optimizer)
    return contents(model, optimizer)


def mesh_of(ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if ranks == 4:
        for _ in range(8):  # PyTorch numbers groups: those of the mesh begin at 9, and "10" sorts before it
            dist.new_group()
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (ranks,))


def saves(place: Path, mesh: Any, layout: str) -> dict[str, Tensor]:
    model, optimizer = filled(layout, mesh)
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as told:
        save_checkpoint(place / f"{mesh.size()} {layout}", model, optimizer)
    assert told.call_count == 3, "what ranks must agree on, where to write, and the end"
    return contents(model, optimizer)


def refusals(place: Path, mesh: Any) -> dict[str, str]:
    """What is told of models whose ranks hold what a checkpoint would mix; nothing may be left of them."""
    rank, told = dist.get_rank(), {}

    def differing(value: Any) -> nn.Module:
        layer = nc.Linear(8, 8, device="cpu")
        with torch.no_grad():
            layer.weight.fill_(value)
        return layer

    def mixed_optimizer() -> tuple[nn.Module, Any]:
        model = differing(0.0)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + rank))

    def delayed() -> nn.Module:
        layer = nc.Linear(16, 16, device="cpu", recipe=nc.recipe.DelayedScaling())
        with torch.no_grad():
            layer.weight.fill_(1.0)
            layer.scale.fill_(float(1 + rank))
        return layer

    moments = differing(0.0)
    adam = torch.optim.AdamW(moments.parameters())
    moments.weight.grad = torch.full((8, 8), float(rank))
    adam.step()
    with torch.no_grad():
        moments.weight.zero_()
    undeclared = grouped(EXPERTS // 2, False)
    with torch.no_grad():
        undeclared.weight0.fill_(float(rank))
    sharded = nc.Linear(8, 8, device="cpu", parallel_mode="column", tp_size=2)
    cases: dict[str, tuple[Any, ...]] = {
        "experts that nobody declared": (undeclared,),
        "stages with equal names": (nn.Sequential(differing(float(rank))),),
        "stages of other shapes": (nn.Linear(4 + rank, 4),),
        "moments": (moments, adam),
        "options": mixed_optimizer(),
        "delayed": (delayed(),),
        "no group": (sharded,),
        "one rank": (differing(0.0) if rank else sharded,),
    }
    for name, case in cases.items():
        try:
            save_checkpoint(place / "refused", *case)
            told[name] = "saved"
        except (ValueError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    try:
        save_checkpoint(place / "refused", differing(0.0), extra={"rank": rank})
    except ValueError as error:
        told["extra"] = str(error)
    group = dist.new_group(backend="gloo")
    saving = save_checkpoint(place / "refused", differing(float(rank)), group=group, asynchronous=True)
    told["asynchronous"] = f"{type(saving.exception()).__name__}"
    dist.barrier()
    left = [entry.name for entry in place.iterdir() if "refused" in entry.name]
    return {**told, "left": str(left)}


def replicas(place: Path) -> list[float]:
    """Running statistics of replicas, of which ``DistributedDataParallel`` keeps the first rank's."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.full((8, 4), float(rank)) * torch.arange(8).view(8, 1)).sum().backward()
    save_checkpoint(place / "replicas", model)
    dist.barrier()
    alone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    load_checkpoint(place / "replicas", alone)
    return [*alone[1].running_mean.tolist(), *model.module[1].running_mean.tolist()]


def two(folder: str) -> dict[str, Any]:
    mesh, place = mesh_of(2), Path(folder).parent
    checks: dict[str, Any] = {}
    for layout in LAYOUTS:
        checks[f"loads {layout} of 1"] = lambda layout=layout: loaded(layout, place / f"1 {layout}", mesh)
        checks[f"saves {layout}"] = lambda layout=layout: saves(place, mesh, layout)
        for most in NORMS:
            checks[f"clips {layout} {most}"] = lambda layout=layout, most=most: clipped(layout, mesh, most)
    checks["refusals"] = lambda: refusals(place, mesh)
    checks["replicas"] = lambda: replicas(place)
    checks["stages of a whole model"] = lambda: stages_of_a_whole_model(place)
    return checks


def stages_of_a_whole_model(place: Path) -> list[str]:
    """A stage whose names begin at 0 again must not read the first stage's values."""
    stage = nn.ModuleDict({f"{number}": nc.Linear(HIDDEN, HIDDEN, device="cpu") for number in range(2)})
    with pytest.raises(ValueError) as error:
        load_checkpoint(place / "1 pipeline", stage)
    return [str(error.value)]


def four(folder: str) -> dict[str, Any]:
    mesh, place = mesh_of(4), Path(folder).parent
    checks: dict[str, Any] = {}
    for layout in LAYOUTS:
        for ranks in (1, 2):
            checks[f"loads {layout} of {ranks}"] = lambda layout=layout, ranks=ranks: loaded(
                layout, place / f"{ranks} {layout}", mesh
            )
        checks[f"saves {layout}"] = lambda layout=layout: saves(place, mesh, layout)
        for most in NORMS:
            checks[f"clips {layout} {most}"] = lambda layout=layout, most=most: clipped(layout, mesh, most)
    return checks


def two_of_four(folder: str) -> dict[str, Any]:
    mesh, place = mesh_of(2), Path(folder).parent
    return {
        f"loads {layout} of 4": lambda layout=layout: loaded(layout, place / f"4 {layout}", mesh)
        for layout in LAYOUTS
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, dict[str, Tensor]]:
    """Checkpoints of one process, and what they hold."""
    found = {}
    for layout in LAYOUTS:
        model, optimizer = filled(layout)
        save_checkpoint(place / f"1 {layout}", model, optimizer)
        found[layout] = contents(model, optimizer)
    return found


@pytest.fixture(scope="module")
def of_two(place: Path, whole: Any) -> list[dict[str, Any]]:
    (place / "two").mkdir()
    return run_checks(two, place / "two", 2)


@pytest.fixture(scope="module")
def of_four(place: Path, of_two: Any) -> list[dict[str, Any]]:
    (place / "four").mkdir()
    return run_checks(four, place / "four", 4)


@pytest.fixture(scope="module")
def of_two_again(place: Path, of_four: Any) -> list[dict[str, Any]]:
    (place / "again").mkdir()
    return run_checks(two_of_four, place / "again", 2)


def assert_together_equal(found: list[dict[str, Tensor]], expected: dict[str, Tensor], layout: str) -> None:
    """What ranks hold is the whole, and nothing is on no rank."""
    assert {name for one in found for name in one} == set(expected)
    for one in found:
        for name, value in one.items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_and_loaded_by_one_two_and_four(
    layout: str, whole: Any, of_two: Any, of_four: Any, of_two_again: Any
) -> None:
    for ranks in (of_two, of_four):
        assert_together_equal(of_all(ranks, f"saves {layout}"), whole[layout], layout)
    for ranks, saved_by in ((of_two, 1), (of_four, 1), (of_four, 2), (of_two_again, 4)):
        assert_together_equal(of_all(ranks, f"loads {layout} of {saved_by}"), whole[layout], layout)


@pytest.mark.parametrize("most", NORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_clipped_as_in_one_process(layout: str, most: float, of_two: Any, of_four: Any) -> None:
    model, _ = filled(layout)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 3.0, most)
    wanted = {name: one.grad for name, one in model.named_parameters()}
    for ranks in (of_two, of_four):
        for norm, grads in of_all(ranks, f"clips {layout} {most}"):
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
            for name, grad in grads.items():
                torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-7)


def test_norms_that_are_none() -> None:
    for wrong in ({"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0.0}, {"max_norm": float("nan")}):
        with pytest.raises(ValueError, match=r"max_norm is .* and norm_type is"):
            clip_grad_norm_(nn.Linear(2, 2), **wrong)
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), float("nan"))
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_back_to_one(layout: str, place: Path, whole: Any, of_two: Any, of_four: Any) -> None:
    for ranks in (2, 4):
        assert_together_equal([loaded(layout, place / f"{ranks} {layout}")], whole[layout], layout)


@pytest.mark.parametrize(
    "case, told",
    [
        (
            "experts that nobody declared",
            r"ranks hold different copies of model\.weight0, .* MoEDispatch\.local_exp",
        ),
        ("stages with equal names", r"different copies of model\.0\.weight, .* nn\.ModuleDict"),
        ("stages of other shapes", r"different copies of model\.weight"),
        (
            "moments",
            r"different copies of optimizer\.state\.weight\.exp_avg, optimizer\.state\.weight\.exp_avg_sq",
        ),
        ("options", r"group 0 of the optimizer has lr=0\.2 on rank 1 and 0\.1 before"),
        ("delayed", r"different copies of model\.scale, .* call nc\.reduce_delayed_scaling"),
        ("no group", r"weight is split over 2 ranks whose group is not known"),
        ("extra", "different copies of extra, .* a list of each rank's values"),
    ],
)
def test_what_a_checkpoint_would_mix_is_refused_on_every_rank(case: str, told: str, of_two: Any) -> None:
    import re

    for found in of_all(of_two, "refusals"):
        assert re.search(told, found[case]), found[case]
        assert len(found[case]) < 330 and found["left"] == "[]"


def test_an_error_of_one_rank_is_raised_on_all(of_two: Any) -> None:
    first, second = of_all(of_two, "refusals")
    assert first["one rank"].startswith("ValueError: weight is split")
    assert second["one rank"].startswith("RuntimeError: rank 0 could not go on, so no rank does: ValueError")
    assert first["asynchronous"] == second["asynchronous"] == "ValueError"


def test_of_buffers_that_replicas_broadcast_the_first_rank_s_count(of_two: Any) -> None:
    (saved, own), (also, other) = ((one[:4], one[4:]) for one in of_all(of_two, "replicas"))
    assert saved == also == own != other


def test_a_stage_reads_no_other_stage_s_values(of_two: Any) -> None:
    for (told,) in of_all(of_two, "stages of a whole model"):
        assert (
            "no rank's model has model.2.weight, model.2.bias, model.3.weight and 1 more of the checkpoint"
            in told
        )
