"""``narrowcast.distributed.shard``: the bits of FSDP2 that gathers in high precision, and fewer bytes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from quantizers.catalog import ONE_OF_EACH
from recipes import QUANTIZED
from serving.test_weights import Experts as Stack
from torch.distributed.tensor import DTensor, Shard
from torch.torch_version import TorchVersion

import narrowcast as nc
from narrowcast import reference
from narrowcast.distributed import gradient_exchange, quantize_master_weights, shard
from narrowcast.distributed.shard import _check_stored, _Chosen, _Rewrap, _tile
from narrowcast.distributed.sharded_weight import ShardedWeight, WeightGather
from narrowcast.nn import quantize_weight, scatter_workspace
from narrowcast.tensors import local

from .blocks import Model, make_model, train
from .ranks_checks import of_all, run_checks
from .test_data_parallel import Recomputed, compiled, fsdp2, recomputed

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")

SIZES = dict.fromkeys(("block", "mxfp8", "nvfp4"), (256, 512, 1))


def make(recipe: str) -> Model:
    return make_model(recipe, *SIZES.get(recipe, (64, 96, 2)))


def values(model: Any) -> dict[str, torch.Tensor]:
    return {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for key, value in model.state_dict().items()
    }


def against_plain(
    recipe: str,
    mesh: Any,
    before: Any = None,
    after: Any = None,
    microbatches: int = 1,
    recompute: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Training with quantized gathers and without; what the layers saw as their weights."""
    width = SIZES.get(recipe, (64,))[0]
    plain = fsdp2(make(recipe), mesh, **options)
    expected = train(plain, width=width, microbatches=microbatches)
    model: Any = make(recipe)
    if before is not None:
        model = before(model)
    receipt: Any = nc.receipt(
        shard(model, mesh, blocks=model.blocks, recompute=recompute, **options)
    ).sharding
    if after is not None:
        model = after(model)
    seen: set[str] = set()
    if before is None and after is None:
        for layer in model.modules():
            if isinstance(layer, nc.Linear):
                layer.register_forward_pre_hook(lambda layer, args: seen.add(type(layer.weight).__name__))
    synchronize = model.set_requires_gradient_sync if microbatches > 1 else None
    copied, copy_out = [], torch.split_with_sizes_copy

    def counted(*args: Any, out: list[torch.Tensor], **options: Any) -> Any:
        copied.append(sum(one.nbytes for one in out))
        return copy_out(*args, out=out, **options)

    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions,
        mock.patch.object(torch, "split_with_sizes_copy", counted),
    ):
        losses = train(model, width=width, microbatches=microbatches, before=synchronize)
    equal = all(
        torch.equal(a, b) for a, b in zip(values(model).values(), values(plain).values(), strict=True)
    )
    return {
        "losses": losses,
        "expected": expected,
        "equal": equal,
        "seen": seen,
        "reductions": reductions.call_count,
        "share": receipt.gathered_bytes / receipt.plain_bytes,
        "copied": sum(copied) / receipt.gathered_bytes,
    }


def kept(mesh: Any) -> dict[str, Any]:
    """What becomes of a sharded weight that is made from meta, saved, loaded and moved."""
    with torch.device("meta"):
        model = Model(device="meta")
    nc.set_recipe(model, QUANTIZED["current"])
    shard(model, mesh, blocks=model.blocks)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    weight = lambda: local(model.head.weight)  # noqa: E731
    found = {"made": type(weight()).__name__}
    saved = copy.deepcopy(model.state_dict())
    found["saved"] = {type(local(value)).__name__ for value in saved.values()}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    losses = train(model, 2)
    found["trained"] = type(weight()).__name__
    with torch.no_grad():  # the head stays gathered in between
        found["evaluated"] = torch.equal(*(model(torch.ones(4, 64)) for _ in range(2)))
    for assign in (False, True):
        model.load_state_dict(saved, assign=assign)
        found[f"loaded-{assign}"] = type(weight()).__name__
        found[f"same-{assign}"] = train(model, 2) == losses
    model.to(torch.bfloat16)
    found["cast"] = (type(weight()).__name__, weight().dtype)
    return found


GRADIENTS = [(768, 512), (768, 1), (9, 768), (9, 1), (32, 9), (32, 1)]  # large, uneven and small ones
STORED_SIZES = {"block": (256, 512, 1), "mxfp8": (64, 128, 1), "nvfp4": (64, 128, 1)}


