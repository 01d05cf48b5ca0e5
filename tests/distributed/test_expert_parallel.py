"""Converted mixtures whose experts are over two ranks, the rest under FSDP2, against one process; compiled, too."""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from convert.models import Experts, Llama4TextExperts, Mixture
from ranks import process_group_removed, run_ranks
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.testing import assert_close

WORLD, SECONDS = 2, 240
WIDTH, TOKENS = 32, 11
EVEN = 20  # tokens that four ranks have equal shares of
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
Results = dict[str, Tensor]


class Scaled(nn.Module):
    """As Llama 4 has its mixture: one expert of each token, whose input the router scales; and a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4, bias=False), Llama4TextExperts()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        best, index = logits.topk(1, dim=1)
        scores = torch.full_like(logits, float("-inf")).scatter(1, index, best).sigmoid()
        routed = (x * scores.t().unsqueeze(2)).reshape(-1, WIDTH)
        return self.shared(x) + self.experts(routed).view(4, -1, WIDTH).sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        gates = [nn.Linear(WIDTH, 4, bias=False) for _ in range(2)]
        self.blocks = nn.ModuleList([*(Mixture(gate, "stacked") for gate in gates), Scaled()])
        self.blocks[1].experts = Experts(transposed=True, bias=True)  # as gpt-oss has them

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def model_of(recipe: str) -> Model:
    return nc.convert(Model(), recipe, skip=["**.*shared*"])


def batch(part: slice) -> Tensor:
    return torch.randn(WORLD * TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))[part]


def step(model: nn.Module, x: Tensor) -> Results:
    """Result and gradients, whole."""
    y = model(x)
    y.square().mean().backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    whole = {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()
    }
    model.zero_grad()
    return {"y": y.detach(), **{name: grad.clone() for name, grad in whole.items()}}


def written_afterwards(mesh: Any, recipe: str, x: Tensor) -> tuple[Results, list[int]]:
    """A step with experts that were written after their parameters were sharded; what the sizes of the state are."""
    model = model_of(recipe)
    nc.distributed.expert_parallel(model, mesh, quantizer=None, align_size=16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(4.0)
    return step(model, x), [
        value.shape[-1] for name, value in model.named_buffers() if name.endswith("scale")
    ]


def reduced(mesh: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank's experts have collected, before and after a reduction over all ranks."""
    model = model_of("delayed")
    nc.distributed.expert_parallel(model, mesh, quantizer=None, align_size=16)
    step(model, x)
    amaxes = [one for name, one in model.named_buffers() if ".experts." in name and name.endswith("amax")]
    before = [one.clone() for one in amaxes]
    nc.reduce_delayed_scaling(model)
    return before, amaxes


def resumed(
    mesh: Any, recipe: str, x: Tensor, folder: str, whole: bool
) -> tuple[Results, list[str], list[str]]:
    """A step after a checkpoint was loaded, its keys, and what was told; ``whole``: all ranks had all experts."""
    models = [model_of(recipe) for _ in range(2)]
    for model in models[whole:]:
        nc.distributed.expert_parallel(model, mesh, quantizer=None, align_size=16)
    step(models[0], batch(slice(TOKENS)) if whole else x)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    path = f"{folder}/{recipe}{' whole' if whole else ''}"
    nc.distributed.save_checkpoint(path, models[0], optimizers[0])
    step(models[1], 100 * x)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        nc.distributed.load_checkpoint(path, models[1], optimizers[1])
    found = step(models[1], x)
    nc.reduce_delayed_scaling(models[1])
    return found, [*models[1].state_dict()], [str(one.message) for one in told]


def work(rank: int) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, own = init_device_mesh("cpu", (WORLD,)), slice(rank * TOKENS, (rank + 1) * TOKENS)
    results: dict[str, Any] = {}
    for recipe, compiled in (("current", False), ("delayed", True), ("mxfp8", False)):
        model = model_of(recipe)
        experts = nc.distributed.expert_parallel(model, mesh, quantizer=None, align_size=16)
        if compiled:  # the others are compiled in test_expert_parallel_huggingface.py
            block = model.blocks[1]
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        for block in model.blocks:
            fully_shard(block, mesh=mesh, ignored_params=experts)
        results[recipe] = [step(model, batch(own)) for _ in range(1 + compiled)]
        if recipe == "current":
            options = StateDictOptions(full_state_dict=True)
            results["saved"] = {
                name: value.clone() for name, value in get_model_state_dict(model, options=options).items()
            }
            results["local"] = sum(one.to_local().numel() for one in experts), len(experts)
    results["written"] = [written_afterwards(mesh, recipe, batch(own)) for recipe in ("delayed", "current")]
    results["reduced"] = reduced(mesh, batch(own))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    results["resumed"] = [
        [resumed(mesh, recipe, batch(own), folder[0], whole) for recipe in ("delayed", "current")]
        for whole in (False, True)
    ]
    model = model_of("current")
    nc.distributed.expert_parallel(model, mesh, average_gradients=False, quantizer=None, align_size=16)
    results["summed"] = step(model, batch(own))["blocks.0.experts.down_proj"]
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), WORLD, SECONDS)


