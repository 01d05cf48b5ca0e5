"""Exported programs: saved, loaded in another process, taken apart, compiled ahead of time; the bits of eager code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import narrowcast as nc
from narrowcast.functional.quantizer_value import quantizer_of_text

WIDTH = 64
RECIPES: dict[str, Callable[[], Any]] = {
    "current": nc.recipe.Float8CurrentScaling,
    "delayed": nc.recipe.DelayedScaling,
    "block": nc.recipe.Float8BlockScaling,
    "mxfp8": nc.recipe.MXFP8BlockScaling,
    "nvfp4": nc.recipe.NVFP4BlockScaling,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nc.Linear(WIDTH, 96, device="cpu"),
    "LayerNormLinear": lambda: nc.LayerNormLinear(WIDTH, 96, device="cpu"),
    "LayerNormMLP": lambda: nc.LayerNormMLP(WIDTH, 128, activation="swiglu", device="cpu"),
    "TransformerLayer": lambda: nc.TransformerLayer(WIDTH, 128, 4, device="cpu"),
    "Sequential": lambda: nc.ops.Sequential(nc.ops.Linear(WIDTH, 128, device="cpu"), nc.ops.GELU()),
    "GroupedLinear": lambda: nc.GroupedLinear(2, WIDTH, 96, device="cpu"),
}
RUN_ELSEWHERE = """
import sys
import torch
for path in sys.argv[1:]:
    x, y = torch.load(path + ".values")
    assert torch.equal(torch.export.load(path).module()(x), y), path
    import narrowcast  # after the first, which runs without