def load_whole(model: Any, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def stored(recipe: str, way: str, mesh: Any) -> dict[str, Any]:
    """Training with weights that are stored quantized, sharded and begun in some way, and in one process."""
    shape = STORED_SIZES.get(recipe, (64, 96, 2))
    plain = make_model(recipe, *shape, quantized=True)
    given = {name: value * 1.5 for name, value in make_model(recipe, *shape).state_dict().items()}
    model = make_model(recipe, *shape, quantized=True, device="meta" if way == "meta" else "cpu")
    share = 0.0
    if way == "shard":
        receipt: Any = nc.receipt(shard(model, mesh, blocks=model.blocks)).sharding
        share = receipt.gathered_bytes / receipt.plain_bytes
        assert not any(
            one.reason for one in receipt.parameters if "weight" in one.name and len(one.shape) == 2
        )
    else:
        fsdp2(model, mesh)
    if way == "meta":
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    if way in ("meta", "loaded"):  # in front of the first forward
        plain.load_state_dict(given)
        load_whole(model, given)
    seen = [type(local(p)).__name__ for name, p in model.named_parameters() if "weight" in name]
    losses = []
    for one in (plain, model):
        torch.manual_seed(1)  # of stochastic rounding
        adam = nc.optimizers.FusedAdam(one.parameters(), master_weights=True) if way == "masters" else None
        losses.append(train(one, width=shape[0], optimizer=adam))
    equal = all(
        torch.equal(a, b) for a, b in zip(values(model).values(), values(plain).values(), strict=True)
    )
    saved = {type(local(value)).__name__ for value in model.state_dict().values()}
    model.load_state_dict(model.state_dict())
    return {
        "losses": losses[1],
        "expected": losses[0],
        "equal": equal,
        "seen": seen,
        "saved": saved,
        "share": share,
    }


def written(mesh: Any) -> list[bool]:
    """Masters of this rank's rows, in each format, and in NVFP4 that quantizes rows and columns differently."""
    from torch.distributed.fsdp import fully_shard

    found, rank = [], mesh.get_local_rank()
    recipes = {**QUANTIZED, "nvfp4 rows": nc.recipe.NVFP4BlockScaling(disable_2d_quantization=True)}
    for recipe in recipes.values():
        with nc.quantized_model_init(recipe=recipe):
            whole, layer = (nc.Linear(64, 256, device="cpu", bias=False, recipe=recipe) for _ in range(2))
        fully_shard(layer, mesh=mesh)
        values = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            whole.weight.copy_(values)
        rows = values.chunk(2)[rank]
        quantize_master_weights([layer.weight], [rows], [rank * rows.numel()])
        with pytest.raises(ValueError, match="not this rank's shard"):
            quantize_master_weights([layer.weight], [rows], [(1 - rank) * rows.numel()])
        outs, x = [], values[:32].clone().requires_grad_()
        for one in (whole, layer):
            torch.manual_seed(0)
            out = one(x)
            outs.append((out, torch.autograd.grad(out.sum(), x)[0]))
        found.append(all(torch.equal(a, b) for a, b in zip(*outs)))
    return found


def scattered(mesh: Any) -> list[bool]:
    """A kept weight of every format that is scattered over the ranks, and gathered for later microbatches."""
    group, found = mesh.get_group(), []
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    for quantizer in ONE_OF_EACH.values():
        kept, _ = quantize_weight(tensor=weight, quantizer=quantizer, cache=True)
        expected = [buffer.clone() for buffer in kept.get_data_tensors() if buffer is not None]
        scatter_workspace(kept, group)
        held = sum(buffer.nbytes for buffer in kept.get_data_tensors() if buffer is not None)
        found.append(held < 0.52 * sum(buffer.nbytes for buffer in expected))
        quantize_weight(
            tensor=weight, quantizer=quantizer, workspace=kept, update_workspace=False, fsdp_group=group
        )
        whole = [buffer for buffer in kept.get_data_tensors() if buffer is not None]
        found.append(all(torch.equal(a, b) for a, b in zip(whole, expected, strict=True)))
        quantize_weight(tensor=2 * weight, quantizer=quantizer, workspace=kept, fsdp_group=group)
        found.append(torch.equal(kept.dequantize(), quantizer.quantize(2 * weight).dequantize()))
    return found


def operations(mesh: Any) -> tuple[Any, Any]:
    """Operations with quantized gathers: their losses, and those without."""
    losses = []
    for quantized in (True, False):
        torch.manual_seed(0)
        model = nc.ops.Sequential(
            nc.ops.LayerNorm(64, device="cpu"),
            nc.ops.Linear(64, 96, device="cpu"),
            nc.ops.GELU(),
            nc.ops.Linear(96, 64, device="cpu"),
        )
        nc.set_recipe(model, QUANTIZED["current"])
        receipt: Any = nc.receipt(shard(model, mesh, quantized_gather=quantized)).sharding
        assert sum(one.quantized for one in receipt.parameters) == 2 * quantized
        losses.append(train(model))
    return losses[0], losses[1]


def reduced(
    mesh: Any,
    microbatches: int,
    reduce_dtype: Any = torch.float32,
    kept: Any = torch.float32,
    hook: Any = None,
) -> dict[str, Any]:
    """Gradients of other rows on every rank, reduced by FSDP2 and by ``shard``; bytes sent past it and by it.

    ``kept``: dtype of the parameters; ``hook``: of FSDP2, which reads the sums.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)}
    gradients, sent, scattered, real = [], 0, [0, 0], gradient_exchange.reduce_scatter_single
    summed: set[torch.dtype] = set()

    def scatter(out: torch.Tensor, *args: Any, **options: Any) -> Any:
        scattered[own] += out.nbytes  # what the other rank gets
        return real(out, *args, **options)

    for own in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 768), torch.nn.Linear(768, 9), torch.nn.Linear(9, 32)]
        model: Any = torch.nn.Sequential(*layers).to(kept)
        if own:
            shard(model, blocks=layers[1:2], **options)
        else:
            fully_shard(layers[1], **options)
            fully_shard(model, **options)
        if hook is not None:
            for part in (layers[1], model):
                part.set_all_reduce_hook(hook)
        rows = torch.Generator().manual_seed(dist.get_rank())
        with (
            mock.patch.object(reference.reduction, "rank_sum", wraps=reference.reduction.rank_sum) as sums,
            mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as exchanged,
            mock.patch.object(gradient_exchange, "reduce_scatter_single", scatter),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                for left in reversed(range(microbatches)):
                    model.set_requires_gradient_sync(not left)
                    model(torch.randn(16, 512, generator=rows)).float().square().mean().backward()
        gradients.append([local(parameter.grad).clone() for parameter in model.parameters()])
        summed |= {call.args[4].dtype for call in sums.call_args_list}
        sent += sum(one.tensor.nbytes for call in exchanged.call_args_list for one in call.args[0][::2])
    said = sum("accumulated gradients travel" in str(one.message) for one in caught)
    equal = all(map(torch.equal, *gradients))
    return {"equal": equal, "sent": sent, "scattered": scattered[True], "said": said, "summed": summed}


class Experts(torch.nn.Module):
    """Two layers of four groups, of which one is empty: their weights in one parameter, and in one each."""

    def __init__(self, recipe: str, stored: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 256 if recipe in SIZES and (recipe == "block" or not stored) else 128
        one = (False, False) if stored or recipe == "nvfp4" else (True, False)
        with nc.quantized_model_init(enabled=stored, recipe=QUANTIZED[recipe]):
            self.blocks = torch.nn.ModuleList(
                nc.GroupedLinear(4, width, width, device="cpu", single_grouped_weight=single)
                for single in one
            )
        self.register_buffer("splits", torch.tensor([7, 9, 0, 16]))
        nc.set_recipe(self, QUANTIZED[recipe])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.blocks:
            x = x + layer(x, self.splits)
        return x


class Mixture(torch.nn.Module):
    """Experts as Transformers stacks them, of which one gets no token."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([Stack(4, 256, 128)])
        for parameter in self.parameters():
            parameter.data.mul_(0.05)
        nc.convert(self, QUANTIZED[recipe], small=True)
        self.blocks[0].in_features = 256  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (torch.arange(len(x)) % 3)[:, None]
        return x + self.blocks[0](x, index, x.new_ones(len(x), 1))


def grouped(recipe: str, mesh: Any) -> dict[str, Any]:
    """Layers of groups with quantized gathers and without; with stored weights in shards and in one process."""
    recipe, *how = recipe.split()
    is_stored = how == ["stored"]
    plain, model = (Mixture(recipe) if how == ["stacked"] else Experts(recipe, is_stored) for _ in range(2))
    receipt: Any = nc.receipt(shard(model, mesh, blocks=model.blocks, recompute=False)).sharding
    plain = plain if is_stored else fsdp2(plain, mesh)
    width, losses = model.blocks[0].in_features, []
    for one in (model, plain):
        torch.manual_seed(1)
        losses.append(train(one, width=width))
    pairs = zip(values(model).values(), values(plain).values(), strict=True)
    equal = all(torch.equal(a, b) for a, b in pairs)
    return {"losses": losses, "equal": equal, "share": receipt.gathered_bytes / receipt.plain_bytes}


def frozen(weights: Any, mesh: Any) -> dict[str, Any]:
    """Frozen weights in four bits, in shards and in one process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 192)).bfloat16()
    nc.convert(model.requires_grad_(False), QUANTIZED["current"], weights=weights)
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)

    def step() -> list[torch.Tensor]:
        out = model(x)
        return [out, *torch.autograd.grad(out.float().square().sum(), x)]

    alone = step()
    receipt: Any = nc.receipt(shard(model, mesh)).sharding
    equal = all(map(torch.equal, step(), alone))
    return {"equal": equal, "share": receipt.gathered_bytes / receipt.plain_bytes}


def checks_of_two(folder: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, dict[str, Any]] = {
        "current": {},
        "delayed": {},
        "block": {},
        "current mixed_precision": {"mp_policy": policy},
        "delayed mixed_precision": {"mp_policy": policy},
        "block recomputed": {"before": lambda m: recomputed(m, Recomputed)},
        "delayed recomputed": {"before": lambda m: recomputed(m, Recomputed)},
        "current compiled": {"before": compiled},
        "delayed accumulated": {"microbatches": 2},
        "current kept": {"reshard_after_forward": False},
        "nvfp4": {},
        "mxfp8 directed compiled": {"before": compiled, "recompute": False},
    }
    checks: dict[str, Any] = {
        name: lambda name=name, given=given: against_plain(name.split()[0], mesh, **given)
        for name, given in options.items()
    }
    checks["subclass"] = lambda: kept(mesh)
    for name in STORED:
        checks[f"stored {name}"] = lambda name=name: stored(*name.split(), mesh)
    checks["written"] = lambda: written(mesh)
    checks["scattered"] = lambda: scattered(mesh)
    for recipe in GROUPED:
        checks[f"grouped {recipe}"] = lambda recipe=recipe: grouped(recipe, mesh)
    checks["operations"] = lambda: operations(mesh)
    for weights in ("nvfp4", "mxfp4"):
        checks[f"frozen {weights}"] = lambda weights=weights: frozen(weights, mesh)
    for count in (1, 2):
        for dtype in (torch.float32, None):
            checks[f"reduced {count} {dtype}"] = lambda count=count, dtype=dtype: reduced(mesh, count, dtype)
        checks[f"reduced in halves {count}"] = lambda count=count: reduced(mesh, count, kept=torch.bfloat16)
    checks["reduced with a hook"] = lambda: reduced(
        mesh, 1, kept=torch.bfloat16, hook=lambda sums: sums.mul_(1 + 2**-12)
    )
    return checks


NAMES = [
    "current",
    "delayed",
    "block",
    "current mixed_precision",
    "delayed mixed_precision",
    "block recomputed",
    "delayed recomputed",
    "current compiled",
    "delayed accumulated",
    "current kept",
    "nvfp4",
    "mxfp8 directed compiled",
]
GROUPED = ["current", "delayed", "block", "mxfp8", "nvfp4", "mxfp8 stored", "nvfp4 stored"]
GROUPED += ["current stacked", "delayed stacked", "block stacked", "mxfp8 stacked"]
STORED = [
    *(f"{recipe} {way}" for recipe in ("current", "nvfp4") for way in ("shard", "masters", "loaded", "meta")),
    *("current fully_shard", "block shard", "block masters"),
    *(f"mxfp8 {way}" for way in ("shard", "fully_shard", "masters", "meta")),
]
SEEN = {"block": "Float8BlockwiseQTensor", "nvfp4": "NVFP4Tensor", "mxfp8": "MXFP8Tensor"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_checks(checks_of_two, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_quantizing_what_was_gathered(name: str, two: list[dict[str, Any]]) -> None:
    for result in of_all(two, name):
        assert result["losses"] == result["expected"] and result["equal"]
        assert result["share"] < (0.52 if "mixed" in name else 0.15 if name == "nvfp4" else 0.35)
        # once all of it, and what are no codes; mxfp8 has other memory for the backward
        assert result["copied"] < (6 if "mxfp8" in name else 2)
        if result["seen"]:
            assert result["seen"] == {SEEN.get(name.split()[0], "Float8Tensor")}
        # one a step for all weights, one for what delayed layers collected, whatever the microbatches
        weights, collected = not name.startswith(("block", "mxfp8")), name.startswith("delayed")
        assert result["reductions"] == 3 * weights + 3 * collected


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_frozen_weights_in_four_bits(weights: str, two: list[dict[str, Any]]) -> None:
    for result in of_all(two, f"frozen {weights}"):
        assert result["equal"] and result["share"] < 0.3


@pytest.mark.parametrize("recipe", GROUPED)
def test_groups(recipe: str, two: list[dict[str, Any]]) -> None:
    """Whole groups on every rank, or rows of each, with scales of their own."""
    for result in of_all(two, f"grouped {recipe}"):
        ours, theirs = result["losses"]
        assert ours == theirs and result["equal"] and result["share"] < (0.53 if "stored" in recipe else 0.27)


def test_a_shard_stays_what_it_is(two: list[dict[str, Any]]) -> None:
    for found in of_all(two, "subclass"):
        assert found["saved"] == {"Tensor"}
        for when in ("made", "trained", "loaded-False", "loaded-True"):
            assert found[when] == ShardedWeight.__name__, when
        assert found["same-False"] and found["same-True"] and found["evaluated"]
        assert found["cast"] == (ShardedWeight.__name__, torch.bfloat16)


@pytest.mark.parametrize("name", STORED)
def test_weights_that_are_stored_quantized_stay_so(name: str, two: list[dict[str, Any]]) -> None:
    """Also what the optimizer writes: one scale for all shards, as in one process."""
    for result in of_all(two, f"stored {name}"):
        assert result["losses"] == result["expected"] and result["equal"]
        kind = SEEN.get(name.split()[0], "Float8Tensor")
        assert set(result["seen"]) == {"Tensor", kind} and result["saved"] == {"Tensor"}
        assert result["share"] < (0.54 if "mxfp8" in name else 0.16 if "nvfp4" in name else 0.27)


def test_shards_of_master_weights(two: list[dict[str, Any]]) -> None:
    for found in of_all(two, "written"):
        assert len(found) == len(QUANTIZED) + 1 and all(found)


def test_kept_weights_are_scattered_and_gathered(two: list[dict[str, Any]]) -> None:
    for found in of_all(two, "scattered"):
        assert len(found) > 9 and all(found)


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_gradients_travel_in_16_bits(dtype: Any, two: list[dict[str, Any]]) -> None:
    """With fp32 sums, which FSDP2 makes since PyTorch 2.15 also where the policy names no dtype."""
    elements = 2 * sum(
        -(-rows // 2) * columns for rows, columns in GRADIENTS
    )  # to the other rank, in two steps
    in_fp32 = dtype == torch.float32 or TorchVersion(torch.__version__) >= "2.15"
    for result in of_all(two, f"reduced 1 {dtype}"):
        assert result["equal"] and not result["said"]
        assert (result["sent"], result["scattered"]) == ((2 * elements, 0) if in_fp32 else (0, 2 * elements))
    for result in of_all(
        two, f"reduced 2 {dtype}"
    ):  # what was accumulated is fp32, and nobody asked for that
        assert result["equal"] and result["sent"] == 0
        assert result["scattered"] == (4 if in_fp32 else 2) * elements
        assert result["said"] == (in_fp32 and dtype is None)


def test_sums_of_gradients_are_written_in_the_parameters_dtype(two: list[dict[str, Any]]) -> None:
    """FSDP2 casts them to it, unless a hook of the user reads them before."""
    for name, dtype in (("halves 1", torch.bfloat16), ("halves 2", None), ("with a hook", torch.float32)):
        for result in of_all(two, f"reduced {name.replace('halves', 'in halves')}"):
            assert result["equal"] and result["summed"] == ({dtype} if dtype else set())


def test_operations(two: list[dict[str, Any]]) -> None:
    for quantized, plain in of_all(two, "operations"):
        assert quantized == plain


# -- one process -------------------------------------------------------------------------------------------------------


@pytest.fixture
def one() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_weights_that_are_gathered_as_codes_are_not_stored_so(recipe: str, one: Any) -> None:
    """The receipt counts them whole, and a model whose class is turned back would compute with the codes."""
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(128, 128)))
    nc.convert(model, QUANTIZED[recipe])
    before = str(nc.receipt(model)).partition("under a recipe")[0]
    receipt = str(nc.receipt(shard(model, one, blocks=[model[0]], recompute=False)))
    assert receipt.startswith(before.partition("\n")[0]) and ", stored" not in receipt
    assert "parameters 64.5 KiB, as before" in receipt
    with pytest.raises(
        RuntimeError, match=r"0\.0\.weight' is gathered by narrowcast.distributed.shard as codes"
    ):
        nc.revert(model)
    assert isinstance(model[0][0], nc.Linear)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "nvfp4", "mxfp8"])
def test_one_rank(recipe: str, one: Any) -> None:
    result = against_plain(recipe, one, recompute=recipe != "mxfp8", reshard_after_forward=True)
    assert result["losses"] == result["expected"] and result["equal"]
    assert result["reductions"] == 0


@pytest.mark.parametrize("recipe", ["current", "nvfp4", "mxfp8"])
def test_stored_weights_that_are_tied_and_cast(recipe: str, one: Any) -> None:
    """Both layers read what is gathered; another dtype leaves the codes as they are."""
    from torch.distributed.fsdp import fully_shard

    def make_tied() -> Any:
        torch.manual_seed(0)
        with nc.quantized_model_init(recipe=QUANTIZED[recipe]):
            model = torch.nn.Sequential(*(nc.Linear(64, 64, device="cpu") for _ in range(2)))
        model[1].weight = model[0].weight
        nc.set_recipe(model, QUANTIZED[recipe])
        return model

    plain, model = make_tied(), make_tied()
    fully_shard(model, mesh=one)
    losses = []
    for made in (plain, model, plain.to(torch.bfloat16), model.to(torch.bfloat16)):
        torch.manual_seed(0)
        losses.append(train(made, 2))
    assert losses[0] == losses[1] and losses[2] == losses[3]
    weight = local(model[0].weight)
    assert isinstance(weight, nc.QuantizedTensor) and weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("stored", [False, True], ids=["plain", "stored"])
def test_recipes_that_tell_grouped_layers_apart(stored: bool, one: Any) -> None:
    """A grouped layer gets the format of its role, as without sharding; linear layers get theirs."""
    recipe = nc.recipe.CustomRecipe(nc.custom_recipes.nvfp4_linear_mxfp8_grouped_linear_factory)

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped = nc.GroupedLinear(2, 128, 128, device="cpu")
            self.plain = nc.Linear(128, 128, device="cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.plain(self.grouped(x, torch.tensor([16, 16])))

    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        with nc.quantized_model_init(enabled=stored, recipe=recipe):
            model: Any = Pair()
        nc.set_recipe(model, recipe)
        if sharded:
            shard(model, one, recompute=False, reshard_after_forward=True)
        torch.manual_seed(1)
        x = torch.randn(32, 128, requires_grad=True)
        torch.manual_seed(2)
        out = model(x)
        out.square().sum().backward()
        results.append([out, x.grad, *(local(parameter.grad) for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize(
    "calls",
    [
        "train evaluate step",
        "train step evaluate",
        "train step evaluate train",
        "forward unwatched backward step",
    ],
)
@pytest.mark.parametrize("reshard", [None, False, True])
def test_forwards_between_those_that_train(recipe: str, calls: str, reshard: bool | None, one: Any) -> None:
    """What they leave gathered is given back where the next forward has other scales, or other weights."""
    losses = []
    for sharded in (False, True):
        model, found, pending = make_model(recipe), [], torch.zeros(())
        if sharded:
            shard(model, one, blocks=model.blocks, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.Generator().manual_seed(0)
        for call in 3 * calls.split():
            if call == "step":
                optimizer.step()
                optimizer.zero_grad()
                continue
            if call == "backward":
                pending.backward()
                continue
            model.train(call != "evaluate")
            with torch.set_grad_enabled(call in ("train", "forward")):
                loss = model(torch.randn(32, 64, generator=rows)).square().mean()
            found.append(loss.item())
            if call == "train":
                loss.backward()
            elif call == "forward":
                pending = loss
        losses.append(found)
    assert losses[0] == losses[1]


class Chosen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(nc.Linear(32, 32, device="cpu") for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for number in chosen:
            x = x + self.blocks[number](x).relu()
        return x


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_that_did_not_run_have_the_scales_of_one_process(apart: bool, one: Any) -> None:
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Chosen()
        nc.set_recipe(model, nc.recipe.DelayedScaling(amax_history_len=3))
        if sharded:
            shard(model, one, **({"blocks": list(model.blocks)} if apart else {}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step, chosen in enumerate(((0, 1, 2), (0, 2), (0,), (0, 2), (0, 1, 2), (1, 2))):
            model(torch.randn(16, 32) * (1 + step), chosen).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(model))
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_step_renews_what_an_evaluation_has_left_gathered(one: Any) -> None:
    """The optimizer has shards, and the layers under FSDP2's root have the whole parameters then."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*(nc.Linear(16, 16, device="cpu") for _ in range(3)))
    nc.set_recipe(model, nc.recipe.DelayedScaling(amax_history_len=4, reduce_amax=False))
    fully_shard(model[1], mesh=one)
    fully_shard(model, mesh=one)
    optimizer = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    for _ in range(2):
        model.train()(torch.ones(3, 16)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.ones(3, 16))
        optimizer.step()
    assert [int(layer.amax_history[:, 0].count_nonzero()) for layer in model] == [2, 2, 0]


def test_what_is_gathered_in_high_precision_and_why(one: Any) -> None:
    model = torch.nn.Sequential(
        nc.Linear(32, 48, device="cpu", recipe=QUANTIZED["mxfp8"]),
        nc.Linear(48, 48, device="cpu"),
        nc.Linear(48, 100, device="cpu", recipe=QUANTIZED["block"]),
        nc.GroupedLinear(2, 100, 32, device="cpu", recipe=QUANTIZED["mxfp8"]),
        nc.Linear(
            32, 32, device="cpu", recipe=nc.recipe.Float8CurrentScaling(backward_override="high_precision")
        ),
        nc.Linear(32, 32, device="cpu", recipe=QUANTIZED["current"]),
    )
    assert shard(model, one, blocks=model) is model
    receipt: Any = nc.receipt(model).sharding
    assert str(nc.receipt(model)).endswith(f"sharding:\n{receipt}")
    reasons = {one.name: one.reason for one in receipt.parameters}
    assert "rows and columns differently" in reasons["0.weight"]
    assert reasons["1.weight"] == "its layer has no recipe"
    assert reasons["2.weight"] == "its 100 rows are not 1 equal shards of whole 128-row tiles"
    assert "recompute=False" in reasons["3.weight0"]
    assert "high precision" in reasons["4.weight"]
    assert reasons["5.weight"] == "" and reasons["5.bias"]
    assert "5.weight" in str(receipt) and "over 1 ranks" in str(receipt)
    assert receipt.plain_bytes - receipt.gathered_bytes == 3 * 32 * 32


@pytest.mark.parametrize(
    "device, accelerator, kind",
    [("cpu", "cuda", "cpu"), ("meta", "cuda", "cuda"), ("meta", None, "cpu")],
)
def test_the_mesh_of_all_ranks(
    device: str, accelerator: str | None, kind: str, one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over the devices where the parameters are; of a model on the meta device, where they will be."""
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    with (
        mock.patch("torch.distributed.device_mesh.init_device_mesh", side_effect=KeyError) as made,
        pytest.raises(KeyError),
    ):
        shard(nc.Linear(32, 32, device=device))
    made.assert_called_once_with(kind, (1,))


def test_which_groups_are_gathered_quantized(one: Any) -> None:
    """Whole ones on every rank; of square tiles, where no tile has rows of two."""
    why = partial(_Chosen._why_not_in_groups, SimpleNamespace(ranks=2))
    assert why(0, 4, 64) == why(128, 4, 256) == ""
    assert why(128, 4, 192) == "its 192 rows per group are not whole 128-row tiles"
    assert why(0, 3, 64) == "its 3 groups are not 2 equal shards"
    options: Any = {"single_grouped_weight": True, "bias": False, "device": "cpu"}
    model = torch.nn.Sequential(
        nc.GroupedLinear(2, 32, 192, recipe=QUANTIZED["block"], **options),
        nc.GroupedLinear(2, 192, 64, recipe=QUANTIZED["delayed"], **options),
    )
    found = nc.receipt(shard(model, one)).sharding.parameters  # type: ignore[union-attr]
    assert [one.reason for one in found] == ["its 192 rows per group are not whole 128-row tiles", ""]


def test_shards_of_stored_weights_are_drawn_again(one: Any) -> None:
    """In the parameter that FSDP2 has, to the values of a layer that is not sharded."""
    from torch.distributed.fsdp import fully_shard

    drawn = []
    for shards in (False, True):
        with nc.quantized_model_init(recipe=QUANTIZED["current"]):
            layer = nc.Linear(64, 48, device="cpu")
        if shards:
            fully_shard(layer)
        torch.manual_seed(3)
        layer.reset_parameters()
        drawn.append(layer.weight.full_tensor() if shards else layer.weight)  # type: ignore[union-attr]
    assert torch.equal(drawn[0].dequantize(), drawn[1].dequantize())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_assigned_to_a_stored_shard_is_stored_like_it(device: str, one: Any) -> None:
    """Loaders that make a model on the meta device assign DTensors of plain values."""
    from torch.distributed.fsdp import fully_shard

    with nc.quantized_model_init(recipe=QUANTIZED["current"]):
        layer, alone = nc.Linear(64, 48, device="cpu"), nc.Linear(64, 48, device="cpu")
    values = {name: torch.randn(held.shape) for name, held in alone.named_parameters()}
    alone.load_state_dict(values)
    fully_shard(layer, mesh=one)
    layer.to(device)
    placed = {name: DTensor.from_local(value, one, [Shard(0)]) for name, value in values.items()}
    layer.load_state_dict(placed, assign=True)
    assert type(local(layer.weight)) is type(alone.weight)
    assert torch.equal(local(layer.weight).dequantize(), alone.weight.dequantize())


def test_rows_of_stored_weights_are_counted() -> None:
    with nc.quantized_model_init(recipe=QUANTIZED["current"]):
        model = torch.nn.Sequential(nc.Linear(32, 48, device="cpu"))
    _check_stored(model, 3, ())
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        _check_stored(model, 32, ())
    _check_stored(model, 32, [model[0].weight])


def test_what_takes_the_place_of_a_weight_is_gathered_like_it(one: Any) -> None:
    """A DTensor that ``load_state_dict(assign=True)`` assigns; a plain tensor stays plain."""
    gather, plain = WeightGather(nc.IdentityQuantizer(), nc.IdentityQuantizer(), False), torch.ones(4, 4)
    hook, assigns = _Rewrap("weight", gather), {"assign_to_params_buffers": True}
    state: dict[str, Any] = {"weight": DTensor.from_local(plain, one, [Shard(0)])}
    hook(torch.nn.Linear(4, 4), state, "", {})
    assert not isinstance(local(state["weight"]), ShardedWeight)
    hook(torch.nn.Linear(4, 4), state, "", assigns)
    assert local(state["weight"])._gather is gather
    state = {"weight": plain}
    hook(torch.nn.Linear(4, 4), state, "", assigns)
    assert state["weight"] is plain


def test_formats_that_quantize_rows_and_columns_apart_are_gathered_where_that_serves(one: Any) -> None:
    mxfp8, apart = QUANTIZED["mxfp8"], nc.recipe.Float8BlockScaling(w_block_scaling_dim=1)
    model = torch.nn.Sequential(
        nc.Linear(64, 128, device="cpu", recipe=mxfp8),
        nc.Linear(40, 128, device="cpu", recipe=mxfp8),
        nc.GroupedLinear(1, 64, 128, device="cpu", recipe=mxfp8),
        nc.ops.Linear(64, 128, device="cpu"),
        nc.Linear(128, 128, device="cpu", recipe=apart),
    )
    nc.set_recipe(model[3], mxfp8)
    shard(model, one, blocks=list(model), recompute=False)
    reasons = {one.name: one.reason for one in nc.receipt(model).sharding.parameters}  # type: ignore[union-attr]
    assert reasons["0.weight"] == ""
    assert reasons["1.weight"] == "its 40 columns are not whole blocks of 32"
    assert reasons["2.weight0"].endswith("and it is the only group")
    assert any(
        name.startswith("3.") and why.endswith("and it is an operation") for name, why in reasons.items()
    )
    assert "two copies" in reasons["4.weight"]
    columns = torch.nn.Sequential(nc.Linear(64, 64, device="cpu", recipe=QUANTIZED["current"]))
    shard(columns, one, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    (reason,) = (one.reason for one in nc.receipt(columns).sharding.parameters if one.name == "0.weight")  # type: ignore[union-attr]
    assert reason == "not sharded by rows"
    for options in ({"nvfp4_use_4over6": True}, {"stochastic_rounding": True}):
        assert _tile(nc.NVFP4Quantizer(with_2d_quantization=True, **options)) is None
    assert _tile(nc.NVFP4Quantizer(with_2d_quantization=True)) == 16


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_shard_is_quantized_once_for_forward_and_backward(recipe: str, one: Any) -> None:
    model: Any = make(recipe)
    receipt: Any = nc.receipt(shard(model, one, blocks=model.blocks)).sharding
    quantized = sum(parameter.quantized for parameter in receipt.parameters)
    gathers, of_last = (
        [local(p)._gather for p in part.parameters() if isinstance(local(p), ShardedWeight)]
        for part in (model, model.blocks[-1])
    )
    with mock.patch.object(WeightGather, "encode", autospec=True, side_effect=WeightGather.encode) as encode:
        train(model, 2, width=SIZES.get(recipe, (64,))[0])
        assert encode.call_count == 2 * quantized
    with torch.no_grad():
        model(torch.ones(4, SIZES.get(recipe, (64,))[0]))
    assert len(gathers) == quantized and not any(gather.given for gather in gathers)
    for again in (True, False):  # its codes are read by the backward as well, or by the forward alone
        model.blocks[-1].set_reshard_after_forward(again)
        model(torch.ones(4, SIZES.get(recipe, (64,))[0])).sum().backward()
        model(torch.ones(4, SIZES.get(recipe, (64,))[0]))
        assert of_last and {bool(gather.given) for gather in of_last} == {again}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_what_is_gathered_by_direction_is_read_in_that_direction(one: Any) -> None:
    model = torch.nn.Sequential(nc.Linear(32, 128, device="cpu", recipe=QUANTIZED["mxfp8"]))
    shard(model, one, recompute=False, reshard_after_forward=True)
    x = torch.ones(32, 32)
    with pytest.raises(RuntimeError, match="runs forward in the backward"):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    for stays in (model.set_reshard_after_forward, model.set_reshard_after_backward):  # type: ignore[operator]
        stays(False)
        with pytest.raises(RuntimeError, match="stay gathered"):
            model(x)
        stays(True)


def test_a_recipe_that_comes_with_an_autocast(one: Any) -> None:
    recipe = QUANTIZED["current"]
    losses = []
    for quantized in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(nc.Linear(32, 32, device="cpu"))
        receipt: Any = nc.receipt(shard(model, one, recipe=recipe, quantized_gather=quantized)).sharding
        assert receipt.parameters[0].quantized == quantized
        with nc.autocast(recipe=recipe):
            loss = model(torch.ones(16, 32)).square().mean()
        loss.backward()
        losses.append(loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("reads", [{"lora_variant": {"default": object()}}, {"trains_merged": True}, {}])
def test_a_weight_that_its_adapter_reads_is_gathered_in_high_precision(reads: Any, one: Any) -> None:
    """DoRA's magnitudes and the merge of ``train_merged`` are those of the weight, not of its codes."""
    adapter = torch.nn.Module()
    adapter.base_layer = nc.Linear(32, 32, device="cpu", recipe=QUANTIZED["current"])
    vars(adapter).update(reads)
    receipt: Any = nc.receipt(shard(torch.nn.Sequential(adapter), one)).sharding
    told = {parameter.name: parameter.reason for parameter in receipt.parameters}
    assert told["0.base_layer.weight"] == ("its adapter reads the weight in every forward" if reads else "")


def test_what_cannot_be(one: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    fused = nc.Linear(32, 32, device="cpu", recipe=QUANTIZED["current"], fuse_wgrad_accumulation=True)
    with pytest.raises(ValueError, match="Linear has fuse_wgrad_accumulation=True"):
        shard(fused, one)
    layer = nc.Linear(32, 32, device="cpu", recipe=QUANTIZED["current"])
    with pytest.raises(ValueError, match="reshard_after_forward=2"):
        shard(layer, one, reshard_after_forward=2)
    with pytest.raises(ValueError, match="no part of the model"):
        shard(layer, one, blocks=[fused])
    with pytest.raises(ValueError, match="blocks holds a list .*; pass modules of it"):
        shard(layer, one, blocks=[[layer]])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="blocks is a Linear; pass a list of modules"):
        shard(layer, one, blocks=layer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh is 'cpu'; pass a DeviceMesh"):
        shard(layer, "cpu")
    unnamed = init_device_mesh("cpu", (1, 1))
    with pytest.raises(
        ValueError, match=r"mesh has 2 dims without names; .*mesh_dim_names=\('replicate', 'shard'\)"
    ):
        shard(layer, unnamed)
    with pytest.raises(TypeError, match="shard takes no 'reshard'; did you mean reshard_after_forward="):
        shard(layer, one, reshard=True)
    with pytest.raises(TypeError, match=r"mp_policy is torch.bfloat16; pass a .*MixedPrecisionPolicy"):
        shard(layer, one, mp_policy=torch.bfloat16)
    with nc.quantized_model_init(recipe=QUANTIZED["current"]):
        groups = nc.GroupedLinear(2, 32, 32, device="cpu", single_grouped_weight=True)
    with pytest.raises(RuntimeError, match="GroupedLinear with single_grouped_weight=False"):
        shard(groups, one)
    with pytest.raises(TypeError, match="shard: recipe is 8, of type int"):
        shard(layer, one, recipe=8)  # type: ignore[arg-type]
    model = torch.nn.Sequential(layer)
    shard(model, one, blocks=model)
    for given in (model, torch.nn.Sequential(layer)):
        with pytest.raises(RuntimeError, match="an FSDP[A-Za-z]* is sharded already; call shard once"):
            shard(given, one, blocks=[layer])
    with pytest.raises(RuntimeError, match="call the model that narrowcast"):
        layer(torch.ones(16, 32))
    other = nc.Linear(32, 32, device="cpu", recipe=QUANTIZED["current"])
    shard(other, one)
    nc.set_recipe(other, QUANTIZED["block"])
    with pytest.raises(RuntimeError, match="is a Float8Tensor, the recipe in force wants .* or shard"):
        other(torch.ones(16, 32))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_weights_that_change_between_microbatches(one: Any) -> None:
    model = torch.nn.Sequential(nc.Linear(32, 32, device="cpu", recipe=QUANTIZED["current"]))
    shard(model, one)
    x = torch.ones(16, 32)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(x).sum().backward()
    model.reshard()  # type: ignore[operator]
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="between microbatches without gradient sync weights must stay"):
        model(x)


def test_groups_have_the_role_of_grouped_layers(one: Any) -> None:
    """A factory that tells them apart gives the shard and the layer the same quantizer."""
    asked = set()

    def factory(role: Any) -> Any:
        asked.add(role.module_type)
        return nc.custom_recipes.current_scaling_factory(role)

    layer: Any = nc.GroupedLinear(2, 32, 48, device="cpu", recipe=nc.recipe.CustomRecipe(qfactory=factory))
    shard(layer, one)
    layer(torch.randn(8, 32), [3, 5]).square().sum().backward()
    assert asked == {"grouped_linear"}
