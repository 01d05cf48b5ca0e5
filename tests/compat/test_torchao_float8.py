"""torchao.float8's names: configurations, conversion and installation, and torchao's own numbers where it is there."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.compat import install_torchao_float8, uninstall_torchao_float8
from narrowcast.compat.torchao_float8 import (
    MODULES,
    CastConfig,
    Float8GemmConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
    _auto_filter_for_recipe,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    recipe_of,
)
from narrowcast.recipe import Format, MMParams

ROWS = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
PLAIN = CastConfig(ScalingType.DISABLED)
CASTS = ("cast_config_input", "cast_config_weight", "cast_config_grad_output")
SECOND = (
    "cast_config_input_for_grad_weight",
    "cast_config_weight_for_grad_input",
    "cast_config_grad_output_for_grad_weight",
)
NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def model(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96, bias=bias), nn.GELU(), nn.Linear(96, 16, bias=bias))


def gradients(one: nn.Module) -> list[torch.Tensor]:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = one(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in one.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_trains_as_the_recipe_of_that_name(name: str) -> None:
    config = Float8LinearConfig.from_recipe_name(name)
    assert Float8LinearConfig.from_recipe_name(Float8LinearRecipeName(name)) == config
    ours = convert_to_float8_training(model(), config=config)
    for found, expected in zip(
        gradients(ours), gradients(nc.convert(model(), name, small=True)), strict=True
    ):
        assert torch.equal(found, expected)


def test_options_become_those_of_the_recipe() -> None:
    default: Any = recipe_of(Float8LinearConfig())
    assert default.float8_current_scaling() and default.fp8_format is Format.HYBRID
    assert default.fp8_quant_bwd_grad.amax_epsilon == 1e-12 and not default.use_power_2_scales
    assert (default.fp8_gemm_fprop, default.fp8_gemm_dgrad) == (MMParams(False), MMParams(True))
    config = Float8LinearConfig(
        cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn),
        gemm_config_output=Float8GemmConfig(),
        gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=True),
        round_scales_to_power_of_2=True,
        emulate=True,
        pad_inner_dim=True,
    )
    other: Any = recipe_of(config)
    assert other.fp8_format is Format.E4M3 and other.use_power_2_scales and other.emulate
    assert other.fp8_quant_fwd_weight.power_2_scale
    assert (other.fp8_gemm_fprop, other.fp8_gemm_wgrad) == (MMParams(True), MMParams(False))
    backward_plain: Any = recipe_of(
        Float8LinearConfig(
            cast_config_grad_output=PLAIN,
            cast_config_weight_for_grad_input=PLAIN,
            cast_config_input_for_grad_weight=PLAIN,
        )
    )
    assert backward_plain.backward_override == "high_precision"
    assert recipe_of(Float8LinearConfig(**dict.fromkeys(CASTS, PLAIN))) is None


def test_one_cast_for_all_operands_keeps_gradients_in_e5m2() -> None:
    shared = CastConfig()
    config = Float8LinearConfig(**dict.fromkeys(CASTS, shared))
    assert shared == CastConfig() and config == Float8LinearConfig()
    assert config.cast_config_grad_output.target_dtype == torch.float8_e5m2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cast_config_input": PLAIN}, "GEMM of output"),
        ({"cast_config_grad_output": PLAIN}, "GEMM of grad_input"),
        ({SECOND[0]: CastConfig(target_dtype=torch.float8_e5m2)}, "one dtype for both"),
        ({"cast_config_weight": ROWS, "enable_fsdp_float8_all_gather": True}, "TENSORWISE weights"),
    ],
)
def test_a_configuration_that_contradicts_itself(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Float8LinearConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"cast_config_input": ROWS},
        {"cast_config_weight_for_grad_input": ROWS},
        {"cast_config_weight": CastConfig(target_dtype=torch.float8_e5m2)},
    ],
)
def test_a_mixture_without_a_recipe_is_refused_before_anything_changes(options: dict[str, Any]) -> None:
    one = model()
    with pytest.raises(ValueError, match='page "From torchao"'):
        convert_to_float8_training(one, config=Float8LinearConfig(**options))
    assert type(one[0]) is nn.Linear


def test_wrong_values() -> None:
    with pytest.raises(ValueError, match="rows are scaled with DYNAMIC"):
        CastConfig(ScalingType.DISABLED, ScalingGranularity.AXISWISE)
    with pytest.raises(ValueError, match="target_dtype is torch.float16"):
        CastConfig(target_dtype=torch.float16)
    with pytest.raises(ValueError, match="use one of 'tensorwise', 'rowwise'"):
        Float8LinearConfig.from_recipe_name("blockwise")
    with pytest.raises(TypeError, match="config is a str"):
        convert_to_float8_training(model(), config="rowwise")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module"):
        convert_to_float8_training([model()])  # type: ignore[arg-type]


def test_the_filter_sees_each_linear_once_by_its_name() -> None:
    seen = []

    def keep_the_last(module: nn.Module, name: str) -> bool:
        seen.append((type(module), name))
        return name != "2"

    one = model()
    before = dict(one.named_parameters())
    assert convert_to_float8_training(one, module_filter_fn=keep_the_last) is one
    assert seen == [(nn.Linear, "0"), (nn.Linear, "2")]
    assert [isinstance(layer, Float8Linear) for layer in one] == [True, False, False]
    assert all(value is before[name] for name, value in one.named_parameters())
    untouched = convert_to_float8_training(model(), module_filter_fn=lambda *_: False)
    assert not any(isinstance(layer, Float8Linear) for layer in untouched.modules())
    assert isinstance(convert_to_float8_training(nn.Linear(32, 32)), Float8Linear)


def test_what_a_swap_of_modules_loses_stays() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    own = nn.Sequential(Doubled(32, 32), nn.Linear(32, 32)).eval()
    own[1].register_forward_hook(lambda module, args, out: torch.zeros(16, 32))
    with pytest.warns(UserWarning, match="forward of their own, such as '0'"):
        convert_to_float8_training(own)
    assert type(own[0]) is Doubled and not own[1].training
    assert not own(torch.randn(16, 32)).any()
    tied = nn.ModuleDict({"words": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    tied["head"].weight = tied["words"].weight
    convert_to_float8_training(tied, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    assert tied["head"].weight is tied["words"].weight
    precompute_float8_dynamic_scale_for_fsdp(tied)


def test_a_second_conversion_changes_the_recipe() -> None:
    one: Any = convert_to_float8_training(model())
    convert_to_float8_training(one, config=Float8LinearConfig.from_recipe_name("rowwise"))
    assert type(one[0].recipe) is nc.recipe.Float8RowwiseScaling


def test_from_float_leaves_the_layer() -> None:
    layer = nn.Linear(32, 48)
    converted: Any = Float8Linear.from_float(layer)
    assert converted.weight is layer.weight and type(layer) is nn.Linear
    assert isinstance(converted, Float8Linear) and not isinstance(layer, Float8Linear)


@pytest.mark.parametrize(
    ("recipe", "shape", "expected"),
    [
        ("tensorwise", (1024, 4096), False),
        ("tensorwise", (1040, 16), True),
        ("tensorwise", (1040, 17), False),
        ("rowwise", (2048, 8192), False),
        ("rowwise", (4096, 2048), False),
        ("rowwise", (4112, 1040), True),
        ("rowwise", (2064, 2064), True),
    ],
)
def test_the_filter_of_sizes(recipe: str, shape: tuple[int, int], expected: bool) -> None:
    layer = nn.Linear(shape[1], shape[0], device="meta")
    gains = _auto_filter_for_recipe(recipe, ["head"])
    assert gains(layer, "up") is expected and not gains(layer, "lm_head") and not gains(nn.GELU(), "up")
    named = {one.__name__: one for one in MODULES["float8.float8_linear_utils"]}
    assert named[f"_auto_filter_for_{recipe}"](layer, "up", ["head"]) is expected
    with pytest.raises(NotImplementedError):
        _auto_filter_for_recipe("rowwise_with_gw_hp", [])


def test_a_compiled_model_is_one_graph() -> None:
    one = convert_to_float8_training(model(), config=Float8LinearConfig.from_recipe_name("rowwise"))
    x = torch.randn(32, 48)
    found = torch.compile(one, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, one(x), rtol=1e-6, atol=1e-6)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package, or none, with narrowcast's names."""
    install_torchao_float8()
    yield importlib.import_module("torchao")
    uninstall_torchao_float8()


