"""RecipeState: quantizers per slot, and delayed-scaling buffers that outlive them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from delayed_simulation import BACKWARD, FORWARD, Simulation, clean_autocast, draw

import narrowcast as nc
from narrowcast import custom_recipes
from narrowcast.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    linear_plan,
)
from narrowcast.roles import QuantizerRole
from narrowcast.state import OWNERS, RecipeState, renew

__all__ = ["clean_autocast"]
E4M3, E5M2 = nc.DType.kFloat8E4M3, nc.DType.kFloat8E5M2
STATELESS: list[Recipe] = [
    Float8CurrentScaling(),
    MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    Float8BlockScaling(),
    NVFP4BlockScaling(),
]


def create(recipe: Any, mode: Any = "forward", num_quantizers: int = 3, **kwargs: Any) -> RecipeState:
    return RecipeState.create(recipe, mode=mode, num_quantizers=num_quantizers, device="cpu", **kwargs)


def delayed(**fields: Any) -> DelayedScaling:
    return DelayedScaling(**{"amax_history_len": 4, "initial_scale": "one", **fields})


# -- which quantizer for which slot -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: type(recipe).__name__)
def test_slots_by_position(recipe: Recipe) -> None:
    plan = linear_plan(recipe, "", True, True, module_type="linear")
    inp, weight, grad = (operand.quantizer for operand in (plan.input, plan.kept_weight, plan.grad_output))
    forward = [q.with_usage(True, True) for q in create(recipe, num_quantizers=6).make_quantizers()]
    assert forward[0] == forward[3] == inp
    if isinstance(weight, nc.MXFP8Quantizer):  # tiles are for layers, and no role says that this is one
        weight = weight.replace(with_2d_quantization=False)
    assert forward[1] == forward[4] == weight
    assert forward[2] == forward[5] == recipe.make_quantizer("output").with_usage(True, True)
    backward = [q.with_usage(True, True) for q in create(recipe, "backward", 4).make_quantizers()]
    assert backward == [grad] * 4
    state = create(recipe)
    assert state.scale is None
    assert state.amax_history is None


def test_slots_by_role() -> None:
    recipe = Float8BlockScaling()
    roles = [
        QuantizerRole("linear", "weight", "fc1"),
        None,
        QuantizerRole("dpa", "qkv"),
        QuantizerRole(tensor_type="input"),
    ]
    state = create(recipe, num_quantizers=4, roles=roles)
    assert [q.block_scaling_dim for q in state.make_quantizers()] == [2, 2, 1, 1]  # type: ignore[attr-defined]
    assert state.roles == [roles[0], QuantizerRole(tensor_type="weight"), roles[2], roles[3]]


def test_one_quantizer_by_default() -> None:
    state = RecipeState.create(MXFP8BlockScaling(), mode="backward")
    assert state.num_quantizers == 1
    assert len(state.make_quantizers()) == 1


@pytest.mark.parametrize("mode, kinds", [("forward", FORWARD), ("backward", BACKWARD)])
@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3], ids=str)
def test_delayed_quantizers_are_views(mode: Any, kinds: tuple[str, ...], fp8_format: Format) -> None:
    count = 2 * len(kinds)
    state = create(delayed(fp8_format=fp8_format), mode, count)
    assert torch.equal(state.scale, torch.ones(count))
    assert torch.equal(state.amax_history, torch.zeros(4, count))
    assert state.scale.dtype == state.amax_history.dtype == torch.float32
    made: list[Any] = state.make_quantizers()
    element = E5M2 if mode == "backward" and fp8_format is Format.HYBRID else E4M3
    for slot, quantizer in enumerate(made):
        assert quantizer.dtype == element
        if kinds[slot % len(kinds)] == "weight":  # by its own amax
            assert type(quantizer) is nc.Float8CurrentScalingQuantizer
            continue
        assert type(quantizer) is nc.Float8Quantizer
        assert quantizer.scale.data_ptr() == state.scale[slot].data_ptr()
        assert quantizer.amax.data_ptr() == state.amax[slot].data_ptr()
        quantizer.quantize(torch.full((2, 2), 3.0 + slot))
    collects = torch.tensor([kinds[slot % len(kinds)] != "weight" for slot in range(count)])
    assert torch.equal(state.amax, (3.0 + torch.arange(count)) * collects)
    assert not state.amax_history.any()


@pytest.mark.parametrize("margin", [0, 1])
def test_scales_before_the_first_step(margin: int) -> None:
    recipe = delayed(initial_scale="range", margin=margin)
    assert create(recipe).scale.tolist() == [16.0 / 2**margin] * 3
    assert create(recipe, "backward", 2).scale.tolist() == [65536.0 / 2**margin] * 2
    assert create(delayed(margin=margin)).scale.tolist() == [1.0] * 3


# -- delayed scaling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, kinds", [("forward", FORWARD), ("backward", BACKWARD)])
def test_quantizers_see_the_renewed_scales(mode: Any, kinds: tuple[str, ...]) -> None:
    recipe = delayed(margin=1)
    state, rule = create(recipe, mode, len(kinds)), Simulation(recipe)
    for kind in kinds:  # quantizers begin with a constant
        rule.columns[kind].scale = np.float32(1)
    made: list[Any] = state.make_quantizers()
    kept = [slot for slot, kind in enumerate(kinds) if kind != "weight"]
    for step in range(6):
        for slot in kept:
            x = draw(step, 4, 4, salt=slot)
            storage = made[slot].quantize(x)
            assert torch.equal(
                storage._scale_inv, 1 / torch.tensor([rule.columns[kinds[slot]].scale], dtype=torch.float32)
            )
            rule.collect(**{kinds[slot]: x})
        rule.renew()
        renew([state])
        expected = rule.tensors(kinds)
        found = (state.scale, state.amax_history, state.amax)
        assert all(torch.equal(one[..., kept], two[..., kept]) for one, two in zip(found, expected))


def test_heirs_share_one_set_of_buffers_that_is_renewed_once() -> None:
    state, heir = create(delayed()), create(delayed())
    assert heir.inherit_state_from(state)
    state.amax.fill_(2.0)
    renew([state, heir])
    assert heir.scale.tolist() == [224.0] * 3
    assert heir.amax_history[:, 0].tolist() == [0.0, 0.0, 0.0, 2.0]


def test_nobody_keeps_a_state_alive() -> None:
    state = create(delayed())
    gone = weakref.ref(state)
    assert state in OWNERS
    del state
    gc.collect()
    assert gone() is None


def test_rebuilding_for_new_roles_keeps_the_buffers() -> None:
    state = create(delayed())
    made: list[Any] = state.make_quantizers()
    made[0].quantize(torch.full((2, 2), 7.0))
    again: list[Any] = state.make_quantizers()
    assert again[0].amax.data_ptr() == made[0].amax.data_ptr()

    heir = create(delayed(), roles=[QuantizerRole("linear", kind, "fc2") for kind in FORWARD])
    assert heir.inherit_state_from(state)
    assert heir.scale is state.scale
    assert heir.amax_history is state.amax_history
    assert heir.amax is state.amax
    inherited: Any = heir.make_quantizers()[0]
    assert float(inherited.amax) == 7.0
    renew([heir])
    assert float(inherited.scale) == 64.0


@pytest.mark.parametrize(
    "other",
    [
        lambda: create(delayed(margin=1)),
        lambda: create(delayed(amax_history_len=5)),
        lambda: create(delayed(), "backward"),
        lambda: create(delayed(), num_quantizers=2),
        lambda: create(Float8CurrentScaling()),
        lambda: RecipeState.create(delayed(), mode="forward", num_quantizers=3, device="meta"),
    ],
    ids=["margin", "length", "mode", "count", "recipe", "device"],
)
def test_another_recipe_inherits_nothing(other: Any) -> None:
    state, source = create(delayed()), other()
    scale, history = state.scale, state.amax_history
    assert not state.inherit_state_from(source)
    assert state.scale is scale
    assert state.amax_history is history


def test_square_tiles_are_for_weights_of_linear_layers() -> None:
    kinds = ("linear", "grouped_linear", "dpa", "")
    roles: list[QuantizerRole | None] = [QuantizerRole(kind, "weight") for kind in kinds]
    recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    made: list[Any] = create(recipe, num_quantizers=5, roles=[*roles, None]).make_quantizers()
    assert [one.with_2d_quantization for one in made] == [True, True, False, False, False]


def test_stateless_recipes_inherit_by_value() -> None:
    assert create(MXFP8BlockScaling()).inherit_state_from(create(MXFP8BlockScaling()))
    assert not create(MXFP8BlockScaling()).inherit_state_from(
        create(MXFP8BlockScaling(enable_2d_quantization=True))
    )


# -- custom recipes ---------------------------------------------------------------------------------------------------


def test_factory_sees_the_roles() -> None:
    seen = []

    def factory(role: QuantizerRole) -> nc.Quantizer:
        seen.append(role)
        return nc.IdentityQuantizer()

    roles = [QuantizerRole("linear", "input", "fc1"), QuantizerRole("dpa", "qkv"), None]
    create(CustomRecipe(qfactory=factory), roles=roles).make_quantizers()
    assert seen == [*roles[:2], QuantizerRole(tensor_type="output")]
    seen.clear()
    create(CustomRecipe(qfactory=factory), "backward", 2).make_quantizers()
    assert seen == [QuantizerRole(tensor_type=kind) for kind in BACKWARD]


def test_requested_state() -> None:
    request = DelayedScalingRequest(amax_history_len=4, margin=1, initial_scale="one")

    def factory(role: QuantizerRole) -> Any:
        return nc.MXFP8Quantizer(E4M3) if role.tensor_type == "weight" else request

    recipe = CustomRecipe(qfactory=factory)
    state = create(recipe)
    made: list[Any] = state.make_quantizers()
    assert [type(q) for q in made] == [nc.Float8Quantizer, nc.MXFP8Quantizer, nc.Float8Quantizer]
    assert state.scale.shape == (3,)
    assert state.amax_history.shape == (4, 3)
    made[2].quantize(torch.full((2, 2), 7.0))
    renew([state])
    assert state.scale.tolist() == [1.0, 1.0, 32.0]

    heir, stranger = create(recipe), create(CustomRecipe(qfactory=lambda role: factory(role)))
    assert heir.inherit_state_from(state)
    assert not stranger.inherit_state_from(state)  # another factory is another recipe
    assert heir.make_quantizers()[2].scale.data_ptr() == made[2].scale.data_ptr()  # type: ignore[attr-defined]
    assert heir.scale is state.scale


@pytest.mark.parametrize(
    "mode, fp8_format, expected",
    [("forward", Format.HYBRID, E4M3), ("backward", Format.HYBRID, E5M2), ("backward", Format.E4M3, E4M3)],
)
def test_requested_element_type(mode: Any, fp8_format: Format, expected: nc.DType) -> None:
    request = DelayedScalingRequest(fp8_format=fp8_format)
    made: Any = create(CustomRecipe(qfactory=lambda role: request), mode, 1).make_quantizers()[0]
    assert made.dtype == expected


OTHERS: dict[str, Any] = {
    "fp8_format": Format.E4M3,
    "margin": 1,
    "amax_history_len": 2,
    "amax_compute_algo": "most_recent",
    "scaling_factor_compute_algo": print,
    "reduce_amax": False,
    "initial_scale": "one",
}


@pytest.mark.parametrize("field", OTHERS)
def test_differing_requests(field: str) -> None:
    other = DelayedScalingRequest(**{field: OTHERS[field]})

    def factory(role: QuantizerRole) -> DelayedScalingRequest:
        return other if role.tensor_type == "weight" else DelayedScalingRequest()

    with pytest.raises(
        ValueError, match="delayed-scaling requests of one module and direction must be equal"
    ):
        create(CustomRecipe(qfactory=factory)).make_quantizers()


def test_request_defaults_are_those_of_the_recipe() -> None:
    assert DelayedScalingRequest() == DelayedScaling()
    assert issubclass(DelayedScalingRequest, nc.QuantizerRequest)
    state = create(CustomRecipe(qfactory=custom_recipes.delayed_scaling_factory))
    state.make_quantizers()
    assert state.amax_history.shape == (1024, 3)


@pytest.mark.parametrize("wrong, error", [(None, ValueError), ("mxfp8", TypeError), (E4M3, TypeError)])
def test_wrong_answers_of_a_factory_name_the_role(wrong: Any, error: type[Exception]) -> None:
    def factory(role: QuantizerRole) -> Any:
        return wrong if role.name == "fc7" else nc.IdentityQuantizer()

    roles = [QuantizerRole("linear", "input", name) for name in ("fc6", "fc7")]
    with pytest.raises(error, match="tensor_type='input', name='fc7'"):
        create(CustomRecipe(qfactory=factory), num_quantizers=2, roles=roles).make_quantizers()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe, kwargs, message",
    [
        (MXFP8BlockScaling(), {"mode": "sideways"}, "mode is 'sideways'; use 'forward' or 'backward'"),
        (MXFP8BlockScaling(), {"roles": []}, "got 0 roles for num_quantizers=3"),
        (MXFP8BlockScaling(), {"roles": [QuantizerRole()] * 4}, "got 4 roles for num_quantizers=3"),
        (MXFP8BlockScaling(), {"num_quantizers": 0}, "num_quantizers is 0; use at least 1"),
        (
            MXFP8BlockScaling,
            {},
            "recipe is the class MXFP8BlockScaling; pass one of narrowcast.recipe's recipes",
        ),
        ("mxfp8", {}, "recipe is a str"),
        (None, {}, "recipe is a NoneType"),
    ],
)
def test_wrong_arguments(recipe: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(recipe, **kwargs)


def test_unknown_kinds_of_recipe() -> None:
    class Unfinished(Recipe):
        def __post_init__(self) -> None:
            pass

    with pytest.raises(NotImplementedError, match="Unfinished makes no quantizers of its own"):
        create(Unfinished()).make_quantizers()


def test_it_makes_one_quantizer_unless_told() -> None:
    for recipe in (delayed(), Float8CurrentScaling()):
        made = RecipeState.create(recipe, mode="forward", device="cpu")
        assert made.num_quantizers == type(made)(recipe, mode="forward", device="cpu").num_quantizers == 1


@pytest.mark.parametrize("recipe", [*STATELESS, delayed()], ids=lambda recipe: type(recipe).__name__)
def test_its_class_is_named_after_the_recipe_s(recipe: Recipe) -> None:
    assert type(create(recipe)).__name__ == f"{type(recipe).__name__}RecipeState"