"""


def made(layer: str, recipe: str, weights: str) -> nn.Module:
    """A layer for inference; ``weights``: "plain", "quantized" parameters, or "stored" by a conversion."""
    torch.manual_seed(0)
    chosen = RECIPES[recipe]()
    if weights == "stored":
        model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU()).requires_grad_(False)
        nc.convert(model, chosen, weights="stored")
    elif weights == "quantized":
        with nc.quantized_model_init(recipe=chosen):
            model = LAYERS[layer]()
    else:
        model = LAYERS[layer]()
    if weights != "stored":
        nc.set_recipe(model, chosen)
    if recipe == "delayed":  # so that there are scales
        model(*inputs(model))
        nc.renew_delayed_scaling(model)
    return model.eval().requires_grad_(False)


def inputs(model: nn.Module, rows: int = 32) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, nc.TransformerLayer):
        return (torch.randn(rows, 2, WIDTH, generator=generator),)
    x = torch.randn(rows, WIDTH, generator=generator)
    return (x, [rows - 12, 12]) if isinstance(model, nc.GroupedLinear) else (x,)


def exported(model: nn.Module, dynamic: bool = True, **options: Any) -> Any:
    if dynamic:
        options["dynamic_shapes"] = ({0: torch.export.Dim("rows", min=1, max=4096)},)
    return torch.export.export(model, inputs(model), **options)


def operators_left(program: Any) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if "narrowcast" in str(node.target)}


def test_saved_programs_run_in_another_process_with_the_bits_of_eager_code(tmp_path: Path) -> None:
    whole, apart = tmp_path / "whole.pt2", tmp_path / "apart.pt2"
    model = made("Linear", "current", "stored")
    program = exported(model)
    for path, form in ((whole, program), (apart, nc.decompose(program))):
        torch.export.save(form, path)
        other = inputs(model, rows=48)  # more rows than it was exported with
        torch.save((*other, model(*other)), f"{path}.values")
    assert operators_left(program) and not operators_left(form)
    assert {type(value) for value in form.state_dict.values()} == {nn.Parameter}
    subprocess.run([sys.executable, "-c", RUN_ELSEWHERE, str(apart), str(whole)], check=True, timeout=120)


def test_quantized_weights_are_quantized_once() -> None:
    model = made("Linear", "current", "quantized")
    program = exported(model).run_decompositions()
    held = {value.dtype: value.numel() for value in program.state_dict.values() if value.dim() == 2}
    assert held == {torch.uint8: 96 * WIDTH}
    quantized = [node for node in program.graph.nodes if "quantize" in str(node.target)]
    assert len(quantized) == 1, "the input alone is quantized when the program runs"
    assert torch.equal(program.module()(*inputs(model)), model(*inputs(model)))


def test_a_program_that_is_trained_raises() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), made("Linear", "current", "plain"), nn.Linear(96, 7))
    (x,) = inputs(model)
    program = exported(model).module()
    with pytest.raises(RuntimeError, match=r"an exported program has no gradients.*torch\.no_grad"):
        program(x)
    with torch.no_grad():
        assert torch.equal(program(x), model(x))
    blocks = made("Linear", "block", "plain").requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"\(96, 64\) requires one"):
        exported(blocks, dynamic=False).module()(x)
    assert torch.equal(exported(model.requires_grad_(False)).module()(x), model(x))


def test_strict_export() -> None:
    model = made("Linear", "mxfp8", "plain")
    program = exported(model, strict=True)
    assert torch.equal(program.module()(*inputs(model)), model(*inputs(model)))
    assert {name.split(".")[-1] for name in operators_left(program)} == {"text"}
    held = [arg for node in program.graph.nodes if "narrowcast" in str(node.target) for arg in node.args]
    # PyTorch 2.11 compiles dtypes ahead of time as numbers, which it reads as those of other dtypes
    dtype = torch.get_default_dtype()
    assert str(dtype).removeprefix("torch.") in held and dtype not in held


@pytest.mark.requested
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("weights", ["plain", "quantized", "stored"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_and_recipe(layer: str, recipe: str, weights: str, dynamic: bool, tmp_path: Path) -> None:
    grouped = layer == "GroupedLinear"
    if weights == "quantized" and layer in ("TransformerLayer", "GroupedLinear"):
        pytest.skip("no quantized parameters by these options")
    if weights == "stored" and (recipe in ("mxfp8", "nvfp4") or layer != "Linear"):
        pytest.skip("no stored weights")
    if grouped and dynamic:
        pytest.skip("splits are constants of the program")
    model = made(layer, recipe, weights)
    program = exported(model, dynamic)
    torch.export.save(program, tmp_path / "whole.pt2")
    forms = [program, program.run_decompositions(), torch.export.load(tmp_path / "whole.pt2")]
    if not grouped:
        forms.append(nc.decompose(program))
        assert not operators_left(forms[-1])
    given = inputs(model, rows=48 if dynamic else 32)
    for form in forms:
        assert torch.equal(form.module()(*given), model(*given))


def compiled_ahead(program: Any, path: Path) -> Callable[..., Tensor]:
    compiled = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return torch._inductor.aoti_load_package(compiled)


@pytest.mark.requested
def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    model = made("Linear", "current", "quantized")
    run = compiled_ahead(exported(model), tmp_path / "compiled.pt2")
    for rows in (32, 48):
        given = inputs(model, rows)
        assert torch.equal(run(*given), model(*given))


@pytest.mark.requested
def test_compiled_ahead_of_time_in_bf16(device: torch.device, tmp_path: Path) -> None:
    model = made("Linear", "current", "plain").to(device, torch.bfloat16)
    given = tuple(x.to(device, torch.bfloat16) for x in inputs(model))
    run = compiled_ahead(torch.export.export(model, given), tmp_path / "compiled.pt2")
    assert torch.equal(run(*given), model(*given))


@pytest.mark.requested
@pytest.mark.parametrize(
    "layer, recipe, weights",
    [
        ("Linear", "current", "stored"),
        ("LayerNormMLP", "nvfp4", "quantized"),
        ("TransformerLayer", "delayed", "plain"),
    ],
)
def test_compiled_ahead_of_time_whole_and_taken_apart(
    layer: str, recipe: str, weights: str, tmp_path: Path
) -> None:
    model = made(layer, recipe, weights)
    given = inputs(model)
    for program in (exported(model), nc.decompose(exported(model))):
        out = compiled_ahead(program, tmp_path / "compiled.pt2")(*given)
        torch.testing.assert_close(out, model(*given))


def test_flops_of_a_program_are_those_of_the_model() -> None:
    model = made("LayerNormMLP", "block", "plain")
    counts = []
    for run in (model, exported(model).module()):
        with FlopCounterMode(display=False) as counter:
            run(*inputs(model))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * 32 * WIDTH * (256 + 128)


def test_what_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(TypeError, match="torch.export.export"):
        nc.decompose(LAYERS["Linear"]())  # type: ignore[arg-type]
    trained = made("Linear", "current", "quantized").requires_grad_(True)
    with pytest.raises(ValueError, match=r"weight is quantized.*requires_grad_\(False\)"):
        nc.decompose(exported(trained))
    with pytest.raises(RuntimeError, match="shapes are data"):
        nc.decompose(exported(made("GroupedLinear", "current", "plain"), dynamic=False))


@pytest.mark.gpu
def test_a_program_of_a_gpu_has_the_bits_of_eager_code_and_is_not_taken_apart(tmp_path: Path) -> None:
    model = nc.Linear(WIDTH, 96, device="cuda", params_dtype=torch.bfloat16).eval().requires_grad_(False)
    nc.set_recipe(model, RECIPES["current"]())
    given = tuple(x.to("cuda", torch.bfloat16) for x in inputs(model))
    program = torch.export.export(model, given)
    torch.export.save(program, tmp_path / "saved.pt2")
    again = torch.export.load(tmp_path / "saved.pt2").module()
    assert torch.equal(again(*given), model(*given))
    with pytest.raises(ValueError, match="export the model on the CPU"):
        nc.decompose(program)


def test_a_class_that_is_not_defined_here() -> None:
    with pytest.raises(RuntimeError, match="import the module that defines it"):
        quantizer_of_text("('elsewhere:Quantizer', ())")


def test_a_quantizer_without_a_value() -> None:
    class Unregistered(nc.Float8CurrentScalingQuantizer):
        pass

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nc.functional.quantize(x, Unregistered(nc.DType.kFloat8E4M3))[0]

    with pytest.raises(TypeError, match="register_value_opaque_quantizer"):
        torch.export.export(Layer(), (torch.randn(32, WIDTH),))
