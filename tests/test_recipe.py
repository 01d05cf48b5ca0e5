"""Recipes: defaults, derived settings, value semantics, environment, and every way to make a wrong one."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MMParams,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
    get_align_size_for_quantization,
    linear_plan,
)

E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2
FAST, SPLIT = MMParams(False), MMParams(True)
PLAIN = QParams()
POWER_2 = QParams(power_2_scale=True)
POWER_2_FROM = QParams(power_2_scale=True, amax_epsilon=1e-12)


def identity_factory(role: nc.QuantizerRole) -> nc.Quantizer:
    return nc.IdentityQuantizer()


def other_factory(role: nc.QuantizerRole) -> nc.Quantizer:
    return nc.IdentityQuantizer()


def largest(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0)


def make(kind: type[Recipe], **fields: Any) -> Recipe:
    if kind is CustomRecipe:
        fields.setdefault("qfactory", identity_factory)
    return kind(**fields)


KINDS = [
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Float8BlockScaling,
    NVFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP4BlockScaling,
    CustomRecipe,
]
ATTENTION = {"fp8_dpa": False, "fp8_mha": False}
COMMON = {**ATTENTION, "backward_override": None, "emulate": False, "saved_activations": None}
DEFAULTS: dict[type[Recipe], dict[str, Any]] = {
    DelayedScaling: {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "initial_scale": "range",
        **COMMON,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        "fp8_quant_fwd_inp": PLAIN,
        "fp8_quant_fwd_weight": PLAIN,
        "fp8_quant_bwd_grad": PLAIN,
        "fp8_gemm_fprop": FAST,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        **COMMON,
    },
    Float8RowwiseScaling: {
        "use_power_2_scales": True,
        "high_precision_wgrad": False,
        "fp8_format": Format.E4M3,
        "fp8_quant_fwd_inp": POWER_2_FROM,
        "fp8_quant_fwd_weight": POWER_2_FROM,
        "fp8_quant_bwd_grad": POWER_2_FROM,
        "fp8_gemm_fprop": FAST,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        **COMMON,
    },
    MXFP8BlockScaling: {
        "margin": 0,
        "fp8_format": Format.E4M3,
        **ATTENTION,
        "backward_override": None,
        "enable_2d_quantization": False,
        "emulate": False,
        "saved_activations": None,
    },
    MXFP6BlockScaling: {
        "forward_format": Format.E2M3,
        "backward_format": Format.E3M2,
        **ATTENTION,
        "backward_override": None,
        "enable_2d_quantization": False,
        "emulate": False,
        "saved_activations": None,
    },
    MXFP4BlockScaling: {
        **ATTENTION,
        "backward_override": None,
        "enable_2d_quantization": False,
        "emulate": False,
        "saved_activations": None,
    },
    Float8BlockScaling: {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_quant_fwd_inp": POWER_2,
        "fp8_quant_fwd_weight": POWER_2,
        "fp8_quant_bwd_grad": POWER_2,
        "fp8_gemm_fprop": SPLIT,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        **COMMON,
    },
    NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        **COMMON,
        "fp4_quant_fwd_inp": QParams(random_hadamard_transform=True),
        "fp4_quant_fwd_weight": QParams(fp4_2d_quantization=True),
        "fp4_quant_bwd_grad": QParams(random_hadamard_transform=True, stochastic_rounding=True),
    },
    CustomRecipe: {
        "qfactory": identity_factory,
        "fp8_format": Format.HYBRID,
        **ATTENTION,
        "backward_override": None,
        "quantization_alignment": 128,
        "fp8_gemm_fprop": FAST,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        "emulate": False,
        "saved_activations": None,
    },
}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("NARROWCAST_", "NVTE_")):
            monkeypatch.delenv(name)


# -- defaults and what follows from them ------------------------------------------------------------------------------


@each_kind
def test_fields_and_defaults(kind: type[Recipe]) -> None:
    recipe = make(kind)
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(kind)}
    assert list(fields.items()) == list(
        DEFAULTS[kind].items()
    )  # also their order: they may be given by position


def test_parameters_default_values() -> None:
    assert MMParams() == MMParams(use_split_accumulator=True)
    assert QParams() == QParams(False, 0.0, False, False, False)
    for params in (MMParams(), QParams()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            params.power_2_scale = True  # type: ignore[misc]


@pytest.mark.parametrize(
    "name, maxima",
    [
        ("E2M1", (6, 6)),
        ("E2M3", (7.5, 7.5)),
        ("E3M2", (28, 28)),
        ("E4M3", (448, 448)),
        ("E5M2", (57344, 57344)),
        ("HYBRID", (448, 57344)),
    ],
)
def test_format_maxima(name: str, maxima: tuple[float, float]) -> None:
    assert (Format[name].max_fwd, Format[name].max_bwd) == maxima


PREDICATES = {
    "delayed": {DelayedScaling},
    "float8_current_scaling": {Float8CurrentScaling},
    "float8_per_tensor_scaling": {DelayedScaling, Float8CurrentScaling},
    "mxfp8": {MXFP8BlockScaling},
    "float8_block_scaling": {Float8BlockScaling},
    "nvfp4": {NVFP4BlockScaling},
    "custom": {CustomRecipe},
}


@pytest.mark.parametrize("predicate", PREDICATES)
def test_predicates_of_class_and_instance(predicate: str) -> None:
    for kind in KINDS:
        assert getattr(kind, predicate)() is (kind in PREDICATES[predicate])
        assert getattr(make(kind), predicate)() is (kind in PREDICATES[predicate])


def test_alignment_of_grouped_rows() -> None:
    sizes = {kind: get_align_size_for_quantization(make(kind)) for kind in KINDS}
    assert sizes == {
        DelayedScaling: 16,
        Float8CurrentScaling: 16,
        Float8RowwiseScaling: 16,
        MXFP8BlockScaling: 32,
        MXFP6BlockScaling: 32,
        MXFP4BlockScaling: 32,
        Float8BlockScaling: 16,
        NVFP4BlockScaling: 128,
        CustomRecipe: 128,
    }
    assert get_align_size_for_quantization(make(CustomRecipe, quantization_alignment=48)) == 48
    assert get_align_size_for_quantization("mxfp8") == 32
    with pytest.raises(ValueError, match="no recipe is named 'mxfp'"):
        get_align_size_for_quantization("mxfp")


def quantizers(recipe: Recipe) -> dict[str, nc.Quantizer]:
    plan = linear_plan(recipe, "fc", True, True, module_type="linear")
    return {kind: getattr(plan, kind).quantizer for kind in ("input", "weight", "grad_output")}


@pytest.mark.parametrize(
    "kind",
    [DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, MXFP8BlockScaling, Float8BlockScaling],
)
@pytest.mark.parametrize("fp8_format, backward", [(Format.E4M3, E4M3), (Format.HYBRID, E5M2)], ids=str)
def test_element_types_follow_the_format(kind: type[Recipe], fp8_format: Format, backward: nc.DType) -> None:
    made = quantizers(make(kind, fp8_format=fp8_format))
    assert {name: q.dtype for name, q in made.items()} == {  # type: ignore[attr-defined]
        "input": E4M3,
        "weight": E4M3,
        "grad_output": backward,
    }


def test_delayed_slots_and_state() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    made = quantizers(recipe)
    assert [made[kind].slot for kind in ("input", "grad_output")] == [0, 2]  # type: ignore[attr-defined]
    assert isinstance(made["weight"], nc.Float8CurrentScalingQuantizer)  # by its own amax
    plan = linear_plan(recipe, "", True, True, module_type="linear")
    assert plan.delayed == recipe
    stateless = linear_plan(Float8CurrentScaling(), "", True, True, module_type="linear")
    assert stateless.delayed is None


@pytest.mark.parametrize("power_2", [False, True])
def test_current_scaling_settings(power_2: bool) -> None:
    recipe = Float8CurrentScaling(use_power_2_scales=power_2)
    for name, quantizer in quantizers(recipe).items():
        assert quantizer.force_pow_2_scales is power_2, name  # type: ignore[attr-defined]
        assert quantizer.amax_epsilon == 0.0  # type: ignore[attr-defined]


def test_settings_of_one_operand_win() -> None:
    recipe = Float8CurrentScaling(fp8_quant_bwd_grad=QParams(power_2_scale=True, amax_epsilon=0.5))
    made = quantizers(recipe)
    settings = {name: (q.force_pow_2_scales, q.amax_epsilon) for name, q in made.items()}  # type: ignore[attr-defined]
    assert settings == {"input": (False, 0.0), "weight": (False, 0.0), "grad_output": (True, 0.5)}


def exponents_only(scale_inv: torch.Tensor) -> bool:
    mantissas, _ = torch.frexp(scale_inv[scale_inv != 0])
    return bool((mantissas == 0.5).all())


@pytest.mark.parametrize(
    "recipe, power_2",
    [
        (Float8CurrentScaling(), False),
        (Float8CurrentScaling(use_power_2_scales=True), True),
        (Float8BlockScaling(), True),
        (Float8BlockScaling(use_f32_scales=True), False),
        (dataclasses.replace(Float8CurrentScaling(), use_power_2_scales=True), True),
        (dataclasses.replace(Float8CurrentScaling(use_power_2_scales=True), use_power_2_scales=False), False),
        (dataclasses.replace(Float8BlockScaling(), use_f32_scales=True), False),
    ],
    ids=lambda value: value if isinstance(value, bool) else type(value).__name__,
)
def test_scale_choice_reaches_the_scales(recipe: Recipe, power_2: bool) -> None:
    x = torch.randn(64, 96)
    for name, quantizer in quantizers(recipe).items():
        storage = quantizer.quantize(x)
        buffers = dict(zip([name for name, _ in storage._FLATTEN_TENSOR_BUFFERS], storage.get_data_tensors()))
        scales = [buffer for key, buffer in buffers.items() if "scale_inv" in key and buffer is not None]
        assert scales
        assert all(exponents_only(scale) is power_2 for scale in scales), name


def test_replace_keeps_the_settings_of_one_operand() -> None:
    given = Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=0.25))
    changed = dataclasses.replace(given, use_power_2_scales=True)
    assert changed.fp8_quant_fwd_inp == QParams(amax_epsilon=0.25)
    assert changed.fp8_quant_fwd_weight == POWER_2


@pytest.mark.parametrize("dims", [(1, 2, 1), (1, 1, 1), (2, 1, 1), (1, 1, 2)])
def test_block_dims(dims: tuple[int, int, int]) -> None:
    x, w, grad = dims
    recipe = Float8BlockScaling(x_block_scaling_dim=x, w_block_scaling_dim=w, grad_block_scaling_dim=grad)
    made = [q.block_scaling_dim for q in quantizers(recipe).values()]  # type: ignore[attr-defined]
    assert made == [x, w, grad]


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("kind", [MXFP8BlockScaling, MXFP6BlockScaling, MXFP4BlockScaling])
def test_mx_two_d_is_for_weights(kind: type[Recipe], two_d: bool) -> None:
    made = quantizers(make(kind, enable_2d_quantization=two_d))
    tiles = {name: q.with_2d_quantization for name, q in made.items()}  # type: ignore[attr-defined]
    assert tiles == {"input": False, "weight": two_d, "grad_output": False}


def test_mxfp6_formats_by_direction() -> None:
    for forward, backward in ((Format.E2M3, Format.E3M2), (Format.E3M2, Format.E2M3)):
        made = quantizers(MXFP6BlockScaling(forward_format=forward, backward_format=backward))
        elements = {name: q.dtype.name for name, q in made.items()}  # type: ignore[attr-defined]
        assert elements == {
            "input": f"kFloat6{forward.value}",
            "weight": f"kFloat6{forward.value}",
            "grad_output": f"kFloat6{backward.value}",
        }


NVFP4_FIELDS = ("with_rht", "with_post_rht_amax", "with_2d_quantization", "stochastic_rounding")


@pytest.mark.parametrize(
    "fields, inp, weight, grad",
    [
        ({}, (1, 1, 0, 0), (0, 0, 1, 0), (1, 1, 0, 1)),
        ({"disable_rht": True}, (0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)),
        ({"disable_stochastic_rounding": True}, (1, 1, 0, 0), (0, 0, 1, 0), (1, 1, 0, 0)),
        ({"disable_2d_quantization": True}, (1, 1, 0, 0), (0, 0, 0, 0), (1, 1, 0, 1)),
    ],
    ids=["default", "no_rht", "no_sr", "no_2d"],
)
def test_nvfp4_settings(fields: dict[str, bool], inp: Any, weight: Any, grad: Any) -> None:
    recipe = NVFP4BlockScaling(**fields)
    made = quantizers(recipe)
    settings = {name: tuple(int(getattr(q, field)) for field in NVFP4_FIELDS) for name, q in made.items()}
    assert settings == {"input": inp, "weight": weight, "grad_output": grad}
    derived = (recipe.fp4_quant_fwd_inp, recipe.fp4_quant_fwd_weight, recipe.fp4_quant_bwd_grad)
    shown = [(p.random_hadamard_transform, p.fp4_2d_quantization, p.stochastic_rounding) for p in derived]
    assert [tuple(map(int, p)) for p in shown] == [(s[0], s[2], s[3]) for s in (inp, weight, grad)]


@pytest.mark.parametrize("scope", ["none", "weights", "activations", "all"])
@pytest.mark.parametrize("use_256", ["none", "weights", "activations", "all"])
def test_four_over_six_scopes(scope: str, use_256: str) -> None:
    recipe = NVFP4BlockScaling(
        disable_rht=True, nvfp4_4over6=scope, nvfp4_4over6_e4m3_use_256=use_256, nvfp4_4over6_err_mode="MSE"
    )
    made = quantizers(recipe)
    chosen = {"weight": ("weights", "all"), "input": ("activations", "all"), "grad_output": ()}
    for name, scopes in chosen.items():
        quantizer: Any = made[name]
        assert quantizer.nvfp4_use_4over6 is (scope in scopes)
        assert quantizer.nvfp4_e4m3_max == (256 if scope in scopes and use_256 in scopes else 448)
        assert quantizer.nvfp4_4over6_err_mode == "MSE"


def test_row_scaled_activation_is_for_inputs() -> None:
    made = quantizers(NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True))
    rows = {name: q.row_scaled_nvfp4 for name, q in made.items()}  # type: ignore[attr-defined]
    assert rows == {"input": True, "weight": False, "grad_output": False}


# -- values -----------------------------------------------------------------------------------------------------------

CHANGES: dict[type[Recipe], list[dict[str, Any]]] = {
    DelayedScaling: [
        {"margin": 1},
        {"fp8_format": Format.E4M3},
        {"amax_history_len": 4},
        {"amax_compute_algo": "most_recent"},
        {"amax_compute_algo": largest},
        {"scaling_factor_compute_algo": print},
        {"reduce_amax": False},
        {"initial_scale": "one"},
        {"emulate": True},
    ],
    Float8CurrentScaling: [
        {"use_power_2_scales": True},
        {"fp8_format": Format.E4M3},
        {"fp8_quant_fwd_inp": QParams(amax_epsilon=1.0)},
        {"fp8_gemm_fprop": SPLIT},
        {"backward_override": "dequantized"},
    ],
    Float8RowwiseScaling: [{"use_power_2_scales": False}, {"high_precision_wgrad": True}],
    MXFP8BlockScaling: [{"fp8_format": Format.HYBRID}, {"enable_2d_quantization": True}],
    MXFP6BlockScaling: [{"forward_format": Format.E3M2}, {"enable_2d_quantization": True}],
    MXFP4BlockScaling: [{"enable_2d_quantization": True}, {"backward_override": "dequantized"}],
    Float8BlockScaling: [{"use_f32_scales": True}, {"w_block_scaling_dim": 1}],
    NVFP4BlockScaling: [{"disable_rht": True}, {"nvfp4_4over6": "weights"}, {"nvfp4_4over6_err_mode": "MSE"}],
    CustomRecipe: [{"qfactory": other_factory}, {"quantization_alignment": 16}],
}


@each_kind
def test_equal_fields_are_equal_recipes(kind: type[Recipe]) -> None:
    recipe = make(kind)
    assert recipe == make(kind)
    assert hash(recipe) == hash(make(kind))
    for fields in CHANGES[kind]:
        changed = make(kind, **fields)
        assert changed != recipe, fields
        assert changed == make(kind, **fields)
        assert len({recipe, changed, make(kind), make(kind, **fields)}) == 2
    assert all(recipe != make(other) for other in KINDS if other is not kind)


@each_kind
def test_repr_names_what_was_changed_and_is_stable(kind: type[Recipe]) -> None:
    recipe = make(kind)
    assert repr(recipe) == repr(make(kind))
    for fields in CHANGES[kind]:
        changed = repr(make(kind, **fields))
        assert changed != repr(recipe) and all(f"{name}=" in changed for name in fields)


@each_kind
def test_frozen(kind: type[Recipe]) -> None:
    recipe, name = make(kind), next(iter(CHANGES[kind][0]))
    hash(recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(recipe, name, CHANGES[kind][0][name])
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(recipe, name)


@each_kind
def test_replace_equals_building_anew(kind: type[Recipe]) -> None:
    for fields in CHANGES[kind]:
        changed = dataclasses.replace(make(kind), **fields)  # type: ignore[type-var]
        assert changed == make(kind, **fields)
        assert quantizers(changed) == quantizers(make(kind, **fields))


@each_kind
def test_copies_and_pickles_are_equal_and_work(kind: type[Recipe]) -> None:
    recipe = make(kind, **CHANGES[kind][-1])
    for twin in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert twin == recipe
        assert hash(twin) == hash(recipe)
        assert quantizers(twin) == quantizers(recipe)


# -- environment ------------------------------------------------------------------------------------------------------

VARIABLES = [
    ("EMULATE", "1", DelayedScaling, "emulate", True),
    ("EMULATE", "true", CustomRecipe, "emulate", True),
    ("FP8_CURRENT_SCALING_POWER_2_SCALES", "1", Float8CurrentScaling, "use_power_2_scales", True),
    ("FP8_BLOCK_SCALING_FP32_SCALES", "on", Float8BlockScaling, "use_f32_scales", True),
    ("NVFP4_DISABLE_RHT", "1", NVFP4BlockScaling, "disable_rht", True),
    ("NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1", NVFP4BlockScaling, "disable_stochastic_rounding", True),
    ("NVFP4_DISABLE_2D_QUANTIZATION", "1", NVFP4BlockScaling, "disable_2d_quantization", True),
    ("NVFP4_4OVER6", "weights", NVFP4BlockScaling, "nvfp4_4over6", "weights"),
    ("NVFP4_4OVER6_E4M3_USE_256", "none", NVFP4BlockScaling, "nvfp4_4over6_e4m3_use_256", "none"),
    ("NVFP4_4OVER6_ERR_MODE", "mse", NVFP4BlockScaling, "nvfp4_4over6_err_mode", "MSE"),
]


@pytest.mark.parametrize("prefix", ["NARROWCAST_", "NVTE_"])
@pytest.mark.parametrize("variable, text, kind, field, value", VARIABLES, ids=[v[0] for v in VARIABLES])
def test_environment_is_read_when_a_recipe_is_built(
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
    variable: str,
    text: str,
    kind: type[Recipe],
    field: str,
    value: Any,
) -> None:
    before = make(kind)
    monkeypatch.setenv(prefix + variable, text)
    assert getattr(make(kind), field) == value
    assert getattr(before, field) == DEFAULTS[kind][field]
    explicit = make(kind, **{field: DEFAULTS[kind][field]})
    assert explicit == before  # an argument wins over the environment
    monkeypatch.delenv(prefix + variable)
    assert make(kind) == before


def test_row_scaled_activation_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_NVFP4_ROW_SCALED_ACTIVATION", "1")
    monkeypatch.setenv("NARROWCAST_NVFP4_DISABLE_RHT", "1")
    assert NVFP4BlockScaling().row_scaled_activation is True


def test_environment_reaches_derived_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWCAST_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert Float8BlockScaling().fp8_quant_fwd_inp == PLAIN


def test_our_prefix_wins_and_nonsense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    monkeypatch.setenv("NARROWCAST_NVFP4_DISABLE_RHT", "0")
    assert NVFP4BlockScaling().disable_rht is False
    monkeypatch.setenv("NARROWCAST_NVFP4_DISABLE_RHT", "perhaps")
    with pytest.raises(ValueError, match=r"NARROWCAST_NVFP4_DISABLE_RHT is 'perhaps'; use 1 or 0"):
        NVFP4BlockScaling()
    monkeypatch.setenv("NARROWCAST_NVFP4_DISABLE_RHT", "0")
    monkeypatch.setenv("NARROWCAST_NVFP4_4OVER6", "some")
    with pytest.raises(ValueError, match="'some'"):
        NVFP4BlockScaling()


# -- errors -----------------------------------------------------------------------------------------------------------

BAD: list[tuple[type[Recipe], dict[str, Any], str]] = [
    *[(kind, {"fp8_format": Format.E5M2}, "E5M2.*Format.E4M3 or Format.HYBRID") for kind in KINDS[:4]],
    (NVFP4BlockScaling, {"fp8_format": Format.E5M2}, "E5M2"),
    (NVFP4BlockScaling, {"fp8_format": Format.HYBRID}, "HYBRID"),
    (NVFP4BlockScaling, {"fp4_format": Format.E4M3}, "E2M1"),
    (MXFP8BlockScaling, {"fp8_format": Format.E2M1}, "E2M1"),
    (Float8CurrentScaling, {"fp8_format": "HYBRID"}, "HYBRID"),
    (DelayedScaling, {"backward_override": "high_precision"}, "backward_override"),
    (DelayedScaling, {"backward_override": "dequantized"}, "backward_override"),
    *[
        (kind, {"backward_override": "none"}, "backward_override is 'none'.*'high_precision'.*'dequantized'")
        for kind in KINDS[1:]
    ],
    (DelayedScaling, {"amax_history_len": 0}, "amax_history_len is 0; use a whole number from 1 to"),
    (DelayedScaling, {"amax_history_len": 2**20 + 1}, "amax_history_len is 1048577; use"),
    (DelayedScaling, {"amax_history_len": 2.5}, "amax_history_len is 2.5"),
    (DelayedScaling, {"margin": 0.5}, "margin is 0.5; use a whole number"),
    (DelayedScaling, {"margin": 33}, "margin is 33; use a whole number from -32 to 32"),
    (DelayedScaling, {"margin": -33}, "margin is -33; use a whole number from -32 to 32"),
    (DelayedScaling, {"amax_compute_algo": "mean"}, "amax_compute_algo is 'mean'; use 'max', 'most_recent'"),
    (DelayedScaling, {"initial_scale": 1.0}, "initial_scale is 1.0; use 'range' or 'one'"),
    (DelayedScaling, {"scaling_factor_compute_algo": "max"}, "scaling_factor_compute_algo is 'max'"),
    (MXFP8BlockScaling, {"margin": 1}, "margin=1"),
    (MXFP6BlockScaling, {"forward_format": Format.E4M3}, "forward_format=Format.E4M3; use Format.E2M3 or"),
    (MXFP6BlockScaling, {"backward_format": Format.HYBRID}, "backward_format=Format.HYBRID; use Format.E2M3"),
    (Float8BlockScaling, {"x_block_scaling_dim": 2}, "two 128x128-scaled operands"),
    (Float8BlockScaling, {"grad_block_scaling_dim": 2}, "two 128x128-scaled operands"),
    (
        Float8BlockScaling,
        {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1, "grad_block_scaling_dim": 2},
        "two 128x128-scaled operands",
    ),
    (Float8BlockScaling, {"w_block_scaling_dim": 3}, "w_block_scaling_dim is 3"),
    *[
        (Float8BlockScaling, {f"fp8_gemm_{gemm}": FAST}, f"fp8_gemm_{gemm}.*use MMParams")
        for gemm in ("fprop", "dgrad", "wgrad")
    ],
    (
        NVFP4BlockScaling,
        {"nvfp4_4over6": "weight"},
        "nvfp4_4over6 is 'weight'; use 'none', 'weights'.* NARROWCAST_NVFP4_4OVER6$",
    ),
    (
        NVFP4BlockScaling,
        {"nvfp4_4over6_e4m3_use_256": "yes"},
        "_use_256 is 'yes'; .* NARROWCAST_NVFP4_4OVER6_E4M3_USE_256$",
    ),
    (
        NVFP4BlockScaling,
        {"nvfp4_4over6_err_mode": "RMS"},
        "nvfp4_4over6_err_mode is 'RMS'; use 'MAE' or 'MSE', also in NARROWCAST_NVFP4_4OVER6_ERR_MODE$",
    ),
    (NVFP4BlockScaling, {"nvfp4_4over6": "all"}, "nvfp4_4over6='all'.*disable_rht=True"),
    (NVFP4BlockScaling, {"nvfp4_4over6": "activations"}, "nvfp4_4over6='activations'.*disable_rht=True"),
    (NVFP4BlockScaling, {"row_scaled_activation": True}, "row_scaled_activation=True.*disable_rht=True"),
    (CustomRecipe, {"qfactory": None}, "callable qfactory"),
    (CustomRecipe, {"qfactory": "mxfp8"}, "callable qfactory.*'mxfp8'"),
    (CustomRecipe, {"quantization_alignment": 0}, "quantization_alignment is 0"),
    (CustomRecipe, {"quantization_alignment": -16}, "quantization_alignment is -16"),
]


@pytest.mark.parametrize("kind, fields, message", BAD, ids=[f"{k.__name__}-{f}" for k, f, _ in BAD])
def test_wrong_recipes_name_value_and_choice(
    kind: type[Recipe], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(kind, **fields)


def test_four_over_six_on_weights_goes_with_rotation() -> None:
    assert NVFP4BlockScaling(nvfp4_4over6="weights").nvfp4_4over6 == "weights"


def test_custom_recipe_needs_a_factory() -> None:
    with pytest.raises(ValueError, match="callable qfactory"):
        CustomRecipe()


@each_kind
@pytest.mark.parametrize("field", ["fp8_dpa", "fp8_mha"])
def test_fp8_attention_is_refused(kind: type[Recipe], field: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{field}=True"):
        make(kind, **{field: True})


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.__name__)
def test_backward_override_is_kept(kind: type[Recipe], override: str) -> None:
    assert make(kind, backward_override=override).backward_override == override  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["no", "x", 1, None], ids=repr)
def test_flags_are_true_or_false(value: Any) -> None:
    """A text would count as true."""
    flags = {
        nc.recipe.DelayedScaling: ("emulate", "reduce_amax"),
        nc.recipe.Float8CurrentScaling: ("emulate", "use_power_2_scales"),
        nc.recipe.Float8BlockScaling: ("emulate", "use_f32_scales"),
        nc.recipe.MXFP8BlockScaling: ("emulate", "enable_2d_quantization"),
        nc.recipe.NVFP4BlockScaling: ("emulate", "disable_rht", "disable_stochastic_rounding"),
        nc.recipe.MMParams: ("use_split_accumulator",),
        nc.recipe.QParams: ("power_2_scale", "fp4_2d_quantization"),
    }
    for kind, names in flags.items():
        for name in names:
            with pytest.raises(TypeError, match=f"{kind.__name__}: {name} is {value!r}; use True or False"):
                kind(**{name: value})


def test_a_plan_needs_the_type_of_its_module() -> None:
    """Left out, it was "linear", and a factory gave grouped weights the format of others."""
    with pytest.raises(TypeError, match="module_type"):
        linear_plan(None, "", True, True)  # type: ignore[call-arg]


def test_an_hadamard_transform_of_one_operand_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="switch it on for both or for neither, and off for weights"):
        NVFP4BlockScaling(
            fp4_quant_fwd_inp=QParams(random_hadamard_transform=True), fp4_quant_bwd_grad=QParams()
        )


@pytest.mark.parametrize(
    ("recipe", "given", "refused"),
    [
        ("NVFP4BlockScaling", {"row_scaled_activation": True, "disable_rht": True}, "pass disable_rht=True"),
        ("NVFP4BlockScaling", {"nvfp4_4over6": "all", "disable_rht": True}, "pass disable_rht=True"),
        ("Float8BlockScaling", {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1}, "two 128x128-scaled"),
    ],
)
def test_fields_that_need_another_are_assigned_before_it(
    recipe: str, given: dict[str, Any], refused: str
) -> None:
    """Found by the fuzzer: what the constructor takes, assignments take, in any order."""
    whole, half = (getattr(nc.recipe, recipe)() for _ in range(2))
    for name, value in given.items():
        setattr(whole, name, value)
    assert whole == getattr(nc.recipe, recipe)(**given)
    setattr(half, *next(iter(given.items())))
    with pytest.raises(ValueError, match=refused):
        nc.Linear(32, 32, device="cpu", recipe=half)(torch.randn(16, 32))


def test_operands_of_nvfp4_are_assigned_one_by_one() -> None:
    """As code for Transformer Engine does; whether they fit together is asked at the first use."""
    recipe = nc.recipe.NVFP4BlockScaling()
    for name in ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"):
        setattr(recipe, name, nc.recipe.QParams())
    assert not recipe.make_quantizer("input").with_rht
    layer = nc.Linear(32, 32, device="cpu", recipe=recipe)
    layer(torch.randn(16, 32)).sum().backward()
    half = nc.recipe.NVFP4BlockScaling()
    half.fp4_quant_fwd_inp = nc.recipe.QParams()
    with pytest.raises(ValueError, match="it cancels in wgrad where inputs and gradients both have it"):
        nc.Linear(32, 32, device="cpu", recipe=half)(torch.randn(16, 32))
    with pytest.raises(ValueError, match="it cancels in wgrad"):
        nc.recipe.NVFP4BlockScaling(fp4_quant_fwd_inp=nc.recipe.QParams())


# -- by name ---------------------------------------------------------------------------------------------------------


def test_every_recipe_has_a_name() -> None:
    named = set(nc.recipe.NAMES.values())
    public = {one for one in vars(nc.recipe).values() if isinstance(one, type) and issubclass(one, Recipe)}
    assert public - named == {Recipe, CustomRecipe} and len(named) == len(nc.recipe.NAMES)
    for name, cls in nc.recipe.NAMES.items():
        assert nc.recipe.recipe_from_name(name) == cls()
    assert nc.recipe.recipe_from_name("nvfp4", emulate=True) == NVFP4BlockScaling(emulate=True)
    assert nc.recipe.recipe_from_name("tensorwise") == Float8CurrentScaling()
    with_bf16_wgrad = Float8RowwiseScaling(high_precision_wgrad=True, emulate=True)
    assert nc.recipe.recipe_from_name("rowwise_with_gw_hp", emulate=True) == with_bf16_wgrad
    written = '{"": {"type": "rowwise_with_gw_hp", "emulate": true}}'
    assert nc.recipe.recipes_from_json(written) == {"": with_bf16_wgrad}


def test_a_recipe_is_taken_by_name_wherever_one_goes() -> None:
    layer, x = nc.Linear(32, 32, device="cpu", recipe="mxfp8"), torch.randn(4, 32)
    assert layer.recipe == MXFP8BlockScaling()
    named = layer(x)
    layer.recipe = None
    with nc.autocast(recipe="mxfp8"):
        assert torch.equal(layer(x), named)
    with nc.autocast(enabled=False, recipe="mxfp8"):
        assert not torch.equal(layer(x), named)
    layer.recipe = "current"
    assert layer.recipe == Float8CurrentScaling()
    with nc.quantized_model_init(recipe="block"):
        assert isinstance(nc.Linear(128, 128, device="cpu").weight, nc.Float8BlockwiseQTensor)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    assert nc.convert(model, {"": "current", "1": "block"}) is model
    assert list(nc.get_recipes(model).values()) == [Float8CurrentScaling(), Float8BlockScaling()]
    nc.set_recipe(model, "delayed")
    assert set(nc.get_recipes(model).values()) == {DelayedScaling()}
    table = '{"": "nvfp4", "1": {"type": "tensorwise", "emulate": true}, "0": null}'
    nc.set_recipe(model, table)
    assert list(nc.get_recipes(model).values()) == [None, Float8CurrentScaling(emulate=True)]


def test_a_recipe_is_taken_by_name_in_compiled_code() -> None:
    layer, x = nc.Linear(32, 32, device="cpu"), torch.randn(4, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(recipe="current"):
            return layer(x)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("MXFP8", "no recipe is named 'MXFP8'; the nearest: 'mxfp8'"),
        ("Float8CurrentScaling", "the nearest: 'current', the name of that class; use one of"),
        ("curent", "the nearest: 'current'"),
        ("fp4", "named 'fp4'; use one of 'delayed', "),
    ],
)
def test_an_unknown_name_tells_the_nearest(name: str, told: str) -> None:
    for owner, call in {
        "autocast": lambda: nc.autocast(recipe=name),
        "Linear": lambda: nc.Linear(32, 32, device="cpu", recipe=name),
        "convert": lambda: nc.convert(torch.nn.Linear(32, 32), name),
        "set_recipe": lambda: nc.set_recipe(nc.Linear(32, 32, device="cpu"), {"": name}),
        "'layers'": lambda: nc.recipe.recipes_from_json(f'{{"layers": "{name}"}}'),
    }.items():
        none = {
            "autocast": "enabled=False is high precision",
            "convert": "skip=, or None in a table, leaves layers as they are",
        }
        expected = f"{owner}: .*{told}.*{none.get(owner, 'None is high precision')}$"
        with pytest.raises(ValueError, match=expected) as raised:
            call()
        error = raised.value
        assert error.__cause__ is None and (error.__suppress_context__ or error.__context__ is None), (
            "told twice"
        )
    with pytest.raises(
        TypeError, match=r"autocast got 'current' as a positional argument; write autocast\(recipe='"
    ):
        nc.autocast("current")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bf16", "none", "FP32"])
def test_high_precision_is_told_first(name: str) -> None:
    """The command line has a name for it."""
    for none, call in {
        "enabled=False": lambda: nc.autocast(recipe=name),
        "None": lambda: nc.Linear(32, 32, device="cpu", recipe=name),
    }.items():
        with pytest.raises(
            ValueError, match=f"named '{name}'; {none} is high precision; use one of 'delayed'"
        ):
            call()


def test_a_plan_is_chosen_by_what_a_broken_graph_knows_as_symbols() -> None:
    def run(x: torch.Tensor, first: int) -> torch.Tensor:
        plan = linear_plan(None, "", first < 2, first < 1, module_type="linear")
        return x + plan.needs_input + 2 * plan.needs_weight

    compiled = torch.compile(run, backend="eager", dynamic=True, fullgraph=True)
    assert [compiled(torch.zeros(1), first).item() for first in (1, 2, 0)] == [1.0, 0.0, 3.0]


@pytest.mark.parametrize(
    "name, meant",
    [
        ("MXFP8", "the nearest: 'mxfp8'"),
        ("fp8", "for FP8 start with 'current'"),
        ("float8", "for FP8 start with 'current'"),
    ],
)
def test_the_recipe_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"no recipe is named '{name}'; {meant}; use one of"):
        nc.recipe.recipe_from_name(name)
