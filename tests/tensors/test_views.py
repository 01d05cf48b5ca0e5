"""Views of quantized tensors: they read as any tensor does, and refuse to be written to."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from quantizers.catalog import E4M3, ONE_OF_EACH, assert_same_buffers, quantize
from reference.checks import normal
from torch import Tensor, nn

import narrowcast as nc

one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)


def parameter(name: str) -> Any:
    return nn.Parameter(quantize(ONE_OF_EACH[name], normal((32, 32), torch.float32)))


WRITES: dict[str, Callable[[Any], Any]] = {
    "select": lambda w: w[0].zero_(),
    "slice": lambda w: w[3:5].add_(1),
    "transpose": lambda w: w.t().fill_(1.0),
    "permute": lambda w: w.permute(1, 0).mul_(2),
    "flat": lambda w: w.view(-1).copy_(torch.zeros(1024)),
    "reshape": lambda w: w.reshape(16, 64).zero_(),
    "flatten": lambda w: w.flatten().zero_(),
    "diagonal": lambda w: w.diagonal().fill_(0),
    "split": lambda w: w.split(8)[1].zero_(),
    "unbind": lambda w: list(w)[2].zero_(),
    "view of a view": lambda w: w.t()[1:3].view(-1, 2, 16).zero_(),
    "assignment": lambda w: w.t().__setitem__(0, 1.0),
    "out": lambda w: torch.add(torch.ones(32), 1, out=w[0]),
    "foreach": lambda w: torch._foreach_zero_([torch.ones(2), w[0]]),
    "init": lambda w: nn.init.ones_(w.t()),
    "data of a view": lambda w: w[0].data.zero_(),
    "view of data": lambda w: w.data[0].zero_(),
    "detached": lambda w: w.t().detach().zero_(),
    "random": lambda w: w.view(-1).normal_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_writes_are_refused(name: str, write: Callable[[Any], Any]) -> None:
    weight = parameter(name)
    before = weight.detach().clone()
    for grad, tensor in ((False, weight), (True, weight.detach())):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match="through a view of a quantized tensor"),
        ):
            write(tensor)
    assert_same_buffers(weight, before)


@one_of_each
def test_views_are_read_as_any_tensor(name: str) -> None:
    weight, plain = parameter(name), parameter(name).detach().dequantize().requires_grad_()
    x = normal((4, 32), torch.float32)
    functions: tuple[Callable[[Any], Any], ...] = (
        lambda w: x @ w.t(),
        lambda w: w[1:3] + w.view(32, 32)[5:7],
        lambda w: torch.cat([w.view(-1), w.t().reshape(-1)]),
        lambda w: w.t().contiguous(),
        lambda w: w[0].clone().mul_(2.0),
        lambda w: torch.stack(list(w)[:3]),
        lambda w: torch.zeros(32).copy_(w[3]),
    )
    for function in functions:
        ours, theirs = function(weight), function(plain)
        assert type(ours) is Tensor and torch.equal(ours, theirs)
        grads = [torch.autograd.grad(y.square().sum(), w)[0] for y, w in ((ours, weight), (theirs, plain))]
        assert torch.equal(*grads)
    view, same = weight.detach()[1], plain.detach()[1]
    assert view.tolist() == same.tolist() and view[2].item() == same[2].item()
    assert (view.numpy() == same.numpy()).all()
    assert torch.equal(copy.deepcopy(view), same) and type(copy.deepcopy(view)) is Tensor
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), same)
    assert "tensor([" in repr(view)


@one_of_each
def test_under_inference_mode(name: str) -> None:
    """Of a weight that was made outside: views are no inference tensors, as those of any weight are none."""
    weight = parameter(name)
    plain = weight.detach().dequantize()
    module = nn.Module()
    module.weight = weight
    with torch.inference_mode():
        for same in (
            weight.detach(),
            weight.data,
            weight.clone(),
            weight.view(32, 32),
            weight.expand_as(weight),
        ):
            assert type(same) is type(weight)
            assert_same_buffers(same, weight)
        for view, theirs in (
            (weight.t(), plain.t()),
            (weight[3], plain[3]),
            (weight.view(-1), plain.view(-1)),
        ):
            assert torch.equal(view, theirs) and torch.equal(view * 2, theirs * 2)
            with pytest.raises(RuntimeError, match="through a view of a quantized tensor"):
                view.zero_()
        assert type(weight.to(torch.float16)) is Tensor and type(weight.to("meta")) is type(weight)
        state = module.state_dict()
        assert torch.equal(weight.dequantize(), plain)
    assert not weight.is_inference() and not state["weight"].is_inference()
    assert_same_buffers(state["weight"], weight)
    weight.to(torch.float32).sum().backward()


def test_in_a_graph() -> None:
    weight = parameter("mxfp8")

    def write(w: Tensor) -> Tensor:
        with torch.no_grad():
            w.t().zero_()
        return w + 1

    with pytest.raises(Exception, match="through a view of a quantized tensor"):
        torch.compile(write, fullgraph=True, backend="aot_eager")(weight)
    for read in (lambda w: w[3:7], lambda w: w.t(), lambda w: w.split(8)[1] + 1):
        compiled: Any = torch.compile(read, fullgraph=True, backend="aot_eager")
        ours, theirs = compiled(weight), read(weight)
        assert torch.equal(ours, theirs.clone())
        grads = [torch.autograd.grad(y.square().sum(), weight)[0] for y in (ours, theirs)]
        assert torch.equal(*grads)


@pytest.fixture
def mesh() -> Iterator[Any]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


NO_SHARD = r"FSDP cannot shard (a (Float8|Grouped)|an (MXFP8|NVFP4))\w*Tensor: "


@pytest.mark.parametrize(
    "recipe", [nc.recipe.Float8CurrentScaling(), nc.recipe.MXFP8BlockScaling()], ids=["current", "mxfp8"]
)
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_sharding_is_refused(mesh: Any, kind: str, recipe: nc.recipe.Recipe) -> None:
    """FSDP1, and FSDP2 with groups in one tensor, would go on with plain values, and nobody would know."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

    def make() -> nn.Module:
        if kind == "linear":
            return nn.Sequential(nc.Linear(32, 32, device="cpu"))
        return nc.GroupedLinear(2, 32, 32, device="cpu", single_grouped_parameter=True)

    with nc.quantized_model_init(recipe=recipe):
        model = make()
    ways: list[Any] = [
        lambda: FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
        ),
    ]
    if kind == "grouped":
        ways.append(lambda: fully_shard(model, mesh=mesh))
    for shard in ways:
        with pytest.raises(RuntimeError, match=f"{NO_SHARD}.*build the model without quantized_model_init"):
            shard()
    fully_shard(make(), mesh=mesh)