def test_scales_of_experts_are_those_of_their_rank(ranks: list[Any]) -> None:
    """A maximum over ranks would be that of different experts."""
    for before, after in (rank["reduced"] for rank in ranks):
        assert before and all(map(torch.equal, before, after))
    assert not any(map(torch.equal, ranks[0]["reduced"][0], ranks[1]["reduced"][0]))


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_is_one_process(ranks: list[Any], recipe: str) -> None:
    """The experts see the rows of all ranks, each quantized by its own group: the gradients of one process."""
    model = model_of(recipe)
    for number in range(len(ranks[0][recipe])):
        expected = step(model, batch(slice(None)))
        ours = [rank[recipe][number] for rank in ranks]
        assert_close(torch.cat([one["y"] for one in ours]), expected.pop("y"), "fp8_flips")
        assert expected.keys() == ours[0].keys() - {"y"}
        # rows that Llama 4's router scaled to 0 have gradients, and are not sent: those no longer set a scale
        follows_amax = recipe != "mxfp8" or number
        tolerance = "fp8_layer" if follows_amax else "fp8_flips"
        for name, grad in expected.items():
            for rank in ours:
                assert_close(rank[name], grad, tolerance)


def test_gradients_may_be_summed(ranks: list[Any]) -> None:
    for rank in ranks:
        averaged = rank["current"][0]["blocks.0.experts.down_proj"]
        assert_close(rank["summed"] / WORLD, averaged, "fp8_flips")