def test_code_that_imports_torchao_gets_these_names(torchao: ModuleType) -> None:
    install_torchao_float8()  # a second call changes nothing
    float8, layers = (
        importlib.import_module(f"torchao.{name}") for name in ("float8", "float8.float8_linear")
    )
    assert float8.Float8LinearConfig is Float8LinearConfig
    assert isinstance(float8.convert_to_float8_training(model())[0], layers.Float8Linear)
    assert importlib.util.find_spec("torchao") is not None and importlib.metadata.version("torchao")
    assert torchao.float8.config.CastConfig is CastConfig


def test_accelerate_s_path_of_torchao_runs_on_narrowcast(torchao: ModuleType) -> None:
    """Accelerate leaves the first and the last layer in high precision."""
    accelerate: Any = pytest.importorskip(
        "accelerate", reason="needs accelerate: pip install 'narrowcast[hf]'"
    )
    handlers = [accelerate.utils.AORecipeKwargs()]
    accelerator = accelerate.Accelerator(mixed_precision="fp8", kwargs_handlers=handlers, cpu=True)
    prepared = accelerator.prepare(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))))
    assert [isinstance(layer, Float8Linear) for layer in prepared] == [False, True, True, False]
    accelerator.backward(prepared(torch.randn(16, 32)).square().mean())
    assert all(parameter.grad is not None for parameter in prepared.parameters())


def test_uninstalling_restores_what_was_there() -> None:
    was_there = importlib.util.find_spec("torchao") is not None
    install_torchao_float8()
    uninstall_torchao_float8()
    uninstall_torchao_float8()
    if was_there:
        real = importlib.import_module("torchao.float8")
        assert real.convert_to_float8_training is not convert_to_float8_training
    else:
        assert not [name for name in sys.modules if name.partition(".")[0] == "torchao"]
        assert importlib.util.find_spec("torchao") is None


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_torchaos(name: str) -> None:
    """In fp32, where neither rounds before the bias: the same codes, so only sums differ in their last bits."""
    real = pytest.importorskip("torchao.float8")
    config = replace(real.Float8LinearConfig.from_recipe_name(name), emulate=True)
    expected = gradients(real.convert_to_float8_training(model(), config=config))
    ours = gradients(convert_to_float8_training(model(), config=Float8LinearConfig.from_recipe_name(name)))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