@pytest.mark.parametrize(
    ("quantizer", "rows", "reason"),
    [
        (nc.MXFP8Quantizer(E4M3), 48, "its 96 rows are not equal shards of whole 32-row blocks"),
        (
            nc.NVFP4Quantizer(with_2d_quantization=True),
            24,
            "its 96 rows are not equal shards of whole 16-row",
        ),
        (nc.Float8CurrentScalingQuantizer(E4M3), 40, "its 96 rows are not equal shards;"),
        (
            nc.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False),
            48,
            "not quantized apart from each other",
        ),
    ],
    ids=["mxfp8", "nvfp4", "current", "rows"],
)
def test_rows_that_are_no_shards(quantizer: nc.Quantizer, rows: int, reason: str) -> None:
    weight = quantizer.quantize(torch.ones(96, 64))
    with pytest.raises(RuntimeError, match=f"{NO_SHARD}.*{reason}"):
        weight.check_rows(rows)


def test_a_forward_that_fsdp_calls_is_not_its_sharding(mesh: Any) -> None:
    """Slices there are those of the model."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nc.MXFP8Quantizer(E4M3).quantize(torch.randn(64, 32))
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) @ self.weight[:32].dequantize()

    model = Model()
    x = torch.ones(2, 32)
    expected = model(x)
    wrapped = FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    assert torch.equal(wrapped(x), expected)