def test_a_first_step_follows_experts_that_were_written_afterwards(ranks: list[Any]) -> None:
    """As those of a checkpoint are: under delayed scaling it is that of current scaling."""
    for rank in ranks:
        (delayed, sizes), (current, _) = rank["written"]
        assert delayed.keys() == current.keys() and set(sizes) == {4 * 4 // WORLD}
        for name, value in current.items():
            assert torch.equal(delayed[name], value), name


@pytest.mark.parametrize("whole", [False, True])
def test_scales_of_experts_begin_anew_after_a_checkpoint(ranks: list[Any], whole: bool) -> None:
    """Every rank has those of its experts, and a checkpoint those of no experts, or of all."""
    for rank in ranks:
        (delayed, keys, told), (current, others, _) = rank["resumed"][whole]
        assert keys == others and any("layers; scales start anew" in one for one in told)
        for name, value in current.items():
            assert torch.equal(delayed[name], value), name


def test_checkpoints_are_those_of_the_model(ranks: list[Any]) -> None:
    plain = Model().state_dict()
    assert ranks[0]["saved"].keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(ranks[0]["saved"][name], value), name
    size, count = ranks[0]["local"]
    sharded = [value for name, value in plain.items() if ".experts." in name]
    assert (2 * size, count) == (sum(one.numel() for one in sharded), len(sharded))


# -- experts over one dim of a mesh, replicas of them over the other ---------------------------------------------------


def replicated(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    x = batch(slice(EVEN)).chunk(4)[rank]
    wires: dict[str, Any] = {"quantizer": None, "align_size": 16}
    both, sharded, told = model_of("mxfp8"), model_of("mxfp8"), model_of("mxfp8")
    nc.distributed.expert_parallel(both, mesh, **wires)
    nc.distributed.expert_parallel(sharded, mesh["ep"], **wires)
    for block in sharded.blocks:
        fully_shard(block.experts, mesh=mesh["dp"])
        fully_shard(block, mesh=mesh._flatten(f"all {id(block)}"))
    nc.distributed.expert_parallel(told, mesh["ep"], **wires)
    with pytest.raises(
        RuntimeError, match="nothing sums the gradients: give expert_parallel the mesh of both"
    ):
        told(x)
    with torch.no_grad():
        told(x)
    scales = {way: amaxes_of_replicas(way, mesh, x) for way in ("both", "sharded", "local")}
    return {"both": step(both, x), "sharded": step(sharded, x), "scales": scales, "warned": warned(mesh)}


def delayed_experts(mesh: Any) -> nn.Module:
    """A mixture in which the experts alone scale with delay."""
    model = nc.convert(
        Mixture(nn.Linear(WIDTH, 4, bias=False), "stacked"), "delayed", skip=["*gate", "shared"]
    )
    nc.distributed.expert_parallel(model, mesh, quantizer=None, align_size=16)
    return model


def amaxes_of_replicas(way: str, mesh: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What a rank's experts have collected, before and after a reduction over all ranks."""
    from torch.distributed.fsdp import fully_shard

    if way == "local":
        experts = nc.GroupedLinear(2, WIDTH, WIDTH, device="cpu", recipe=nc.recipe.DelayedScaling())
        nc.distributed.MoEDispatch(4, mesh["ep"].get_group()).local_experts(experts)
        model: nn.Module = nn.ModuleDict({"experts": experts})
        experts(x, torch.tensor([2, len(x) - 2])).square().mean().backward()
    else:
        model = delayed_experts(mesh if way == "both" else mesh["ep"])
        if way == "sharded":
            fully_shard(model.experts, mesh=mesh["dp"])
        model(x).square().mean().backward()
    amaxes = [one for name, one in model.named_buffers() if "amax" in name and "history" not in name]
    before = [one.clone() for one in amaxes]
    nc.reduce_delayed_scaling(model)
    return before, amaxes


def warned(mesh: Any) -> list[bool]:
    """Whether ranks hear that nothing is reduced: of experts that no other rank has, and of those with replicas."""
    found = []
    for one in (mesh._flatten("every"), mesh):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = delayed_experts(one)
            model(torch.ones(3, WIDTH)).sum().backward()
            nc.renew_delayed_scaling(model)
        found.append(any("there are several ranks" in str(one.message) for one in told))
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(replicated, tmp_path_factory.mktemp("four"), 4, SECONDS)


def test_replicas_of_experts_have_the_gradients_of_one_process(four: list[Any]) -> None:
    """With a mesh of both dims, or FSDP2 over the other one; without either a forward raises."""
    expected = step(model_of("mxfp8"), batch(slice(EVEN)))
    for found in four:
        for way in ("both", "sharded"):
            for name, grad in expected.items():
                if ".experts." in name:
                    assert_close(found[way][name], grad, "fp8_flips")


@pytest.mark.parametrize("way", ["both", "sharded", "local"])
def test_replicas_of_experts_agree_on_amaxes_and_others_do_not_mix(four: list[Any], way: str) -> None:
    found = [rank["scales"][way] for rank in four]
    wanted = [[*map(torch.maximum, found[rank][0], found[(rank + 2) % 4][0])] for rank in range(4)]
    for (before, after), both in zip(found, wanted):
        assert before and all(map(torch.equal, after, both))
    assert not any(map(torch.equal, wanted[0], wanted[1]))
    assert not any(map(torch.equal, found[0][0], found[2][0]))


def test_ranks_hear_that_nothing_is_reduced_if_they_hold_the_same_experts(four: list[Any]) -> None:
    assert [rank["warned"] for rank in four] == [[False, True]] * 4


def test_bad_arguments() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.raises(TypeError, match="mesh is an int; pass a DeviceMesh"):
        nc.distributed.expert_parallel(Model(), 2)
    with process_group_removed():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(ValueError, match="call nc.convert first"):
            nc.distributed.expert_parallel(Model(), init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="mesh has 3 dimensions"):
            nc.distributed.expert_parallel(model_of("current"), init_device_mesh("cpu", (1, 1, 1)))
        stored = nc.convert(Model().requires_grad_(False), "current", weights="stored", small=True)
        with pytest.raises(
            ValueError,
            match=r"of '[a-z0-9.]+' are stored as codes, which ranks do not share; call narrowcast.revert",
        ):
            nc.distributed.expert_parallel(stored, init_device_mesh("cpu", (1,)))
        model = model_of("current")
        x = batch(slice(None))
        expected = step(copy.deepcopy(model), x)
        nc.distributed.expert_parallel(model, init_device_mesh("cpu", (1,)), quantizer=None)
        for name, value in step(model, x).items():
            assert_close(value, expected[name], "fp8_layer")
