"""An amax that ranks share: the parts of a tensor are quantized as the whole is, into new tensors and into old ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import narrowcast as nc
from narrowcast import functional

from .catalog import E4M3, assert_same_buffers

WORLD, SECONDS = 2, 120
QUANTIZERS: dict[str, nc.Quantizer] = {
    "current": nc.Float8CurrentScalingQuantizer(E4M3),
    "nvfp4": nc.NVFP4Quantizer(),
    "nvfp4 rht": nc.NVFP4Quantizer(with_rht=True),
    "nvfp4 2d": nc.NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4 columns": nc.NVFP4Quantizer(rowwise=False, with_rht=True),
}
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def whole() -> torch.Tensor:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
    x[:32] *= 100  # so that the parts alone would be scaled otherwise
    return x


def part(rank: int) -> torch.Tensor:
    return whole()[32 * rank : 32 * (rank + 1)]


def results(quantizer: nc.Quantizer, x: torch.Tensor, group: Any) -> dict[str, Any]:
    """In all the ways in which a group can be given."""
    name = group.group_name
    old, skipped = (quantizer.make_empty(tuple(x.shape), device="cpu") for _ in range(2))
    for buffer in skipped.get_data_tensors():
        if buffer is not None:
            buffer.zero_()
    made = {
        "new": quantizer.quantize(x, amax_reduction_group=group),
        "by name": quantizer.quantize(x, amax_reduction_group=name),
        "out": quantizer.quantize(x, out=old, amax_reduction_group=group),
        "update": quantizer.update_quantized(
            x, quantizer.make_empty(tuple(x.shape), device="cpu"), amax_reduction_group=group
        ),
        "skipped": quantizer.update_quantized(
            x, skipped, noop_flag=torch.ones(1), amax_reduction_group=group
        ),
    }
    return {key: tensor.get_data_tensors() for key, tensor in made.items()}


def work(rank: int) -> Any:
    made = {
        name: results(quantizer.replace(with_amax_reduction=True), part(rank), dist.group.WORLD)
        for name, quantizer in QUANTIZERS.items()
    }
    return made


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("ranks"), WORLD, SECONDS)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_parts_are_quantized_as_the_whole(ranks: list[dict[str, Any]], name: str) -> None:
    values, alone = QUANTIZERS[name].quantize(whole()).dequantize(), []
    for rank in range(WORLD):
        made = ranks[rank][name]
        tensor = QUANTIZERS[name].make_empty((32, 48), device="cpu")
        for mine, theirs in zip(tensor.get_data_tensors(), made["new"], strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                mine.copy_(theirs)
        assert torch.equal(tensor.dequantize(), values[32 * rank : 32 * (rank + 1)])
        for way in ("by name", "out", "update"):
            for ours, theirs in zip(made[way], made["new"], strict=True):
                assert ours is theirs is None or torch.equal(ours, theirs), way
        assert all(buffer is None or not buffer.any() for buffer in made["skipped"])
        alone.append(QUANTIZERS[name].quantize(part(rank)).dequantize())
    assert not torch.equal(torch.cat(alone), values)


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_a_group_must_be_given(name: str) -> None:
    quantizer, x = QUANTIZERS[name].replace(with_amax_reduction=True), part(0)
    out = QUANTIZERS[name].quantize(x)
    for use in (
        lambda: quantizer.quantize(x),
        lambda: quantizer.quantize(x, out=out),
        lambda: quantizer.update_quantized(x, out),
    ):
        with pytest.raises(ValueError, match="got no process group; pass amax_reduction_group"):
            use()
    with pytest.raises(TypeError, match="amax_reduction_group is an int"):
        quantizer.quantize(x, amax_reduction_group=5)
    alone = QUANTIZERS[name]
    for ignore in (
        lambda: alone.quantize(x, amax_reduction_group="group"),
        lambda: alone.quantize(x, out=out, amax_reduction_group="group"),
        lambda: alone.update_quantized(x, out, amax_reduction_group="group"),
    ):
        with pytest.raises(ValueError, match=r"with_amax_reduction=False; use quantizer\.replace"):
            ignore()
    with pytest.raises(ValueError, match="call its quantize with amax_reduction_group"):
        functional.quantize(x, quantizer)


@pytest.mark.parametrize("name", ["current", "nvfp4 rht"])
def test_in_a_graph(name: str) -> None:
    quantizer, x = QUANTIZERS[name].replace(with_amax_reduction=True), part(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for group in (dist.group.WORLD, dist.group.WORLD.group_name):
            compiled = torch.compile(
                lambda x, group=group: quantizer.quantize(x, amax_reduction_group=group),
                fullgraph=True,
                backend="aot_eager",
            )
            made = compiled(x)
            assert_same_buffers(made, QUANTIZERS[name].quantize(x))
            assert made._quantizer == QUANTIZERS[name]
    finally:
        dist.destroy_process_group()


def layers() -> dict[str, Any]:
    options = {"device": "cpu", "dtype": torch.bfloat16}
    return {
        "Linear": nc.Linear(32, 32, **options),
        "LayerNormLinear": nc.LayerNormLinear(32, 32, **options),
        "LayerNormMLP": nc.LayerNormMLP(32, 32, **options),
        "GroupedLinear": nc.GroupedLinear(1, 32, 32, **options),
        "ops": nc.ops.Sequential(nc.ops.Linear(32, 32, **options)),
        "ops.Quantize": nc.ops.Sequential(nc.ops.Quantize(), nc.ops.Linear(32, 32, **options)),
    }


@pytest.mark.parametrize("name", layers())
def test_layers_have_no_group_to_give(name: str) -> None:
    layer, x = layers()[name], torch.ones(4, 32, dtype=torch.bfloat16)
    recipe = nc.recipe.CustomRecipe(
        qfactory=lambda role: nc.Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True)
    )
    with (
        nc.autocast(recipe=recipe),
        pytest.raises(ValueError, match="no process group to give; use with_amax"),
    ):
        layer(x, [4]) if name == "GroupedLinear" else layer(x)
