"""``FlopCounterMode`` counts the library's GEMMs as it counts those of torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import DEVICE, MORE_FORMATS, QUANTIZED
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import narrowcast as nc


def flops(layer: nn.Module, *inputs: Any, recipe: Any = None, backward: bool = True) -> int:
    with FlopCounterMode(display=False) as counter, nc.autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(*inputs)
        if backward:
            out.float().sum().backward()
    return counter.get_total_flops()


# sizes that are whole blocks: the padding of packed codes is work that is done, and counted
@pytest.mark.parametrize(
    "recipe", [*QUANTIZED.values(), *MORE_FORMATS.values()], ids=[*QUANTIZED, *MORE_FORMATS]
)
def test_a_step_counts_as_that_of_a_plain_layer(recipe: Any) -> None:
    x = torch.randn(64, 96, device=DEVICE, requires_grad=True)
    ours, plain = nc.Linear(96, 160, device=DEVICE), nn.Linear(96, 160, device=DEVICE)
    assert flops(ours, x, recipe=recipe) == flops(plain, x) == 3 * 2 * 64 * 96 * 160
    assert flops(ours, x, recipe=recipe, backward=False) == 2 * 64 * 96 * 160


def test_hybrid_and_plain_operands_are_counted() -> None:
    def factory(role: nc.QuantizerRole) -> nc.Quantizer:
        if role.tensor_type == "weight":
            return nc.IdentityQuantizer()
        rows, columns = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3), nc.NVFP4Quantizer()
        return nc.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)

    recipe = nc.recipe.CustomRecipe(qfactory=factory, emulate=DEVICE == "cuda")
    x = torch.randn(64, 96, device=DEVICE, requires_grad=True)
    assert flops(nc.Linear(96, 160, device=DEVICE), x, recipe=recipe) == 3 * 2 * 64 * 96 * 160


@pytest.mark.parametrize(
    "recipe", [None, QUANTIZED["current"], QUANTIZED["mxfp8"]], ids=["none", "current", "mxfp8"]
)
def test_groups_count_their_rows(recipe: Any) -> None:
    layer = nc.GroupedLinear(2, 96, 160, device=DEVICE)
    x = torch.randn(64, 96, device=DEVICE, requires_grad=True)
    assert flops(layer, x, [24, 40], recipe=recipe) == 3 * 2 * 64 * 96 * 160


def test_gradients_accumulated_in_place_count() -> None:
    layer = nc.Linear(96, 160, device=DEVICE, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(160, 96, device=DEVICE)
    x = torch.randn(64, 96, device=DEVICE, requires_grad=True)
    assert flops(layer, x, recipe=QUANTIZED["current"]) == 3 * 2 * 64 * 96 * 160


def test_the_order_of_imports_does_not_matter() -> None:
    """Here narrowcast comes first, in other processes the counter."""
    code = (
        "import sys, torch, torch.utils.flop_counter as counter\nimport narrowcast\n"
        "assert torch.ops.narrowcast.gemm in counter.flop_registry\n"
        "assert not [finder for finder in sys.meta_path if 'narrowcast' in type(finder).__module__]\n"
    )
    source = str(Path(nc.__file__).resolve().parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source, timeout=120)


@pytest.mark.parametrize(("included", "repeated"), [(False, [0, 6, 6]), (True, [0, 0, 3])])
def test_a_memory_budget_of_the_compiler_counts_our_gemms(included: bool, repeated: list[int]) -> None:
    """As docs/memory.md says: without the option PyTorch takes every operator of a library for a cheap one."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    gemms: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        gemms.append(sum("gemm" in str(node.target) for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    layers = [
        one for _ in range(6) for one in (nn.Linear(256, 256, dtype=torch.bfloat16, device="cpu"), nn.GELU())
    ]
    model = nc.convert(nn.Sequential(*layers), "current")
    found = []
    for budget in (1.0, 0.99, 0.5):
        torch._dynamo.reset()
        config = {"activation_memory_budget": budget, "is_non_builtin_to_include": included}
        with torch._functorch.config.patch(config):
            x = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
            torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
        forward, backward = gemms[-2:]
        found.append(backward - 2 * forward)
    assert found == repeated
