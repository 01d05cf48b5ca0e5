"""Transformer Engine's options at the values that ask for nothing; others name themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowcast as nc

# what a program written for Transformer Engine passes, to say that it wants none of it
PARALLEL: dict[str, Any] = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "parallel_mode": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": "qkv",
    "symmetric_ar_type": None,
}
MLP = {**PARALLEL, "seq_length": 2048, "micro_batch_size": 4, "set_parallel_mode": False}
LAYERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "Linear": ((8, 16), PARALLEL),
    "LayerNormLinear": ((8, 16), PARALLEL),
    "LayerNormMLP": ((8, 16), MLP),
    "GroupedLinear": ((2, 8, 16), PARALLEL),
    "LayerNorm": ((8,), {"sequence_parallel": False}),
    "RMSNorm": ((8,), {"sequence_parallel": None, "params_dtype": torch.float32}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_values_that_ask_for_nothing_are_taken(name: str) -> None:
    sizes, options = LAYERS[name]
    torch.manual_seed(0)
    layer = getattr(nc, name)(*sizes, device="cpu", **options)
    torch.manual_seed(0)
    plain = getattr(nc, name)(*sizes, device="cpu")
    assert repr(layer) == repr(plain)
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert layer.state_dict().keys() == plain.state_dict().keys()


REFUSED = {
    "ub_overlap_ag": True,
    "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": True,
    "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True,
    "symmetric_ar_type": "one_shot",
}


@pytest.mark.parametrize("name", LAYERS)
def test_values_that_ask_for_more_name_the_option(name: str) -> None:
    sizes, options = LAYERS[name]
    for option in options.keys() & REFUSED.keys():
        with pytest.raises(NotImplementedError, match=rf"^{name}\({option}=.*leave {option} out, or pass "):
            getattr(nc, name)(*sizes, device="cpu", **{option: REFUSED[option]})


@pytest.mark.parametrize("name", LAYERS)
def test_other_names_are_errors_as_ever(name: str) -> None:
    sizes, options = LAYERS[name]
    for option in ("in_feature", "seq_length") if "seq_length" not in options else ("in_feature",):
        with pytest.raises(TypeError, match=rf"^{name} takes no '{option}'; "):
            getattr(nc, name)(*sizes, device="cpu", **{option: 1})


def test_one_rank_may_say_how_it_would_be_parallel() -> None:
    for mode in ("column", "row"):
        assert nc.Linear(8, 16, device="cpu", parallel_mode=mode, tp_size=1).weight.shape == (16, 8)
    assert nc.LayerNormMLP(8, 16, device="cpu", set_parallel_mode=True, tp_size=1).fc1_weight.shape == (16, 8)


@pytest.mark.parametrize("norm", [nc.LayerNorm, nc.RMSNorm])
def test_norms_know_their_size_by_its_older_name(norm: Any) -> None:
    layer = norm(hidden_size=8, device="cpu")
    assert layer.normalized_shape == (8,)
    assert layer.weight.shape == (8,)
    for sizes in ({}, {"normalized_shape": 8, "hidden_size": 8}):
        with pytest.raises(ValueError, match="give one of them"):
            norm(device="cpu", **sizes)
