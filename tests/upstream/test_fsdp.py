"""What narrowcast uses of FSDP2 and DTensor that is not public: there, and what happens where it is not."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loss import is_stated, outcomes
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.distributed import shard
from narrowcast.distributed.stand_in import Contents, StandIn
from narrowcast.tensors import local
from narrowcast.upstream import fsdp
from narrowcast.upstream.private import ENTRIES, UpstreamError

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]
SCENARIOS = f"{Path(__file__).with_name('distributed_scenarios.py')}"
RECIPE = nc.recipe.Float8CurrentScaling()


@pytest.fixture
def mesh(request: Any) -> Iterator[Any]:
    """One rank; two where a test says so, of which this is one and the other answers nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = getattr(request, "param", 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


TWO = pytest.mark.parametrize("mesh", [2], indirect=True)


def make(stored: bool = False) -> Any:
    with nc.quantized_model_init(enabled=stored, recipe=RECIPE):
        model = torch.nn.Sequential(nc.Linear(32, 64, device="cpu"), nc.Linear(64, 32, device="cpu"))
    nc.set_recipe(model, RECIPE)
    return model


def fully_sharded(mesh: Any, stored: bool = False, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(make(stored), mesh=mesh, **options)


class Seen(TorchDispatchMode):
    """Notes FSDP2's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fsdp":
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


# -- a DTensor's part --------------------------------------------------------------------------------------------------


def test_the_part_of_a_dtensor(mesh: Any) -> None:
    weight = fully_sharded(mesh)[0].weight
    assert fsdp.is_distributed(weight) and not fsdp.is_distributed(weight.to_local())
    assert fsdp.local_part(weight) is weight._local_tensor
    other = torch.zeros(32, 32)
    fsdp.replace_local_part(weight, other)
    assert weight._local_tensor is other


def test_the_part_of_a_dtensor_that_keeps_it_elsewhere() -> None:
    renamed: Any = types.SimpleNamespace(device_mesh=None)
    for use in (fsdp.local_part, local, lambda tensor: fsdp.replace_local_part(tensor, torch.ones(2))):
        with pytest.raises(UpstreamError, match="_local_tensor"):
            use(renamed)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_groups_of_parameters(mesh: Any) -> None:
    model = fully_sharded(mesh, reshard_after_forward=True)
    (group,) = fsdp.parameter_groups(model)
    assert fsdp.reduces_gradients(group) and fsdp.gathers_in_backward(group)
    assert not fsdp.keeps_after_backward(group)
    assert {id(part) for part in fsdp.sharded_parts(group)} == {id(local(p)) for p in model.parameters()}
    assert fsdp.gradient_dtypes(group) == {p.dtype for p in model.parameters()}
    assert not fsdp.has_reduction_hook(group)
    model.set_all_reduce_hook(print)
    assert fsdp.has_reduction_hook(group)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    assert not fsdp.reduces_gradients(group) and not fsdp.gathers_in_backward(group)
    assert fsdp.keeps_after_backward(group)


def test_without_the_state_of_a_module(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    model = fully_sharded(mesh)
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")
    with pytest.raises(UpstreamError, match="_get_fsdp_state.*use torch.distributed.fsdp.fully_shard"):
        fsdp.parameter_groups(model)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (fsdp.reduces_gradients, "reduce_grads"),
        (fsdp.gathers_in_backward, "post_forward_mesh_info"),
        (lambda group: fsdp._read(group, "mesh_info"), "mesh_info"),
        (fsdp.keeps_after_backward, "reshard_after_backward"),
        (fsdp.sharded_parts, "fsdp_params"),
        (fsdp.gradient_dtypes, "fsdp_params"),
        (fsdp.has_reduction_hook, "_all_reduce_hook"),
    ],
)
def test_without_an_attribute_of_a_group(read: Any, name: str) -> None:
    with pytest.raises(UpstreamError, match=f"FSDPParamGroup.{name}"):
        read(types.SimpleNamespace())


def test_without_the_sharded_parameter() -> None:
    for read in (fsdp.sharded_parts, fsdp.gradient_dtypes):
        with pytest.raises(UpstreamError, match="FSDPParam.sharded_param"):
            read(types.SimpleNamespace(fsdp_params=[types.SimpleNamespace()]))


def test_the_dtype_of_a_forward(mesh: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = fully_sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert fsdp.compute_dtypes(model) == {id(local(p)): torch.bfloat16 for p in model.parameters()}
    assert fsdp.compute_dtypes(fully_sharded(mesh)) == {}


def test_without_the_policy_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    part = types.SimpleNamespace(sharded_param=types.SimpleNamespace(_local_tensor=torch.zeros(1)))
    group = types.SimpleNamespace(fsdp_params=[part])
    monkeypatch.setattr(fsdp, "parameter_groups", lambda model: [group])
    with pytest.raises(UpstreamError, match="FSDPParam.mp_policy"):
        fsdp.compute_dtypes(torch.nn.Linear(1, 1))


# -- buffers -----------------------------------------------------------------------------------------------------------


@TWO
def test_operators_that_fsdp_applies_to_its_buffers(mesh: Any) -> None:
    with Seen() as seen:
        fully_sharded(mesh)(torch.ones(4, 32)).sum().backward()
    assert seen.names - {"fsdp::copy_"} <= set(fsdp.BUFFER_OPERATORS)
    assert {fsdp.BUFFER_OPERATORS[name] for name in seen.names - {"fsdp::copy_"}} == {
        "put gradients in",
        "put shards in",
        "take weights out",
    }


def halved(mesh: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = make()
    shard(
        model,
        mesh,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        reshard_after_forward=True,
    )
    return model


@TWO
@pytest.mark.parametrize("name", [*fsdp.BUFFER_OPERATORS])
def test_without_an_operator_on_buffers(name: str, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch 2.15 renamed one of them: an error says so, if this release applies the operator."""
    with Seen() as seen:
        fully_sharded(mesh)(torch.ones(4, 32)).sum().backward()
    monkeypatch.delitem(fsdp.BUFFER_OPERATORS, name)
    applied = name in seen.names
    expected = pytest.raises(UpstreamError, match="quantized_gather=False.*reduce_dtype")
    with expected if applied else contextlib.nullcontext():
        model = halved(mesh)
        for _ in range(2):
            model(torch.ones(4, 32)).sum().backward()


def test_an_operator_that_is_not_known() -> None:
    buffer = StandIn(Contents(), (4,), torch.float32, "cpu")
    with pytest.raises(UpstreamError, match=r"aten\.mul.* of a buffer that tensors are sent without"):
        buffer.mul(2)
    with pytest.raises(UpstreamError, match=r"aten\.view\.dtype"):
        buffer.view(torch.uint8)


# -- sharding ----------------------------------------------------------------------------------------------------------


@TWO
def test_sharding_is_seen_from_inside(mesh: Any) -> None:
    model = fully_sharded(mesh, stored=True)
    weight = local(model[0].weight)
    assert isinstance(weight, nc.QuantizedTensor) and weight.shape == (32, 32)
    assert weight._is_shard and weight._shards is not None and weight._shards.size() == 2
    assert fsdp.sharding_caller() == ""


def test_sharding_is_seen_wherever_fsdp_keeps_its_files(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked for is the public function, not a path."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    monkeypatch.setitem(vars(_fsdp_param), "__name__", "torch.sharding.parameter")
    assert isinstance(local(fully_sharded(mesh, stored=True)[0].weight), nc.QuantizedTensor)


def test_replicas_are_shards_of_one_rank(mesh: Any) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = replicate(make(stored=True), mesh=mesh)
    assert isinstance(local(model[0].weight), nc.QuantizedTensor)
    model(torch.ones(4, 32)).sum().backward()


def test_sharding_by_an_unknown_function(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on with plain values."""
    monkeypatch.setattr(fsdp, "_sharding_code", lambda modules: (frozenset(), frozenset()))
    with pytest.raises(UpstreamError, match="fully_shard.*build the model without quantized_model_init"):
        fully_sharded(mesh, stored=True)


class Renamed:
    """A caller that holds a parameter in another form."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def ask(self) -> Any:
        return fsdp.current_sharding()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"_module_info": types.SimpleNamespace()},
        {"_module_info": types.SimpleNamespace(shared_modules=[])},
        {"_module_info": types.SimpleNamespace(shared_modules=[]), "mesh_info": types.SimpleNamespace()},
    ],
    ids=["module_info", "shared_modules", "mesh_info", "shard_mesh_size"],
)
def test_sharding_of_an_unknown_form(fields: dict[str, Any]) -> None:
    with pytest.raises(UpstreamError, match="FSDPParam._module_info and .mesh_info"):
        Renamed(**fields).ask()


# -- managed modules and styles ----------------------------------------------------------------------------------------


def test_fsdp_marks_the_modules_whose_parameters_it_writes(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fsdp.is_managed(fully_sharded(mesh)[0]) and not fsdp.is_managed(make()[0])
    monkeypatch.setattr(fsdp, "_marks_modules", lambda: False)
    with pytest.raises(UpstreamError, match="_is_fsdp_managed_module.*without is_first_microbatch"):
        fsdp.is_managed(make()[0])


@TWO
def test_styles_are_seen_when_they_place_a_parameter(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer: Any = parallelize_module(nc.Linear(32, 64, device="cpu"), mesh, ColwiseParallel())
    assert layer._placed and layer.out_features == 32
    import torch.distributed.tensor.parallel as parallel

    class Other:
        pass

    for name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        monkeypatch.setattr(parallel, name, Other)
    with pytest.raises(UpstreamError, match="styles of narrowcast.distributed"):
        parallelize_module(nc.Linear(32, 64, device="cpu"), mesh, ColwiseParallel())


# -- losses in processes of their own ----------------------------------------------------------------------------------


def test_without_a_name_with_a_path() -> None:
    names = ["torch._chunk_cat"]
    found = outcomes(names, f"{SCENARIOS}:sharded", ("torch", "torch.distributed.fsdp"))
    assert [name for name in names if not is_stated(name, found)] == []


def test_every_entry_is_here() -> None:
    words = ("fsdp", "FSDP", "DTensor", "_chunk_cat", "parallel's styles")
    assert len([name for name in ENTRIES if any(word in name for word in words)]) == 19
