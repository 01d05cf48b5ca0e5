"""``gemm_few_rows``: the bits of two operators, where a layer calls it, and that compiled code does, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recipes import DEVICE, QUANTIZED
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import narrowcast as nc
from narrowcast.functional import gemm, gemm_few_rows, quantize
from narrowcast.quantizers import DelayedFloat8Quantizer

E4M3 = nc.DType.kFloat8E4M3
LIMITS = {"delayed": 8, "current": 8, "block": 16}
ROWWISE = {"rowwise": True, "columnwise": False}
PAIRS: dict[str, tuple[nc.Quantizer, nc.Quantizer]] = {
    "delayed": (DelayedFloat8Quantizer(E4M3, 1, **ROWWISE), nc.Float8CurrentScalingQuantizer(E4M3)),
    "current": (nc.Float8CurrentScalingQuantizer(E4M3, **ROWWISE),) * 2,
    "block": (
        nc.Float8BlockQuantizer(E4M3, **ROWWISE, block_scaling_dim=1),
        nc.Float8BlockQuantizer(E4M3, **ROWWISE, block_scaling_dim=2),
    ),
}
MODULES: dict[str, Any] = {
    "linear": lambda **place: nc.Linear(48, 160, **place),
    "norm": lambda **place: nc.LayerNormLinear(48, 160, bias=False, **place),
    "mlp": lambda **place: nc.LayerNormMLP(48, 160, activation="swiglu", normalization="RMSNorm", **place),
}


class Names(TorchDispatchMode):
    """Operators of ours that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "narrowcast":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def ran(module: nn.Module, x: Tensor) -> list[str]:
    with Names() as names:
        module(x)
    return [name for name in names.seen if name.startswith(("gemm", "quantize", "norm", "act"))]


def inputs(rows: int, features: int = 48) -> Tensor:
    return torch.randn(rows, features, device=DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 2, 7, 17, 64, 65])
@pytest.mark.parametrize("name", PAIRS)
def test_the_same_as_two_operators(name: str, rows: int) -> None:
    """On a CPU to the bit; a GPU's kernel adds the products in another order."""
    left, right = PAIRS[name]
    x, weight, bias = inputs(rows, 200), torch.randn(36, 200, device=DEVICE), torch.randn(36, device=DEVICE)
    scale = torch.tensor([1.0, 37.0], device=DEVICE) if name == "delayed" else None
    operand = right.with_usage(**ROWWISE)
    codes = quantize(weight, operand, None, None, None)
    how = bias, torch.float32
    made = gemm_few_rows(x, left, codes, operand, *how, 36, scale, False)
    wanted = gemm(
        "fprop", quantize(x, left, None, scale, None), left, codes, operand, *how, rows, 36, False, False
    )
    if DEVICE == "cpu":
        assert torch.equal(made, wanted)
    else:
        torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("kind", MODULES)
def test_where_a_layer_calls_it(kind: str, name: str) -> None:
    module, limit = MODULES[kind](device=DEVICE, params_dtype=torch.bfloat16).eval(), LIMITS[name]
    nc.set_recipe(module, QUANTIZED[name])
    count = 2 if kind == "mlp" else 1
    with torch.no_grad():
        few, more = ran(module, inputs(limit)), ran(module, inputs(limit + 1))
        assert few.count("gemm_few_rows") == count and "gemm" not in few
        assert not [
            one for one in few if one.endswith("_quantize")
        ]  # the norm and the activation leave it to the GEMM
        assert more.count("gemm") == count and "gemm_few_rows" not in more
    module.train()
    assert "gemm_few_rows" not in ran(module, inputs(3))  # which records gradients
    module.requires_grad_(False)  # a frozen layer collects the amax of delayed scaling all the same
    assert ("gemm_few_rows" in ran(module, inputs(3))) == (name != "delayed")


@pytest.mark.parametrize("kind", MODULES)
def test_formats_without_such_a_kernel(kind: str) -> None:
    module = MODULES[kind](device=DEVICE, params_dtype=torch.bfloat16).eval()
    for recipe in (nc.recipe.MXFP8BlockScaling(emulate=True), nc.recipe.Float8CurrentScaling(emulate=True)):
        nc.set_recipe(module, recipe)
        with torch.no_grad():
            assert "gemm_few_rows" not in ran(module, inputs(2))


@pytest.mark.parametrize("kind", MODULES)
def test_stored_weights_in_compiled_code(kind: str) -> None:
    """One graph for every number of rows, without a guard on it; eager code's bits."""
    recipe = nc.recipe.Float8BlockScaling()
    with torch.no_grad(), nc.quantized_model_init(recipe=recipe):
        module = MODULES[kind](device=DEVICE, params_dtype=torch.bfloat16).eval()
    nc.set_recipe(module, recipe)
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    counted = torch.compile(module, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for rows in (3, 1):
            x = inputs(rows)
            assert torch.equal(run(x), module(x))
        for rows in (5, 9, 70, 100):
            counted(inputs(rows))
    assert len(graphs) == 1


def test_flops_and_receipts_count_it() -> None:
    layer = nc.Linear(48, 160, device=DEVICE).eval()
    nc.set_recipe(layer, nc.recipe.Float8CurrentScaling())
    x = torch.randn(2, 3, 48, device=DEVICE)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 6 * 48 * 160


@pytest.mark.gpu
@pytest.mark.parametrize("name", LIMITS)
def test_a_graph_holds_its_launch(name: str) -> None:
    with torch.no_grad(), nc.quantized_model_init(recipe=QUANTIZED[name]):
        layer = nc.Linear(256, 512, device="cuda", params_dtype=torch.bfloat16).eval()
    nc.set_recipe(layer, QUANTIZED[name])
    # of a second size PyTorch would make a graph for any number of rows, which are then not known to be few
    run = torch.compile(layer, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for rows in (1, 7):
            x = inputs(rows, 256)
            made, wanted = run(x), layer(x)
            assert torch.equal(made, wanted)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run(x)
                torch.cuda.synchronize()
            kernels = [event.name for event in profile.events() if event.name.startswith("_")]
            assert kernels and not [name for name in kernels if "cast" in name or "quantize" in name]


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", LIMITS)
def test_a_contraction_of_one(scaling: str) -> None:
    """Its kernel multiplied codes of columns that are not there, which one ptxas leaves in a register of before."""
    layer = nc.Linear(1, 48, device="cuda").eval()
    nc.set_recipe(layer, QUANTIZED[scaling])
    for rows in (1, 2):
        x = torch.randn(rows, 1, device="cuda")
        results = []
        for garbage in (float("nan"), 0.0):
            _ = [torch.full((size,), garbage, device="cuda") for size in (1, 192, 4096, 1 << 16)]
            with torch.no_grad():
                results.append(layer(x))
        assert results[0].isfinite().all() and torch.equal(*results)
