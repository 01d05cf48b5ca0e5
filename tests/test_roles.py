"""Roles, and what a slot is for when no role says so."""

from __future__ import annotations

import dataclasses

import pytest

import narrowcast as nc
from narrowcast.recipe import tensor_type_at


def test_unknown_fields_are_empty() -> None:
    assert nc.QuantizerRole() == nc.QuantizerRole("", "", "")
    role = nc.QuantizerRole("linear", "weight", "fc1")
    assert (role.module_type, role.tensor_type, role.name) == ("linear", "weight", "fc1")


def test_frozen_value() -> None:
    role = nc.QuantizerRole("linear", "weight", "fc1")
    assert hash(role) == hash(nc.QuantizerRole("linear", "weight", "fc1"))
    assert role != nc.QuantizerRole("linear", "weight", "fc2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        role.name = "fc2"  # type: ignore[misc]


def test_position_repeats_per_gemm() -> None:
    assert [tensor_type_at("forward", slot) for slot in range(6)] == ["input", "weight", "output"] * 2
    assert [tensor_type_at("backward", slot) for slot in range(4)] == ["grad_output", "grad_input"] * 2


def test_role_wins_over_position_when_it_names_a_gemm_tensor() -> None:
    assert tensor_type_at("forward", 0, nc.QuantizerRole(tensor_type="weight")) == "weight"
    assert tensor_type_at("forward", 0, nc.QuantizerRole(tensor_type="grad_output")) == "grad_output"
    assert tensor_type_at("forward", 1, nc.QuantizerRole(tensor_type="qkv")) == "weight"
    assert tensor_type_at("backward", 1, nc.QuantizerRole(name="fc1")) == "grad_input"
